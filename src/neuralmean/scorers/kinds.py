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

MIDDLE = (1 / 4, 3 / 4)  # of the layers, from the input to the output
LAST = (3 / 4, 1.0)


class KindScorer:
    r"""Scores the appearance and the content of each input.

    With :math:`m_c` and :math:`\sigma_c` the mean and the deviation of a column over in-distribution inputs, the score of a
    range of layers is

    .. math::
        s(x) = \frac{1}{D'} \sum_c |x_c - m_c| / \sigma_c.

    Attributes:
        usual_: Mean and deviation of each column, (2, D).
        ranges_: First column and end of the middle and of the last layers, (2, 2).
    """

    learnt = ("usual_", "ranges_")

    usual_: Tensor
    ranges_: Tensor

    def fit(self, vectors: Tensor, column_layers: Tensor, n_layers: int) -> Self:
        """Learn from the vectors (N, D) of in-distribution inputs.

        Args:
            vectors: Discrepancies.
            column_layers: Index of the layer of each column, (D,).
            n_layers: How many layers there are.
        """
        is_twice = bool((column_layers.diff() < 0).any())  # first the means, then the deviations: the means are read
        layers = column_layers[: len(column_layers) // 2] if is_twice else column_layers
        self.ranges_ = torch.tensor([_columns(layers, n_layers, share) for share in (MIDDLE, LAST)])
        moments = Moments.of_blocks((block[:, : len(layers)] for block in Blocks(vectors)), len(layers))
        self.usual_ = torch.stack([moments.mean, scale_of(moments)]).float()
        return self

    def score(self, observation: Observation, scorer: Scores) -> Tensor:
        """Score appearance and content of each input, shape (N, 2); higher = more OOD.

        Args:
            observation: The result of a pass.
            scorer: The scorer of the detector, whose terms measure content.
        """
        appearance = self._spread(observation.vector, self.ranges_[0])
        terms = getattr(scorer, "terms", None)
        found = {} if terms is None else terms(view_of(scorer, observation))
        named = [value for name, value in found.items() if name != "constant"]
        content = torch.stack(named).sum(dim=0) if named else self._spread(observation.vector, self.ranges_[1])
        return torch.stack([appearance, content.to(appearance.dtype)], dim=1)

    def _spread(self, vectors: Tensor, columns: Tensor) -> Tensor:
        start, end = columns.tolist()
        mean, deviation = self.usual_[:, start:end]
        spread: Tensor = ((vectors[:, start:end].float() - mean) / deviation).abs().mean(dim=1)
        return spread

    def state(self) -> dict[str, Tensor]:
        """Return what was learnt, by name, for a saved file."""
        return {name: getattr(self, name) for name in self.learnt}

    def load_state(self, state: Mapping[str, Tensor]) -> Self:
        """Load what another one has learnt.

        Raises:
            ArtefactError: The numbers are invalid.
        """
        usual, ranges = (state[name] for name in self.learnt)
        is_right = usual.dim() == 2 and len(usual) == 2 and bool((usual[1] > 0).all())
        is_right = is_right and ranges.shape == (2, 2) and ranges.dtype == torch.int64
        if not is_right or not all(0 <= start < end <= usual.shape[1] for start, end in ranges.tolist()):
            raise ArtefactError("the kinds are not what was learnt from vectors")
        self.usual_, self.ranges_ = usual, ranges
        return self


def _columns(layers: Tensor, n_layers: int, share: tuple[float, float]) -> list[int]:
    """Return the first column and the end of a range of the layers, of at least one layer."""
    first = min(int(share[0] * n_layers), n_layers - 1)
    end = max(first + 1, round(share[1] * n_layers))
    return [int((layers < first).sum()), int((layers < end).sum())]
