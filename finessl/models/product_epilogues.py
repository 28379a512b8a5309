"""Matrix products whose epilogue applies an MLP's activation, in bf16 on Hopper GPUs.

cuBLAS has no epilogue for QuickGELU. A kernel of its own reads and writes a matrix of 3,072 columns then, forward and
backward, which takes half as long as the product. QuACK's products (CuTe DSL) apply a function to the numbers before they are
stored, and are as fast as cuBLAS's: https://github.com/Dao-AILab/quack, `pip install finessl[hopper]`.

To import this module takes seconds, and each of both products takes three more when a machine compiles it for the first time.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from finessl.data.folder_index import cache_folder

os.environ.setdefault("QUACK_CACHE_DIR", str(cache_folder() / "quack"))  # its own is in /tmp, where others may write

from quack.activation import dquick_gelu, quick_gelu  # noqa: E402
from quack.epilogue.frontend import gemm_epilogue  # noqa: E402
from quack.gemm_config import GemmConfig  # noqa: E402

# The fastest of 16 on an H200, for 18,912 and 6,304 rows, forward and backward.
CONFIG = GemmConfig(
    tile_m=128, tile_n=192, pingpong=True, cluster_m=2, cluster_n=1, is_dynamic_persistent=False, device_capacity=9
)


@gemm_epilogue(outputs=("activated",))
def add_bias_and_activate(acc: Any, bias: Any) -> dict[str, Any]:
    hidden = acc + bias
    return {"D": hidden, "activated": quick_gelu(hidden)}


@gemm_epilogue()
def multiply_by_slope(acc: Any, c: Any) -> dict[str, Any]:
    grad, _ = dquick_gelu(c, acc)
    return {"D": grad}


def expand(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """h = x weightᵀ + bias, and QuickGELU(h).   out: as in `fused_ops.activate`."""
    hidden = x.new_empty(len(x), len(weight))
    out = torch.empty_like(hidden) if out is None else out
    add_bias_and_activate(
        x, weight.t(), out={"D": hidden, "activated": out}, bias=bias[None], config=CONFIG, tuned=False
    )
    return hidden, out


def expand_backward(grad: Tensor, weight: Tensor, hidden: Tensor, out: Tensor | None = None) -> Tensor:
    """The gradient of h, from that of QuickGELU(h) weightᵀ."""
    out = torch.empty_like(hidden) if out is None else out
    multiply_by_slope(grad, weight, hidden, out={"D": out}, config=CONFIG, tuned=False)
    return out
