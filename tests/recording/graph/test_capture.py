from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch import nn

from neuralmean import Detector
from neuralmean.errors import InputError
from neuralmean.export import to_onnx, to_pt2
from neuralmean.recording.graph.capture import _silent, capture
from neuralmean.service.freezing import Freezing
from neuralmean.service.workers import Runner, Threads
from tests.recording.graph import hostile

pytestmark = pytest.mark.filterwarnings("ignore::neuralmean.errors.CalibrationWarning")

SHAPE = (3, 8, 8)


def images(n=60):
    return torch.rand(n, *SHAPE, generator=torch.Generator().manual_seed(1))


def detector_of(kind):
    return Detector(kind().eval(), scorer="average").calibrate(images())


WAYS = {
    "freeze": lambda detector, path: detector.freeze(images(2)),
    "pt2": lambda detector, path: to_pt2(detector, path, input_shape=SHAPE),
    "portable": lambda detector, path: to_pt2(detector, path, input_shape=SHAPE, portable=True),
    "onnx": lambda detector, path: to_onnx(detector, path, input_shape=SHAPE),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", hostile.VALUES + hostile.CALLS, ids=lambda kind: kind.__name__)
def test_a_model_that_is_no_fixed_graph_is_refused_in_one_sentence(kind, way, tmp_path, capfd):
    if way == "onnx":
        pytest.importorskip("onnx")
    detector = detector_of(kind)
    capfd.readouterr()
    with pytest.raises(InputError, match=f"Expected {kind.__name__} .*to be a fixed graph") as refused:
        WAYS[way](detector, tmp_path / "x.onnx")
    assert "\n" not in str(refused.value)
    assert capfd.readouterr().err == ""  # torch.export prints whole graphs
    assert not any(tmp_path.iterdir())
    assert not detector.is_frozen


@pytest.mark.parametrize("kind", hostile.VALUES + hostile.CALLS, ids=lambda kind: kind.__name__)
def test_a_service_goes_on_with_the_model_that_is_no_fixed_graph(kind, caplog):
    detector = detector_of(kind)
    runner = Runner(detector, Threads(1, 1))
    with caplog.at_level("INFO", "neuralmean.service"):
        Freezing(detector, [runner], images(1)).join()
    assert f"without compilation: Expected {kind.__name__} to be a fixed graph" in caplog.text
    assert not detector.is_frozen


@pytest.mark.parametrize("way", ["portable", "onnx"])
def test_a_graph_that_is_wrong_for_single_inputs_is_not_kept(way, tmp_path):
    if way == "onnx":
        pytest.importorskip("onnx")
    with pytest.raises(InputError, match=r"`output` differs for 1 test inputs .* No file was written"):
        WAYS[way](detector_of(hostile.OneAlone), tmp_path / "x.onnx")
    assert not any(tmp_path.iterdir())


class Whole(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs):
        return self.inner(*inputs)


class Writes(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.where = where
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        if self.where == "buffer":
            self.total += 1
            return x * self.total
        return x.mul_(2)


@pytest.mark.parametrize(("where", "said"), [("buffer", "a pass writes to 'inner.total'"), ("input", "writes to its")])
def test_a_pass_that_writes_is_refused(where, said):
    with pytest.raises(InputError, match=said):
        capture(Whole(Writes(where)).eval(), [torch.ones(3, 2)], any_size=True)


def test_a_captured_program_takes_batches_of_any_size():
    program = capture(Whole(nn.Linear(2, 1)).eval(), [torch.ones(3, 2)], any_size=True)
    for size in (1, 2, 40):
        assert program.module()(torch.ones(size, 2)).shape == (size, 1)


def test_only_the_thread_that_captures_is_silent(capsys):
    with _silent():
        sys.stderr.write("from here")
        other = threading.Thread(target=lambda: sys.stderr.write("from there"))
        other.start()
        other.join()
    sys.stderr.write(", afterwards")
    assert capsys.readouterr().err == "from there, afterwards"
