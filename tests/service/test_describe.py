"""Sentences for people."""

import pytest
import torch

from neuralmean.detector.decision import Explanation
from neuralmean.service.describe import describe_detector, describe_p_value, describe_reason, layer_profile


def _explanation(by_layer, terms=None, exact=True):
    layers = ("a", "b", "c")
    channels = ("a[0]", "a[1]", "b[0]", "b[1]", "c[0]", "c[1]", "c[2]", "c[3]")
    values = torch.tensor([by_layer])
    rows = torch.zeros(1, 8)
    return Explanation(values.sum(1), layers, channels, values, rows, terms or {}, exact)


def test_a_p_value_is_told_as_a_count():
    assert describe_p_value(0.5, 199) == "99 of 199 held-out images look at least as unusual."
    assert describe_p_value(1 / 200, 199) == "None of 199 held-out images looks as unusual."


def test_a_wide_layer_is_not_strange_for_being_wide():
    explanation = _explanation([3.0, 0.0, 4.0])  # 1.5 and 1 per channel
    reason = describe_reason(explanation, 0, is_ood=True)
    assert reason == "Strangest to the early layers, which see colours, edges and textures; above all a."
    assert layer_profile(explanation, 0)[2] == {"layer": "c", "contribution": 4.0, "n_channels": 4}


@pytest.mark.parametrize(
    ("by_layer", "word"), [([1.0, 0.0, 0.0], "early"), ([0.0, 1.0, 0.0], "middle"), ([0.0, 0.0, 1.0], "late")]
)
def test_the_depth_is_named(by_layer, word):
    assert f"comes from the {word} layers" in describe_reason(_explanation(by_layer), 0, is_ood=False)


def test_terms_that_weigh_more_than_all_layers_are_named_but_not_a_constant():
    terms = {"energy": torch.tensor([9.0]), "constant": torch.tensor([50.0])}
    reason = describe_reason(_explanation([1.0, 0.0, 0.0], terms, exact=False), 0, is_ood=True)
    assert reason.startswith("The term 'energy' weighs more than all layers together. Strangest to the early")
    assert reason.endswith("The shares are a first-order approximation.")


def test_nothing_to_say_is_said():
    assert describe_reason(_explanation([-1.0, 0.0, 0.0]), 0, is_ood=False) == "No layer raises the score."


def test_the_description_counts_every_held_out_score(detector):
    described = describe_detector(detector, "toy")
    assert sum(described["histogram"]["counts"]) == described["n_held_out"] == 200
    assert described["threshold"] == detector.threshold
