"""The optional packages of this subpackage, imported when they are needed."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from neuralmean.errors import MissingExtraError


def import_extra(module: str) -> Any:
    """Import a module of the `ray` extra.

    Raises:
        MissingExtraError: It is not installed; the message says how to.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings at import concern only the authors of these packages
            return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(
            f"Expected {package!r} to be installed, but it cannot be imported: {error}. "
            "Install it with `pip install neuralmean[ray]`."
        ) from error
