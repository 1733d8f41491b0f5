from __future__ import annotations

import numpy as np
import pytest
import torch

from neuralmean import Detector
from neuralmean.detector.kinds import KINDS, SENTENCES, name_kinds
from neuralmean.errors import ArtefactError
from neuralmean.scorers import AverageScorer, Observation
from neuralmean.scorers.kinds import KindScorer


@pytest.fixture
def fitted(model, images):
    return Detector(model).fit(images[:200], held_out=images[200:])


def test_an_input_that_is_not_flagged_is_typical(fitted, images):
    decision = fitted.predict(images)
    assert all((kind == "typical") != flag for kind, flag in zip(decision.kind, decision.is_ood.tolist(), strict=True))


def test_the_flags_do_not_depend_on_the_kinds(fitted, images, strange):
    decision = fitted.predict(torch.cat([images, strange]))
    assert torch.equal(decision.is_ood, decision.p_value <= decision.level)


def test_bright_noise_looks_strange(fitted, strange):
    decision = fitted.predict(strange)
    assert set(decision.kind) <= {"appearance", "both"}
    assert decision.sentence[0] == SENTENCES[decision.kind[0]]
    assert (decision.p_appearance <= 0.05).all()


def test_every_way_to_decide_gives_the_same_kinds(fitted, images, strange):
    x = torch.cat([images[:5], strange[:5]])
    whole, called = fitted.predict(x, batch_size=3), fitted(x)[1]
    assert whole.kind == called.kind == [one.kind[0] for one in called]
    torch.testing.assert_close(whole.p_content, called.p_content)
    assert called[5:].kind == called.take(torch.arange(5, 10)).kind == whole.kind[5:]


def test_kinds_come_back_from_a_file(fitted, images, strange, model, tmp_path):
    fitted.save(tmp_path / "a.nmd")
    loaded = Detector.load(tmp_path / "a.nmd", model)
    x = torch.cat([images[:20], strange[:20]])
    assert loaded.predict(x).kind == fitted.predict(x).kind
    torch.testing.assert_close(loaded.predict(x).p_appearance, fitted.predict(x).p_appearance)


def test_calibrate_sets_new_p_values(fitted, images, strange):
    before = fitted.predict(strange).p_appearance.min()
    fitted.calibrate(images[200:240])
    assert fitted.predict(strange).p_appearance.min() == pytest.approx(1 / 41)
    assert before == pytest.approx(1 / 101)


@pytest.mark.parametrize("scorer", ["logistic", "mlp"])
@pytest.mark.parametrize("statistic", ["mean", "both"])
def test_other_scorers_have_kinds_as_well(model, images, strange, scorer, statistic):
    detector = Detector(model, scorer=scorer, statistic=statistic)
    detector.fit(images[:200], strange[:50], held_out=images[200:])
    assert set(detector.predict(strange[50:]).kind) <= {"appearance", "both"}


def test_a_detector_that_kept_no_rows_is_unsure(model, images, strange):
    decision = Detector(model, scorer="average").calibrate(images).predict(strange)
    assert set(decision.kind) == {"unsure"}
    assert decision.p_appearance is None
    assert decision.p_content is None


def test_a_stopped_pass_is_unsure(model, images, strange):
    detector = Detector(model).fit(images[:200], held_out=images[200:], early_exit=True)
    output, decision = detector(strange + 50)
    assert output is None
    assert set(decision.kind) == {"unsure"}


def test_p_values_of_kinds_hold_their_rate(model):
    """Of fresh in-distribution inputs about 5 % have a p-value of 5 % or less, of each kind."""
    generator = torch.Generator().manual_seed(5)
    fresh = torch.rand(1600, 3, 8, 8, generator=generator)
    decision = Detector(model).fit(fresh[:400], held_out=fresh[400:1000]).predict(fresh[1000:])
    for found in (decision.p_appearance, decision.p_content):
        assert 0.02 <= (found <= 0.05).double().mean().item() <= 0.09


def test_every_kind_has_a_sentence():
    assert set(SENTENCES) == set(KINDS)


def test_kinds_without_p_values():
    assert name_kinds(torch.tensor([True, False]), None, 0.05) == ["unsure", "typical"]


def _reference_spread(train, x, columns):
    usual = (train[:, columns].mean(0), train[:, columns].std(0, correction=0))
    return ((x[:, columns] - usual[0]) / usual[1]).abs().mean(1).log()


def test_appearance_is_the_spread_of_the_middle_layers_beyond_what_the_first_ones_say():
    train, x = torch.randn(500, 8) * torch.arange(1, 9), torch.randn(5, 8) * 9
    scorer = KindScorer().fit(train, torch.arange(8) // 2, 4)

    def of(rows, layer):
        return _reference_spread(train, rows, slice(2 * layer, 2 * layer + 2))

    middle = (of(train, 1) + of(train, 2)) / 2
    slope = np.polyfit(of(train, 0).numpy(), middle.numpy(), 1)
    expected = (of(x, 1) + of(x, 2)) / 2 - torch.from_numpy(np.polyval(slope, of(x, 0).numpy()))
    found = scorer.score(Observation(x), AverageScorer())
    torch.testing.assert_close(found, torch.stack([expected, of(x, 3)], dim=1).float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("n_layers", [1, 2, 3, 5])
def test_a_model_of_few_layers_has_kinds(n_layers):
    train = torch.randn(50, 2 * n_layers)
    scorer = KindScorer().fit(train, torch.arange(2 * n_layers) // 2, n_layers)
    again = KindScorer().load_state(scorer.state())
    assert again.score(Observation(train), AverageScorer()).isfinite().all()


def test_content_explains_a_flag_where_the_appearance_is_as_usual():
    p_values = torch.tensor([[0.04, 0.1], [0.06, 0.1], [0.06, 0.3], [0.04, 0.04]])
    assert name_kinds(torch.ones(4, dtype=torch.bool), p_values, 0.05) == ["appearance", "content", "unsure", "both"]


@pytest.mark.parametrize(
    "changed",
    [{"widths_": torch.tensor([2, 9, 1])}, {"line_": torch.zeros(7)}, {"usual_": torch.zeros(2, 6)}],
    ids=["widths", "line", "deviation"],
)
def test_a_state_of_another_shape_is_refused(changed):
    scorer = KindScorer().fit(torch.randn(50, 6), torch.tensor([0, 0, 1, 1, 2, 2]), 3)
    with pytest.raises(ArtefactError, match="not what was learnt"):
        KindScorer().load_state({**scorer.state(), **changed})
