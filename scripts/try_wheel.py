"""Installs the wheel of a folder in a clean environment for every Python from 3.10 to 3.13 that is found, and tries it.

In each: `nmd demo`, `nmd score` on what it wrote, and the tests of the core, with the source tree out of reach.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
TESTS = ("stats", "scorers", "detector", "cli")


def find_python(version: str) -> str | None:
    """Return the path of a Python of this version: on the PATH or installed by pyenv; None if there is none."""
    homes = sorted(Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser().glob(f"versions/{version}.*/bin/python"))
    candidates = [*map(str, homes), shutil.which(f"python{version}") or ""]
    for candidate in filter(None, candidates):
        done = subprocess.run(
            [candidate, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.stdout.strip() == version:
            return candidate
    return None


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command without the source tree on its path; a failure ends this script with its output."""
    start = time.monotonic()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}")
    last = (done.stdout.strip().splitlines() or [""])[-1]
    sys.stderr.write(
        f"{Path(command[0]).name} {' '.join(map(str, command[1:3]))}: {time.monotonic() - start:.0f} s. {last[:100]}\n"
    )


def try_wheel(python: str, wheel: Path, folder: Path) -> None:
    """Install the wheel in a new environment in `folder` and use it there."""
    run(python, "-m", "venv", folder / "venv", cwd=folder)
    own = folder / "venv" / ("Scripts" if sys.platform == "win32" else "bin")
    pip = (own / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt")
    run(*pip, f"{wheel}[report,serve]", "pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100", "httpx", cwd=folder)
    run(own / "nmd", "demo", "--out", "demo-output", cwd=folder)
    run(own / "nmd", "score", "demo-output/digits.nmd", "demo-output/images", "--quiet", cwd=folder)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    tests = [f"tests/{name}" for name in TESTS]
    run(own / "python", "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *tests, cwd=folder)


def main(dist: Path, versions: Sequence[str]) -> None:
    """Try the one wheel of a folder on every Python that is found, of these versions."""
    (wheel,) = dist.resolve().glob("*.whl")
    tried = []
    for version in versions:
        python = find_python(version)
        if python is None:
            sys.stderr.write(f"Python {version}: not installed\n")
            continue
        with tempfile.TemporaryDirectory() as folder:
            try_wheel(python, wheel, Path(folder))
        tried.append(version)
        sys.stderr.write(f"Python {version}: installed, demo, score and tests passed\n")
    if not tried:
        sys.exit("Expected a Python from 3.10 to 3.13, but found none.")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or VERSIONS)
