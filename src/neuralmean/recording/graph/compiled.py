"""Compiled graphs: AOTInductor in a process of its own, and a cache of packages that only the user may write to.

A package is code. It is loaded from the user's own cache and from nowhere else.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from neuralmean.errors import InputError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

Graph = Callable[[Sequence[Tensor]], list[Tensor]]

N_RUNNERS = 4
"""How many threads may run one graph at a time; more wait."""
LONGEST_S = 1800

# Freezing folds norms into convolutions; the number of threads is the caller's when a graph runs, not when it is compiled.
_CHILD = """
import sys, torch
torch.set_num_threads(int(sys.argv[3]))
program = torch.export.load(sys.argv[1])
options = {"freezing": True, "cpp.dynamic_threads": True}
with torch.no_grad():
    torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[2], inductor_configs=options)
"""


def compile_program(program: ExportedProgram, weights: str) -> Graph:
    """Return a program as compiled code, from the cache or else compiled now.

    Args:
        program: What `capture` returned.
        weights: Digest of the weights in it.

    Raises:
        InputError: There is no C++ compiler, or it failed; the message is the reason.
    """
    package = cache_folder() / f"{_key(program, weights)}.pt2"
    if not package.is_file():
        _compile(program, package)
    return _load(package)


def cache_folder() -> Path:
    """Return the folder of compiled packages, made if there is none.

    Raises:
        InputError: Somebody else may write to it.
    """
    if sys.platform == "win32":
        root = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches"
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "neuralmean" / "graphs"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if hasattr(os, "getuid"):
        found = folder.lstat()
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if not is_own or stat.S_IMODE(found.st_mode) & 0o077:
            raise InputError(f"{str(folder)!r} must be a folder of your own that nobody else may use (mode 0700)")
    return folder


def check_compiler() -> None:
    """Raise unless there is a C++ compiler, as `InputError` whose message is the reason."""
    named = os.environ.get("CXX", "")
    if not any(shutil.which(name) for name in (named, "g++", "clang++", "c++", "cl") if name):
        raise InputError(
            "compiling needs a C++ compiler, and there is none: install g++ (Debian: `apt install g++`), Xcode's command line "
            "tools or the Visual Studio build tools"
        )


def _compile(program: ExportedProgram, package: Path) -> None:
    check_compiler()
    with tempfile.TemporaryDirectory(dir=package.parent) as folder:
        source, made = Path(folder) / "program.pt2", Path(folder) / "package.pt2"
        torch.export.save(program, source)
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor")}
        command = [sys.executable, "-c", _CHILD, str(source), str(made), str(torch.get_num_threads())]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LONGEST_S)
        if done.returncode or not made.is_file():
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise InputError(f"torch's compiler failed ({lines[-1][:200].rstrip('.')})")
        made.replace(package)


def _load(package: Path) -> Graph:
    from torch._inductor.package.package import load_package

    loader: Any = load_package(str(package), num_runners=N_RUNNERS).loader

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        found: list[Tensor] = loader.boxed_run(list(inputs))
        return found

    return run


def _key(program: ExportedProgram, weights: str) -> str:
    """Return a name for what is compiled, and where."""
    from neuralmean import __version__

    processor = platform.processor(), platform.machine(), torch.backends.cpu.get_cpu_capability(), _processor_name()
    shapes = [str(node.meta.get("val")) for node in program.graph.nodes if node.op == "placeholder"]
    digest = hashlib.sha256(repr((weights, torch.__version__, __version__, processor, _CHILD, shapes)).encode())
    digest.update(str(program.graph).encode())
    for name, value in sorted(program.constants.items()):
        if isinstance(value, Tensor):
            digest.update(f"{name}:{value.dtype}:{tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
