"""One contract for every scorer that comes with the library."""

from __future__ import annotations

import pytest
import torch

from neuralmean.errors import InputError, NotFittedError
from neuralmean.scorers import SCORERS, Observation, make_scorer


def observation(n, seed, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(n, 12, generator=generator) + shift
    return Observation(vector, vector[:, :3] * 2, vector[:, 3:8])


INLIERS, OUTLIERS, FAR = observation(120, 0), observation(60, 1, 4.0), observation(64, 2, 8.0)


def view(scorer, rows):
    return rows if scorer.needs else rows.vector


def fitted(name):
    scorer = make_scorer(name)
    return scorer.fit(view(scorer, INLIERS), view(scorer, OUTLIERS) if scorer.uses_outliers else None)


@pytest.mark.parametrize("name", sorted(SCORERS))
class TestEveryScorer:
    def test_fit_returns_itself(self, name):
        scorer = make_scorer(name)
        assert scorer.fit(view(scorer, INLIERS), view(scorer, OUTLIERS)) is scorer

    def test_one_number_per_row_and_higher_is_further_out(self, name):
        scorer = fitted(name)
        near, far = scorer.score(view(scorer, observation(64, 3))), scorer.score(view(scorer, FAR))
        assert near.shape == far.shape == (64,)
        assert near.max() < far.min()

    def test_a_score_does_not_depend_on_its_neighbours(self, name):
        scorer = fitted(name)
        rows = observation(40, 5)
        together, alone = scorer.score(view(scorer, rows)), scorer.score(view(scorer, rows[slice(7, 8)]))
        torch.testing.assert_close(together[7:8], alone, rtol=1e-5, atol=1e-5)

    def test_inputs_are_left_alone(self, name):
        before = [part.clone() for part in INLIERS.parts()]
        scorer = fitted(name)
        scorer.score(view(scorer, INLIERS))
        assert all(torch.equal(one, other) for one, other in zip(INLIERS.parts(), before, strict=True))

    def test_fitting_again_gives_the_same_scores_and_leaves_the_global_random_state(self, name):
        torch.manual_seed(1)
        one = fitted(name)
        expected = torch.rand(1)
        torch.manual_seed(1)
        assert torch.equal(torch.rand(1), expected)
        torch.manual_seed(2)
        two = fitted(name)
        assert torch.equal(one.score(view(one, FAR)), two.score(view(two, FAR)))

    def test_the_state_moves_to_another_scorer_bit_for_bit(self, name):
        scorer = fitted(name)
        again = make_scorer(name, scorer.get_options()).load_state({k: v.clone() for k, v in scorer.state().items()})
        assert torch.equal(scorer.score(view(scorer, FAR)), again.score(view(again, FAR)))

    def test_a_scorer_that_was_in_use_forgets_what_it_knew(self, name):
        scorer, other = make_scorer(name), observation(120, 9, 1.0)
        for rows in (other, INLIERS):
            scorer.fit(view(scorer, rows), view(scorer, OUTLIERS))
            scorer.score(view(scorer, FAR))
        expected = fitted(name).score(view(scorer, FAR))
        assert torch.equal(scorer.score(view(scorer, FAR)), expected)
        used = make_scorer(name).fit(view(scorer, other), view(scorer, OUTLIERS))
        used.score(view(scorer, FAR))
        assert torch.equal(used.load_state(scorer.state()).score(view(scorer, FAR)), expected)

    def test_contributions_add_up_to_the_score(self, name):
        scorer = fitted(name)
        parts = scorer.contributions(view(scorer, FAR))
        if parts is None:
            assert name == "mlp"
            return
        terms = scorer.terms(view(scorer, FAR)) if hasattr(scorer, "terms") else {}
        total = parts.sum(1) + sum(terms.values())
        torch.testing.assert_close(total, scorer.score(view(scorer, FAR)), rtol=1e-4, atol=1e-4)

    def test_an_unfitted_scorer_says_so(self, name):
        scorer = make_scorer(name)
        if not scorer.learnt:
            return
        with pytest.raises(NotFittedError, match=f"The '{name}' scorer is not fitted yet. Call `fit` before `score`"):
            scorer.score(view(scorer, FAR))

    def test_a_state_that_lacks_something_is_refused(self, name):
        scorer = fitted(name)
        if not scorer.learnt:
            return
        state = scorer.state()
        state.pop(scorer.learnt[0])
        with pytest.raises(InputError, match=f"Expected the state of a '{name}' scorer to hold"):
            make_scorer(name).load_state(state)


def test_unknown_options_are_refused():
    with pytest.raises(
        InputError, match=r"Expected only the options \['tokens', 'seed'\] for the 'typicality' scorer, but got \['x'\]"
    ):
        make_scorer("typicality", {"x": 1})


def test_rows_must_have_the_same_columns():
    with pytest.raises(InputError, match="the same columns, but got 2 and 3"):
        make_scorer("logistic").fit(torch.zeros(5, 2), torch.zeros(5, 3))
