"""Which layers moved: the mean of the latest items against the held-out data, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from neuralmean.monitor.status import LayerShift
from neuralmean.stats.held_out_profile import HeldOutProfile
from neuralmean.stats.moments import Moments


def layer_shifts(
    layers: Sequence[str], parts: Sequence[Moments], profile: HeldOutProfile, *, n_reference: int | None, certain: bool
) -> tuple[tuple[LayerShift, ...], int]:
    """Return how far each layer has moved, the farthest first, and the number of latest items this is computed on.

    A change is visible in the mean of the window only once it fills much of the window. So the latest block, the latest two and
    so on are compared as well, and the part with the clearest move is used, if there is a clear one.

    Args:
        layers: Names of the layers.
        parts: Moments of these parts, in increasing size; the window last.
        profile: The profile to compare with.
        n_reference: Number of examples behind the profile's means; None for exact ones.
        certain: Whether layers may be marked as moved.
    """
    off = 0.0 if n_reference is None else 1 / n_reference
    noise = torch.tensor([1 / part.count + off for part in parts], dtype=torch.float64)
    times = profile.layer_shifts(parts) / noise[:, None]  # (parts, layers) of what chance explains
    over = times / profile.limit(math.log(1000 * times.numel()))  # 0.1 % for all layers and parts together
    clearest = int(over.amax(dim=1).argmax()) if bool((over > 1).any()) else -1
    rows = zip(layers, times[clearest].tolist(), over[clearest].tolist(), strict=True)
    shifts = [
        LayerShift(name, math.sqrt(max(0.0, ratio - 1) * noise[clearest].item()), certain and excess > 1)
        for name, ratio, excess in rows
    ]
    return tuple(sorted(shifts, key=lambda shift: -shift.shift)), parts[clearest].count
