"""The house rules that a machine can hold: rooms and their order, public names, hooks, lazy extras, one public door."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import neuralmean
from neuralmean import Detector

SRC = Path(neuralmean.__file__).parent

# In the order in which they may import each other: a room imports only from rooms before it.
ROOMS = (
    "errors",
    "data",
    "files",
    "models",
    "stats",
    "recording",
    "scorers",
    "detector",
    "monitor",
    "export",
    "jobs",
    "report",
    "service",
    "integrations",
    "bench",
    "cli",
)


def imported_rooms(path: Path) -> set[str]:
    """Return the rooms that a file imports, at its top or inside a function; `TYPE_CHECKING` blocks do not count."""
    tree = ast.parse(path.read_text())
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    modules: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.level:
            modules.add(f"neuralmean.{path.relative_to(SRC).parts[0]}")
        elif isinstance(node, ast.ImportFrom) and node.module == "neuralmean":
            modules.update(f"neuralmean.{alias.name}" for alias in node.names if alias.name != "__version__")
        elif isinstance(node, ast.ImportFrom):
            modules.add(str(node.module))
    return {name.split(".")[1] for name in modules if name.startswith("neuralmean.")}


def wrong_imports(room: str, imported: set[str]) -> set[str]:
    """Return the rooms among `imported` that `room` may not import."""
    return imported - set(ROOMS[: ROOMS.index(room) + 1])


def files_of(room: str) -> list[Path]:
    return [SRC / "errors.py"] if room == "errors" else sorted((SRC / room).rglob("*.py"))


def test_the_root_holds_the_rooms_and_nothing_else():
    found = {path.name for path in SRC.iterdir() if path.name != "__pycache__"}
    rooms = set(ROOMS) - {"errors"}
    assert found == rooms | {"__init__.py", "__main__.py", "errors.py", "py.typed"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_from_rooms_before_it(room):
    for file in files_of(room):
        assert not wrong_imports(room, imported_rooms(file)), file.relative_to(SRC)


def test_an_import_that_points_the_wrong_way_is_noticed(tmp_path):
    assert wrong_imports("stats", {"models", "recording"}) == {"recording"}
    file = SRC / "stats" / "moments.py"
    for line in ("from neuralmean.recording import Recorder", "import neuralmean.recording.sink"):
        tree = tmp_path / "bad.py"
        tree.write_text(
            f"def late():\n    {line}\n{file.read_text()}".replace("from __future__ import annotations\n", "")
        )
        assert "recording" in imported_rooms(tree)


def module_graph() -> dict[str, set[str]]:
    """Return which modules each module imports while it is imported itself: not inside functions, not for types only."""
    names = {".".join(("neuralmean", *path.relative_to(SRC).with_suffix("").parts)): path for path in SRC.rglob("*.py")}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    return {name: set(_imported_at_once(ast.parse(path.read_text()), names)) - {name} for name, path in names.items()}


def _imported_at_once(node: ast.AST, names: Collection[str]) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.ImportFrom) and child.module != "neuralmean":  # the root holds the version
            for alias in child.names:
                found = f"{child.module}.{alias.name}"
                yield from {found if found in names else str(child.module)} & set(names)
        yield from _imported_at_once(child, names)


def find_cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the names on or before some cycle: those left when names without imports are removed again and again."""
    left = dict(graph)
    while done := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in done:
            del left[name]
    return sorted(left)


def test_no_module_is_in_a_cycle_of_imports():
    graph = module_graph()
    assert len(graph) > 200
    assert find_cycle(graph) == []


def test_a_cycle_of_imports_is_noticed():
    graph = module_graph()
    graph["neuralmean.stats.moments"] |= {"neuralmean.detector.detector"}
    assert {"neuralmean.stats.moments", "neuralmean.detector.detector"} <= set(find_cycle(graph))


def test_tests_mirror_the_rooms():
    own = {path.name for path in Path(__file__).parent.iterdir() if path.is_dir() and not path.name.startswith("_")}
    assert own <= {*ROOMS, "attacks", "docs", "corpus", "faults", "fuzz", "real"}


def test_public_names_are_few_sorted_and_there():
    names = neuralmean.__all__
    assert len(names) <= 20
    assert names == sorted(names)
    assert all(hasattr(neuralmean, name) for name in names)


def test_hooks_are_registered_in_one_file_only():
    """Looks for the attribute in the syntax tree, so that neither an alias nor `getattr` with a literal is missed."""
    users = set()
    for file in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            name = (
                node.attr if isinstance(node, ast.Attribute) else node.value if isinstance(node, ast.Constant) else ""
            )
            if isinstance(name, str) and re.fullmatch(
                r"(register_(module_)?(full_)?(forward|backward)\w*|_\w*_hooks\w*)", name
            ):
                users.add(file.relative_to(SRC).as_posix())
    # The peers of the benchmark read activations and gradients of their own.
    assert {name for name in users if not name.startswith("bench/")} == {"recording/hooks.py"}


def test_the_recorder_uses_public_torch_names_only():
    private = re.compile(r"\b(torch|module|model|core|RemovableHandle)(\.\w+)*\._(?!_)\w+|_compiled_call_impl|next_id")
    for file in (SRC / "recording").glob("*.py"):
        found = [match.group() for match in private.finditer(file.read_text())]
        assert not found, (file.name, found)


def test_nothing_outside_its_room_reads_a_private_attribute_of_a_detector():
    private = re.compile(r"\bdetector\._(?!_)\w+")
    for file in SRC.rglob("*.py"):
        if file.relative_to(SRC).parts[0] != "detector":
            assert not private.findall(file.read_text()), file.relative_to(SRC)


def test_one_image_passes_through_few_files(model, images):
    detector = Detector(model, scorer="average").calibrate(images)
    detector(images[:1])
    calls = []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(SRC)):
            calls.append(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        detector(images[:1])
    finally:
        sys.setprofile(None)
    switches = sum(one != other for one, other in pairwise(calls))
    assert len(set(calls)) <= 12, sorted(set(calls))
    assert switches <= 25, calls


def test_importing_the_package_pulls_no_optional_or_slow_dependency():
    heavy = (
        "fastapi",
        "jinja2",
        "lightning",
        "matplotlib",
        "mlflow",
        "onnx",
        "pandas",
        "pyarrow",
        "ray",
        "scipy",
        "sklearn",
        "timm",
        "torchvision",
        "transformers",
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


def test_models_are_never_scripted_or_traced():
    for file in SRC.rglob("*.py"):
        assert not re.search(r"torch\.jit\.(trace|script|freeze)\b", file.read_text()), file
    assert torch.__version__
