"""Classes of image files with model.onnx: python predict.py IMAGE…   (needs numpy, pillow and onnxruntime)"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession(
    str(Path(__file__).with_name("model.onnx")), providers=onnxruntime.get_available_providers()
)
about = json.loads(session.get_modelmeta().custom_metadata_map["finessl"])
SIZE, BILINEAR = about["image_size"], Image.Resampling.BILINEAR


def squash(image, box=None):
    """Across, then down: Pillow 13 and later would round some tall images differently."""
    left, top, right, bottom = box or (0, 0, *image.size)
    across = image.resize((SIZE, image.height), BILINEAR, (left, 0, right, image.height))
    return across.resize((SIZE, SIZE), BILINEAR, (0, top, SIZE, bottom))


def read(path):
    """uint8 [SIZE, SIZE, 3]: upright, on white, squashed to a square; a large JPEG is first reduced by its decoder."""
    with Image.open(path) as file:
        stored, draft = file.size, file.draft(None, (2 * SIZE, 2 * SIZE))
        reduced = squash(file, draft[1]) if draft and file.size != stored else file
        image = ImageOps.exif_transpose(reduced)
    if image.mode.startswith("I;16"):
        values = np.asarray(image)
        image = Image.fromarray((values >> (8 if values.max() > 4095 else 4)).astype(np.uint8))  # 16 or 12 bits
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(squash(image.convert("RGB")))


def predict(paths):
    """probabilities [n, classes], logits [n, classes], embedding [n, dim]"""
    return session.run(None, {"images": np.stack([read(path) for path in paths])})


if __name__ == "__main__":
    for path in sys.argv[1:]:
        probabilities = predict([path])[0][0]
        print(path, about["classes"][probabilities.argmax()], f"{probabilities.max():.4f}", sep="\t")
