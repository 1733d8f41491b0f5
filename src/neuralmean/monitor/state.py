"""Between a `Monitor` and its state file: what goes into the header and the tensors, and back bit for bit.

A file holds bounded arrays: at most 10,000 ranked scores (or as many as were held out), the latest items (2,048, or the window if
that is larger), moments of the window's blocks, and at most as many accepted scores as latest items.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuralmean.detector.detector import Detector
from neuralmean.errors import NotFittedError
from neuralmean.files.artefact import Artefact
from neuralmean.monitor.status import KIND_SENTENCES, Alarm
from neuralmean.stats.betting import WEIGHTS
from neuralmean.stats.correlation import LEVELS
from neuralmean.stats.moments import Moments
from neuralmean.stats.sequential import Evidence, OnlineRanks

if TYPE_CHECKING:
    from neuralmean.monitor.monitor import Monitor

_COLUMNS = 7  # of `RecentItem`
_MOST = 2**53  # of anything that is counted
_LARGEST_WINDOW = 2**20


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
    items, item_values = monitor._items.state()
    blocks, block_values = monitor._block_ranks.state()
    arrays = {f"items.{name}": value for name, value in items.items()}
    arrays |= {f"blocks.{name}": value for name, value in blocks.items()}
    if monitor._accepted is not None:
        arrays["accepted"] = monitor._accepted
    tensors = {name: torch.from_numpy(value.copy()) for name, value in arrays.items()}
    moments = [*monitor._blocks, monitor._open, monitor._learnt]
    tensors["moments.mean"] = torch.stack([part.mean for part in moments])
    tensors["moments.m2"] = torch.stack([part.m2 for part in moments])
    tensors["recent"] = torch.tensor(list(monitor._recent), dtype=torch.float64).reshape(-1, _COLUMNS)
    if monitor._repeats.last_vector is not None:
        tensors["last_vector"] = monitor._repeats.last_vector.float()
    header = {
        "kind": "monitor",
        "detector": monitor._identity,
        "window": monitor.window,
        "false_alarm_rate": monitor.false_alarm_rate,
        "every": monitor.every,
        "follow": monitor.follow,
        "seed": monitor.seed,
        "n": [monitor._n_seen, monitor._n_ood, monitor._n_resets, monitor._n_accepted, monitor._n_followed],
        "n_by_kind": monitor._n_by_kind,
        "p_value_counts": monitor._p_value_counts,
        "p_value_sum": monitor._p_value_sum,
        "alarm": None if monitor._alarm is None else asdict(monitor._alarm),
        "spacing": [monitor._spacing, monitor._estimated_at, monitor._spaced_from],
        "following": monitor._following,
        "items": item_values,
        "repeats": monitor._repeats.state(),
        "blocks": {"ranks": block_values, "evidence": monitor._block_evidence.state()},
        "moment_counts": [part.count for part in moments],
    }
    return Artefact(header, {name: tensor for name, tensor in tensors.items() if tensor.numel()})


def from_artefact(kind: type[Monitor], artefact: Artefact, detector: Detector) -> Monitor:
    """Return the monitor that an artefact describes.

    Raises:
        ValueError: Content that no monitor could have written; also other errors of Python's own for missing or wrong parts.
    """
    header, tensors = artefact.header, artefact.tensors
    window = _whole(header["window"], 1, _LARGEST_WINDOW, "window")
    monitor = kind(
        detector,
        window=window,
        false_alarm_rate=header["false_alarm_rate"],
        every=header["every"],
        follow=header["follow"],
        seed=_whole(header["seed"], 0, 2**63, "seed"),
    )
    n_seen, n_ood, *others = (_whole(count, 0, _MOST, "count") for count in header["n"])
    monitor._n_resets, monitor._n_accepted, monitor._n_followed = others
    if "accepted" in tensors:
        monitor._accepted = _accepted(tensors["accepted"], monitor._recent.maxlen or 0)
    monitor._begin_tests()
    monitor._n_seen, monitor._n_ood = n_seen, n_ood
    _restore_counters(monitor, header, _tensor(tensors, "recent"))
    _restore_moments(monitor, header["moment_counts"], tensors["moments.mean"], tensors["moments.m2"])
    monitor._alarm = _alarm(header["alarm"], n_seen)
    spacing, *at = header["spacing"]
    monitor._spacing = _whole(spacing, 1, LEVELS[-1], "spacing")
    monitor._estimated_at, monitor._spaced_from = (_whole(item, 0, n_seen, "item") for item in at)
    following = header["following"]
    monitor._following = None if following is None else _whole(following, 0, n_seen, "item")
    arrays = _ranked(tensors, "items", header["items"]["ranks"], monitor._items.ranks)
    monitor._items.restore({**arrays, "bins": _tensor(tensors, "items.bins").numpy()}, header["items"])
    monitor._repeats.restore(header["repeats"], _last_vector(tensors.get("last_vector"), monitor._width))
    blocks = header["blocks"]
    monitor._block_ranks = OnlineRanks.restore(
        _ranked(tensors, "blocks", blocks["ranks"], monitor._block_ranks), blocks["ranks"]
    )
    monitor._block_evidence = Evidence.restore(blocks["evidence"], WEIGHTS)
    if not 0 <= monitor._block_evidence.n <= monitor._items.evidence[0].n <= n_seen:
        raise ValueError("the tests have seen more than the monitor")
    return monitor


def _alarm(values: dict[str, Any] | None, n_seen: int) -> Alarm | None:
    if values is None:
        return None
    alarm = Alarm(
        **{**values, "since": tuple(map(int, values["since"])), "examples": tuple(map(int, values["examples"]))}
    )
    items = (alarm.item, *alarm.since, *alarm.examples, alarm.n_since, alarm.n_flagged)
    known = alarm.kind in KIND_SENTENCES and alarm.test in ("items", "blocks", "repeats")
    if not known or len(alarm.since) != 2 or not all(type(item) is int and 0 <= item <= n_seen for item in items):
        raise ValueError("the alarm is not one")
    return alarm


def _accepted(scores: Tensor, most: int) -> NDArray[np.float64]:
    if scores.dim() != 1 or len(scores) > most or not bool(torch.isfinite(scores).all()):
        raise ValueError("the accepted scores are not scores")
    return scores.double().numpy()


def _restore_counters(monitor: Monitor, header: dict[str, Any], recent: Tensor) -> None:
    n_seen, n_ood = monitor._n_seen, monitor._n_ood
    counts = [_whole(count, 0, _MOST, "count") for count in header["p_value_counts"]]
    total = header["p_value_sum"]
    if len(counts) != len(monitor._p_value_counts) or sum(counts) != n_seen or n_ood > n_seen:
        raise ValueError("the counts do not add up")
    by_kind = {kind: _whole(header["n_by_kind"][kind], 0, _MOST, "count") for kind in monitor._n_by_kind}
    if sum(by_kind.values()) != n_ood:
        raise ValueError("the counts by kind do not add up")
    if not isinstance(total, (int, float)) or not 0 <= total <= n_seen:
        raise ValueError("the p-values do not add up")
    recent = recent.reshape(-1, _COLUMNS)
    is_flag = (recent[:, 5] == 0) | (recent[:, 5] == 1)
    is_p_value = ((recent[:, (1, 4)] >= 0) & (recent[:, (1, 4)] <= 1)).all(dim=1)
    most = monitor._recent.maxlen or 0
    if (
        not bool(torch.isfinite(recent).all())
        or len(recent) != min(n_seen, most)
        or not bool((is_flag & is_p_value).all())
    ):
        raise ValueError("the window does not hold p-values and flags of the latest items")
    monitor._p_value_counts, monitor._p_value_sum = counts, float(total)
    monitor._n_by_kind = by_kind
    monitor._recent.extend(monitor.recent_item(row) for row in recent.tolist())


def _restore_moments(monitor: Monitor, counts: list[Any], means: Tensor, m2s: Tensor) -> None:
    """Set the blocks of the window, the open block and what was learnt, in this order."""
    shape = (len(counts), monitor._width)
    if means.shape != shape or m2s.shape != shape or means.dtype != torch.float64 or m2s.dtype != torch.float64:
        raise ValueError("the moments do not fit the detector")
    if not bool(torch.isfinite(means).all() and torch.isfinite(m2s).all() and (m2s >= 0).all()):
        raise ValueError("the moments are not finite")
    *blocks, n_open, n_learnt = (_whole(count, 0, _MOST, "number of items") for count in counts)
    size = monitor.block_size
    if len(blocks) > monitor.window // size or any(count != size for count in blocks) or n_open >= size:
        raise ValueError("the blocks do not fit the window")
    if n_learnt > monitor.window:
        raise ValueError("the learnt items do not fit the window")
    moments = [Moments(*parts) for parts in zip((*blocks, n_open, n_learnt), means, m2s, strict=True)]
    monitor._learnt, monitor._open = moments.pop(), moments.pop()
    monitor._blocks = deque(moments)


def _ranked(
    tensors: dict[str, Tensor], name: str, values: dict[str, Any], fresh: OnlineRanks
) -> dict[str, NDArray[Any]]:
    """Return the arrays of ranks, after checking that they may be those of a stream."""
    if values["capacity"] != fresh.capacity or type(values["capacity"]) is not int:
        raise ValueError("the ranks have another capacity than those of this detector")
    arrays = {key: _tensor(tensors, f"{name}.{key}").numpy() for key in ("scores", "ties", "counts")}
    if not ((arrays["ties"] >= 0) & (arrays["ties"] < 1)).all() or arrays["counts"].dtype != np.int64:
        raise ValueError("the ranks are not those of a stream")
    return arrays


def _last_vector(vector: Tensor | None, width: int) -> Tensor | None:
    if vector is not None and (vector.shape != (width,) or not bool(torch.isfinite(vector).all())):
        raise ValueError("the last vector is not that of this detector")
    return vector


def _whole(value: Any, lowest: int, highest: int, name: str) -> int:
    if type(value) is not int or not lowest <= value <= highest:
        raise ValueError(f"{str(value)[:40]!r} is no {name}")
    return value


def _tensor(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Return a tensor of the file; one without elements is not in it."""
    return tensors.get(name, torch.empty(0, dtype=torch.float64))
