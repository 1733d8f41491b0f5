"""Where in an input a score comes from: the contributions of the watched layers, split over their positions.

The maps of the layers add up to the contributions that `Detector.explain` reports. Only these inputs keep their
activations; they take one forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from neuralmean.data.batch import Batch, to_batches
from neuralmean.errors import InputError, NotFittedError
from neuralmean.models.layers import Layer, layer_slices
from neuralmean.recording.activations import Activations
from neuralmean.recording.observer import ChannelStats
from neuralmean.scorers import Observation
from neuralmean.scorers.contract import contributions_of
from neuralmean.stats.places import BLUR, distances, enlarge, patch_grid, split_over_positions, standing_out

if TYPE_CHECKING:
    from neuralmean.detector.detector import Detector


def locate(detector: Detector, x: Any, *, by_layer: bool = False, batch_size: int = 16) -> Tensor:
    """Return how much each place of each input contributes to its score; see `Detector.locate`."""
    detector.check_weights()
    found = [_locate_batch(detector, batch, by_layer) for batch in to_batches(x, name="x", batch_size=batch_size)]
    longest = max(own.shape[-1] for own in found)
    # Batches of tokens need not be padded to one length.
    return torch.cat([torch.nn.functional.pad(own, (0, longest - own.shape[-1])) for own in found])


class _Strange(NamedTuple):
    """How strange each position is, after one pass."""

    layers: list[list[Tensor]]  # distance of each position, (N, *positions), for each call of each layer
    place: Tensor | None  # how much each position stands out in the first layer that tells, (N, H, W)
    shares: Tensor  # contribution of each layer to the score, (N, L)


def _locate_batch(detector: Detector, batch: Batch, by_layer: bool) -> Tensor:
    if batch.images is not None:
        raise InputError(
            "Expected images of one size to locate in, but got a list of images. Call `locate` for each of them."
        )
    strange = _run(detector, batch)
    size = _input_size(batch, detector.watched, strange.layers)
    blur = BLUR if len(size) == 2 else 0.0
    if not by_layer:  # layers with the same positions are added up first: most of the work is in enlarging them
        placed = [_onto_input(own.sum(dim=0), size, blur) for _, own in _split_alike(strange, batch.mask)]
        return functools.reduce(torch.add, placed)
    maps = torch.zeros(*strange.shares.shape, *size, dtype=torch.float64)
    for indices, split in _split_alike(strange, batch.mask):
        for index, own in zip(indices, split, strict=True):
            maps[:, index] += _onto_input(own, size, blur)
    return maps


def _run(detector: Detector, batch: Batch) -> _Strange:
    """Return how strange each position of each layer is, after one forward pass."""
    layers, slices = detector.watched, layer_slices(detector.watched)
    centre, mask = _centre(detector), batch.mask
    centres = [centre[slices[layer.name]] for layer in layers]
    place: Tensor | None = None

    def keep(index: int, activation: Tensor) -> Tensor:
        nonlocal place
        channels_last = layers[index].channels_last
        if place is None and activation.dim() == 4 and not channels_last:
            place = standing_out(activation)
        shape = activation.shape[:1] + (activation.shape[1:-1] if channels_last else activation.shape[2:])
        own = _mask_for(mask, shape, activation.device)
        found = distances(activation, centres[index].to(activation.device), own, channels_last=channels_last)
        return found.cpu().reshape(shape)

    with torch.no_grad():
        found = detector._observer.recorder.keep_activations(batch, keep)
    by_channel = _shares(detector, found)
    shares = torch.stack([by_channel[:, slices[layer.name]].sum(dim=1) for layer in layers], dim=1)
    return _Strange(found.kept, place, shares)


def _split_alike(strange: _Strange, mask: Tensor | None) -> Iterator[tuple[list[int], Tensor]]:
    """Yield the contribution of each position, (M, N, *positions), of M layers with the same positions, and their indices.

    A layer that ran several times is among them once for each call.
    """
    calls: dict[torch.Size, list[tuple[int, Tensor]]] = {}
    for index, kept in enumerate(strange.layers):
        for own in kept:
            calls.setdefault(own.shape, []).append((index, own))
    shares = strange.shares / torch.tensor([len(kept) for kept in strange.layers])
    for shape, members in calls.items():
        indices, count = [index for index, _ in members], len(members)
        found = _mask_for(mask, tuple(shape), shares.device)
        place = strange.place if len(shape) == 3 else None
        split = split_over_positions(
            torch.cat([own for _, own in members]),
            shares[:, indices].T.flatten(),
            None if found is None else found.repeat(count, 1),
            None if place is None else enlarge(place, shape[1:]).repeat(count, 1, 1),
        )
        yield indices, split.reshape(count, *shape)


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


def _mask_for(mask: Tensor | None, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
    """Return the mask if it is one of these positions, (N, *positions)."""
    return None if mask is None or tuple(mask.shape) != shape else mask.to(device)


def _onto_input(maps: Tensor, size: Sequence[int], blur: float = 0.0) -> Tensor:
    """Return maps over a layer's positions as maps over those of the input, (N, *size), with the same sums."""
    if maps.dim() - 1 == len(size):
        return enlarge(maps, size, blur=blur)
    grid = patch_grid(maps.shape[1], size) if maps.dim() == 2 and len(size) == 2 else None
    if grid is not None:
        prefix, shape = grid
        placed = enlarge(maps[:, prefix:].reshape(len(maps), *shape), size, blur=blur)
        maps = maps[:, :prefix]
    else:
        placed = torch.zeros(len(maps), *size, dtype=maps.dtype)
    # Contributions of no place (the class token, a layer after the pooling) are spread over all of them.
    rest = maps.reshape(len(maps), -1).sum(dim=1) / placed[0].numel()
    return placed + rest.reshape(-1, *[1] * len(size))


def _input_size(batch: Batch, layers: Sequence[Layer], kept: list[list[Tensor]]) -> tuple[int, ...]:
    """Return the positions of an input: (H, W) of an image, (T,) of tokens or of a signal."""
    x = batch.first
    if x.dim() > 3:
        return tuple(x.shape[2:])
    if x.dim() == 2 and not x.is_floating_point():
        return tuple(x.shape[1:])
    if x.dim() == 3:
        length = (x.shape[1],)
        is_tokens = all(layer.channels_last for layer in layers) and any(
            own.shape[1:] == length for calls in kept for own in calls
        )
        return length if is_tokens else tuple(x.shape[2:])
    raise InputError(
        f"Expected inputs with positions (images, tokens, signals) to locate in, but got shape {tuple(x.shape)}."
    )
