"""Compiled graphs: AOTInductor in a separate process, and a cache of packages that only the user may write to.

A package is code, so it is loaded only from the user's own cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from neuralmean.errors import InputError
from neuralmean.files.artefact import add_tensor
from neuralmean.files.cache import cache_folder

if TYPE_CHECKING:
    from torch.export import ExportedProgram

Graph = Callable[[Sequence[Tensor]], list[Tensor]]

N_RUNNERS = 4  # threads that may run one graph at a time; others wait
N_KEPT = 32  # packages in the cache; beyond that, the least recently used are deleted
LONGEST_S = 1800

abandoned: ContextVar[threading.Event | None] = ContextVar("abandoned", default=None)
"""Set by a thread that compiles in the background: once the event is set, no further step begins, and the compiler ends."""

# Freezing folds norms into convolutions. The number of threads is chosen at run time, not at compile time.
# Only the compiler is nice: a thread that holds Python's lock must not wait for a processor.
_CHILD = """
import json, os, sys, threading, time
if hasattr(os, "nice"): os.nice(10)
import torch
def watch(parent):  # exit once the requesting process has ended
    while os.getppid() == parent: time.sleep(1)
    os.killpg(0, 9) if hasattr(os, "killpg") else os._exit(1)
threading.Thread(target=watch, args=[os.getppid()], daemon=True).start()
torch.set_num_threads(os.cpu_count() or 1)
options = {"freezing": True, "cpp.dynamic_threads": True, "aot_inductor.metadata": json.load(open(sys.argv[1]))}
for folder in sys.argv[2:]:
    program = torch.export.load(os.path.join(folder, "program.pt2"))
    made = os.path.join(folder, "package.pt2")
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=made, inductor_configs=options)
"""


def compile_programs(programs: Sequence[ExportedProgram], weights: str) -> list[Graph]:
    """Return the compiled programs, from the cache if they are there.

    Args:
        programs: Programs returned by `capture`.
        weights: Digest of the weights in them.

    Raises:
        InputError: There is no C++ compiler, or it failed; the message is the reason.
    """
    folder = cache_folder("graphs")
    packages = [folder / f"{_key(program, weights)}.pt2" for program in programs]
    if not all(package.is_file() for package in packages):
        for left in folder.glob("tmp*"):  # left by a killed process
            if time.time() - left.stat().st_mtime > 2 * LONGEST_S:
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder) as made:
            for new, package in zip(compile_packages(programs, Path(made)), packages, strict=True):
                new.replace(package)
        for old in sorted(folder.glob("*.pt2"), key=lambda path: path.stat().st_mtime)[:-N_KEPT]:
            old.unlink(missing_ok=True)
    for package in packages:
        os.utime(package)
    return [_load(package) for package in packages]


def check_compiler() -> None:
    """Raise `InputError` unless there is a C++ compiler; the message is the reason."""
    named = os.environ.get("CXX", "")
    if not any(shutil.which(name) for name in (named, "g++", "clang++", "c++", "cl") if name):
        raise InputError(
            "compiling needs a C++ compiler, but none was found: install g++ (Debian: `apt install g++`), Xcode's command line "
            "tools or the Visual Studio build tools"
        )


def compile_packages(
    programs: Sequence[ExportedProgram], folder: Path, metadata: dict[str, str] | None = None
) -> list[Path]:
    """Compile programs in one process and return the packages, files below `folder`.

    Args:
        programs: Programs returned by `capture`.
        folder: A private folder for the compiler's output.
        metadata: Text to store in the packages.

    Raises:
        InputError: There is no C++ compiler, or it failed; the message is the reason.
    """
    check_compiler()
    parts = [folder / str(index) for index in range(len(programs))]
    for part, program in zip(parts, programs, strict=True):
        part.mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about tensors that share memory, but saves them
            torch.export.save(program, part / "program.pt2")
    written = folder / "metadata.json"
    written.write_text(json.dumps(metadata or {}))
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    environment.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, "-c", _CHILD, str(written), *map(str, parts)]
    code, errors = _run(command, environment)
    packages = [part / "package.pt2" for part in parts]
    if code or not all(package.is_file() for package in packages):
        lines = errors.strip().splitlines() or [f"exit code {code}"]
        raise InputError(f"torch's compiler failed ({lines[-1][:200].rstrip('.')})")
    return packages


def check_wanted() -> None:
    """Raise if whoever compiles in the background has abandoned it, as `InputError` whose message is the reason."""
    event = abandoned.get()
    if event is not None and event.is_set():
        raise InputError("its compilation was abandoned")


def _run(command: Sequence[str], environment: dict[str, str]) -> tuple[int, str]:
    """Run a command and return its exit code and what it wrote to stderr; it ends, with its children, when nobody wants it."""
    options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    until = time.monotonic() + LONGEST_S
    with subprocess.Popen(command, env=environment, start_new_session=True, **options) as process:
        try:
            while time.monotonic() < until:
                check_wanted()
                with suppress(subprocess.TimeoutExpired):
                    errors = process.communicate(timeout=0.2)[1]
                    return process.returncode, errors
            raise InputError(f"torch's compiler took longer than {LONGEST_S} seconds")
        except BaseException:
            if sys.platform == "win32":
                process.kill()
            else:
                os.killpg(process.pid, signal.SIGKILL)
            raise


def _load(package: Path) -> Graph:
    from torch._inductor.package.package import load_package

    loader: Any = load_package(str(package), num_runners=N_RUNNERS).loader
    return lambda inputs: loader.boxed_run(list(inputs))


def _key(program: ExportedProgram, weights: str) -> str:
    """Return a name for a compiled program that depends on the machine."""
    from neuralmean import __version__

    processor = [platform.processor(), platform.machine(), torch.backends.cpu.get_cpu_capability()]
    with suppress(OSError):  # Linux itself reports only x86_64
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor += sorted({line for line in lines if line.startswith(("model name", "flags"))})
    shapes = [str(node.meta.get("val")) for node in program.graph.nodes if node.op == "placeholder"]
    digest = hashlib.sha256(repr((weights, torch.__version__, __version__, processor, _CHILD, shapes)).encode())
    digest.update(str(program.graph).encode())
    for name, value in sorted(program.constants.items()):
        if isinstance(value, Tensor):
            add_tensor(digest, name, value)
    return digest.hexdigest()
