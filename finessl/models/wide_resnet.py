"""Wide ResNet 28-k (Zagoruyko & Komodakis 2016), the usual network of semi-supervised learning from scratch (FixMatch)."""

from __future__ import annotations

from torch import Tensor, nn


def norm(channels: int) -> nn.BatchNorm2d:
    """FixMatch's slow running statistics: momentum 0.001 in PyTorch is 0.999 in TensorFlow."""
    return nn.BatchNorm2d(channels, momentum=0.001)


class Block(nn.Module):
    """norm, ReLU, 3×3, norm, ReLU, 3×3, plus a shortcut. If the width changes, the shortcut is a 1×1 convolution. In the first
    block its input is the activated one."""

    def __init__(self, inputs: int, outputs: int, stride: int, activate_shortcut: bool = False) -> None:
        super().__init__()
        self.norm1 = norm(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.act = nn.LeakyReLU(0.1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else nn.Identity()
        self.activate_shortcut = activate_shortcut

    def forward(self, x: Tensor) -> Tensor:
        activated = self.act(self.norm1(x))
        shortcut = self.shortcut(activated if self.activate_shortcut else x)
        return shortcut + self.conv2(self.act(self.norm2(self.conv1(activated))))


class WideResNet(nn.Module):
    """images [n, 3, h, w] → features [n, 64·width]; (28 - 4) / 6 = 4 blocks in each of three stages."""

    def __init__(self, width: int) -> None:
        super().__init__()
        channels = [16, 16 * width, 32 * width, 64 * width]
        self.num_features = channels[-1]
        self.stem = nn.Conv2d(3, channels[0], 3, padding=1, bias=False)
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    Block(channels[s], channels[s + 1], stride=1 if s == 0 else 2, activate_shortcut=s == 0),
                    *(Block(channels[s + 1], channels[s + 1], stride=1) for _ in range(3)),
                )
                for s in range(3)
            )
        )
        self.norm = norm(channels[-1])
        self.act = nn.LeakyReLU(0.1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="leaky_relu")

    def forward(self, images: Tensor) -> Tensor:
        return self.act(self.norm(self.stages(self.stem(images)))).mean((2, 3))
