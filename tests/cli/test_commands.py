from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from neuralmean import Detector
from neuralmean.detector.saved import open_saved
from neuralmean.files.artefact import FORMAT_VERSION
from neuralmean.scorers import SCORERS
from tests.cli.conftest import FIT, pictures, save_pictures


def count_and(calls, function):
    def call(*args, **kwargs):
        calls.append(1)
        return function(*args, **kwargs)

    return call


COMMANDS = ["demo", "inspect", "fit", "score", "explain", "report", "export", "serve", "history", "mcp", "bench"]


def test_version_says_library_torch_and_format(nmd):
    code, out, _ = nmd("--version")
    assert code == 0
    assert out.startswith("neuralmean ")
    assert out.strip().endswith(f"torch {torch.__version__}, file format {FORMAT_VERSION}")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_a_worked_example(nmd, command):
    code, out, _ = nmd(command, "--help")
    assert code == 0
    assert "Example:" in out
    assert f"nmd {command}" in out


def test_the_help_of_fit_names_every_scorer(nmd):
    out = " ".join(nmd("fit", "--help")[1].split())
    assert not [name for name in SCORERS if name not in out]


@pytest.mark.parametrize("command", ["list", "run", "report", "train", "data", "models"])
def test_every_bench_help_has_a_worked_example(nmd, command):
    code, out, _ = nmd("bench", command, "--help")
    assert (code, "Example:" in out) == (0, True)


def test_wrong_usage_leaves_with_2(nmd):
    assert nmd("score")[0] == 2
    assert nmd("nonsense")[0] == 2
    assert nmd("score", "a.nmd", "b", "--batch-size", "0")[0] == 2


class TestInspect:
    def test_a_model_is_described(self, world, nmd):
        code, out, _ = nmd("inspect", "toynet:Net", *FIT)
        assert code == 0
        lines = out.splitlines()
        assert lines[1].split() == ["bn1", "batchnorm", "8"]
        assert "2 layers, 24 channels" in out
        assert "batch-norm buffers" in out
        assert "far, angle, reach and doubt (classes from 'fc')" in out

    def test_a_saved_file_is_described(self, saved, nmd):
        code, out, _ = nmd("inspect", "m.nmd")
        assert code == 0
        assert "model: toynet:Net" in out
        assert "held_out 60" in out
        assert "terms: far, " in out

    @pytest.mark.parametrize("spec", ["timm:resnet18", "torchvision:resnet18"])
    def test_peers_are_listed_without_a_download(self, nmd, spec):
        pytest.importorskip(spec.split(":")[0])
        code, out, _ = nmd("inspect", spec)
        assert code == 0
        assert "20 layers, 4800 channels" in out

    def test_a_model_that_cannot_be_built_is_one_sentence(self, world, nmd):
        code, out, err = nmd("inspect", "toynet:Nett")
        assert (code, out) == (1, "")
        assert err.startswith("Error: Expected")
        assert "Traceback" not in err


class TestFit:
    def test_scores_are_those_of_the_library(self, saved, nmd, world):
        import toynet
        from safetensors.torch import load_file

        model = toynet.Net()
        model.load_state_dict(load_file("w.safetensors"))
        detector = Detector.load(saved, model.eval())
        strange = pictures(5, 4, strange=True)
        expected = detector.predict((torch.from_numpy(strange).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5)
        _, out, _ = nmd("score", "m.nmd", "new/odd", "--format", "json")
        rows = [json.loads(line) for line in out.splitlines()]
        assert [row["score"] for row in rows] == pytest.approx(expected.score.tolist(), rel=1e-5)
        assert [row["is_ood"] for row in rows] == expected.is_ood.tolist() == [True] * 5

    def test_without_held_out_images_it_says_what_that_is_worth(self, world, nmd):
        code, out, err = nmd("fit", "toynet:Net", *FIT, "--id", "train", "--out", "m.nmd")
        assert (code, out) == (0, "")
        assert "Note: " in err
        assert "held_out" in err

    def test_outliers_and_arrays_are_taken(self, world, nmd):
        np.savez("odd.npz", images=pictures(40, 9, strange=True))
        code, _, err = nmd("fit", "toynet:Net", *FIT, "--id", "train", "--ood", "odd.npz", "--held-out", "val",
                           "--scorer", "logistic", "--out", "m.nmd", "-q")  # fmt: skip
        assert code == 0, err
        assert open_saved("m.nmd", trust_local_code=True).detector.fitted["n_ood"] == 40

    def test_images_must_be_prepared_somehow(self, world, nmd):
        code, _, err = nmd("fit", "toynet:Net", "--id", "train", "--out", "m.nmd")
        assert code == 1
        assert "Pass --mean, --std and --size" in err

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--mean", "a,b"), "Expected --mean to be comma-separated numbers, but got 'a,b'"),
            (("--size", "0"), "Expected --size to be N or HxW in pixels, but got '0'"),
            (("--engine", "spark"), "Expected --engine to be local or ray, but got 'spark'"),
            (("--scorer", "magic"), "Expected `scorer` to be one of"),
        ],
    )
    def test_bad_options_are_one_sentence(self, world, nmd, options, message):
        code, _, err = nmd("fit", "toynet:Net", *FIT, "--id", "train", "--out", "m.nmd", *options)
        assert code == 2
        assert message in err
        assert "Traceback" not in err


class TestScore:
    def test_a_table_by_default(self, saved, nmd):
        code, out, err = nmd("score", "m.nmd", "new")
        lines = out.splitlines()
        assert code == 0
        assert lines[0].split() == ["verdict", "kind", "p-value", "score", "path"]
        assert len(lines) == 11
        assert lines[-1].startswith("OOD")
        assert "10 scored" in err

    def test_csv_json_and_parquet_hold_the_same(self, saved, nmd, world):
        pytest.importorskip("pyarrow")
        from pyarrow import parquet

        for name in ("x.csv", "x.jsonl", "x.parquet"):
            assert nmd("score", "m.nmd", "new", "--out", name)[0] == 0
        records = csv.DictReader((world / "x.csv").read_text().splitlines())
        table = [(r["path"], float(r["score"]), float(r["p_value"]), r["is_ood"] == "true", r["kind"]) for r in records]
        lines = [tuple(json.loads(line).values()) for line in (world / "x.jsonl").read_text().splitlines()]
        frame = [tuple(row.values()) for row in parquet.read_table("x.parquet").to_pylist()]
        assert table == lines == frame
        assert len(table) == 10

    @pytest.mark.parametrize(
        "options",
        [
            ("--format", "xml"),
            ("--resume",),
            ("--format", "parquet"),
            ("--engine", "spark"),
            ("--engine", "ray", "--freeze"),
        ],
    )
    def test_wrong_usage_leaves_with_2(self, saved, nmd, options):
        code, _, err = nmd("score", "m.nmd", "new", *options)
        assert code == 2
        assert "Expected" in err

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
    def test_a_full_disk_behind_stdout_is_one_sentence(self, saved):
        with Path("/dev/full").open("w") as full:
            command = [sys.executable, "-m", "neuralmean", "score", "m.nmd", "new", "--quiet", "--trust-local-code"]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr.strip().splitlines()[-1].startswith("Error: expected to write the answer, but No space left")
        assert "Traceback" not in done.stderr

    def test_fail_on_ood_leaves_with_3(self, saved, nmd):
        assert nmd("score", "m.nmd", "new/odd", "--fail-on-ood")[0] == 3
        assert nmd("score", "m.nmd", "new/odd")[0] == 0

    def test_bad_files_are_named_and_the_rest_goes_on(self, saved, nmd, world):
        (world / "new" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
        (world / "new" / "empty.jpg").write_bytes(b"")
        (world / "new" / "notes.txt").write_text("hello")
        Image.new("L", (2, 2)).save(world / "new" / "grey.bmp")
        code, out, err = nmd("score", "m.nmd", "new", "--format", "json")
        assert code == 0
        assert len(out.splitlines()) == 11
        assert "broken.png" in err
        assert "empty.jpg" in err
        assert "2 unreadable" in err
        assert "1 skipped" in err

    def test_nothing_readable_is_a_failure(self, saved, nmd, world):
        (world / "bad").mkdir()
        (world / "bad" / "x.png").write_bytes(b"nope")
        code, _, err = nmd("score", "m.nmd", "bad")
        assert code == 1
        assert "Expected at least one image or text that can be read in bad, but there is none" in err

    def test_missing_things_are_one_sentence(self, saved, nmd, world):
        assert "No such file" in nmd("score", "none.nmd", "new")[2]
        assert nmd("score", "m.nmd", "nowhere")[0] == 1
        (world / "w.safetensors").rename(world / "elsewhere.safetensors")
        code, _, err = nmd("score", "m.nmd", "new")
        assert code == 1
        assert "Pass them with --weights" in err
        assert nmd("score", "m.nmd", "new", "--weights", "elsewhere.safetensors")[0] == 0

    def test_other_weights_are_refused(self, saved, nmd, world):
        import toynet
        from safetensors.torch import save_file

        save_file(toynet.Net().state_dict(), world / "w.safetensors")
        code, _, err = nmd("score", "m.nmd", "new")
        assert code == 1
        assert "its weights differ" in err

    def test_parquet_needs_a_file_and_resume_too(self, saved, nmd):
        assert "Pass --out FILE" in nmd("score", "m.nmd", "new", "--format", "parquet")[2]
        assert "Pass --out FILE with --resume" in nmd("score", "m.nmd", "new", "--resume")[2]
        assert "Expected the format to be one of" in nmd("score", "m.nmd", "new", "--format", "xml")[2]

    def test_a_killed_run_leaves_no_half_file_and_goes_on(self, saved, nmd, world):
        save_pictures(world / "many", pictures(3000, 11))
        args = ["score", "m.nmd", "many", "--out", "x.csv", "--batch-size", "20", "--trust-local-code"]
        command = [sys.executable, "-c", "from neuralmean.cli import main; main()", *args]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(world), *sys.path]), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        partial = world / "x.csv.partial"
        while process.poll() is None and not (partial.exists() and partial.read_bytes().count(b"\n") > 5):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (world / "x.csv").exists()
        assert partial.exists()
        code, _, err = nmd(*args, "--resume")
        assert code == 0, err
        assert "from the earlier run" in err
        resumed = (world / "x.csv").read_text()
        assert nmd("score", "m.nmd", "many", "--out", "y.csv", "--batch-size", "20")[0] == 0
        assert resumed == (world / "y.csv").read_text()
        assert not partial.exists()

    def test_a_run_with_other_settings_is_not_gone_on_with(self, saved, nmd, world):
        (world / "x.csv.partial").write_text('{"key": "another"}\n')
        code, _, err = nmd("score", "m.nmd", "new", "--out", "x.csv", "--resume")
        assert code == 1
        assert "Leave out --resume to start again" in err


class TestExplain:
    def test_layers_and_terms_are_shown(self, saved, nmd):
        code, out, _ = nmd("explain", "m.nmd", "new/odd/0000.png")
        assert code == 0
        assert "bn1" in out
        assert "doubt: how undecided the classifier is" in out
        assert "add up to the score" in out
        assert "█ raises the score, ░ lowers it" in out

    def test_a_map_of_the_image_is_written(self, saved, nmd, world):
        assert nmd("explain", "m.nmd", "new/odd/0000.png", "--out", "map.png")[0] == 0
        assert (world / "map.png").read_bytes().startswith(b"\x89PNG")
        code, _, err = nmd("explain", "m.nmd", "new/odd/0000.png", "--out", "map.jpg")
        assert code == 2
        assert "Expected --out to end in .png, but got 'map.jpg'" in err

    def test_a_folder_is_no_image(self, saved, nmd):
        code, _, err = nmd("explain", "m.nmd", "new")
        assert code == 2
        assert "Expected one image to explain, but 'new' is a folder" in err

    def test_a_row_of_an_array_is_named_as_score_names_it(self, saved, nmd, world):
        images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
        np.savez(world / "many.npz", images=images)
        _, scored, _ = nmd("score", "m.nmd", "many.npz", "--format", "json")
        rows = [json.loads(line) for line in scored.splitlines()]
        for row in rows:
            _, out, _ = nmd("explain", "m.nmd", row["path"], "--format", "json")
            assert json.loads(out)["path"] == row["path"]
            assert json.loads(out)["score"] == pytest.approx(row["score"], rel=1e-5)
        code, _, err = nmd("explain", "m.nmd", "many.npz#3")
        assert code == 1
        assert "Expected an image that can be read, but got 'many.npz#3', but there is none." in err

    def test_json_adds_up(self, saved, nmd):
        _, out, _ = nmd("explain", "m.nmd", "new/odd/0000.png", "--format", "json")
        row = json.loads(out)
        assert sum(row["layers"].values()) + sum(row["terms"].values()) == pytest.approx(
            row["score"], rel=1e-3, abs=1e-3
        )
        assert row["is_ood"] is True

    def test_what_is_no_image_is_one_sentence(self, saved, nmd, world):
        (world / "x.png").write_bytes(b"nope")
        code, _, err = nmd("explain", "m.nmd", "x.png")
        assert code == 1
        assert "Expected an image that can be read, but got 'x.png'" in err
        assert "Expected --format to be table or json" in nmd("explain", "m.nmd", "x.png", "--format", "xml")[2]


class TestBench:
    def test_experiments_and_methods_are_listed(self, nmd):
        assert "few-shot" in nmd("bench", "list")[1]
        assert "energy" in nmd("bench", "list", "--methods")[1].split()

    def test_missing_folders_are_one_sentence(self, nmd, world):
        code, _, err = nmd("bench", "run", "few-shot", "--data", "nowhere", "--weights", "nowhere")
        assert code == 1
        assert err.splitlines()[-1].startswith("Error: Expected")
        assert nmd("bench", "data", "--data", "nowhere")[0] == 1
        assert nmd("bench", "run", "nonsense", "--data", ".", "--weights", ".")[0] == 1


def test_names_of_sets_are_read():
    from neuralmean.cli.options import named_paths
    from neuralmean.errors import InputError

    assert named_paths(["a=x/y", "photos/cats"]) == {"a": "x/y", "cats": "photos/cats"}
    with pytest.raises(InputError, match="Expected NAME=DIR, but got '=x'"):
        named_paths(["=x"])
    with pytest.raises(InputError, match="but 'a' occurs twice"):
        named_paths(["a=x", "a=y"])
