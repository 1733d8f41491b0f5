r"""A batch norm and the ReLU behind it as one comparison: the numbers, for whichever graph.

Dense networks normalise before they convolve, where no convolution can take the norm in: norm and ReLU are two operations over
all that came before. With what the norm multiplies a channel by, s, and then adds, b,

.. math::
    \mathrm{relu}(s x + b) = s \max(x, -b / s) + b

for s > 0, and with min in place of max for s < 0. The next convolution takes s into its weights and b into its bias, and a
comparison with constants is left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

NEGLIGIBLE = 1e-12
"""A channel with |s| of at most this times |b| is constant: s x is below the last digit of b for any |x| up to 50,000.

The formula holds its digits for every other: single precision has -b / s up to 1e12, and s times that is as exact as b.
"""


@dataclass(frozen=True)
class Clamp:
    """A norm with its ReLU as `scale * min(max(x, lower), upper) + shift`, (C,) each."""

    lower: Numbers
    upper: Numbers
    scale: Numbers
    shift: Numbers

    @property
    def falls(self) -> bool:
        """Whether a channel has a negative scale, and so an upper bound."""
        return bool(np.any(self.scale < 0))

    @property
    def rises(self) -> bool:
        """Whether a channel has a positive scale, and so a lower bound."""
        return bool(np.any(self.scale > 0))

    def into(self, weight: Numbers, bias: Numbers | None) -> tuple[Numbers, Numbers]:
        """Return weight and bias of a convolution that takes scale and shift in; it must pad nothing and have one group."""
        shape = (-1, *[1] * (weight.ndim - 2))
        shifted = (weight * self.shift.reshape(shape)).sum(axis=tuple(range(1, weight.ndim)))
        return weight * self.scale.reshape(shape), shifted if bias is None else shifted + bias


def to_clamp(scale: Numbers, shift: Numbers) -> Clamp:
    """Return relu(scale * x + shift) as a comparison; a constant channel is its constant, and its x anything finite.

    Example:
        >>> clamp = to_clamp(np.array([2.0, -1.0]), np.array([4.0, 3.0]))
        >>> clamp.lower.tolist(), clamp.upper.tolist()
        ([-2.0, -inf], [inf, 3.0])
    """
    is_constant = np.abs(scale) <= NEGLIGIBLE * np.abs(shift)
    bound = -shift / np.where(is_constant, 1, scale)
    return Clamp(
        lower=np.select([is_constant, scale > 0], [0, bound], -np.inf),
        upper=np.select([is_constant, scale < 0], [0, bound], np.inf),
        scale=np.where(is_constant, 0, scale),
        shift=np.where(is_constant, np.maximum(shift, 0), shift),
    )
