"""Converts a `Monitor` to its state file and back, bit for bit.

A file holds bounded arrays: at most 10,000 ranked scores (or as many as were held out), the latest items (2,048, or the window if
that is larger), moments of the window's blocks, and at most as many accepted scores as latest items.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuralmean.detector.detector import Detector
from neuralmean.errors import NotFittedError
from neuralmean.files.artefact import Artefact
from neuralmean.monitor.checked import whole
from neuralmean.monitor.counters import Counters
from neuralmean.monitor.status import KIND_SENTENCES, Alarm, Test

if TYPE_CHECKING:
    from neuralmean.monitor.monitor import Monitor

_LARGEST_WINDOW = 2**20


def identity(detector: Detector) -> str:
    """Return a digest of the parts of a detector that a monitor uses: the watched channels, the calibration and the profile."""
    if detector.calibration is None:
        raise NotFittedError("Expected a detector with a threshold to monitor. Call `fit` or `calibrate` first.")
    digest = hashlib.sha256("\n".join(detector.channels).encode())
    digest.update(detector.calibration.scores.double().numpy().tobytes())
    if (known := detector.profile) is not None:
        for numbers in (known.moments.mean, known.moments.m2, known.squares, known.largest):
            digest.update(numbers.numpy().tobytes())
    return digest.hexdigest()


def to_artefact(monitor: Monitor) -> Artefact:
    """Return the content of the state file of `monitor`."""
    parts = {"items": monitor._items.state(), "repeats": monitor._repeats.state(), "blocks": monitor._blocks.state()}
    tensors = {f"{part}.{name}": tensor for part, (own, _) in parts.items() for name, tensor in own.items()}
    tensors["recent"] = monitor._recent.state()
    if monitor._accepted is not None:
        tensors["accepted"] = torch.from_numpy(monitor._accepted.copy())
    header = {
        "kind": "monitor",
        "detector": monitor._identity,
        "window": monitor.window,
        "false_alarm_rate": monitor.false_alarm_rate,
        "every": monitor.every,
        "follow": monitor.follow,
        "seed": monitor.seed,
        "counters": monitor._counters.state(),
        "n": [monitor._n_resets, monitor._n_accepted, monitor._n_followed],
        "alarm": None if monitor._alarm is None else asdict(monitor._alarm),
        "spacing": monitor._spacing.state(),
        "following": monitor._following,
        **{part: values for part, (_, values) in parts.items()},
    }
    return Artefact(header, {name: tensor for name, tensor in tensors.items() if tensor.numel()})


def from_artefact(kind: type[Monitor], artefact: Artefact, detector: Detector) -> Monitor:
    """Return the monitor that an artefact describes.

    Raises:
        ValueError: The content is not that of a monitor; missing or wrong parts may raise other built-in errors.
    """
    header, tensors = artefact.header, artefact.tensors
    monitor = kind(
        detector,
        window=whole(header["window"], "window", _LARGEST_WINDOW, 1),
        false_alarm_rate=header["false_alarm_rate"],
        every=header["every"],
        follow=header["follow"],
        seed=whole(header["seed"], "seed", 2**63),
    )
    monitor._n_resets, monitor._n_accepted, monitor._n_followed = (whole(count, "count") for count in header["n"])
    if "accepted" in tensors:
        monitor._accepted = _accepted(tensors["accepted"], monitor.n_remembered)
    monitor._begin_tests()
    monitor._counters = Counters.restore(header["counters"])
    n_seen = monitor._counters.n_seen
    recent = tensors.get("recent", torch.empty(0, dtype=torch.float64))
    monitor._recent.restore(recent, n_seen, monitor._items.n_bins)
    monitor._alarm = _alarm(header["alarm"], n_seen)
    monitor._spacing.restore(header["spacing"], n_seen)
    following = header["following"]
    monitor._following = None if following is None else whole(following, "item", n_seen)
    for part, test in (("items", monitor._items), ("repeats", monitor._repeats), ("blocks", monitor._blocks)):
        test.restore(_part(tensors, part), header[part])
    if not 0 <= monitor._blocks.evidence.n <= monitor._items.n <= n_seen:
        raise ValueError("the tests have seen more than the monitor")
    return monitor


def _part(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}


def _alarm(values: dict[str, Any] | None, n_seen: int) -> Alarm | None:
    if values is None:
        return None
    alarm = Alarm(
        **{**values, "since": tuple(map(int, values["since"])), "examples": tuple(map(int, values["examples"]))}
    )
    items = (alarm.item, *alarm.since, *alarm.examples, alarm.n_since, alarm.n_flagged)
    known = alarm.kind in KIND_SENTENCES and alarm.test in get_args(Test)
    if not known or len(alarm.since) != 2 or not all(type(item) is int and 0 <= item <= n_seen for item in items):
        raise ValueError("the alarm is not one")
    return alarm


def _accepted(scores: Tensor, most: int) -> NDArray[np.float64]:
    if scores.dim() != 1 or len(scores) > most or not bool(torch.isfinite(scores).all()):
        raise ValueError("the accepted scores are not scores")
    return scores.double().numpy()
