"""Makes `docs/img/report.png`: fits ResNet-56, writes its report and takes a picture of the upper part of it.

NEURALMEAN_DATA=DIR NEURALMEAN_WEIGHTS=DIR python scripts/pictures.py [OUT.png]

Needs the sets of the benchmark (`nmd bench data`), the weights resnet56-cifar10.safetensors, and Chromium.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from neuralmean import Detector
from neuralmean.data.images import ImageBatches
from neuralmean.models.spec import resolve
from neuralmean.report import write_report

OUT = Path(__file__).parents[1] / "docs" / "img" / "report.png"
SETS = {"SVHN": "svhn-test", "ImageNet (crop)": "imagenet-crop", "CIFAR-100": "cifar100-test"}
WIDTH = 1100
LAST = "section.half"  # the picture ends below these sections


def report(data: Path, weights: Path, out: Path) -> Path:
    """Fit on 2,000 training images with 1,000 test images held out, and report on 1,000 other test images and OOD sets."""
    built = resolve("bench:resnet56", weights=weights / "resnet56-cifar10.safetensors")

    def images(name: str, start: int, stop: int) -> ImageBatches:
        wanted = range(start, stop)
        return ImageBatches(
            [data / f"{name}.npz"],
            built.preprocessing,
            workers=0,
            skip=lambda row: int(row.rpartition("#")[2]) not in wanted,
        )

    detector = Detector(built.model).fit(images("cifar10-train", 0, 2000), held_out=images("cifar10-test", 0, 1000))
    strangers = {name: images(file, 0, 1000) for name, file in SETS.items()}
    info = {"preprocessing": built.preprocessing.to_json(), "id_name": "CIFAR-10"}
    title = "ResNet-56 on CIFAR-10: what is out of distribution?"
    return write_report(detector, images("cifar10-test", 1000, 2000), strangers, out, title=title, info=info)


def picture(page: Path, out: Path) -> None:
    """Take a picture of the upper part of a report, in 128 colours."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        tab = chromium.new_page(viewport={"width": WIDTH, "height": 1000})
        tab.goto(page.resolve().as_uri())
        box = tab.locator(LAST).last.bounding_box()
        end = box["y"] + box["height"] + 16
        shot = tab.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": end})
        chromium.close()
    Image.open(io.BytesIO(shot)).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(out, optimize=True)


if __name__ == "__main__":
    places = [os.environ.get(name) for name in ("NEURALMEAN_DATA", "NEURALMEAN_WEIGHTS")]
    if None in places:
        sys.exit("Expected NEURALMEAN_DATA and NEURALMEAN_WEIGHTS to name folders. Set both.")
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    with tempfile.TemporaryDirectory() as folder:
        picture(report(*map(Path, places), Path(folder) / "report.html"), target)
    print(f"{target}: {target.stat().st_size / 1024:.0f} kB")
