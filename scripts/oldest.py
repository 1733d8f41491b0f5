"""Prints the oldest version of each dependency that pyproject.toml allows, as pip constraints; torch is left to the caller."""

from __future__ import annotations

import re
import sys
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]


def oldest(requirements: list[str]) -> list[str]:
    """Return `name==version` for each `name>=version`, but for torch.

    Example:
        >>> oldest(["torch>=2.6", "numpy>=1.26", "uvloop>=0.19; sys_platform != 'win32'"])
        ['numpy==1.26', 'uvloop==0.19']
    """
    found = [re.match(r"([\w-]+)(?:\[.*\])?>=([\w.]+)", requirement) for requirement in requirements]
    return [f"{one[1]}=={one[2]}" for one in found if one and one[1] != "torch"]


if __name__ == "__main__":
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = sorted(set(oldest([*project["dependencies"], *extras["report"], *extras["serve"]])))
    sys.stdout.write("\n".join(lines) + "\n")
