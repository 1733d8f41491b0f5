"""The command with hostile files, full disks and closed streams, in a process of its own."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys

import pytest

from neuralmean.files.artefact import Artefact
from tests.cli.conftest import nmd, pictures, save_pictures, saved, world  # noqa: F401 - fixtures

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="descriptors and limits of POSIX")


def shell(command, folder):
    """Run a line of shell in which `nmd` is the command; its folder is not on Python's path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path != str(folder))}
    line = command.replace("nmd ", f"{sys.executable} -c 'from neuralmean.cli import main; main()' ", 1)
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_a_file_does_not_make_the_command_import_code_from_the_working_folder(saved, world):
    (world / "toynet.py").write_text("import pathlib; pathlib.Path('hacked').touch()")
    done = shell("nmd score m.nmd new", world)
    assert done.returncode == 1
    assert "pass --trust-local-code" in done.stderr
    assert not (world / "hacked").exists()


@pytest.mark.parametrize("kind", ["evil", "bench"])
@pytest.mark.parametrize("file", ["entry_points.txt", "top_level.txt"])
def test_what_looks_like_an_installed_package_in_the_working_folder_is_not_imported(world, kind, file):
    info = world / "evil-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (info / file).write_text("evil" if file == "top_level.txt" else f"[neuralmean.models]\n{kind} = evil:SOURCE\n")
    (world / "evil.py").write_text("import pathlib; pathlib.Path('hacked').touch()")
    spec = "bench:resnet20" if kind == "bench" else "evil:x"
    Artefact({"info": {"model": spec}}, {}).write(world / "x.nmd")
    done = shell("nmd score x.nmd .", world)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert not (world / "hacked").exists()


def test_out_does_not_overwrite_what_is_read(saved, world, nmd):
    before = saved.read_bytes()
    for name in ("m.nmd", "./m.nmd", "new/../m.nmd"):
        code, _, err = nmd("score", "m.nmd", "new", "--format", "csv", "--out", name)
        assert (code, "Expected --out to be another file than" in err) == (2, True)
    os.link(world / "m.nmd", world / "link")
    (world / "sym").symlink_to("m.nmd")
    code, _, err = nmd("score", "m.nmd", "new", "--format", "csv", "--out", "sym")
    assert (code, "which is read" in err) == (2, True)
    assert saved.read_bytes() == before


READ = {
    "texts": ("score", "m.nmd", "in.txt", "--out", "in.txt"),
    "rows": ("score", "m.nmd", "in.csv", "new", "--out", "./in.csv"),
    "groups": ("score", "m.nmd", "new", "--groups", "in.csv", "--out", "in.csv"),
    "fit": ("fit", "toynet:build", "--id", "in.npz", "--out", "in.npz"),
    "held_out": ("fit", "toynet:build", "--id", "new", "--held-out", "in.npz", "--out", "in.npz"),
    "report": ("report", "m.nmd", "--id", "new", "--ood", "odd=in.npz", "--out", "in.npz"),
    "history": ("history", "in.csv", "--out", "in.csv"),
    "state": ("serve", "m.nmd", "--state", "m.nmd"),
    "served_history": ("serve", "m.nmd", "--history", "h", "--state", "h"),
}


@pytest.mark.parametrize("case", READ)
def test_what_is_read_is_not_overwritten(saved, world, nmd, case):
    for name in ("in.txt", "in.npz"):
        (world / name).write_text("precious")
    (world / "in.csv").write_text("path,group\nprecious,1\n")
    before = {path: path.read_bytes() for path in world.iterdir() if path.is_file()}
    code, _, err = nmd(*READ[case])
    option = READ[case][-2]
    assert (code, f"Expected {option} to be another file than" in err) == (2, True), err
    assert {path: path.read_bytes() for path in world.iterdir() if path.is_file()} == before


def test_with_stderr_closed_results_still_come(saved, world):
    done = shell("nmd score m.nmd new --format json --trust-local-code 2>&-", world)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 10)
    assert shell("nmd score none.nmd new 2>&-", world).returncode == 1
    assert shell("nmd score m.nmd new --trust-local-code 0<&-", world).returncode == 0


def test_with_stdout_closed_the_command_fails_and_says_so(saved, world):
    done = shell("nmd score m.nmd new --trust-local-code >&-", world)
    assert done.returncode == 1
    assert "expected to write the answer" in done.stderr


def test_a_cell_is_no_formula(saved, world, nmd):
    save_pictures(world / "odd", pictures(1, 5))
    names = ["=1+1.png", "+1.png", "-1.png", "@SUM(A1).png", "plain.png"]
    for name in names:
        shutil.copy(world / "odd" / "0000.png", world / name)
    assert nmd("score", "m.nmd", *[f"./{name}" for name in names], "--out", "x.csv")[0] == 0
    with (world / "x.csv").open(newline="") as file:
        cells = [row["path"] for row in csv.DictReader(file)]
    assert not [cell for cell in cells if cell[0] in "=+-@"]
    assert all((world / cell).exists() for cell in cells)


def test_a_full_disk_is_told_by_the_journal(saved, world):
    save_pictures(world / "many", pictures(150, 11))
    limited = "ulimit -f 4; trap '' XFSZ; "  # blocks of 1,024 bytes
    args = "m.nmd many --out x.json --batch-size 20 --quiet --trust-local-code"
    done = shell(f"{limited}nmd score {args}", world)
    assert done.returncode == 1
    assert "Finished parts are kept: run it again to continue" in done.stderr
    assert "the answer" not in done.stderr
    assert "Traceback" not in done.stderr
    done = shell(f"nmd score {args} --resume", world)
    assert done.returncode == 0, done.stderr
    assert len((world / "x.json").read_text().splitlines()) == 150


ESCAPES = "\x1b]0;title\x07\x1b[31m"


@pytest.fixture
def odd(saved, world):
    """Arguments to score a folder with names that would steer a terminal."""
    save_pictures(world / "some", pictures(1, 5))
    (world / "some" / "0000.png").rename(world / "some" / f"{ESCAPES}.png")
    (world / "some" / f"bad{ESCAPES}.png").write_bytes(b"no image")
    return ["score", "m.nmd", "some", "--format", "csv", "--trust-local-code"]


def test_a_name_does_not_steer_the_terminal(world, odd):
    start = [sys.executable, "-c", "from neuralmean.cli import main; main()", *odd]
    (world / "terminal.py").write_text(f"import pty, sys; sys.exit(pty.spawn({start!r}) >> 8)")
    shown = shell(f"{sys.executable} terminal.py", world)
    assert shown.returncode == 0, shown.stdout
    assert "1b]0;title" in shown.stdout
    assert "\x1b]0;" not in shown.stdout


def test_a_name_reaches_a_program_as_it_is(world, odd):
    done = shell(f"nmd {' '.join(odd)}", world)
    assert done.returncode == 0, done.stderr
    assert f"some/{ESCAPES}.png" in done.stdout
    assert "\x1b" not in done.stderr


def test_a_saved_file_does_not_steer_the_terminal(world, nmd):
    content = {"model": f"evil{ESCAPES}"}
    header = {
        "fitted": {},
        "calibration": {"threshold": 1.0, "false_alarm_rate": 0.05, "source": ESCAPES},
        "info": content,
    }
    header |= {"layers": [], "statistic": "mean", "scorer": {"name": ESCAPES}, "reference": {"source": "data"}}
    Artefact({**header, "fingerprint": "0" * 64, "model_class": "", "versions": {}}, {}).write(world / "evil.nmd")
    code, out, _ = nmd("inspect", "evil.nmd")
    assert code == 0
    assert "model: evil\\x1b]0;title" in out
    assert "\x1b" not in out
