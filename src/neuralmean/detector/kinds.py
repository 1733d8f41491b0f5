"""What kind of strangeness a flagged input has: how it looks, what it shows, or both.

Two further conformal p-values, calibrated on the same rows, classify the flagged inputs. Which inputs are
flagged, and so the false-alarm rate over all kinds, depends on the usual p-value alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from neuralmean.scorers import Observation, Scorer
from neuralmean.scorers.kinds import KindScorer
from neuralmean.stats.calibration import Calibration

Kind = Literal["typical", "appearance", "content", "both", "unsure"]
KINDS: tuple[Kind, ...] = get_args(Kind)

FLAGGED_KINDS = KINDS[1:]  # kinds of flagged inputs
MOST = 0.2  # p-value of content up to which it explains a flag where the appearance is as usual

SENTENCES: dict[Kind, str] = {
    "typical": "The input looks like the training data.",
    "appearance": "The input looks unlike the training data (noise, blur, exposure, another sensor); what it shows is familiar.",
    "content": "The input looks as usual, but what it shows belongs to no known class.",
    "both": "The input looks unlike the training data, and what it shows belongs to no known class.",
    "unsure": "The input is unusual, but neither its appearance nor its content alone explains why.",
}


@dataclass(frozen=True, eq=False)
class Kinds:
    """Gives the p-values of appearance and content.

    Attributes:
        kind_scorer: Scores both.
        scorer: The scorer of the detector.
        appearance: Held-out scores of appearance.
        content: Held-out scores of content.
    """

    kind_scorer: KindScorer
    scorer: Scorer
    appearance: Calibration
    content: Calibration

    @classmethod
    def learn(
        cls, scorer: Scorer, inliers: Observation, held_out: Observation, layers: Tensor, n_layers: int, rate: float
    ) -> Kinds:
        """Learn from in-distribution rows, and calibrate on others.

        Args:
            scorer: The fitted scorer of the detector.
            inliers: The rows to learn from.
            held_out: The rows to calibrate on.
            layers: Index of the layer of each column, (D,).
            n_layers: How many layers there are.
            rate: The false-alarm rate.
        """
        own = KindScorer().fit(inliers.vector, layers, n_layers)
        scores = torch.cat([own.score(block, scorer) for block in held_out.blocks()]).detach()
        return cls(own, scorer, *_calibrate(scores, rate))

    def calibrated(self, scores: Tensor, rate: float) -> Kinds:
        """Return the same with other held-out scores, (N, 2)."""
        return Kinds(self.kind_scorer, self.scorer, *_calibrate(scores, rate))

    def score(self, observation: Observation) -> Tensor:
        """Score appearance and content, (N, 2); higher = more OOD."""
        return self.kind_scorer.score(observation, self.scorer).detach()

    def p_values(self, observation: Observation) -> Tensor:
        """Return the p-values of appearance and content, float64 (N, 2)."""
        columns = self.score(observation).unbind(dim=1)
        parts = (self.appearance, self.content)
        return torch.stack([one.p_value(column) for one, column in zip(parts, columns, strict=True)], dim=1)


def _calibrate(scores: Tensor, rate: float) -> tuple[Calibration, Calibration]:
    appearance, content = scores.unbind(dim=1)
    return Calibration.of(appearance, rate), Calibration.of(content, rate)


def name_kinds(is_ood: Tensor, p_values: Tensor | None, rate: float) -> list[Kind]:
    """Return the kind of each of N inputs.

    Args:
        is_ood: Which inputs are flagged, (N,).
        p_values: Of appearance and content, (N, 2); None where they are not known.
        rate: The p-value at or below which appearance and content are strange each. Where the appearance is not, content explains
            the flag if it is among the most unusual fifth.

    Example:
        >>> flags = torch.tensor([False, True, True, True, True])
        >>> name_kinds(flags, torch.tensor([[0.0, 0.0], [0.0, 0.1], [0.9, 0.1], [0.0, 0.0], [0.9, 0.9]]), 0.05)
        ['typical', 'appearance', 'content', 'both', 'unsure']
    """
    if p_values is None:
        return ["unsure" if flag else "typical" for flag in is_ood.tolist()]
    return [FLAGGED_KINDS[index] if index >= 0 else "typical" for index in kind_codes(is_ood, p_values, rate).tolist()]


def kind_codes(is_ood: Tensor, p_values: Tensor, rate: float) -> Tensor:
    """Return the kind of each of N inputs as an index of `FLAGGED_KINDS`, -1 for `typical`; see `name_kinds`."""
    looks, shows = (p_values <= rate).unbind(dim=1)
    shows = shows | (~looks & (p_values[:, 1] <= MOST))
    codes = torch.where(looks, torch.where(shows, 2, 0), torch.where(shows, 1, 3))
    return torch.where(is_ood.to(codes.device), codes, -1)
