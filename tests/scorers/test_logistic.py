from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

from neuralmean.errors import InputError, NotFittedError
from neuralmean.scorers.logistic import PENALTIES, LogisticScorer, fold_of_row
from neuralmean.scorers.logistic_solver import Effort, Problems, RowBlocks, sketch_spectrum, solve
from neuralmean.scorers.standardise import column_scale


def two_clouds(n_in, n_out, columns, *, apart, seed=0, correlated=True):
    """RowBlocks of two Gaussian clouds whose columns are correlated, far from zero and of different size."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5 if correlated else torch.eye(columns)
    shift = apart * torch.randn(columns, generator=generator) / columns**0.5
    rows = torch.randn(n_in + n_out, columns, generator=generator)
    rows[n_in:] += shift
    rows = rows @ mix * torch.logspace(-2, 2, columns) + 3
    return rows[:n_in], rows[n_in:]


def _reference_logistic_cv(inliers, outliers):
    """C, weights and mean fold accuracy per C of sklearn's own class, run until it has converged."""
    from sklearn.linear_model import LogisticRegressionCV
    from sklearn.preprocessing import StandardScaler

    rows = StandardScaler().fit_transform(torch.cat([inliers, outliers]).double().numpy())
    labels = np.repeat([0, 1], [len(inliers), len(outliers)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its defaults are being renamed
        model = LogisticRegressionCV(scoring="accuracy", tol=1e-7, max_iter=5000).fit(rows, labels)
    return float(np.ravel(model.C_)[0]), torch.from_numpy(model.coef_[0]).float()


@pytest.mark.parametrize(
    ("n_in", "n_out", "columns", "apart"),
    [(200, 200, 5, 1.5), (60, 40, 150, 4.0), (500, 300, 30, 1.5), (25, 25, 400, 6.0), (350, 450, 12, 0.5)],
)
def test_chosen_penalty_and_weights_are_those_of_sklearn(n_in, n_out, columns, apart):
    inliers, outliers = two_clouds(n_in, n_out, columns, apart=apart)
    penalty, weight = _reference_logistic_cv(inliers, outliers)
    scorer = LogisticScorer().fit(inliers, outliers)
    assert scorer.penalty_.item() == pytest.approx(penalty)
    torch.testing.assert_close(scorer.weight_, weight, rtol=2e-3, atol=2e-3 * weight.abs().max().item())


def test_weight_of_one_row_of_each_kind_by_hand():
    # Standardised, the rows are -1 and 1. With C = 1 the sum is 2 log(1 + exp(-w)) + w² / 2, least where w = 2 / (1 + exp(w)).
    scorer = LogisticScorer().fit(torch.tensor([[10.0]]), torch.tensor([[14.0]]))
    weight = scorer.weight_.item()
    assert weight == pytest.approx(2 / (1 + math.exp(weight)), abs=1e-5)
    assert weight == pytest.approx(0.6749, abs=1e-4)
    assert (scorer.mean_.item(), scorer.scale_.item(), scorer.penalty_.item()) == (12.0, 2.0, 1.0)
    torch.testing.assert_close(scorer.score(torch.tensor([[12.0], [16.0]])), torch.tensor([0.0, 2 * weight]))


@pytest.mark.parametrize(("n_in", "n_out"), [(5, 5), (7, 9), (23, 51), (6, 5), (100, 8)])
@pytest.mark.parametrize("folds", [3, 5])
def test_folds_are_those_of_sklearn(n_in, n_out, folds):
    from sklearn.model_selection import StratifiedKFold

    is_ood = torch.arange(n_in + n_out) >= n_in
    for kinds in (is_ood, ~is_ood, is_ood[torch.randperm(len(is_ood))]):
        expected = torch.empty(len(kinds), dtype=torch.long)
        for number, (_, held_out) in enumerate(StratifiedKFold(folds).split(np.zeros(len(kinds)), kinds.numpy())):
            expected[torch.from_numpy(held_out)] = number
        assert fold_of_row(kinds, folds).tolist() == expected.tolist()


def test_of_equally_good_penalties_the_strongest_is_taken():
    inliers, outliers = two_clouds(40, 40, 3, apart=200.0)
    assert LogisticScorer().fit(inliers, outliers).penalty_.item() == PENALTIES[0].item() == 1e-4


@pytest.mark.parametrize("each", [1, 2])
def test_with_fewer_than_three_of_a_kind_nothing_is_chosen(each):
    inliers, outliers = two_clouds(20, each, 4, apart=10.0)
    scorer = LogisticScorer().fit(inliers, outliers)
    assert scorer.penalty_.item() == 1.0
    assert scorer.score(outliers).min() > scorer.score(inliers).mean()


@pytest.mark.parametrize("each", [3, 4])
def test_few_examples_make_as_many_folds(each):
    inliers, outliers = two_clouds(each, each, 40, apart=30.0)
    scorer = LogisticScorer().fit(inliers, outliers)
    assert scorer.penalty_.item() in PENALTIES.tolist()
    assert scorer.score(outliers).min() > scorer.score(inliers).max()


@pytest.mark.parametrize("rows_each", [20, 400], ids=["rotated", "as they are"])
def test_columns_that_do_not_vary_get_no_weight(rows_each):
    inliers, outliers = two_clouds(rows_each, rows_each, 30, apart=3.0)
    for column, value in ((3, 0.0), (7, 0.1), (8, 1e4)):
        inliers[:, column] = outliers[:, column] = value
    scorer = LogisticScorer().fit(inliers, outliers)
    assert (scorer.weight_ == 0).nonzero()[:, 0].tolist() == [3, 7, 8]
    assert scorer.scale_[[3, 7, 8]].tolist() == [1.0, 1.0, 1.0]


def test_contributions_add_up_exactly_to_the_score():
    inliers, outliers = two_clouds(100, 100, 40, apart=2.0)
    scorer = LogisticScorer().fit(inliers, outliers)
    assert torch.equal(scorer.contributions(outliers).sum(dim=1), scorer.score(outliers))
    expected = (outliers[4] - scorer.mean_) / scorer.scale_ * scorer.weight_
    torch.testing.assert_close(scorer.contributions(outliers)[4], expected)


class TestContract:
    @pytest.fixture
    def clouds(self):
        return two_clouds(300, 280, 20, apart=3.0)

    def test_fit_returns_self_and_leaves_inputs_alone(self, clouds):
        before = [part.clone() for part in clouds]
        scorer = LogisticScorer()
        assert scorer.fit(*clouds) is scorer
        scorer.score(clouds[0])
        assert all(torch.equal(part, copy) for part, copy in zip(clouds, before, strict=True))

    def test_score_is_one_number_per_row_and_does_not_depend_on_neighbours(self, clouds):
        scorer = LogisticScorer().fit(*clouds)
        together = scorer.score(clouds[0])
        assert together.shape == (300,)
        torch.testing.assert_close(together[17:18], scorer.score(clouds[0][17:18]))

    def test_two_fits_agree_bit_for_bit_and_leave_the_global_random_state_alone(self, clouds):
        state = torch.get_rng_state()
        first = LogisticScorer().fit(*clouds)
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(5)
        second = LogisticScorer().fit(*clouds)
        assert all(torch.equal(first.state()[name], second.state()[name]) for name in first.learnt)

    def test_state_carries_the_scores_bit_for_bit(self, clouds):
        scorer = LogisticScorer().fit(*clouds)
        twin = LogisticScorer().load_state({name: value.clone() for name, value in scorer.state().items()})
        assert torch.equal(twin.score(clouds[1]), scorer.score(clouds[1]))
        assert sum(value.numel() * value.element_size() for value in scorer.state().values()) == 3 * 20 * 4 + 8

    def test_fit_works_in_inference_mode_and_on_its_tensors(self, clouds):
        expected = LogisticScorer().fit(*clouds).weight_
        with torch.inference_mode():
            made_inside = [part * 1 for part in clouds]
            assert torch.equal(LogisticScorer().fit(*made_inside).weight_, expected)
        assert torch.equal(LogisticScorer().fit(*made_inside).weight_, expected)

    def test_scoring_before_fit_is_an_error(self):
        with pytest.raises(
            NotFittedError, match=r"The 'logistic' scorer is not fitted yet\. Call `fit` before `score`\."
        ):
            LogisticScorer().score(torch.zeros(1, 3))

    @pytest.mark.parametrize(
        ("inliers", "outliers", "got"),
        [
            (4, None, "4 in-distribution and 0 OOD"),
            (4, 0, "4 in-distribution and 0 OOD"),
            (0, 3, "0 in-distribution and 3"),
        ],
    )
    def test_one_kind_only_is_an_error(self, inliers, outliers, got):
        with pytest.raises(InputError, match=f"Expected examples of both kinds .* but got {got}"):
            LogisticScorer().fit(torch.zeros(inliers, 3), None if outliers is None else torch.zeros(outliers, 3))

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_values_that_are_not_finite_are_an_error(self, clouds, value):
        clouds[1][5, 7] = value
        with pytest.raises(
            InputError, match=r"Expected finite rows to fit on, but got NaN or Inf in 1 columns, the first is 7\."
        ):
            LogisticScorer().fit(*clouds)


class TestChunks:
    def test_chunks_give_what_the_whole_gives(self):
        inliers, outliers = two_clouds(400, 500, 25, apart=1.5)
        whole = LogisticScorer().fit(inliers, outliers)
        rows, is_ood = torch.cat([inliers, outliers]), torch.arange(900) >= 400
        parts = LogisticScorer().fit_chunks(lambda: zip(rows.split(128), is_ood.split(128), strict=True))
        assert parts.penalty_ == whole.penalty_
        torch.testing.assert_close(parts.mean_, whole.mean_)
        torch.testing.assert_close(parts.scale_, whole.scale_)
        torch.testing.assert_close(parts.weight_, whole.weight_, rtol=1e-2, atol=1e-3)

    def test_float16_rows_of_a_memory_mapped_file_are_read_chunk_by_chunk(self, tmp_path):
        inliers, outliers = two_clouds(300, 300, 10, apart=2.0)
        table = torch.cat([inliers, outliers]).half()
        np.save(tmp_path / "rows.npy", table.numpy())
        stored = np.load(tmp_path / "rows.npy", mmap_mode="r")
        longest = 0

        def chunks():
            nonlocal longest
            for start in range(0, 600, 90):
                part = torch.from_numpy(stored[start : start + 90].copy())
                longest = max(longest, len(part))
                yield part, torch.arange(start, start + len(part)) >= 300

        parts = LogisticScorer().fit_chunks(chunks)
        whole = LogisticScorer().fit(table[:300].float(), table[300:].float())
        assert longest == 90
        torch.testing.assert_close(parts.weight_, whole.weight_, rtol=1e-2, atol=1e-3)

    @pytest.mark.parametrize(
        ("kinds", "got"),
        [
            ([], "0 in-distribution and 0 OOD"),
            ([True, True], "0 in-distribution and 2 OOD"),
            ([False], "1 in-distribution and 0"),
        ],
    )
    def test_one_kind_only_is_an_error(self, kinds, got):
        chunks = [(torch.zeros(1, 2), torch.tensor([kind])) for kind in kinds]
        with pytest.raises(InputError, match=f"both kinds .* but got {got} .*Pass chunks that hold both"):
            LogisticScorer().fit_chunks(lambda: chunks)


class TestSolver:
    @staticmethod
    def problems(dtype=torch.float64):
        """Three problems over 120 rows: all rows, half of them, and all with hardly a penalty."""
        inliers, outliers = two_clouds(60, 60, 6, apart=1.0, correlated=False)
        table = torch.cat([inliers, outliers]).to(dtype)
        mean, scale, _ = column_scale(lambda: [table.float()])
        table = ((table - mean) / scale).to(dtype)
        share = torch.full((3, 120), 1 / 120, dtype=dtype)
        share[1] = (torch.arange(120) % 2) / 60
        sign = torch.ones(120, dtype=dtype)
        sign[:60] = -1
        return RowBlocks(lambda: table.split(50), 120, 6, dtype), Problems(
            sign, share, torch.tensor([[1e-1], [1e-2], [1e-6]], dtype=dtype)
        )

    @staticmethod
    def _reference_gradient(table, problems, weights):
        """By autograd, from the formula in the module's docstring."""
        weights = weights.clone().requires_grad_()
        losses = torch.log1p(torch.exp(-problems.sign * (weights[:, :-1] @ table.T + weights[:, -1:])))
        total = (problems.share * losses).sum() + (problems.ridge / 2 * weights[:, :-1] ** 2).sum()
        return torch.autograd.grad(total, weights)[0]

    @pytest.mark.parametrize("far", [0.0, 5.0], ids=["from zero", "from afar"])
    def test_every_gradient_vanishes_where_it_stops(self, far):
        rows, problems = self.problems()
        start = far * torch.randn(3, 7, dtype=torch.float64)
        weights, margins = solve(rows, problems, sketch_spectrum(rows), start, Effort(1e-9, 200))
        table = torch.cat(list(rows.blocks()))
        assert self._reference_gradient(table, problems, weights).abs().max() < 1e-8
        torch.testing.assert_close(margins, weights[:, :-1] @ table.T + weights[:, -1:])

    def test_problems_solved_together_are_solved_as_if_alone(self):
        rows, problems = self.problems()
        spectrum = sketch_spectrum(rows)
        together, _ = solve(rows, problems, spectrum, torch.zeros(3, 7).double(), Effort(1e-9, 200))
        for number in range(3):
            one = problems[torch.tensor([number])]
            alone, _ = solve(rows, one, spectrum, torch.zeros(1, 7).double(), Effort(1e-9, 200))
            torch.testing.assert_close(alone[0], together[number], rtol=1e-5, atol=1e-6)

    def test_iterations_are_bounded_and_what_they_leave_is_finite_and_better_than_the_start(self):
        rows, problems = self.problems(torch.float32)
        spectrum = sketch_spectrum(rows)
        table = torch.cat(list(rows.blocks()))
        start = torch.zeros(3, 7)
        before = self._reference_gradient(table, problems, start).abs().amax(dim=1)
        weights, _ = solve(rows, problems, spectrum, start, Effort(0.0, 4))
        assert (self._reference_gradient(table, problems, weights).abs().amax(dim=1) < 0.2 * before).all()

    def test_rows_that_a_plane_separates_do_not_run_away(self):
        table = torch.cat([torch.randn(50, 4) - 20, torch.randn(50, 4) + 20])
        sign = torch.ones(100)
        sign[:50] = -1
        rows = RowBlocks.of(table)
        problems = Problems(sign, torch.full((1, 100), 0.01), torch.tensor([[1e-12]]))
        weights, margins = solve(rows, problems, sketch_spectrum(rows), torch.zeros(1, 5), Effort(1e-7, 100))
        assert weights.isfinite().all()
        assert (margins * sign > 0).all()

    def test_sketch_finds_the_eigenvectors_of_rows_of_low_rank(self):
        table = torch.randn(600, 12).double() @ torch.randn(12, 300).double()
        rows = RowBlocks(lambda: table.split(250), 600, 300, torch.float64)
        spectrum = sketch_spectrum(rows)
        exact = torch.linalg.eigvalsh(table.T @ table / 600)
        torch.testing.assert_close(spectrum.values.sort().values[-12:], exact[-12:], rtol=1e-6, atol=0)
        again = (spectrum.vectors * spectrum.values) @ spectrum.vectors.T
        torch.testing.assert_close(again, table.T @ table / 600, rtol=0, atol=1e-6 * exact[-1].item())


class TestColumnScale:
    def test_numbers_by_hand(self):
        rows = torch.tensor([[1.0, 5.0], [3.0, 5.0], [8.0, 5.0]])
        mean, scale, varies = column_scale(lambda: [rows[:2], rows[2:]])
        assert mean.tolist() == [4.0, 5.0]
        torch.testing.assert_close(scale, torch.tensor([(26 / 3) ** 0.5, 1.0]))
        assert varies.tolist() == [True, False]

    def test_columns_far_from_zero_keep_their_spread(self):
        rows = 1000 + torch.randn(5000, 2)
        _, scale, _ = column_scale(lambda: rows.split(700))
        torch.testing.assert_close(scale, rows.double().std(dim=0, correction=0).float(), rtol=1e-5, atol=0)
