"""Decisions and explanations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from neuralmean import Calibration, Decision, Detector
from neuralmean.errors import (
    InputError,
)
from tests.conftest import make_trained
from tests.detector.conftest import HELD_OUT, fitted


class TestExplain:
    @pytest.mark.parametrize("scorer", ["average", "logistic", "typicality"])
    def test_contributions_add_up_to_the_score(self, model, images, strange, scorer):
        detector = Detector(model, scorer=scorer).fit(images, strange, held_out=HELD_OUT)
        explanation = detector.explain(strange[:7])
        assert explanation.exact
        total = explanation.by_channel.sum(1) + sum(explanation.terms.values())
        torch.testing.assert_close(total, detector.score(strange[:7]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(explanation.by_layer.sum(1), explanation.by_channel.sum(1), rtol=1e-4, atol=1e-4)
        assert explanation.by_layer.shape == (7, 2)

    def test_a_scorer_that_is_not_a_sum_is_explained_to_first_order(self, model, images, strange):
        with torch.no_grad():
            explanation = Detector(model, scorer="mlp").fit(images, strange, held_out=HELD_OUT).explain(strange[:3])
        assert not explanation.exact
        assert explanation.by_layer.shape == (3, 2)

    def test_the_largest_contributions_come_first(self, model, images, strange):
        explanation = fitted(model, images, scorer="average").explain(strange[:1])
        layers, channels = explanation.top_layers(), explanation.top_channels(n=3)
        assert [name for name, _ in layers] == sorted(
            detector_layers := ["bn1", "bn2"], key=dict(layers).get, reverse=True
        )
        assert len(layers) == len(detector_layers)
        assert len(channels) == 3
        assert channels[0][1] == explanation.by_channel.max().item()
        assert "1 inputs" in repr(explanation)


class Dividing(nn.Module):
    """Divides its feature by its length, which may be nothing, behind the last watched layer."""

    def __init__(self):
        super().__init__()
        self.inner = make_trained()
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        feature = self.inner(x)
        return self.fc((feature - self.inner.fc.bias) / (x.abs().sum((1, 2, 3)) > 0).unsqueeze(1))


def test_a_score_that_is_no_number_is_an_error_and_not_a_verdict(images):
    detector = Detector(Dividing(), scorer="typicality").fit(images, held_out=HELD_OUT)
    inputs = torch.cat([images[:2], torch.zeros(1, 3, 8, 8)])
    for ask in (detector, detector.predict):
        with pytest.raises(InputError, match=r"Expected a score for each input, but 1 of 3 \(rows \[2\]\) are NaN"):
            ask(inputs)


def test_an_infinite_score_is_a_score(model, images):
    class Certain:
        def fit(self, inliers):
            pass

        def score(self, vectors):
            return torch.where(vectors.abs().sum(1) > 20, torch.inf, vectors[:, 1])

    detector = Detector(model, scorer=Certain()).fit(images, held_out=HELD_OUT)
    decision = detector.predict(images[:3] * 50)
    assert decision.score.isinf().all()
    assert decision.is_ood.all()


def test_a_decision_is_neither_true_nor_false_and_can_be_cut(model, images):
    decision = fitted(model, images, scorer="average").predict(images[:6])
    with pytest.raises(InputError, match="Expected `is_ood`: a decision on N inputs"):
        bool(decision)
    assert torch.equal(decision[2:4].score, decision.score[2:4])
    for last in (-1, 5, np.int64(5), torch.tensor(5)):
        assert torch.equal(decision[last].score, decision.score[-1:])


def test_terms_are_above_their_usual(model, images):
    detector = fitted(model, images)
    found = detector.explain(HELD_OUT)
    for name in ("reach", "doubt"):
        assert abs(found.terms[name].mean()) < 0.5  # in units of their deviation on in-distribution inputs
    total = found.by_layer.sum(1) + sum(found.terms.values())
    torch.testing.assert_close(total, found.score, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("level", ["0.1", float("nan"), True, torch.tensor(0.1)], ids=repr)
def test_a_level_that_is_no_number_is_refused(level):
    decision = Decision(torch.arange(3.0), Calibration.of(torch.arange(40.0), 0.05))
    with pytest.raises(InputError, match="Expected `level` to be a p-value, a number, but got"):
        decision.most_false(level)
