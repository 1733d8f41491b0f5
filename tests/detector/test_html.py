"""What a notebook shows."""

import torch
from torch import nn

from neuralmean import Calibration, Decision, Detector, Explanation


def test_a_decision_shows_each_input_and_how_many_are_flagged():
    decision = Decision(torch.tensor([0.5, 99.0]), Calibration.of(torch.arange(40.0), 0.05))
    text = decision._repr_html_()
    assert "1 of 2 out of distribution" in text
    assert text.count("<tr>") == 3
    assert "<td>99</td>" in text
    assert text.index("in distribution") < text.index("OOD")


def test_a_long_decision_shows_its_first_inputs():
    text = Decision(torch.zeros(500), Calibration.of(torch.arange(40.0), 0.05))._repr_html_()
    assert text.count("<tr>") == 11
    assert "the first 10" in text


def test_an_explanation_names_layers_and_escapes_them():
    values = torch.tensor([[1.0, 3.0]])
    text = Explanation(
        torch.tensor([4.0]), ("a", "<b>"), ("a[0]", "<b>[0]"), values, values, {}, exact=True
    )._repr_html_()
    assert "&lt;b&gt; +3, a +1" in text
    assert "<b>" not in text


def test_a_detector_says_what_it_watches_before_and_after_calibration():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    images = torch.rand(64, 3, 8, 8)
    model(images)
    detector = Detector(model, scorer="average")
    assert "call fit or calibrate" in detector._repr_html_()
    text = detector.calibrate(images)._repr_html_()
    assert "<td>1, 4</td>" in text
    assert "5 % false alarms" in text
