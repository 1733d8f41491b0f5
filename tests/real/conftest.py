"""Where the real images and weights are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def roots() -> tuple[Path, Path]:
    """The folders of the image sets and of the trained models."""
    data, weights = os.environ.get("NEURALMEAN_DATA"), os.environ.get("NEURALMEAN_WEIGHTS")
    if not data or not weights:
        pytest.skip("NEURALMEAN_DATA and NEURALMEAN_WEIGHTS do not name folders")
    return Path(data), Path(weights)
