"""The check for scorers of one's own: it passes ours, and finds each thing that a detector could not rely on."""

import pytest
import torch

from neuralmean.errors import InputError
from neuralmean.scorers import SCORERS, check_scorer, make_scorer


@pytest.mark.parametrize("name", sorted(SCORERS))
def test_our_own_scorers_pass(name):
    check_scorer(make_scorer(name))


class Own:
    """The distance to the mean: the least that passes."""

    def fit(self, inliers, outliers):
        self.mean = inliers.mean(0)

    def score(self, vectors):
        return (vectors - self.mean).norm(dim=1)


def test_the_least_that_passes_and_stays_as_it_was():
    scorer = Own()
    check_scorer(scorer, columns=5, seed=3)
    assert vars(scorer) == {}


class OneArgument(Own):
    def fit(self, inliers):
        self.mean = inliers.mean(0)


class Seeing(Own):
    needs = frozenset({"logits"})

    def fit(self, inliers, outliers):
        self.mean = inliers.logits.mean(0)

    def score(self, rows):
        return (rows.logits - self.mean).norm(dim=1)


@pytest.mark.parametrize("kind", [OneArgument, Seeing])
def test_other_forms_pass(kind):
    check_scorer(kind())


class Failing(Own):
    def fit(self, inliers, outliers):
        raise KeyError("x")


class Shape(Own):
    def score(self, vectors):
        return super().score(vectors)[:, None]


class Infinite(Own):
    def score(self, vectors):
        return super().score(vectors) / 0


class Upside(Own):
    def score(self, vectors):
        return -super().score(vectors)


class Neighbours(Own):
    def score(self, vectors):
        return (vectors - vectors.mean(0)).norm(dim=1) + super().score(vectors)


class Writing(Own):
    def score(self, vectors):
        return vectors.sub_(self.mean).add_(self.mean).mul_(1.0001).norm(dim=1)


class WritingOnce(Own):
    def fit(self, inliers, outliers):
        super().fit(inliers, outliers)
        outliers[0] = 0


class Seeding(Own):
    def fit(self, inliers, outliers):
        torch.manual_seed(7)
        super().fit(inliers, outliers)


class Random(Own):
    count = 0

    def fit(self, inliers, outliers):
        Random.count += 1
        self.mean = inliers.mean(0) + Random.count * 1e-3


class Remembering(Own):
    def fit(self, inliers, outliers):
        self.mean = (getattr(self, "mean", 0) + inliers.mean(0)) / 2


class Forgetful(Own):
    def state(self):
        return {}

    def load_state(self, state):
        return self


class Listing(Forgetful):
    def state(self):
        return {"mean": self.mean.tolist()}


class Shares(Own):
    def contributions(self, vectors):
        return vectors - self.mean


class NarrowShares(Own):
    def contributions(self, vectors):
        return (vectors - self.mean)[:, :1]


class Uncopied(Own):
    def __deepcopy__(self, memo):
        raise TypeError("no")


BROKEN = {
    Failing: r"Expected Failing to be fitted, called with tensors as a detector calls it, but it raised KeyError: 'x'",
    Shape: r"to score 64 rows, .* Expected `score` to return a tensor of shape \(64,\), but got \(64, 1\)",
    Infinite: "Expected of Infinite a finite score for each row, but some are infinite",
    Upside: "higher scores for rows far from the in-distribution ones, but their median is -",
    Neighbours: "a score that does not depend on the rows beside it, but they differ by up to",
    Writing: "Expected of Writing",
    WritingOnce: "rows that are left alone, but `fit` or `score` writes into them",
    Seeding: "torch's random state to be left alone, but it is changed",
    Random: "the same scores after fitting again, but they differ",
    Remembering: "a scorer that is fitted again to forget what it knew",
    Forgetful: "the same scores from what `state` returned",
    Listing: "`state` to return tensors by name, but it returns something else",
    Shares: "contributions and terms that add up to the score",
    NarrowShares: r"contributions of shape \(64, 12\), but got \(64, 1\)",
    Uncopied: "Expected Uncopied to be copied",
}


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_what_a_detector_could_not_rely_on_is_found(kind):
    with pytest.raises(InputError, match=BROKEN[kind]):
        check_scorer(kind())


def test_what_is_no_scorer_is_refused():
    with pytest.raises(InputError, match="Expected an object with `fit` and `score`, but got str"):
        check_scorer("average")
