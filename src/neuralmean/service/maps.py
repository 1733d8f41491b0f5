"""Pictures of where the score of an image comes from, for the page and for clients that ask for an explanation."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from neuralmean.data.preprocessing import Preprocessing
from neuralmean.detector.detector import Detector
from neuralmean.errors import InputError
from neuralmean.report.overlay import overlay_uri

MOST = 4  # images of a request that get a map: each takes a pass of its own
SIDE = 224


def draw_maps(detector: Detector, inputs: Iterable[Tensor], preprocessing: Preprocessing) -> list[str | None]:
    """Return the first images under their maps, as data URIs; None for an image that cannot be explained.

    Args:
        detector: What scored them.
        inputs: The model's inputs, shape (N, C, H, W) each.
        preprocessing: How the images were prepared.
    """
    images = [image for batch in inputs for image in batch][:MOST]
    return [_draw(detector, image, preprocessing) for image in images]


def _draw(detector: Detector, image: Tensor, preprocessing: Preprocessing) -> str | None:
    try:
        return overlay_uri(image, detector.locate(image.unsqueeze(0))[0], preprocessing, SIDE)
    except InputError:
        return None
