"""Fills in what only the place of release knows: the project's addresses, and absolute links in the README that PyPI shows.

The release workflow sets `NEURALMEAN_REPOSITORY` to the address of the repository; without it the package has no addresses and
the README keeps its relative links.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def absolute(text: str, repository: str) -> str:
    """Return Markdown whose relative links and images point into a repository."""
    text = re.sub(r"(!\[[^\]]*\]\()(?!\w+:|#)", rf"\1{repository}/raw/HEAD/", text)
    return re.sub(r"(?<!!)(\[[^\]]*\]\()(?!\w+:|#)", rf"\1{repository}/blob/HEAD/", text)


class Hook(MetadataHookInterface):
    """Sets `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the dynamic fields."""
        repository = os.environ.get("NEURALMEAN_REPOSITORY", "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute(text, repository) if repository else text,
        }
        metadata["urls"] = {
            name: f"{repository}{path}"
            for name, path in (
                ("Repository", ""),
                ("Documentation", "/tree/HEAD/docs"),
                ("Changelog", "/blob/HEAD/CHANGELOG.md"),
                ("Issues", "/issues"),
            )
            if repository
        }


def get_metadata_hook() -> type[Hook]:
    """Return what hatchling calls."""
    return Hook
