"""Where in an input a score comes from: the contributions of the watched layers, split over their positions.

The maps of the layers add up to the contributions that `Detector.explain` reports. Only these inputs keep their
activations; they take one forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from neuralmean.data.batch import Batch, to_batches
from neuralmean.errors import InputError, NotFittedError
from neuralmean.models.layers import Layer, layer_slices
from neuralmean.recording.activations import Activations
from neuralmean.recording.observer import ChannelStats
from neuralmean.scorers import Observation
from neuralmean.scorers.contract import contributions_of
from neuralmean.stats.places import enlarge, patch_grid, position_weights, split_over_positions

if TYPE_CHECKING:
    from neuralmean.detector.detector import Detector


def locate(detector: Detector, x: Any, *, by_layer: bool = False, batch_size: int = 16) -> Tensor:
    """Return how much each place of each input contributes to its score; see `Detector.locate`."""
    detector.check_weights()
    found = []
    for batch in to_batches(x, name="x", batch_size=batch_size):
        size, maps = _batch_maps(detector, batch)
        if by_layer:
            found.append(torch.stack([_onto_input(own, size) for own in maps], dim=1))
        else:
            found.append(functools.reduce(torch.add, (_onto_input(own, size) for own in _sum_alike(maps))))
    longest = max(own.shape[-1] for own in found)
    # Batches of tokens need not be padded to one length.
    return torch.cat([torch.nn.functional.pad(own, (0, longest - own.shape[-1])) for own in found])


def _sum_alike(maps: Iterable[Tensor]) -> Iterable[Tensor]:
    """Add up the maps of layers with the same positions: most of the work is in enlarging them."""
    sums: dict[torch.Size, Tensor] = {}
    for own in maps:
        sums[own.shape] = sums[own.shape] + own if own.shape in sums else own
    return sums.values()


def _batch_maps(detector: Detector, batch: Batch) -> tuple[tuple[int, ...], list[Tensor]]:
    """Return the positions of an input, and the map of each layer over the layer's own positions, after one forward pass."""
    if batch.images is not None:
        raise InputError(
            "Expected images of one size to locate in, but got a list of images. Call `locate` for each of them."
        )
    layers, slices = detector.watched, layer_slices(detector.watched)
    centre = _centre(detector)
    shapes: list[list[tuple[int, ...]]] = [[] for _ in layers]

    def keep(index: int, activation: Tensor) -> Tensor:
        layer = layers[index]
        shapes[index].append(tuple(activation.shape[1:-1] if layer.channels_last else activation.shape[2:]))
        own = centre[slices[layer.name]].to(activation.device)
        return position_weights(activation, own, channels_last=layer.channels_last)

    with torch.no_grad():
        found = detector._observer.recorder.keep_activations(batch, keep)
    shares = _shares(detector, found)
    maps = []
    for layer, kept, sizes in zip(layers, found.kept, shapes, strict=True):
        own = shares[:, slices[layer.name]].sum(dim=1) / len(kept)
        parts = [_place(weights, own, found.mask, shape) for weights, shape in zip(kept, sizes, strict=True)]
        first = parts[0].shape[1:]
        # A layer that ran several times uses the positions of its first call: the finest level of a pyramid.
        maps.append(parts[0] + sum(_onto_input(part, first) for part in parts[1:]))
    return _input_size(batch, layers, shapes), maps


def _centre(detector: Detector) -> Tensor:
    if detector.reference is None:
        raise NotFittedError(
            "The detector has no reference yet, as the model has no batch-norm buffers. Call `fit` first."
        )
    return detector.reference.mean_single


def _shares(detector: Detector, found: Activations) -> Tensor:
    """Return the contribution of each watched channel to the score, (N, D)."""
    recording = found.recording
    recorded = (recording.mean, recording.variance, recording.logits, recording.feature)
    stats = ChannelStats(*(None if part is None else part.cpu() for part in recorded))  # type: ignore[arg-type]
    vectors = detector._vectors(stats.means, stats.variances)
    by_channel = contributions_of(detector.scorer, Observation(vectors, stats.logits, stats.feature))[0]
    # With both statistics, the columns of the deviations come after those of the means.
    return by_channel.reshape(len(by_channel), -1, stats.means.shape[1]).sum(dim=1)


def _place(weights: Tensor, shares: Tensor, mask: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """Return the contribution of each position of one activation to the score, (N, *shape)."""
    if mask is not None and (len(weights), *shape) != tuple(mask.shape):
        mask = None
    maps = split_over_positions(weights, shares.to(weights.device), mask).cpu()
    return maps.reshape(len(maps), *shape)


def _onto_input(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Return maps over a layer's positions as maps over those of the input, (N, *size), with the same sums."""
    if maps.dim() - 1 == len(size):
        return enlarge(maps, size)
    grid = patch_grid(maps.shape[1], size) if maps.dim() == 2 and len(size) == 2 else None
    if grid is not None:
        prefix, shape = grid
        placed = enlarge(maps[:, prefix:].reshape(len(maps), *shape), size)
        maps = maps[:, :prefix]
    else:
        placed = torch.zeros(len(maps), *size, dtype=maps.dtype)
    # Contributions of no place (the class token, a layer after the pooling) are spread over all of them.
    rest = maps.reshape(len(maps), -1).sum(dim=1) / placed[0].numel()
    return placed + rest.reshape(-1, *[1] * len(size))


def _input_size(batch: Batch, layers: Sequence[Layer], shapes: list[list[tuple[int, ...]]]) -> tuple[int, ...]:
    """Return the positions of an input: (H, W) of an image, (T,) of tokens or of a signal."""
    x = batch.first
    if x.dim() > 3:
        return tuple(x.shape[2:])
    if x.dim() == 2 and not x.is_floating_point():
        return tuple(x.shape[1:])
    if x.dim() == 3:
        length = (x.shape[1],)
        is_tokens = all(layer.channels_last for layer in layers) and any(length in own for own in shapes)
        return length if is_tokens else tuple(x.shape[2:])
    raise InputError(
        f"Expected inputs with positions (images, tokens, signals) to locate in, but got shape {tuple(x.shape)}."
    )
