r"""The convolutional neural tangent kernel of ConvNet-4 (Arora et al., NeurIPS 2019, Sec. 4), exactly, without training.

For a network that ends in an average over positions, the kernel of two images needs the covariance of every position of
one with every position of the other: 29² x 29² numbers for the first layer of ConvNet-4. Because of the strides, most
of them are unused. The last map has 2 x 2 positions, so pairs of positions differ by one of nine offsets, and as a
layer's patches move both positions alike, every earlier layer needs the same nine offsets, each a map that is averaged
over patches like an image. This is exact, a hundred times less work, and needs no jax.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from neuralmean.bench.baselines.base import Context, Method, View
from neuralmean.bench.baselines.perturbation import batches_of, hold_out
from neuralmean.bench.models import TrainedModel
from neuralmean.errors import InputError, NotFittedError

LAYERS = ((4, 1), (4, 2), (4, 2), (3, 2))  # (kernel, stride) of ConvNet-4's convolutions
INLIERS = 100  # ID images in the sum; the paper does not say how many
PAIRS = 2000  # pairs of images at a time

Dual = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps covariance and both variances before an activation to the covariances of its value and of its derivative."""


class Cntk(Method):
    r"""Scores an image by minus the sum of its kernel values with in-distribution images.

    .. math::
        s(x) = -\sum_i \kappa(x, x_i)

    The kernel is that of ConvNet-4 with ReLU and infinitely many channels; batch norms are left out. It depends on the
    architecture only, not on the weights.

    Args:
        inliers: Number of in-distribution images in the sum.
        normalised: Whether kernel values are divided by those of each image with itself, which removes contrast.
    """

    name = "cntk"
    title = "CNTK"
    paper = "Arora et al., On Exact Computation with an Infinitely Wide Neural Net, NeurIPS 2019"
    reads = frozenset({"images"})
    most_inliers: int | None = INLIERS
    heavy = True

    def __init__(self, inliers: int = INLIERS, *, normalised: bool = False) -> None:
        self.most_inliers = self._count = inliers
        self._normalised = normalised
        self._inliers: Tensor | None = None
        self._norms = torch.zeros(0)
        if (inliers, normalised) != (INLIERS, False):
            self.name = f"{self.name}-{inliers}{'-normalised' if normalised else ''}"

    def fit(self, context: Context) -> None:
        """Keep some of the inliers."""
        rows = hold_out(len(context.inliers), seed=context.seed, share=1.0, most=self._count).validation
        self._inliers = torch.cat(list(batches_of(context.trained, context.inliers, rows)))
        if self._normalised:
            self._norms = torch.cat([self._norm(batch) for batch in torch.split(self._inliers, 10)])

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        if self._inliers is None:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        size = max(1, PAIRS // len(self._inliers))
        return -torch.cat([self._sum(batch, self._inliers) for batch in examples.batches(size)])

    def _sum(self, batch: Tensor, inliers: Tensor) -> Tensor:
        values = self.kernel(batch, inliers).double()
        return (values / (self._norm(batch)[:, None] * self._norms) if self._normalised else values).sum(dim=1)

    def _norm(self, batch: Tensor) -> Tensor:
        """Square root of the kernel value of each image with itself, (N,)."""
        return torch.cat([self.kernel(one, one).double()[0].sqrt() for one in torch.split(batch, 1)])

    def suits(self, trained: TrainedModel) -> bool:
        """Whether the method supports the model: always, as it does not use it."""
        return True

    def kernel(self, left: Tensor, right: Tensor) -> Tensor:
        """Kernel values of images (N, 3, H, W) with images (M, 3, H, W), shape (N, M)."""
        return tangent_kernel(left, right, relu_dual, LAYERS)


def tangent_kernel(left: Tensor, right: Tensor, dual: Dual, layers: Sequence[tuple[int, int]]) -> Tensor:
    r"""Neural tangent kernel of convolutions without padding, an average over all positions, and a linear layer.

    .. math::
        \Sigma^{h}_{p,q} = \mathrm{mean}_d\, K^{h-1}_{sp+d,\, sq+d}, \quad
        \Theta^{h} = \Sigma^{h} + \mathrm{mean}_d\, (\Theta \odot \dot K)^{h-1}_{sp+d,\, sq+d}, \quad
        \kappa = \mathrm{mean}_{p,q} (K + \Theta \odot \dot K)^{H}_{p,q}

    where :math:`K` and :math:`\dot K` are the covariances after the activation and its derivative, and the first
    :math:`K` is the mean over channels of the products of two images.

    Args:
        left: Images, shape (N, C, H, W).
        right: Images, shape (M, C, H, W).
        dual: The activation.
        layers: Kernel and stride of each convolution.

    Returns:
        Shape (N, M).
    """
    sizes = [_final_size(length, layers) for length in left.shape[2:]]
    if min(sizes) < 1:
        raise InputError(f"Expected images that {len(layers)} convolutions fit into, but got {tuple(left.shape)}.")
    variances = [_variances(images, dual, layers) for images in (left, right)]
    total = torch.zeros(len(left), len(right), dtype=left.dtype, device=left.device)
    for down, across in itertools.product(*(range(1 - size, size) for size in sizes)):
        total += _one_offset(left, right, variances, dual, layers, (down, across))
    positions: int = sizes[0] * sizes[1]
    return total / positions**2


def relu_dual(covariance: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    r"""Arc-cosine kernels of degree 1 and 0, times two: :math:`2 E[\sigma(u)\sigma(v)]`, :math:`2 E[\sigma'\sigma']`."""
    norm = (left * right).sqrt().clamp_min(1e-12)
    cosine = (covariance / norm).clamp(-1, 1)
    angle = torch.pi - torch.arccos(cosine)
    return norm * ((1 - cosine**2).clamp_min(0).sqrt() + cosine * angle) / torch.pi, angle / torch.pi


def _one_offset(
    left: Tensor,
    right: Tensor,
    variances: list[list[Tensor]],
    dual: Dual,
    layers: Sequence[tuple[int, int]],
    offset: tuple[int, int],
) -> Tensor:
    """Sum of the kernel over the pairs of final positions that are `offset` apart, shape (N, M)."""
    stride = 1
    for _, one in layers:
        stride *= one
    shift = (offset[0] * stride, offset[1] * stride)
    value = _products(_cut(left, shift), _cut(right, (-shift[0], -shift[1])))
    tangent = None
    for number, (kernel, step) in enumerate(layers):
        stride //= step
        before = _patch_means(value, kernel, step)
        theta = before if tangent is None else before + _patch_means(tangent, kernel, step)
        shift = (offset[0] * stride, offset[1] * stride)
        mine = _cut(variances[0][number], shift).unsqueeze(1)
        theirs = _cut(variances[1][number], (-shift[0], -shift[1])).unsqueeze(0)
        value, slope = dual(before, mine, theirs)
        tangent = theta * slope
    return (value if tangent is None else value + tangent).sum(dim=(2, 3))


def _variances(images: Tensor, dual: Dual, layers: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Variance at every position before each activation, (N, H, W) for each layer."""
    found, value = [], (images**2).mean(dim=1)
    for kernel, step in layers:
        before = _patch_means(value, kernel, step)
        found.append(before)
        value, _ = dual(before, before, before)
    return found


def _products(left: Tensor, right: Tensor) -> Tensor:
    """Mean over channels of (N, C, H, W) times (M, C, H, W), shape (N, M, H, W)."""
    value = left[:, None, 0] * right[None, :, 0]
    for channel in range(1, left.shape[1]):
        value.addcmul_(left[:, None, channel], right[None, :, channel])
    return value.div_(left.shape[1])


def _patch_means(maps: Tensor, kernel: int, step: int) -> Tensor:
    """As `avg_pool2d` on (…, H, W), but rows first, then columns: several times as fast on a CPU."""
    for dimension in (-1, -2):
        count = (maps.shape[dimension] - kernel) // step + 1
        reach = (count - 1) * step + 1
        parts = [maps.narrow(dimension, start, reach) for start in range(kernel)]
        if step > 1:
            parts = [part[..., ::step] if dimension == -1 else part[..., ::step, :] for part in parts]
        total = parts[0] + parts[1] if kernel > 1 else parts[0].clone()
        for part in parts[2:]:
            total += part
        maps = total
    return maps.div_(kernel**2)


def _cut(maps: Tensor, shift: tuple[int, int]) -> Tensor:
    """The part of (…, H, W) whose positions stay inside when moved by `shift`."""
    down, across = shift
    height, width = maps.shape[-2:]
    return maps[..., max(0, -down) : height - max(0, down), max(0, -across) : width - max(0, across)]


def _final_size(length: int, layers: Sequence[tuple[int, int]]) -> int:
    for kernel, step in layers:
        length = (length - kernel) // step + 1
    return length
