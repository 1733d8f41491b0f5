"""`nmd` with arguments from anywhere: 0, 1 or 2 and a clear sentence; no traceback, no hang, no lot of memory, no mess."""

from __future__ import annotations

import os
import re
import sys

import numpy as np
import pytest
import torch
import typer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from neuralmean.cli.app import load_commands
from neuralmean.errors import InputError
from neuralmean.jobs import Journal
from neuralmean.models import spec
from tests.cli.conftest import FIT, MODULE, pictures, save_pictures
from tests.fuzz.command import World, run, tame

pytestmark = pytest.mark.filterwarnings("ignore")

MAX_GROWTH = 300 * 2**20
FEW, MANY = settings(deadline=None, max_examples=60), settings(deadline=None, max_examples=2000)

# What an option takes when all is well, by the name of the parameter.
GOOD = {
    "model": "toynet:Net", "saved": "m.nmd", "paths": "new", "id_data": "train.npz", "ood": "odd=odd.npz",
    "held_out": "val.npz", "image": "new/0000.png", "weights": "w.safetensors", "mean": "0.5,0.5,0.5",
    "std": "0.5,0.5,0.5", "size": "12", "format_": "json", "engine": "local", "scorer": "average", "layers": "bn*",
    "statistic": "mean", "data": "data", "results": "rows.json", "names": "transfer", "name": "convnet4",
    "id_set": "cifar10", "workers": "0", "batch_size": "8", "false_alarm_rate": "0.1", "limit": "50",
    "host": "127.0.0.1", "port": "0", "top": "3", "cache": "cache", "html": "r.html", "state": "s.state",
    "methods": "msp",
}  # fmt: skip
OUT = {
    "fit": "o.nmd",
    "export": "o.onnx",
    "report": "o.html",
    "demo": "demo",
    "run": "o.json",
    "train": "o.safetensors",
}
NUMBERS = [
    "0", "-0", "-1", "1", "2", "2.5", "1e3", "1e308", "-1e400", "nan", "inf", "-inf", "0x10", "1_000", "١٢",
    "2147483648", "9223372036854775808", "1" + "0" * 30, "9" * 5000, "1,2", "1,2,3", "nan,nan,nan", "0,0,0",
    "16384", "16385x1", "99999999",
]  # fmt: skip
NAMES = [
    "", " ", "-", "--", "---", "-h", "=", "a=", "=b", ".", "..", "nowhere", "nowhere/x.csv", "text.txt",
    "text.txt/inside", "empty.nmd", "damaged.nmd", "folder", "new", "new/*", "**", "[", "{0..3}", "{", "train.npz",
    "damaged.npz", "m.nmd", "w.safetensors", "toynet.py", "data", "rows.json", "text.json", "/", "/dev/null",
    "/dev/full", "/nowhere/x.nmd", "~", "$HOME", "%s", "%", "{}", "x.onnx", "x.pt2", "x.parquet", "x.jsonl",
    "x.txt", "x.html", "CON", "a" * 300, "a" * 5000, "é☃.csv", "line\nbreak", "\x1b[31m", "\udcff\udcfe",
    "\udcff.csv", "--fail-on-ood", "--unknown", "--unknown=1", "-q", "-qq", "-z", "--out", "--help", "--version",
    "--batch-size=-3",
]  # fmt: skip
WORDS = [
    "toynet:Net", "toynet:Nothing", "toynet:np", "toynet", "toynet:", ":Net", ":", "a:b:c", "math:pi", "math:sqrt",
    "os.path:join", "timm:nothing", "timm:hf-hub:a/b", "torchvision:nothing", "bench:resnet20", "bench:nothing",
    "toynet.py:Net", "../toynet:Net", "1:2", "average", "logistic", "mlp", "typicality", "magic", "mean",
    "variance", "both", "local", "ray", "table", "json", "csv", "parquet", "xml", "transfer", "few-shot", "msp",
    "quick", "cifar10", "svhn", "nothing", "bn1", "bn*", "fc", "none", "True", "null", "127.0.0.1", "::",
    "no.such.host.invalid", "256.256.256.256",
]  # fmt: skip
TEXT = st.text(st.characters(exclude_characters="/\\\0", exclude_categories=["Cs"]), max_size=12)


def _commands(command, path=()):
    if hasattr(command, "commands"):  # by what it has: typer brings its own click or uses the one that is installed
        for name, inner in command.commands.items():
            yield from _commands(inner, (*path, name))
    else:
        yield path, command


COMMANDS = list(_commands(typer.main.get_command(load_commands())))


def _accident(draw, arguments, places):
    """Something goes wrong: mostly a value, now and then the order or the number of words."""
    bad = draw(st.sampled_from([*NUMBERS, *NAMES, *WORDS]) | TEXT)
    kind = draw(st.sampled_from(["value"] * 7 + ["insert", "drop", "twice"]))
    if kind == "value" and places:
        arguments[draw(st.sampled_from(places))] = bad
    elif kind == "insert":
        arguments.insert(draw(st.integers(0, len(arguments))), bad)
    elif arguments:
        at = draw(st.integers(0, len(arguments) - 1))
        arguments[at : at + 1] = [] if kind == "drop" else [arguments[at]] * 2


@st.composite
def calls(draw):
    """A command with what it needs and a few of its options, to which an accident or two happen."""
    path, command = draw(st.sampled_from(COMMANDS))
    arguments, places = list(path), []
    for parameter in command.params:
        needed = parameter.required or (path == ("fit",) and parameter.name in ("mean", "std", "size", "weights"))
        if not needed and draw(st.integers(0, 3)) > 0:
            continue
        if parameter.param_type_name == "option":
            arguments.append(draw(st.sampled_from(parameter.opts)))
        if not getattr(parameter, "is_flag", False):
            places.append(len(arguments))
            arguments.append(OUT.get(path[-1], "o.csv") if parameter.name == "out" else GOOD.get(parameter.name, "7"))
    for _ in range(draw(st.integers(0, 2))):
        _accident(draw, arguments, [place for place in places if place < len(arguments)])
    return arguments


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A working folder with a small model, images, and files that are not what they seem."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.delenv("NMD_TOKEN", raising=False)
        tame(patch)
        (folder / "toynet.py").write_text(MODULE)
        sys.modules.pop("toynet", None)
        import toynet

        installed = spec._is_installed
        patch.setattr(spec, "_is_installed", lambda module: module == "toynet" or installed(module))
        torch.manual_seed(0)
        model = toynet.Net().train()
        with torch.no_grad():
            for step in range(20):
                model((torch.from_numpy(pictures(64, 100 + step)).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5)
        save_file(model.state_dict(), folder / "w.safetensors")
        for seed, (name, count) in enumerate({"train": 60, "val": 40, "odd": 30}.items()):
            np.savez(folder / f"{name}.npz", images=pictures(count, seed, strange=name == "odd"))
        save_pictures(folder / "new", pictures(4, 3))
        (folder / "damaged.npz").write_bytes((folder / "val.npz").read_bytes()[:200])
        for name in ("folder", "data", "weights"):
            (folder / name).mkdir()
        (folder / "text.txt").write_text("hello")
        (folder / "text.json").write_text("[1, {}]")
        (folder / "rows.json").write_text("[]")
        (folder / "empty.nmd").touch()
        made = run("fit", "toynet:Net", *FIT, "--id", "train.npz", "--held-out", "val.npz", "--out", "m.nmd", "-q")
        assert made.code == 0, made.err
        (folder / "damaged.nmd").write_bytes((folder / "m.nmd").read_bytes()[:-40])
        for command in (("score", "m.nmd", "new"), ("inspect", "timm:x"), ("inspect", "torchvision:x"),
                        ("report", "m.nmd", "--id", "val.npz", "--ood", "odd.npz", "--out", "r.html"),
                        ("serve", "m.nmd"), ("bench", "list")):  # fmt: skip
            run(*command)  # loads what is loaded once
        (folder / "r.html").unlink()
        world = World(folder)
        world.keep()
        yield world
        sys.modules.pop("toynet", None)


def check(world, arguments):
    """Run and hold what came out against what is promised."""
    world.restore()
    beside = set(world.folder.parent.iterdir())
    outcome = run(*arguments)
    assert outcome.code in (0, 1, 2) or (outcome.code == 3 and "--fail-on-ood" in arguments)
    assert "Traceback" not in outcome.err + outcome.out
    assert outcome.grown < MAX_GROWTH
    errors = [line for line in outcome.err.splitlines() if line.startswith("Error: ")]
    if outcome.code == 1:
        assert len(errors) == 1
        assert re.search(r"\w{3}", errors[0])
    elif outcome.code in (0, 3):
        assert errors == []
    assert set(world.folder.parent.iterdir()) == beside
    assert not list(world.folder.rglob("*.nmd-tmp"))
    return outcome


def test_every_command_is_among_those_tried():
    assert {path[-1] for path, _ in COMMANDS} >= {
        "fit",
        "score",
        "inspect",
        "explain",
        "report",
        "serve",
        "run",
        "train",
    }


@FEW
@given(calls())
@example(["score", "m.nmd", "train.npz", "new", "--workers", "1024"])
@example(["score", "m.nmd", "train.npz", "new", "--workers", "1" + "0" * 30])
@example(["score", "m.nmd", "new", "--out", ""])
@example(["score", "m.nmd", "/dev/zero"])
@example(["score", "/dev/zero", "new"])
@example(["fit", "toynet:Net", *FIT, "--id", "train.npz", "--out", "x.nmd", "--size", "16384"])
@example(["bench", "report", ""])
@example(["demo", "--out", "text.txt"])
@example(["demo", "--out", "a" * 300])
def test_any_arguments_end_in_an_exit_code_and_a_sentence(world, arguments):
    check(world, arguments)


@pytest.mark.slow
@MANY
@given(calls())
def test_any_arguments_end_in_an_exit_code_and_a_sentence_many_times(world, arguments):
    check(world, arguments)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="names of files are text elsewhere")
@pytest.mark.parametrize(
    "out", [(), ("--out", "x.csv"), ("--out", "x.jsonl"), ("--out", "x.parquet"), ("--out", "x.txt")]
)
@pytest.mark.parametrize("how", [("--format", "json"), ("--format", "csv"), ()])
def test_a_file_whose_name_is_no_text_is_scored(world, out, how):
    world.restore()
    odd = os.fsencode(world.folder / "new") + b"/\xff\xfe.png"
    with open(odd, "wb") as file:  # noqa: PTH123 - a name of bytes
        file.write((world.folder / "new" / "0000.png").read_bytes())
    outcome = run("score", "m.nmd", "new", *how, *out)
    assert outcome.code == 0, outcome.err
    assert "5 scored" in outcome.err
    os.unlink(odd)  # noqa: PTH108


def test_a_run_by_chunks_is_gone_on_with(world, monkeypatch):
    """`--engine ray`, here without its workers: two arrays are two chunks, of which the first is done."""
    world.restore()
    command = ["score", "m.nmd", "train.npz", "val.npz", "text.txt", "--engine", "ray", "--workers", "0", "--out"]
    assert run(*command, "whole.csv").code == 0
    add = Journal.add

    def stop_at_the_second(self, key, content):
        if len(list(self.entries())) == 1:
            raise InputError("Expected to go on, but the power is gone.")
        add(self, key, content)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", stop_at_the_second)
        assert run(*command, "o.csv").code == 1
    outcome = run(*command, "o.csv", "--resume")
    assert outcome.code == 0
    assert "100 scored" in outcome.err
    assert "1 unreadable" in outcome.err
    assert "60 from the earlier run" in outcome.err
    assert (world.folder / "o.csv").read_bytes() == (world.folder / "whole.csv").read_bytes()
    assert len(run(*command[:-1]).out.splitlines()) == 101
