"""Between a `Monitor` and its state file: what goes into the header and the tensors, and back bit for bit."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from neuralmean.detector.detector import Detector
from neuralmean.errors import NotFittedError
from neuralmean.files.artefact import Artefact
from neuralmean.stats.moments import Moments
from neuralmean.stats.sequential import Evidence, OnlineRanks

if TYPE_CHECKING:
    from neuralmean.monitor.monitor import Monitor


def identity(detector: Detector) -> str:
    """Return a digest of what a monitor relies on: the watched channels, the calibration and the profile."""
    if detector.calibration is None:
        raise NotFittedError("Expected a detector with a threshold to monitor. Call `fit` or `calibrate` first.")
    digest = hashlib.sha256("\n".join(detector.channels).encode())
    digest.update(detector.calibration.scores.double().numpy().tobytes())
    if (known := detector.profile) is not None:
        for numbers in (known.moments.mean, known.moments.m2, known.squares, known.largest):
            digest.update(numbers.numpy().tobytes())
    return digest.hexdigest()


def to_artefact(monitor: Monitor) -> Artefact:
    """Return what the state file of `monitor` holds."""
    items, item_values = monitor._item_ranks.state()
    blocks, block_values = monitor._block_ranks.state()
    arrays = {f"items.{name}": value for name, value in items.items()}
    arrays |= {f"blocks.{name}": value for name, value in blocks.items()}
    tensors = {name: torch.from_numpy(value.copy()) for name, value in arrays.items()}
    moments = [*monitor._blocks, monitor._open, monitor._learnt]
    tensors["moments.mean"] = torch.stack([part.mean for part in moments])
    tensors["moments.m2"] = torch.stack([part.m2 for part in moments])
    tensors["recent"] = torch.tensor(list(monitor._recent), dtype=torch.float64).reshape(-1, 2)
    header = {
        "kind": "monitor",
        "detector": monitor._identity,
        "window": monitor.window,
        "false_alarm_rate": monitor.false_alarm_rate,
        "seed": monitor.seed,
        "n": [monitor._n_seen, monitor._n_ood, monitor._n_resets],
        "p_value_counts": monitor._p_value_counts,
        "p_value_sum": monitor._p_value_sum,
        "drift": monitor._drift,
        "evidence": [monitor._item_evidence.state(), monitor._block_evidence.state()],
        "ranks": [item_values, block_values],
        "moment_counts": [part.count for part in moments],
    }
    return Artefact(header, {name: tensor for name, tensor in tensors.items() if tensor.numel()})


def from_artefact(kind: type[Monitor], artefact: Artefact, detector: Detector) -> Monitor:
    """Return the monitor that an artefact describes; raises what Python raises where its content makes no sense."""
    header, tensors = artefact.header, artefact.tensors
    counts, means, m2s = header["moment_counts"], tensors["moments.mean"], tensors["moments.m2"]
    moments = [Moments(int(count), mean, m2) for count, mean, m2 in zip(counts, means, m2s, strict=True)]
    monitor = kind(
        detector,
        window=header["window"],
        false_alarm_rate=header["false_alarm_rate"],
        seed=int(header["seed"]),
    )
    monitor._learnt, monitor._open = moments.pop(), moments.pop()
    monitor._blocks = deque(moments)
    monitor._n_seen, monitor._n_ood, monitor._n_resets = map(int, header["n"])
    monitor._p_value_counts = [int(count) for count in header["p_value_counts"]]
    monitor._p_value_sum = float(header["p_value_sum"])
    monitor._recent.extend(
        (p_value, bool(flag)) for p_value, flag in _tensor(tensors, "recent").reshape(-1, 2).tolist()
    )
    monitor._drift = None if header["drift"] is None else (int(header["drift"][0]), str(header["drift"][1]))
    monitor._item_evidence, monitor._block_evidence = map(Evidence.restore, header["evidence"])
    monitor._item_ranks, monitor._block_ranks = (
        OnlineRanks.restore(
            {key: _tensor(tensors, f"{name}.{key}").numpy() for key in ("scores", "ties", "counts")}, values
        )
        for name, values in zip(("items", "blocks"), header["ranks"], strict=True)
    )
    return monitor


def _tensor(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Return a tensor of the file; one without elements is not in it."""
    return tensors.get(name, torch.empty(0, dtype=torch.float64))
