"""Generalized ODIN: a head that decomposes confidence, and a step chosen without OOD images (Hsu et al., CVPR 2020)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuralmean.bench.baselines.base import Context, View
from neuralmean.bench.baselines.finetune import NewHead
from neuralmean.bench.baselines.perturbation import batches_of, hold_out, signs

STEPS = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)  # the paper's


class DividingHead(nn.Module):
    r"""DeConf-C: returns the logits :math:`h(x) / g(x)` in training mode and :math:`h(x)` in evaluation mode.

    .. math::
        h_k(x) = \cos(w_k, z), \quad g(x) = \sigma(\mathrm{BN}(w_g^\top z + b_g))

    :math:`z` is the penultimate feature. The directions :math:`w_k` are initialised from `head`.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(head.weight.detach().clone())
        self.gate = nn.Linear(head.in_features, 1, device=head.weight.device)
        nn.init.zeros_(self.gate.bias)
        nn.init.constant_(self.gate.weight, head.in_features**-0.5)  # not random, as the norm rescales it anyway
        self.norm = nn.BatchNorm1d(1, device=head.weight.device)

    def forward(self, feature: Tensor) -> Tensor:
        """Map features (N, F) to (N, K)."""
        cosine = F.linear(F.normalize(feature, dim=1), F.normalize(self.weight, dim=1))
        if not self.training:
            return cosine
        gate: Tensor = self.norm(self.gate(feature))
        return cosine / gate.sigmoid()


class GeneralizedOdin(NewHead):
    r"""Scores an image by its largest :math:`h_k` after a step that increases it.

    .. math::
        \hat x = x - \epsilon \, \mathrm{sign}(-\nabla_x \max_k h_k(x)), \quad s(x) = -\max_k h_k(\hat x)

    The step is the one with the largest sum of :math:`\max_k h_k(\hat x)` over ID images, as in the paper. The paper trains
    from scratch for 200 epochs; here a copy with the new head is fine-tuned.
    """

    name = "g-odin"
    title = "G-ODIN"
    paper = "Hsu et al., Generalized ODIN, CVPR 2020"
    uses_gradients = True

    def __init__(self) -> None:
        super().__init__()
        self.step = STEPS[0]

    def new_head(self, old: nn.Linear) -> nn.Module:
        """Make the new layer from the old one."""
        return DividingHead(old)

    def fit(self, context: Context) -> None:
        """Train the copy, then choose the step on ID images."""
        super().fit(context)
        rows = hold_out(len(context.inliers), seed=context.seed, share=1.0).validation
        totals = torch.zeros(len(STEPS), dtype=torch.float64)
        for batch in batches_of(context.trained, context.inliers, rows):
            direction = self._direction(batch)
            with torch.no_grad():
                totals += torch.stack([self._largest(batch + step * direction).sum() for step in STEPS]).cpu()
        self.step = STEPS[int(totals.argmax())]

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        found = []
        for batch in examples.batches():
            moved = batch + self.step * self._direction(batch)
            with torch.no_grad():
                found.append(-self._largest(moved))
        return torch.cat(found)

    def _largest(self, batch: Tensor) -> Tensor:
        outputs: Tensor = self.network(batch)
        return outputs.double().amax(dim=1)

    def _direction(self, batch: Tensor) -> Tensor:
        return signs(batch, self._largest, self.trained.std)
