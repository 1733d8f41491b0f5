"""The house rules that a machine can hold: import direction, public names, lazy extras."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import neuralmean

SRC = Path(neuralmean.__file__).parent

ROWS = [
    ["version", "errors"],
    [
        "files",
        "progress",
        "metrics",
        "data",
        "layers",
        "moments",
        "channels",
        "synthesis",
        "preprocessing",
        "sequential",
        "memory",
        "table",
        "clamping",
    ],
    ["recording", "running", "fingerprint", "packing"],
    ["recorder", "looking", "norms"],
    ["reference"],
    ["discrepancy"],
    ["scorers", "baseline"],
    ["calibration", "observer"],
    ["decision", "artefact", "fitting", "gathering", "traced"],
    ["cascade"],
    ["saving"],
    ["detector"],
    ["images", "weights", "monitor_state"],
    ["monitor", "modelspec", "inspection"],
    ["opening", "scoring", "export"],
]
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}


def imported_modules(path):
    """Names of neuralmean's modules that a file imports when it is imported itself."""
    found = set()
    tree = ast.parse(path.read_text())
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "neuralmean":
            parts = node.module.split(".")
            found.update([parts[1]] if len(parts) > 1 else [alias.name for alias in node.names])
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[1] for alias in node.names if alias.name.startswith("neuralmean."))
    return found


@pytest.mark.parametrize("name", sorted(ROW_OF))
def test_core_imports_point_upwards(name):
    files = sorted((SRC / name).glob("*.py")) if (SRC / name).is_dir() else [SRC / f"{name}.py"]
    above = {other for other, row in ROW_OF.items() if row < ROW_OF[name]} | {name}
    above |= {"bench"} if name == "modelspec" else set()  # only when somebody asks for `bench:NAME`
    for file in files:
        assert imported_modules(file) <= above, file.name


def test_the_library_never_imports_the_benchmark():
    allowed = {"cli", "modelspec"}  # they turn `bench:NAME` and `nmd bench` into calls
    for file in SRC.rglob("*.py"):
        part = file.relative_to(SRC).parts[0].removesuffix(".py")
        if part != "bench" and part not in allowed:
            assert "bench" not in imported_modules(file), file


def test_public_names_are_few_sorted_and_there():
    names = neuralmean.__all__
    assert len(names) <= 20
    assert names == sorted(names)
    assert all(hasattr(neuralmean, name) for name in names)


def test_hooks_are_registered_in_one_file_only():
    users = {
        file.name
        for file in SRC.rglob("*.py")
        if re.search(r"register_forward|\._forward_(pre_)?hooks", file.read_text()) and "bench" not in file.parts
    }
    assert users == {"hooks.py"}


def test_importing_the_package_pulls_no_optional_or_slow_dependency():
    heavy = (
        "fastapi",
        "jinja2",
        "matplotlib",
        "onnx",
        "pyarrow",
        "ray",
        "scipy",
        "sklearn",
        "timm",
        "torchvision",
        "uvicorn",
    )
    code = f"import sys, neuralmean; sys.exit(', '.join(m for m in {heavy!r} if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_pickle_is_read():
    for file in SRC.rglob("*.py"):
        text = file.read_text()
        assert "pickle.load" not in text, file
        assert "torch.load(" not in text or "weights_only=True" in text, file
