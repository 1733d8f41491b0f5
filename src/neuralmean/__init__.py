"""Tells you when a PyTorch model is looking at something it was not trained for."""

from neuralmean.version import __version__

__all__ = ["__version__"]
