"""Rates that hold for each group: labels, predictions, pooling, files."""

import numpy as np
import pytest
import torch
from torch import nn

from neuralmean import Calibration, Decision, Detector
from neuralmean.detector.groups import predicted_labels
from neuralmean.errors import CalibrationWarning, InputError


@pytest.fixture
def images():
    return torch.rand(200, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model(images):
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    model = nn.Sequential(*layers).train()
    for _ in range(20):
        model(images)
    model.eval()
    with torch.no_grad():
        model[-1].bias -= model(images).median(dim=0).values
    return model


@pytest.fixture
def detector(model, images):
    return Detector(model, scorer="average").calibrate(images)


def _scores(random, n):
    """Scores of two cameras, one of which always scores higher, and of a third with few examples."""
    groups = random.choice(["door", "yard"], size=n)
    return torch.from_numpy(random.normal(size=n) + 3 * (groups == "yard")), groups.tolist()


def test_the_rate_holds_for_each_group_and_not_without_groups():
    random, flagged, plain = np.random.default_rng(0), {"door": [], "yard": []}, {"door": [], "yard": []}
    for _ in range(300):
        held_out, labels = _scores(random, 400)
        scores, groups = _scores(random, 100)
        by_group = Decision(scores, Calibration.of(held_out, 0.1, groups=labels), groups=tuple(groups))
        overall = Decision(scores, Calibration.of(held_out, 0.1))
        for name in flagged:
            rows = torch.tensor([group == name for group in groups])
            flagged[name].append(by_group.is_ood[rows].double().mean().item())
            plain[name].append(overall.is_ood[rows].double().mean().item())
    for name in flagged:
        assert 0.08 < np.mean(flagged[name]) <= 0.1 + 4 * np.std(flagged[name]) / 300**0.5
    assert np.mean(plain["yard"]) > 0.15
    assert np.mean(plain["door"]) < 0.02


def test_p_values_thresholds_and_flags_are_those_of_the_group():
    held_out, labels = _scores(np.random.default_rng(1), 300)
    calibration = Calibration.of(held_out, 0.05, groups=labels, confidence=0.9)
    decision = Decision(torch.tensor([2.5, 2.5, 9.0]), calibration, groups=("door", "yard", "yard"))
    for row, name in enumerate(decision.groups):
        own = Calibration.of(held_out[[label == name for label in labels]], 0.05, confidence=0.9)
        assert decision.p_value[row] == own.p_value(decision.score[row : row + 1])
        assert decision.thresholds[row] == own.threshold
        assert decision.is_ood[row] == (decision.score[row] > own.threshold)
        assert decision.levels[row] == decision[row].level == own.level
        # Also as Python floats.
        assert decision[row].is_ood.item() == (decision[row].p_value.item() <= decision[row].level)
    assert decision.is_ood.tolist() == [True, False, True]
    assert decision[1].groups == ("yard",)
    assert decision[torch.tensor([2, 0])].is_ood.tolist() == [True, True]
    assert decision.most_false() <= 2
    assert len(decision.select(0.5)) == 3


def test_small_groups_are_pooled_with_a_warning_that_names_them():
    scores, labels = torch.arange(60.0), ["a"] * 30 + ["b"] * 15 + ["c"] * 15
    said = (
        r"2 of 3 groups have fewer than 19 held-out examples and are pooled: 'b', 'c'\. "
        "The false-alarm rate holds for them together"
    )
    with pytest.warns(CalibrationWarning, match=said):
        calibration = Calibration.of(scores, 0.05, groups=labels)
    assert (list(calibration.groups), calibration.pooled) == (["a"], ("b", "c"))
    decision = Decision(torch.tensor([35.0, 35.0, 35.0]), calibration, groups=("a", "b", "unknown"))
    with pytest.warns(CalibrationWarning, match="1 of the groups had no held-out examples: 'unknown'"):
        assert decision.p_value.tolist() == pytest.approx([1 / 31, 26 / 31, 26 / 31])
    with pytest.warns(CalibrationWarning, match="the false-alarm rate holds over all inputs, not for them"):
        alone = Calibration.of(scores[:35], 0.05, groups=labels[:35])
    assert len(alone.pool.scores) == 35  # five are no pool


def test_wrong_groups_are_refused(detector, images):
    calibration = Calibration.of(torch.arange(60.0), 0.05, groups=["a"] * 30 + ["b"] * 30)
    with pytest.raises(
        InputError, match="Expected `groups`, a label for each input, as the detector was calibrated by group"
    ):
        Decision(torch.zeros(2), calibration).p_value  # noqa: B018
    with pytest.raises(InputError, match="Expected a group for each of 2 inputs, but got 1"):
        Decision(torch.zeros(2), calibration, groups=("a",)).p_value  # noqa: B018
    with pytest.raises(InputError, match="Expected a group for each of 60 held-out examples, but got 2"):
        Calibration.of(torch.arange(60.0), 0.05, groups=["a", "b"])
    with pytest.raises(InputError, match="Expected `groups` to be labels, 'predicted' or 'length', but got 'camera'"):
        detector.calibrate(images, groups="camera")
    with pytest.raises(InputError, match="Expected `held_out` examples and no `early_exit` with `groups`"):
        detector.fit(images, groups=["a"] * len(images))
    detector.calibrate(images)
    with pytest.raises(InputError, match="Expected no `groups`, as the detector was not calibrated by group"):
        detector.predict(images[:2], groups=["a", "b"])


def test_groups_may_be_columns_of_tables_arrays_and_tensors(detector, images):
    pandas = pytest.importorskip("pandas")
    numbers = [row % 2 for row in range(len(images))]
    expected = detector.fit(images, held_out=images + 1e-3, groups=numbers).predict(images[:4], groups=numbers[:4])
    for kind in (np.array, torch.tensor, tuple, lambda labels: pandas.Series(labels, index=labels[::-1])):
        groups = kind(numbers)
        detector.fit(images, held_out=images + 1e-3, groups=groups)
        assert detector.calibrated().group_names == ("0", "1")
        decision = detector.predict(images[:4], groups=kind(numbers[:4]))
        assert decision.groups == ("0", "1", "0", "1")
        assert decision.p_value.tolist() == expected.p_value.tolist()
    with pytest.raises(InputError, match="Expected `groups` to be a label for each input, but got 7"):
        detector.calibrate(images, groups=7)
    with pytest.raises(InputError, match="Expected `groups` to be a label for each input, but got 'door'"):
        detector.predict(images, groups="door")


def test_a_mask_takes_the_groups_of_its_rows():
    calibration = Calibration.of(torch.arange(80.0), 0.05, groups=["a"] * 40 + ["b"] * 40)
    decision = Decision(torch.tensor([39.0, 41.0, 78.0]), calibration, groups=("a", "b", "b"))
    taken = decision[decision.score > 40]
    assert taken.groups == ("b", "b")
    assert taken.p_value.tolist() == decision.p_value.tolist()[1:]
    whole = decision[torch.ones(3, dtype=torch.bool)]
    assert (whole.groups, whole.p_value.tolist()) == (decision.groups, decision.p_value.tolist())
    assert len(decision[torch.zeros(3, dtype=torch.bool)]) == 0
    with pytest.raises(InputError, match=r"Expected a mask of 3 inputs, but got one of shape \(2,\)"):
        decision[torch.tensor([True, False])]


def test_a_detector_keeps_its_groups_in_its_file(detector, images, tmp_path):
    labels = ["left" if row % 2 else "right" for row in range(len(images))]
    detector.fit(images, held_out=images + 1e-3, groups=labels)
    decision = detector.predict(images[:4], groups=labels[:4])
    _, again = detector(images[:4], groups=labels[:4])
    assert decision.p_value.tolist() == again.p_value.tolist()
    with pytest.raises(InputError, match="as the detector was calibrated by group"):
        detector(images[:4])
    detector.save(tmp_path / "model.nmd")
    loaded = Detector.load(tmp_path / "model.nmd", detector.model)
    assert loaded.predict(images[:4], groups=labels[:4]).p_value.tolist() == decision.p_value.tolist()
    assert loaded.learnt.grouped_by == "given"


def test_the_prediction_may_be_the_group(model, images, tmp_path):
    detector = Detector(model, scorer="average").calibrate(images, groups="predicted", false_alarm_rate=0.2)
    _, decision = detector(images[:9])
    assert decision.groups == tuple(str(label) for label in model(images[:9]).argmax(dim=1).tolist())
    assert detector.predict(images[:9]).p_value.tolist() == decision.p_value.tolist()
    detector.save(tmp_path / "model.nmd")
    assert Detector.load(tmp_path / "model.nmd", model).predict(images[:9]).groups == decision.groups
    with pytest.raises(
        InputError, match=r"Expected a model with an output of shape \(N, classes\) for groups by prediction"
    ):
        predicted_labels(torch.zeros(3))
