"""What must hold for any numbers: moments, merging, block permutation, calibration, metrics, chunks."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from neuralmean import Calibration, Layer, Moments, Reference, permute_blocks
from neuralmean.jobs.cluster.pieces import stretches
from neuralmean.stats.calibration import examples_needed
from neuralmean.stats.metrics import evaluate

quick = settings(deadline=None, max_examples=60)
numbers = st.floats(-1e6, 1e6, allow_subnormal=False)
scores = st.lists(st.integers(-20, 20).map(float), min_size=1, max_size=40)


def _tree(parts, rng):
    """Add in a random tree order."""
    parts = list(parts)
    while len(parts) > 1:
        i = rng.randrange(len(parts) - 1)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0]


class TestMoments:
    @quick
    @given(st.lists(numbers, min_size=1, max_size=30), st.integers(0, 1000))
    def test_merging_in_any_tree_agrees_with_exact_fractions(self, values, seed):
        rng = random.Random(seed)
        cuts = sorted(rng.randrange(len(values) + 1) for _ in range(4))
        rows = torch.tensor(values, dtype=torch.float64).unsqueeze(1)
        parts = [Moments.of(rows[a:b]) for a, b in zip([0, *cuts], [*cuts, len(values)], strict=True)]
        total = _tree(parts, rng)
        exact = [Fraction(value) for value in values]
        mean = sum(exact) / len(exact)
        spread = sum((value - mean) ** 2 for value in exact)
        size = max(1.0, *(abs(value) for value in values))
        assert total.count == len(values)
        assert math.isclose(total.mean.item(), float(mean), rel_tol=1e-12, abs_tol=1e-12 * size)
        assert math.isclose(total.m2.item(), float(spread), rel_tol=1e-10, abs_tol=1e-10 * size**2)

    @quick
    @given(st.lists(numbers, min_size=2, max_size=20), numbers, st.floats(0.01, 100))
    def test_shifting_and_scaling_do_what_they_must(self, values, shift, scale):
        rows = torch.tensor(values, dtype=torch.float64).unsqueeze(1)
        before, after = Moments.of(rows), Moments.of(rows * scale + shift)
        size = scale * max(1.0, *(abs(value) for value in values)) + abs(shift)
        torch.testing.assert_close(after.mean, before.mean * scale + shift, rtol=1e-12, atol=1e-12 * size)
        torch.testing.assert_close(after.std, before.std * scale, rtol=1e-6, atol=1e-6 * size)

    @quick
    @given(st.lists(numbers, min_size=1, max_size=20), st.integers(2, 1000))
    def test_the_same_rows_many_times_have_the_same_mean_and_variance(self, values, times):
        once = Moments.of(torch.tensor(values, dtype=torch.float64).unsqueeze(1))
        many = sum([once] * times)
        size = max(1.0, *(abs(value) for value in values))
        torch.testing.assert_close(many.mean, once.mean, rtol=1e-12, atol=1e-12 * size)
        torch.testing.assert_close(many.variance, once.variance, rtol=1e-9, atol=1e-9 * size**2)

    @quick
    @given(st.integers(1, 60), st.integers(0, 10_000))
    def test_a_reference_merged_from_any_shards_in_any_order_is_that_of_all(self, n, seed):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        layers = (Layer("a", "batchnorm", 2), Layer("b", "batchnorm", 1))
        means = torch.randn(n, 3, generator=generator) * 10 ** rng.uniform(-3, 3) + rng.uniform(-1e3, 1e3)
        variances = torch.rand(n, 3, generator=generator)
        whole = Reference.of_statistics(layers, means, variances)
        order = list(range(n))
        rng.shuffle(order)
        parts, begin = [Reference.empty(layers)], 0
        while begin < n:
            step = rng.randint(1, n)
            rows = order[begin : begin + step]
            parts.append(Reference.of_statistics(layers, means[rows], variances[rows]))
            begin += step
        rng.shuffle(parts)
        merged = _tree(parts, rng)
        assert merged.count == n
        torch.testing.assert_close(merged.mean, whole.mean, rtol=1e-12, atol=1e-12 * means.abs().max().item())
        torch.testing.assert_close(merged.std, whole.std, rtol=1e-9, atol=1e-9)


class TestBlocks:
    @quick
    @given(st.integers(1, 4), st.integers(2, 24), st.integers(2, 24), st.integers(1, 6), st.integers(0, 1000))
    def test_permuting_commutes_with_whatever_is_done_to_single_pixels(self, n, height, width, blocks, seed):
        assume(min(blocks, height) * min(blocks, width) > 1)
        images = torch.rand(n, 3, height, width, generator=torch.Generator().manual_seed(seed))
        moved = permute_blocks(images, blocks=blocks, seed=seed)
        assert torch.equal(permute_blocks(2 * images + 1, blocks=blocks, seed=seed), 2 * moved + 1)
        assert moved.shape == images.shape
        # All channels of an image move alike, so the colour of every pixel stays together.
        assert torch.equal(permute_blocks(images[:, :1], blocks=blocks, seed=seed), moved[:, :1])

    @quick
    @given(st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.int64, torch.bool]), st.integers(0, 99))
    def test_type_and_every_pixel_survive(self, dtype, seed):
        images = torch.randint(0, 2, (2, 3, 9, 13), generator=torch.Generator().manual_seed(seed)).to(dtype)
        moved = permute_blocks(images, seed=seed)
        assert moved.dtype == dtype
        for before, after in zip(images, moved, strict=True):
            assert torch.equal(before.flatten(1).sort().values, after.flatten(1).sort().values)


class TestCalibration:
    @quick
    @given(st.lists(numbers, min_size=19, max_size=60), st.randoms(), st.sampled_from([0.05, 0.1, 0.5]))
    def test_the_order_of_the_held_out_scores_does_not_matter(self, values, rng, rate):
        shuffled = list(values)
        rng.shuffle(shuffled)
        one, other = (Calibration.of(torch.tensor(v, dtype=torch.float64), rate) for v in (values, shuffled))
        assert one.threshold == other.threshold
        assert torch.equal(one.scores, other.scores)

    @quick
    @given(st.lists(numbers, min_size=19, max_size=60), st.lists(numbers, min_size=2, max_size=10))
    def test_p_values_fall_as_scores_rise_and_stay_within_their_bounds(self, held, fresh):
        calibration = Calibration.of(torch.tensor(held, dtype=torch.float64), 0.05)
        p = calibration.p_value(torch.tensor(sorted(fresh), dtype=torch.float64))
        assert (p.diff() <= 0).all()
        assert p.min() >= 1 / (len(held) + 1) - 1e-6
        assert p.max() <= 1

    @quick
    @given(st.lists(st.integers(-50, 50), min_size=19, max_size=80), st.sampled_from([0.05, 0.1, 0.3]))
    def test_of_the_held_out_scores_at_most_the_rate_is_flagged(self, held, rate):
        calibration = Calibration.of(torch.tensor(held, dtype=torch.float64), rate)
        flagged = sum(value > calibration.threshold for value in held)
        assert flagged <= rate * (len(held) + 1)
        assert len(held) >= examples_needed(rate)

    @quick
    @given(st.lists(st.integers(-50, 50), min_size=19, max_size=60), st.integers(-60, 60))
    def test_only_the_order_of_scores_counts(self, held, score):
        plain = Calibration.of(torch.tensor(held, dtype=torch.float64), 0.1)
        bent = Calibration.of(torch.tensor([value**3 + 7.0 for value in held], dtype=torch.float64), 0.1)
        one = plain.p_value(torch.tensor([float(score)], dtype=torch.float64))
        assert torch.equal(one, bent.p_value(torch.tensor([score**3 + 7.0], dtype=torch.float64)))


class TestMetrics:
    @quick
    @given(scores, scores)
    def test_every_figure_is_a_percentage_and_they_fit_together(self, inliers, outliers):
        made = evaluate(inliers, outliers)
        for name in ("auroc", "aupr_id", "aupr_ood", "tnr95", "fpr95", "accuracy"):
            assert 0 <= getattr(made, name) <= 100 + 1e-9
        assert math.isclose(made.tnr95 + made.fpr95, 100)
        assert made.accuracy >= 50 - 1e-9  # flagging nothing is always possible

    @quick
    @given(scores, scores)
    def test_turning_scores_round_turns_the_area_round(self, inliers, outliers):
        there, back = evaluate(inliers, outliers), evaluate(np.negative(inliers), np.negative(outliers))
        assert math.isclose(there.auroc + back.auroc, 100, abs_tol=1e-9)
        swapped = evaluate(np.negative(outliers), np.negative(inliers))
        assert math.isclose(swapped.auroc, there.auroc, abs_tol=1e-9)
        assert math.isclose(swapped.aupr_id, there.aupr_ood, abs_tol=1e-9)

    @quick
    @given(scores, scores, st.integers(2, 5))
    def test_every_score_twice_changes_nothing(self, inliers, outliers, times):
        once, again = evaluate(inliers, outliers), evaluate(inliers * times, outliers * times)
        assert math.isclose(once.auroc, again.auroc, abs_tol=1e-9)
        assert math.isclose(once.accuracy, again.accuracy, abs_tol=1e-9)

    @quick
    @given(scores, scores, st.floats(0.1, 10))
    def test_moving_outliers_further_out_never_hurts(self, inliers, outliers, step):
        before, after = evaluate(inliers, outliers), evaluate(inliers, np.add(outliers, step))
        assert after.auroc >= before.auroc - 1e-9
        assert after.tnr95 >= before.tnr95 - 1e-9


@quick
@given(st.sets(st.integers(0, 60)), st.integers(1, 20))
def test_stretches_cover_every_row_once(rows, limit):
    parts = list(stretches(sorted(rows), limit))
    assert [row for first, stop in parts for row in range(first, stop)] == sorted(rows)
    assert all(0 < stop - first <= limit for first, stop in parts)
