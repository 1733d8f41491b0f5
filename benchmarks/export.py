"""onnxruntime with detection in the graph, over onnxruntime without it."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import subjects
from benchmarks.timing import interleave
from neuralmean import Detector, export
from neuralmean.errors import CalibrationWarning


def run(*, names: tuple[str, ...], batches: tuple[int, ...], seconds: float) -> list[dict[str, Any]]:
    """Return one row for each model and batch: the ratio, and the largest difference of scores to torch."""
    import onnxruntime

    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            detector = _detector(name)
            plain, whole = Path(folder) / "plain.onnx", Path(folder) / "whole.onnx"
            export.to_onnx(detector, whole, input_shape=subjects.SHAPE)
            _export_plain(detector.model, plain)
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = torch.get_num_threads()
            # Else the threads of one session spin for a while after a run, on the cores that the other one needs.
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            sessions = [onnxruntime.InferenceSession(path, options) for path in (plain, whole)]
            for size in batches:
                rows.append(_measure(name, detector, sessions, size, seconds))
                row = rows[-1]
                print(
                    f"{name:12s} onnxruntime    batch {size:3d}: plain {row['plain']['seconds'] * 1e3:8.2f} ms, "
                    f"with detection {row['detection']['ratio']:.3f}, largest difference {row['difference']:.2g}",
                    flush=True,
                )
    return rows


def _measure(name: str, detector: Detector, sessions: list[Any], size: int, seconds: float) -> dict[str, Any]:
    x = subjects.images(size, seed=1)
    feeds = [{session.get_inputs()[0].name: x.numpy()} for session in sessions]
    timings = interleave(
        {
            "plain": lambda: sessions[0].run(None, feeds[0]),
            "detection": lambda: sessions[1].run(None, feeds[1]),
        },
        baseline="plain",
        seconds=seconds,
    )
    score = sessions[1].run(["score"], feeds[1])[0]
    difference = float(np.abs(score - detector.score(x).numpy()).max())
    row: dict[str, Any] = {"model": name, "mode": "onnxruntime", "batch": size, "difference": difference}
    return row | {key: timing.to_dict() for key, timing in timings.items()}


def _detector(name: str) -> Detector:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        return Detector(subjects.build(name), scorer="average").fit(subjects.images(64))


def _export_plain(model: torch.nn.Module, path: Path) -> None:
    rows = torch.export.Dim("batch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, (subjects.images(2),), dynamic_shapes=({0: rows},), strict=False)
        exported = torch.onnx.export(program, (), dynamo=True, verbose=False)
    if exported is None:
        raise RuntimeError("torch.onnx returned no graph")
    exported.save(str(path))
