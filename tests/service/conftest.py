"""A served toy detector, and a client that talks to it without a socket."""

from __future__ import annotations

import asyncio
import io
from contextlib import asynccontextmanager

import numpy as np
import pytest
from PIL import Image

from neuralmean import Detector
from neuralmean.data.preprocessing import Preprocessing
from tests.conftest import make_trained

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

PREPROCESSING = Preprocessing((8, 8), mean=(0.0,) * 3, std=(1.0,) * 3)


@pytest.fixture
def detector(images):
    return Detector(make_trained(), scorer="average").calibrate(images[:200])


@asynccontextmanager
async def running(app, **options):
    """A client of an application whose worker runs."""
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", **options) as client:
            yield client


def ask(app, method, path, **options):
    """One request and its response."""

    async def go():
        async with running(app) as client:
            return await client.request(method, path, **options)

    return asyncio.run(go())


def png(seed=0, size=8, mode="RGB"):
    """The bytes of a PNG of noise, and its pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, "PNG")
    return buffer.getvalue(), pixels
