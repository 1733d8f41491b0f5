r"""The kind of strangeness: two further scores, of how an input looks and of what it shows.

*Appearance* reads the middle layers, whose channel means follow low-level statistics (noise, blur, exposure, another sensor)
before they are combined into classes. *Content* reads the terms of the scorer that belong to no layer (feature, logits), or else
the last layers. Both are learnt from in-distribution rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import Self

from neuralmean.data.table import Blocks
from neuralmean.errors import ArtefactError
from neuralmean.scorers.base import Observation, Scores
from neuralmean.scorers.contract import view_of
from neuralmean.stats.discrepancy import scale_of
from neuralmean.stats.moments import Moments

FIRST = 4  # layers, or as many as there are before the middle ones
NEITHER = (
    "constant",
    "learnt",
)  # terms that tell nothing of content: `learnt` comes from whatever OOD examples there were
_LEAST_SPREAD = 1e-6  # of a layer whose channels all have their usual means


class KindScorer:
    r"""Scores the appearance and the content of each input.

    With :math:`m_c` and :math:`\sigma_c` the mean and the deviation of a channel's discrepancy over in-distribution inputs, the
    spread of a layer is

    .. math::
        s_l(x) = \log \frac{1}{C_l} \sum_{c \in l} |x_c - m_c| / \sigma_c.

    Appearance is the mean spread of the middle half of the layers, less what a line through the spreads of the first layers says
    it should be: those follow the colours and the contrast of a scene, which are no news. Content is the sum of the scorer's
    terms that belong to no layer, for scorers without such terms the mean spread of the last quarter of the layers.

    Attributes:
        usual_: Mean and deviation of each channel, (2, D).
        widths_: Channels of each layer, (L,).
        line_: Weight of each layer's spread in the appearance, and what is added to their sum, (L + 1,).
    """

    learnt = ("usual_", "widths_", "line_")

    usual_: Tensor
    widths_: Tensor
    line_: Tensor
    _widths: list[int]  # the same as numbers: a captured graph must not read them off a tensor

    def fit(self, vectors: Tensor, column_layers: Tensor, n_layers: int) -> Self:
        """Learn from the vectors (N, D) of in-distribution inputs.

        Args:
            vectors: Discrepancies.
            column_layers: Index of the layer of each column, (D,).
            n_layers: How many layers there are.
        """
        is_twice = bool((column_layers.diff() < 0).any())  # first the means, then the deviations: the means are read
        layers = column_layers[: len(column_layers) // 2] if is_twice else column_layers
        self.widths_ = layers.bincount(minlength=n_layers)
        self._widths = self.widths_.tolist()
        moments = Moments.of_blocks((block[:, : len(layers)] for block in Blocks(vectors)), len(layers))
        self.usual_ = torch.stack([moments.mean, scale_of(moments)]).float()
        spreads = torch.cat([self._spreads(block) for block in Blocks(vectors)]).double()
        (start, end), _ = _ranges(n_layers)
        known = torch.cat([spreads[:, : min(FIRST, start)], torch.ones(len(spreads), 1, dtype=spreads.dtype)], dim=1)
        # By the pseudo-inverse: of few rows, or of layers that move together, there are many lines.
        line = torch.linalg.pinv(known, rtol=1e-6) @ spreads[:, start:end].mean(dim=1)
        weights = torch.zeros(n_layers + 1, dtype=spreads.dtype)
        weights[start:end] = 1 / (end - start)
        weights[: len(line) - 1] -= line[:-1]
        weights[-1] = -line[-1]
        self.line_ = weights.float()
        return self

    def score(self, observation: Observation, scorer: Scores) -> Tensor:
        """Score appearance and content of each input, shape (N, 2); higher = more OOD.

        Args:
            observation: The result of a pass.
            scorer: The scorer of the detector, whose terms measure content.
        """
        spreads, (_, (last, _)) = self._spreads(observation.vector), _ranges(len(self.widths_))
        appearance = (spreads * self.line_[:-1]).sum(dim=1) + self.line_[-1]
        terms = getattr(scorer, "terms", None)
        found = {} if terms is None else terms(view_of(scorer, observation))
        named = [value for name, value in found.items() if name not in NEITHER]
        content = torch.stack(named).sum(dim=0) if named else spreads[:, last:].mean(dim=1)
        return torch.stack([appearance, content.to(appearance.dtype)], dim=1)

    def _spreads(self, vectors: Tensor) -> Tensor:
        """Return the spread of each layer, (N, L)."""
        mean, deviation = self.usual_
        distances = ((vectors[:, : len(mean)].float() - mean) / deviation).abs()
        means = [part.mean(dim=1) for part in distances.split(self._widths, dim=1)]
        return torch.stack(means, dim=1).clamp_min(_LEAST_SPREAD).log()

    def state(self) -> dict[str, Tensor]:
        """Return what was learnt, by name, for a saved file."""
        return {name: getattr(self, name) for name in self.learnt}

    def load_state(self, state: Mapping[str, Tensor]) -> Self:
        """Load what another one has learnt.

        Raises:
            ArtefactError: The numbers are invalid.
        """
        usual, widths, line = (state[name] for name in self.learnt)
        is_right = usual.dim() == 2 and len(usual) == 2 and bool((usual[1] > 0).all())
        is_right = is_right and widths.dim() == 1 and widths.dtype == torch.int64 and bool((widths > 0).all())
        if not is_right or widths.sum() != usual.shape[1] or line.shape != (len(widths) + 1,):
            raise ArtefactError("the kinds are not what was learnt from vectors")
        self.usual_, self.widths_, self.line_, self._widths = usual, widths, line, widths.tolist()
        return self


def _ranges(n_layers: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the first and the end of the middle layers, and of the last ones, of at least one layer each.

    Example:
        >>> _ranges(8), _ranges(1)
        (((2, 6), (6, 8)), ((0, 1), (0, 1)))
    """
    start, last = n_layers // 4, min(3 * n_layers // 4, n_layers - 1)
    return (start, max(start + 1, round(3 * n_layers / 4))), (last, n_layers)
