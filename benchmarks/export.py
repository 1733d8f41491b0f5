"""onnxruntime with detection in the graph, over onnxruntime with the model alone."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import subjects
from benchmarks.timing import interleave
from neuralmean import Detector, export
from neuralmean.errors import CalibrationWarning

TURNS = 3


def run(*, names: tuple[str, ...], batches: tuple[int, ...], seconds: float) -> Iterator[dict[str, Any]]:
    """Yield one row for each model and batch: the ratio, and the largest difference of scores to torch.

    Where the runtime happens to have its memory makes a difference of up to a fifth, and lasts as long as the graph is loaded:
    graphs are loaded anew a few times, in another order, and the middle one of the ratios counts.
    """
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            detector = _detector(name)
            plain, whole = (Path(folder) / f"{graph}.onnx" for graph in ("plain", "whole"))
            export.to_onnx(detector, whole, input_shape=subjects.SHAPE)
            _export_plain(detector.model, plain)
            graphs = {"plain": plain, "detection": whole}
            for size in batches:
                turns = [_measure(name, detector, _open(graphs, turn), size, seconds / TURNS) for turn in range(TURNS)]
                row = sorted(turns, key=lambda row: float(row["detection"]["ratio"]))[TURNS // 2]
                row["turns"] = [turn["detection"]["ratio"] for turn in turns]
                print(
                    f"{name:12s} onnxruntime    batch {size:3d}: plain {row['plain']['seconds'] * 1e3:8.2f} ms, "
                    f"with detection {row['detection']['ratio']:.3f} "
                    f"(turns {', '.join(f'{ratio:.3f}' for ratio in row['turns'])}), largest difference {row['difference']:.2g}",
                    flush=True,
                )
                yield row


def _open(graphs: dict[str, Path], turn: int) -> dict[str, Any]:
    """Load the graphs, each turn in another order."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    affinities = _affinities(torch.get_num_threads())
    if affinities:
        options.add_session_config_entry("session.intra_op_thread_affinities", affinities)
    names = list(graphs)
    return {name: onnxruntime.InferenceSession(graphs[name], options) for name in names[turn:] + names[:turn]}


def _affinities(threads: int) -> str:
    """Return a processor for each thread but the main one, counted from 1; nothing if the main one is not bound to its own."""
    own = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    is_bound = len(own) == 1 or os.environ.get("OMP_PROC_BIND", "false").lower() != "false"
    others = [cpu for cpu in range(os.cpu_count() or 1) if cpu not in (own[:1] or [0])][: threads - 1]
    # A thread starts where the one that makes it is bound, and all would share that processor. The runtime wants one for each.
    return ";".join(str(cpu + 1) for cpu in others) if is_bound and len(others) == threads - 1 else ""


def _measure(name: str, detector: Detector, sessions: dict[str, Any], size: int, seconds: float) -> dict[str, Any]:
    x = subjects.images(size, seed=1)
    feeds = {graph: {session.get_inputs()[0].name: x.numpy()} for graph, session in sessions.items()}
    timings = interleave(
        {graph: partial(session.run, None, feeds[graph]) for graph, session in sessions.items()},
        baseline="plain",
        seconds=seconds,
        rounds=(3, 600),  # of each turn
        block=0.1,
    )
    score = sessions["detection"].run(["score"], feeds["detection"])[0]
    difference = float(np.abs(score - detector.score(x).numpy()).max())
    row: dict[str, Any] = {"model": name, "mode": "onnxruntime", "batch": size, "difference": difference}
    return row | {key: timing.to_dict() for key, timing in timings.items()}


def _detector(name: str) -> Detector:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        return Detector(subjects.build(name), scorer="average").fit(subjects.images(64))


def _export_plain(model: torch.nn.Module, path: Path) -> None:
    """Write a model as torch exports it."""
    rows = torch.export.Dim("batch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, (subjects.images(2),), dynamic_shapes=({0: rows},), strict=False)
        exported = torch.onnx.export(program, (), dynamo=True, verbose=False)
    if exported is None:
        raise RuntimeError("torch.onnx returned no graph")
    path.write_bytes(exported.model_proto.SerializeToString())
