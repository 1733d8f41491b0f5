"""The scorer that adds what out-of-distribution examples teach to the typicality score."""

from __future__ import annotations

import pytest
import torch

from neuralmean.errors import InputError
from neuralmean.scorers import GuidedScorer, Observation, make_scorer
from tests.scorers.test_typicality import clustered


def shifted(n, seed, column):
    """Rows like those of `clustered`, but for one column."""
    rows = clustered(n, seed)
    vector = rows.vector.clone()
    vector[:, column] += 6.0
    return Observation(vector, rows.logits, rows.feature)


def test_the_score_equals_its_formula():
    train, strange, rows = clustered(300, 0), shifted(60, 1, 3), clustered(20, 2)
    scorer = GuidedScorer().fit(train, strange)
    (typical, learnt), (typical_std, learnt_std) = scorer.mean_.tolist(), scorer.std_.tolist()
    pairs = zip(scorer.typicality.score(rows).tolist(), scorer.learned.score(rows.vector).tolist(), strict=True)
    expected = [(t - typical) / typical_std + max(0.0, (y - learnt) / learnt_std) / 3 for t, y in pairs]
    assert scorer.score(rows).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("learner", ["logistic", "mlp"])
def test_examples_raise_the_scores_of_their_like_and_lower_none(learner):
    scorer = GuidedScorer(learner=learner).fit(clustered(400, 0), shifted(100, 1, 3))
    alike, fresh = shifted(100, 2, 3), clustered(400, 3)
    plain = (scorer.typicality.score(alike) - scorer.mean_[0]) / scorer.std_[0]
    assert (scorer.score(alike) >= plain - 1e-5).all()
    assert (scorer.score(alike) - plain).median() > 0.5
    assert scorer.score(alike).median() > scorer.score(fresh).quantile(0.95)


def test_both_parts_are_measured_on_rows_that_they_were_not_learnt_from():
    scorer = GuidedScorer().fit(clustered(1000, 0, width=60), _wide(50))
    fresh = clustered(1000, 5, width=60)
    standard = scorer._standard(scorer._both(fresh))
    assert standard.mean(0).abs().max() < 0.25
    assert (standard.std(0) - 1).abs().max() < 0.25


def _wide(n):
    rows = clustered(n, 1, width=60)
    return Observation(rows.vector + 1.0, rows.logits, rows.feature)


def test_contributions_and_terms_add_up_to_the_score():
    scorer, rows = GuidedScorer().fit(clustered(300, 0), shifted(60, 1, 3)), shifted(20, 2, 3)
    total = scorer.contributions(rows).sum(dim=1) + sum(scorer.terms(rows).values())
    torch.testing.assert_close(total, scorer.score(rows), rtol=1e-4, atol=1e-4)


def test_state_goes_into_a_new_scorer():
    scorer, rows = GuidedScorer(learner="mlp").fit(clustered(300, 0), shifted(60, 1, 3)), clustered(20, 2)
    again = make_scorer("guided", scorer.get_options()).load_state(scorer.state())
    torch.testing.assert_close(again.score(rows), scorer.score(rows), rtol=0, atol=0)


def test_a_batch_of_one_scores_as_the_input_itself():
    scorer, rows = GuidedScorer().fit(clustered(300, 0), shifted(60, 1, 3)), shifted(1, 2, 3)
    torch.testing.assert_close(scorer.score_batch(rows), scorer.score(rows)[0])


def test_without_examples_it_says_what_to_do():
    with pytest.raises(InputError, match="Expected `ood_data` to fit the 'guided' scorer, but got none"):
        GuidedScorer().fit(clustered(100, 0), None)


def test_an_unknown_learner_is_an_error():
    with pytest.raises(InputError, match=r"Expected `learner` to be one of \['logistic', 'mlp'\], but got 'forest'"):
        GuidedScorer(learner="forest")
