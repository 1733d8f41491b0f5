from __future__ import annotations

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


def test_appearance_is_the_spread_of_the_middle_layers_and_content_that_of_the_last():
    train = torch.randn(500, 8) * torch.arange(1, 9)
    scorer = KindScorer().fit(train, torch.arange(8) // 2, 4)
    x = torch.randn(5, 8) * 9
    spread = ((x - train.mean(0)) / train.std(0, correction=0)).abs()
    found = scorer.score(Observation(x), AverageScorer())
    torch.testing.assert_close(
        found, torch.stack([spread[:, 2:6].mean(1), spread[:, 6:].mean(1)], dim=1), rtol=1e-2, atol=0
    )


def test_a_state_of_another_shape_is_refused():
    scorer = KindScorer().fit(torch.randn(50, 6), torch.tensor([0, 0, 1, 1, 2, 2]), 3)
    state = {**scorer.state(), "ranges_": torch.tensor([[0, 9], [0, 1]])}
    with pytest.raises(ArtefactError, match="not what was learnt"):
        KindScorer().load_state(state)
