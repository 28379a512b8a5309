"""Classes of image files with model.onnx: python predict.py IMAGE…   (needs numpy, pillow and onnxruntime)"""
import json, sys
from pathlib import Path
import numpy as np
import onnxruntime as ort
from PIL import Image, ImageOps
session = ort.InferenceSession(Path(__file__).with_name("model.onnx"), providers=ort.get_available_providers())
size = (about := json.loads(session.get_modelmeta().custom_metadata_map["finessl"]))["image_size"]

def squash(image, box):  # across, then down: Pillow 13 and later would round some tall images differently
    across = image.resize((size, image.height), Image.Resampling.BILINEAR, (box[0], 0, box[2], image.height))
    return across.resize((size, size), Image.Resampling.BILINEAR, (0, box[1], size, box[3]))

def read(path):  # uint8 [size, size, 3]: upright, on white; a large JPEG is first reduced by its decoder
    with Image.open(path) as file:
        stored, draft = file.size, file.draft(None, (2 * size, 2 * size))
        image = ImageOps.exif_transpose(squash(file, draft[1]) if draft and file.size != stored else file)
    if image.mode.startswith("I;16"):  # the highest 8 of 16 bits, or of 12 where all values fit in these
        image = Image.fromarray((np.asarray(image) >> (8 if np.asarray(image).max() > 4095 else 4)).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return np.asarray(squash(image.convert("RGB"), (0, 0, *image.size)))

def predict(paths):  # probabilities [n, classes], logits [n, classes], embedding [n, dim]
    return session.run(None, {"images": np.stack([read(path) for path in paths])})

for path in sys.argv[1:] if __name__ == "__main__" else []:
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a name may hold bytes that are no text
    probabilities = predict([path])[0][0]
    print(path, about["classes"][probabilities.argmax()], f"{probabilities.max():.4f}", sep="\t")
