"""Inputs for comparing two forms of a model, the same in every run."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SEVERAL = 8
_SIZES = (1, 2, 3, 5, 17)  # batch sizes


def odd_inputs(x: Tensor) -> Iterator[Tensor]:
    """Yield inputs like `x`, and synthetic ones of its shape: noise, zeros, large numbers, natural-looking images.

    Batches have several sizes. Only floating-point inputs have synthetic ones.
    """
    yield x[:SEVERAL]
    for size in _SIZES:
        if x.is_floating_point():
            given = noise(size, x)
            yield from (given, torch.zeros_like(given), 50 * given, given.abs(), -given.abs())
            if x.dim() == 4:
                yield natural_looking(given)
        else:
            yield x[torch.arange(size) % len(x)]


def noise(size: int, x: Tensor) -> Tensor:
    """Return `size` inputs of the shape and type of `x`, always the same."""
    return torch.randn(size, *x.shape[1:], generator=torch.Generator().manual_seed(size)).to(x.dtype)


def natural_looking(images: Tensor) -> Tensor:
    """Return noise, (N, C, H, W), with the spectrum of photographs: power falls with the square of the frequency."""
    rows, columns = torch.fft.fftfreq(images.shape[2])[:, None], torch.fft.rfftfreq(images.shape[3])
    frequency = torch.sqrt(rows**2 + columns**2).clamp_min(1 / max(images.shape[2:]))
    made: Tensor = torch.fft.irfft2(torch.fft.rfft2(images.float()) / frequency, s=images.shape[2:])
    made = made + made.mean(dim=1, keepdim=True)  # the colours of a photograph are correlated
    return (made / made.std(dim=(1, 2, 3), keepdim=True).clamp_min(1e-6)).to(images.dtype)


def are_close(one: Tensor | None, other: Tensor | None, *, tolerance: float = 1e-5) -> bool:
    """Whether two tensors agree up to rounding, relative to the largest number (or ten times, to each number)."""
    if one is None or other is None:
        return one is other
    one, other = one.detach().cpu(), other.detach().cpu()
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    largest = one[one.isfinite()].abs().max().item() if one.isfinite().any() else 0.0
    return torch.allclose(one, other, rtol=10 * tolerance, atol=tolerance * max(1.0, largest), equal_nan=True)
