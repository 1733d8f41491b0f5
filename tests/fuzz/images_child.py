"""Decodes damaged images in a process without torch, so that a few megabytes too much show. Run by `test_hostile_images`."""

from __future__ import annotations

import io
import json
import os
import random
import sys
import types
import warnings
from pathlib import Path


def main(count: int, package: str) -> None:
    # The package's own __init__ imports torch: stand in for it, as the decoding workers do.
    stand_in = types.ModuleType("neuralmean")
    stand_in.__path__ = [package]
    sys.modules["neuralmean"] = stand_in
    warnings.simplefilter("ignore")
    import numpy as np
    from mutations import mutate
    from PIL import Image
    from watch import measure

    from neuralmean.data.images.arrays import ArrayFile
    from neuralmean.data.images.decode import decode_image
    from neuralmean.data.preprocessing import Preprocessing
    from neuralmean.errors import InputError

    how = Preprocessing((224, 224), (0.5,) * 3, (0.5,) * 3)
    seeds = _seeds(np, Image)
    path = Path(os.environ["FUZZ_FOLDER"])

    def use(kind: str, data: bytes) -> bool:
        try:
            if kind in ("npy", "npz"):
                target = path / f"x.{kind}"
                target.write_bytes(data)
                with ArrayFile(str(target)) as file:
                    how.array_pixels(file.read(0, min(4, len(file))))
            else:
                how.pixels(decode_image(data))
        except InputError:
            return False
        return True

    good = 0
    for kind, data in seeds * 2:  # twice: the first time loads Pillow's plugins
        good = max(good, measure(lambda kind=kind, data=data: use(kind, data))[1] or 0)
    slowest, largest, refused, unexpected = 0.0, 0, 0, []
    for seed in range(count):
        rng = random.Random(seed)
        kind, data = rng.choice(seeds)
        damaged, outcome = mutate(data, rng), []
        try:
            seconds, memory = measure(lambda kind=kind, data=damaged, outcome=outcome: outcome.append(use(kind, data)))
            refused += not outcome[0]
        except BaseException as error:  # noqa: BLE001 - this is what is being looked for
            unexpected.append([seed, kind, repr(error)])
            continue
        slowest, largest = max(slowest, seconds), max(largest, memory or 0)
        if memory and memory > 2 * good:
            unexpected.append([seed, kind, f"{memory:,} bytes of memory; a good file takes {good:,}"])
    report = {"slowest": slowest, "good": good, "largest": largest, "refused": refused, "unexpected": unexpected}
    sys.stdout.write(json.dumps(report))


def _seeds(np, image_module) -> list[tuple[str, bytes]]:
    """Good files of every kind, some of them of photo size."""
    noise = np.random.default_rng(0).integers(0, 256, (320, 240, 3), dtype=np.uint8)
    smooth = np.linspace(0, 255, 600 * 800 * 3).reshape(600, 800, 3).astype(np.uint8)
    exif = image_module.Exif()
    exif[0x0112] = 6
    made = []
    for kind, options in (
        ("PNG", {}), ("JPEG", {"exif": exif}), ("JPEG", {"progressive": True}), ("WEBP", {}), ("WEBP", {"lossless": True}),
        ("BMP", {}), ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"}), ("TIFF", {"compression": "jpeg"}),
    ):  # fmt: skip
        for pixels in (noise, smooth):
            made.append((kind, image_module.fromarray(pixels), options))
    made.append(("PNG", image_module.fromarray(smooth).convert("P"), {}))
    made.append(("PNG", image_module.fromarray(smooth[:, :, 0].astype(np.int32) * 200).convert("I;16"), {}))
    seeds = []
    for kind, image, options in made:
        buffer = io.BytesIO()
        image.save(buffer, kind, **options)
        seeds.append((kind, buffer.getvalue()))
    stack = np.stack([noise[:32, :32]] * 6)
    for kind, save in (("npy", np.save), ("npz", lambda f, a: np.savez_compressed(f, images=a))):
        buffer = io.BytesIO()
        save(buffer, stack)
        seeds.append((kind, buffer.getvalue()))
    return seeds


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
