from __future__ import annotations

import pytest
import torch
from torch import nn

from neuralmean.errors import InputError, NotFittedError
from neuralmean.scorers import mlp
from neuralmean.scorers.mlp import MlpScorer


def ring_and_core(n, seed=0, columns=6):
    """Inliers near the origin, outliers around them: no plane separates the two."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2 * n, columns, generator=generator)
    rows[n:] *= 4
    return rows[:n] * 0.5, rows[n:]


def two_clouds(n, seed=0, columns=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, columns, generator=generator) + 5, torch.randn(n, columns, generator=generator) + 7


def share_in_order(inliers, outliers):
    """AUROC by its definition: the share of pairs whose outlier has the higher score."""
    return (outliers[:, None] > inliers[None]).float().mean().item()


@pytest.fixture(scope="module")
def clouds():
    return two_clouds(60)


@pytest.fixture(scope="module")
def scorer(clouds):
    return MlpScorer().fit(*clouds)


def test_it_learns_what_no_linear_scorer_can():
    scorer = MlpScorer().fit(*ring_and_core(600))
    inliers, outliers = ring_and_core(300, seed=1)
    assert share_in_order(scorer.score(inliers), scorer.score(outliers)) > 0.98


def test_twenty_five_of_each_are_enough_for_clouds_that_are_apart(clouds):
    scorer = MlpScorer().fit(clouds[0][:25], clouds[1][:25])
    assert share_in_order(scorer.score(clouds[0][25:]), scorer.score(clouds[1][25:])) > 0.95


def test_score_is_the_logit_of_three_layers(scorer, clouds):
    _reference_network = nn.Sequential(
        nn.Linear(6, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 1)
    ).eval()
    state = scorer.state()
    for number, layer in enumerate((_reference_network[0], _reference_network[2], _reference_network[5]), start=1):
        layer.load_state_dict({"weight": state[f"weight{number}_"], "bias": state[f"bias{number}_"]})
    pooled = torch.cat(clouds)
    standardised = (clouds[1] - pooled.mean(dim=0)) / pooled.std(dim=0, correction=0)
    torch.testing.assert_close(scorer.score(clouds[1]), _reference_network(standardised)[:, 0])


def test_one_step_of_training_by_hand(monkeypatch):
    """One epoch of one batch: every weight moves by minus 0.001 times the gradient of the loss, dropout as drawn."""
    monkeypatch.setattr(mlp, "MAX_EPOCHS", 1)
    rows, target = torch.tensor([[1.0, -1.0]]), torch.tensor([1.0])
    trained = mlp._train(rows, target, torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    layers = [layer.requires_grad_() for layer in mlp._first_weights(2, generator)]
    torch.randperm(1, generator=generator), torch.randperm(1, generator=generator)
    kept = torch.rand((1, 64), generator=generator) >= 0.5
    hidden = torch.relu(torch.relu(rows @ layers[0].T + layers[1]) @ layers[2].T + layers[3])
    logit = (2 * hidden * kept) @ layers[4].T + layers[5]
    gradients = torch.autograd.grad(torch.log1p(torch.exp(-logit)).sum(), layers)
    for before, gradient, after in zip(layers, gradients, trained, strict=True):
        torch.testing.assert_close(after, before.detach() - 0.001 * gradient)


def test_training_ends_when_the_validation_loss_no_longer_falls(monkeypatch):
    noise = torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
    epochs = 0
    shuffle = torch.randperm

    def counted(*args, **kwargs):
        nonlocal epochs
        epochs += 1
        return shuffle(*args, **kwargs)

    monkeypatch.setattr(mlp, "LEARNING_RATE", 0.1)  # noise is learnt by heart at once, and the validation loss rises
    monkeypatch.setattr(torch, "randperm", counted)
    MlpScorer().fit(noise[:300], noise[300:])
    few_rows = epochs
    epochs = 0
    MlpScorer().fit(noise[:300], noise[100:])
    assert few_rows == 1 + mlp.MAX_EPOCHS  # 400 rows: none kept aside, all epochs
    assert epochs < mlp.MAX_EPOCHS  # 600 rows: stopped early


@pytest.mark.parametrize("value", [0.1, -3.0])
def test_a_column_that_did_not_vary_counts_for_nothing(clouds, value):
    inliers, outliers = (part.clone() for part in clouds)
    inliers[:, 2] = outliers[:, 2] = value
    scorer = MlpScorer().fit(inliers, outliers)
    moved = outliers.clone()
    moved[:, 2] = 1e6
    torch.testing.assert_close(scorer.score(moved), scorer.score(outliers))


class TestContract:
    def test_fit_returns_self_and_leaves_inputs_alone(self, clouds):
        before = [part.clone() for part in clouds]
        scorer = MlpScorer()
        assert scorer.fit(*clouds) is scorer
        scorer.score(clouds[0])
        assert all(torch.equal(part, copy) for part, copy in zip(clouds, before, strict=True))

    def test_score_does_not_depend_on_neighbours(self, scorer, clouds):
        together = scorer.score(clouds[0])
        assert together.shape == (60,)
        torch.testing.assert_close(together[7:8], scorer.score(clouds[0][7:8]), rtol=1e-5, atol=1e-6)

    def test_a_seed_decides_everything_and_the_global_random_state_is_left_alone(self, scorer, clouds):
        torch.manual_seed(5)
        state = torch.get_rng_state()
        again = MlpScorer(seed=0).fit(*clouds)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(again.score(clouds[1]), scorer.score(clouds[1]))
        assert not torch.equal(MlpScorer(seed=1).fit(*clouds).score(clouds[1]), scorer.score(clouds[1]))

    def test_state_and_options_carry_the_scores_bit_for_bit(self, scorer, clouds):
        twin = MlpScorer(**scorer.get_options()).load_state(
            {name: part.clone() for name, part in scorer.state().items()}
        )
        assert torch.equal(twin.score(clouds[1]), scorer.score(clouds[1]))
        assert scorer.get_options() == {"seed": 0}
        assert {part.dtype for part in scorer.state().values()} == {torch.float32}
        assert not any(part.requires_grad for part in scorer.state().values())

    def test_fit_works_whatever_gradient_mode_the_caller_is_in(self, scorer, clouds):
        expected = scorer.score(clouds[1])
        with torch.no_grad():
            assert torch.equal(MlpScorer().fit(*clouds).score(clouds[1]), expected)
        with torch.inference_mode():
            made_inside = [part * 1 for part in clouds]
            assert torch.equal(MlpScorer().fit(*made_inside).score(clouds[1]), expected)

    def test_score_has_a_gradient_so_that_it_can_be_explained(self, scorer, clouds):
        rows = clouds[1].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(scorer.score(rows).sum(), rows)
        assert gradient.shape == rows.shape
        assert gradient.abs().sum() > 0
        assert scorer.contributions(rows) is None

    def test_scoring_before_fit_is_an_error(self):
        with pytest.raises(NotFittedError, match=r"The 'mlp' scorer is not fitted yet\. Call `fit` before `score`\."):
            MlpScorer().score(torch.zeros(1, 3))

    @pytest.mark.parametrize("outliers", [None, torch.zeros(0, 3)], ids=["none", "empty"])
    def test_one_kind_only_is_an_error(self, outliers):
        with pytest.raises(InputError, match="Expected examples of both kinds to fit the 'mlp' scorer, but got 4 in-"):
            MlpScorer().fit(torch.zeros(4, 3), outliers)

    def test_values_that_are_not_finite_are_an_error(self):
        with pytest.raises(InputError, match="but got NaN or Inf in 1 columns, the first is 1"):
            MlpScorer().fit(torch.zeros(4, 3), torch.tensor([[0.0, torch.nan, 0.0]]))

    @pytest.mark.parametrize("seed", [-1, 0.5, "0", True], ids=repr)
    def test_a_seed_that_is_none_is_an_error(self, seed):
        with pytest.raises(InputError, match=f"Expected `seed` to be an integer of at least 0, but got {seed!r}"):
            MlpScorer(seed=seed)
