from __future__ import annotations

import math

import pytest
import torch

from neuralmean.errors import InputError
from neuralmean.scorers import Observation, TypicalityScorer
from neuralmean.scorers.typicality import ANGLE_FROM, generalised_entropy


def clustered(n, seed, classes=3, width=20, spread=1.0):
    """Rows around class centres, with logits that say the class and a feature that shows it."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(99)) * 3
    label = torch.randint(classes, (n,), generator=generator)
    vector = centres[label] + spread * torch.randn(n, width, generator=generator)
    logits = torch.nn.functional.one_hot(label, classes) * 8.0 + torch.randn(n, classes, generator=generator)
    return Observation(vector, logits, vector[:, :6].clone())


def _reference_far(scorer_rows, rows):
    """The far term from its formula, one number at a time, with class means that need no shrinking to speak of."""
    classes = scorer_rows.logits.argmax(1).tolist()
    n, k = len(classes), scorer_rows.logits.shape[1]
    width = scorer_rows.vector.shape[1]
    columns = scorer_rows.vector.double().T.tolist()
    shares, terms = [], []
    temperature = scorer_rows.logits.double().std(1).mean()
    probabilities = (rows.logits.double() / temperature).softmax(1).tolist()
    for c in range(width):
        values = columns[c]
        grand = sum(values) / n
        means = [sum(v for v, g in zip(values, classes, strict=True) if g == j) / classes.count(j) for j in range(k)]
        overall = sum((v - grand) ** 2 for v in values) / (n - 1)
        squares = sum((v - means[g]) ** 2 for v, g in zip(values, classes, strict=True))
        within = (squares + 10 * overall) / (n - k + 10)
        between = sum(classes.count(j) / n * (means[j] - grand) ** 2 for j in range(k))
        tau = max(between - within * (k - 1) / n, 0)
        means = [grand + tau / (tau + within / classes.count(j)) * (means[j] - grand) for j in range(k)]
        shares.append((n - k) * tau / (tau + within) + 10)
        terms.append(
            [
                abs(
                    max(-10.0, min(10.0, (rows.vector[i, c].item() - grand) / within**0.5))
                    - sum(p * (m - grand) for p, m in zip(probabilities[i], means, strict=True)) / within**0.5
                )
                for i in range(len(rows))
            ]
        )
    return [sum(s * t[i] for s, t in zip(shares, terms, strict=True)) / sum(shares) for i in range(len(rows))]


def test_the_far_term_equals_its_formula():
    train, rows = clustered(200, 0), clustered(5, 1)
    scorer = TypicalityScorer().fit(train)
    torch.testing.assert_close(
        scorer._terms(rows)[:, 0], torch.tensor(_reference_far(train, rows)), rtol=1e-4, atol=1e-4
    )


def _reference_doubt(row, gamma=0.1):
    total = sum(math.exp(value) for value in row)
    likely = sorted((math.exp(value) / total for value in row), reverse=True)[: max(10, len(row) // 10)]
    return sum(q**gamma * (1 - q) ** gamma for q in likely)


@pytest.mark.parametrize("classes", [2, 7, 300])
def test_the_doubt_term_equals_its_formula(classes):
    logits = 3 * torch.randn(6, classes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = [_reference_doubt(row) for row in logits.tolist()]
    assert generalised_entropy(logits).tolist() == pytest.approx(expected, rel=1e-9)


def test_doubt_tells_confident_predictions_apart_in_single_precision():
    """In single precision 1 - q is 0 from a lead of 17 on, and the naive formula jumps."""
    leads = torch.tensor([5.0, 20.0, 40.0, 80.0])
    logits = torch.stack([leads, torch.zeros(4)], dim=1)
    doubt = generalised_entropy(logits)
    torch.testing.assert_close(doubt.double(), generalised_entropy(logits.double()), rtol=1e-5, atol=1e-7)
    assert (doubt.diff() < 0).all()


def test_the_reach_term_is_energy_over_length():
    scorer, rows = TypicalityScorer().fit(clustered(200, 0)), clustered(4, 1)
    length = scorer._angle.with_length(scorer._standardised(rows))[1].tolist()
    energy = [-math.log(sum(math.exp(value) for value in row)) for row in rows.logits.tolist()]
    assert scorer._terms(rows)[:, 2].tolist() == pytest.approx(
        [e / n for e, n in zip(energy, length, strict=True)], rel=1e-5
    )


def test_an_input_that_lies_nearer_than_usual_gains_nothing_by_it():
    train = clustered(500, 0)
    scorer = TypicalityScorer().fit(train)
    near = Observation(train.vector * 0 + scorer.centre_.mean(), train.logits, train.feature)
    assert (scorer.standard_terms(near)[:, 0] >= 0).all()
    assert (scorer.standard_terms(clustered(500, 1))[:, 0] == 0).float().mean() > 0.3


def test_a_channel_that_hardly_ever_fires_decides_nothing():
    def spiked(rows, height):
        spike = torch.zeros(len(rows), 1)
        spike[0] = height
        return Observation(torch.cat([rows.vector, spike], dim=1), rows.logits, rows.feature)

    train, fresh = clustered(300, 0), clustered(100, 1)
    plain, scorer = TypicalityScorer().fit(spiked(train, 0.0)), TypicalityScorer().fit(spiked(train, 1e-3))
    torch.testing.assert_close(scorer.term_std_, plain.term_std_, rtol=0.2, atol=0)
    usual, struck, hit_harder = plain.score(spiked(fresh, 0.0)), *(scorer.score(spiked(fresh, h)) for h in (50.0, 5e6))
    assert (struck - usual)[1:].abs().max() < 0.5
    torch.testing.assert_close(struck, hit_harder)  # however far it fires, it counts as ten deviations


@pytest.mark.parametrize("factor", [10.0, 1e3, 1e6])
def test_an_input_of_huge_activations_is_not_typical_for_its_confidence(factor):
    scorer, fresh = TypicalityScorer().fit(clustered(300, 0)), clustered(100, 1)
    huge = Observation(fresh.vector * factor, fresh.logits * factor, fresh.feature * factor)
    assert scorer.score(huge).min() > scorer.score(fresh).max()


def test_few_examples_leave_the_angle_out_and_say_so():
    scorer = TypicalityScorer().fit(clustered(ANGLE_FROM - 1, 0))
    assert scorer.left_out() == {"angle": "it takes 100 examples"}
    rows = clustered(20, 1)
    assert scorer.standard_terms(rows)[:, 1].abs().max() == 0
    parts = scorer.contributions(rows).sum(dim=1) + sum(scorer.terms(rows).values())
    torch.testing.assert_close(parts, scorer.score(rows), rtol=1e-4, atol=1e-4)
    assert TypicalityScorer().fit(clustered(ANGLE_FROM, 0)).left_out() == {}


def test_rows_made_of_others_are_scored_by_what_was_learnt_without_their_origin():
    """Copies of the rows themselves: scored by the fold without them, as fresh rows are, and not as rows that were learnt."""
    train, fresh = clustered(200, 0, width=400), clustered(200, 1, width=400)
    scorer = TypicalityScorer()
    crossed = scorer.fit_and_score(train, None, train, torch.arange(200))
    assert crossed.isnan().sum() == 0
    again = TypicalityScorer().fit(train)
    torch.testing.assert_close(scorer.score(fresh), again.score(fresh))
    assert (crossed.median() - again.score(fresh).median()).abs() < 0.5
    assert again.score(train).median() < crossed.median() - 0.5


def test_the_angle_is_minus_the_cosine_to_the_nearest_class():
    train = clustered(2000, 0)
    scorer = TypicalityScorer().fit(train)
    centres = torch.stack([train.vector[train.logits.argmax(1) == k].mean(0) for k in range(3)])
    on_centre = Observation(centres, torch.eye(3) * 8, centres[:, :6])
    assert scorer._terms(on_centre)[:, 1].tolist() == pytest.approx([-1, -1, -1], abs=1e-3)


def test_an_input_between_the_classes_is_less_typical_than_one_of_a_class():
    train = clustered(500, 0)
    between = clustered(200, 2)
    between = Observation(between.vector.roll(1, 1), between.logits, between.feature.roll(1, 1))
    scorer = TypicalityScorer().fit(train)
    assert scorer.score(between).min() > scorer.score(clustered(200, 3)).quantile(0.99)


def test_terms_are_standardised_on_rows_they_were_not_learnt_from():
    scorer = TypicalityScorer().fit(clustered(1000, 0, width=200))
    fresh = (scorer._terms(clustered(1000, 1, width=200)) - scorer.term_mean_) / scorer.term_std_
    assert fresh.mean(0).abs().max() < 0.25
    assert (fresh.std(0) - 1).abs().max() < 0.25


@pytest.mark.parametrize("output", [None, "single"], ids=["no logits", "regression"])
def test_a_model_without_classes_gets_what_is_possible(output):
    train, fresh, strange = (
        clustered(400, 0, classes=1),
        clustered(100, 1, classes=1),
        clustered(100, 2, classes=1, spread=4),
    )

    def strip(rows):
        return Observation(rows.vector, None if output is None else rows.logits[:, :1], None)

    scorer = TypicalityScorer().fit(strip(train))
    assert scorer.score(strip(strange)).median() > scorer.score(strip(fresh)).max()
    assert scorer._terms(strip(fresh))[:, 2:].abs().max() == 0


def test_more_classes_than_rows_are_no_trouble():
    generator = torch.Generator().manual_seed(0)
    train = Observation(torch.randn(60, 30), torch.randn(60, 500, generator=generator), torch.randn(60, 10))
    assert torch.isfinite(TypicalityScorer().fit(train).score(train)).all()


def test_state_stays_small_with_a_thousand_classes():
    """A thousand classes and the 26,560 batch-norm channels of a ResNet-50: under 20 MB, whatever was learnt."""
    classes, channels, feature = 1000, 26_560, 2048
    low_rank = 32 * (classes + channels)
    angles = 2 * (512 * 512 + 512 + classes * 512)
    assert 4 * (low_rank + angles + 4 * channels + 3 * feature) < 20e6


def test_a_batch_is_told_apart_more_sharply_than_one_input():
    train, near = clustered(500, 0), clustered(400, 5, spread=1.15)
    scorer = TypicalityScorer().fit(train)

    def gap(size):
        ours, theirs = (
            torch.stack([scorer.score_batch(rows[slice(i, i + size)]) for i in range(0, 400, size)])
            for rows in (clustered(400, 4), near)
        )
        return (theirs.mean() - ours.mean()) / (ours.std() + theirs.std())

    assert gap(1) < gap(10) < gap(40)


def test_a_batch_of_one_scores_as_the_input_itself():
    scorer, rows = TypicalityScorer().fit(clustered(300, 0)), clustered(1, 1)
    torch.testing.assert_close(scorer.score_batch(rows), scorer.score(rows)[0])


def test_too_few_rows_are_an_error():
    with pytest.raises(InputError, match="Expected at least 20 examples to fit the 'typicality' scorer, but got 5"):
        TypicalityScorer().fit(clustered(5, 0))


def test_rows_that_are_all_alike_are_an_error():
    same = Observation(torch.ones(50, 3), torch.randn(50, 2), torch.randn(50, 2))
    with pytest.raises(InputError, match="Expected inputs that differ from each other"):
        TypicalityScorer().fit(same)


def test_classes_that_never_occur_change_nothing_and_cost_nothing():
    few, rows = clustered(400, 1), clustered(50, 2)

    def among_many(observation, places=(5, 70_000, 99_999)):
        logits = torch.full((len(observation), 100_000), -50.0)
        logits[:, list(places)] = observation.logits
        return Observation(observation.vector, logits, observation.feature)

    expected = TypicalityScorer().fit(few)
    found = TypicalityScorer().fit(among_many(few))
    assert found.left_.shape == (100_000, 3)
    assert found.angle_target_.shape == expected.angle_target_.shape
    # Their energy and softmax are other ones, but what was learnt of the vectors is the same.
    torch.testing.assert_close(found.left_[[5, 70_000, 99_999]] @ found.right_, expected.left_ @ expected.right_)
    assert torch.isfinite(found.score(among_many(rows))).all()


@pytest.mark.parametrize(("classes", "clustered_"), [(3, True), (1, False)], ids=["clusters", "none"])
def test_clusters_replace_classes_only_where_there_are_some(classes, clustered_):
    def strip(rows):
        return Observation(rows.vector, None, None)

    scorer = TypicalityScorer().fit(strip(clustered(600, 0, classes=classes, width=60)))
    assert bool(len(scorer.clusters_)) == clustered_
    strange = strip(clustered(100, 2, classes=classes, width=60, spread=2.0))
    assert scorer.score(strange).median() > scorer.score(strip(clustered(300, 1, classes=classes, width=60))).quantile(
        0.95
    )


class TestTokens:
    """Transformers: *far* is the whitened length of the row."""

    def test_far_is_the_length_and_may_lower_a_score(self):
        scorer, rows = TypicalityScorer(tokens=True).fit(clustered(300, 0)), clustered(200, 1)
        far, length = scorer._terms(rows)[:, 0], scorer._angle.with_length(scorer._standardised(rows))[1]
        torch.testing.assert_close(far, length)
        assert scorer.standard_terms(rows)[:, 0].min() < 0

    def test_the_length_is_a_mahalanobis_distance(self):
        train, rows = clustered(300, 0), clustered(5, 1)
        scorer = TypicalityScorer(tokens=True).fit(train)
        inverse = (scorer.angle_whiten_ @ scorer.angle_whiten_.T).double()
        off = (scorer._standardised(rows) - scorer.angle_offset_).double()
        expected = [math.sqrt(sum(a * b for a, b in zip(row, inverse @ row, strict=True))) for row in off]
        assert scorer._terms(rows)[:, 0].tolist() == pytest.approx(expected, rel=1e-4)

    def test_channels_and_terms_add_up_to_the_score(self):
        scorer, rows = TypicalityScorer(tokens=True).fit(clustered(300, 0)), clustered(7, 1)
        total = scorer.contributions(rows).sum(dim=1) + sum(scorer.terms(rows).values())
        torch.testing.assert_close(total, scorer.score(rows), rtol=1e-4, atol=1e-4)

    def test_what_was_learnt_can_be_loaded(self):
        scorer, rows = TypicalityScorer(tokens=True).fit(clustered(300, 0)), clustered(7, 1)
        loaded = TypicalityScorer(**scorer.get_options()).load_state(scorer.state())
        assert torch.equal(loaded.score(rows), scorer.score(rows))

    def test_few_examples_and_models_without_classes_keep_the_distance_of_channels(self):
        for train in (clustered(60, 0), Observation(clustered(300, 0).vector)):
            rows = train[:9]
            plain, scorer = TypicalityScorer().fit(train), TypicalityScorer(tokens=True).fit(train)
            assert torch.equal(plain.score(rows), scorer.score(rows))
            loaded = TypicalityScorer(tokens=True).load_state(scorer.state())
            assert torch.equal(loaded.score(rows), scorer.score(rows))
