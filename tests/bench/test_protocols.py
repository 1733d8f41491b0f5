"""A test image never reaches a fit; every protocol gives what the paper says it gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from neuralmean.bench import protocols
from neuralmean.bench.data.imageset import ImageSet
from neuralmean.bench.protocols import Draw, EvalSet, FitSet, split_off
from neuralmean.data.augmentation import permute_blocks
from neuralmean.errors import InputError


def make(count, seed=0, name="cifar10", split="train"):
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    return ImageSet.of(pixels, np.arange(count), name=name, split=split)


def fit_set(count=60, seed=0, name="cifar10"):
    return FitSet.of(make(count, seed, name), apart_from=[])


class TestFitSet:
    def test_test_images_are_refused(self):
        with pytest.raises(InputError, match=r"Expected images to fit on, but got the test split of 'svhn'"):
            FitSet.of(make(5, name="svhn", split="test"), apart_from=[])

    def test_test_images_are_refused_by_the_constructor_too(self):
        with pytest.raises(InputError, match=r"Test images must not be fitted on"):
            FitSet(make(5, split="test"), np.arange(5))

    def test_images_that_also_occur_in_a_test_set_are_left_out(self):
        train, test = make(20), make(10, seed=1, split="test")
        pixels = train.images.copy()
        pixels[7] = test.images[3]
        train = ImageSet.of(pixels, train.labels, name="cifar10", split="train")
        allowed = FitSet.of(train, apart_from=[EvalSet(test)])
        assert allowed.rows.tolist() == [row for row in range(20) if row != 7]

    def test_a_train_set_that_is_the_test_set_is_an_error(self):
        train = make(20)
        test = ImageSet.of(train.images, train.labels, name="cifar10", split="test")
        with pytest.raises(
            InputError, match=r"20 of its 20 images are test images too. Check that train and test files"
        ):
            FitSet.of(train, apart_from=[EvalSet(test)])

    def test_a_draw_is_part_of_the_set_without_repeats_and_depends_on_the_seed(self):
        whole = fit_set(60)
        one, same, other = (whole.draw(25, seed=seed) for seed in (3, 3, 4))
        assert len(one) == 25
        assert len(set(one.rows.tolist())) == 25
        assert one.rows.tolist() == same.rows.tolist() != other.rows.tolist()
        assert one.digest() == same.digest() != other.digest()

    @pytest.mark.parametrize("count", [0, 61])
    def test_a_draw_of_more_than_there_is_is_an_error(self, count):
        with pytest.raises(InputError, match=r"Expected to draw between 1 and 60 images of 'cifar10'"):
            fit_set(60).draw(count, seed=0)

    def test_a_draw_never_brings_back_what_was_left_out(self):
        train, test = make(30), make(10, seed=1, split="test")
        pixels = train.images.copy()
        pixels[[2, 9]] = test.images[[0, 1]]
        allowed = FitSet.of(ImageSet.of(pixels, None, name="a", split="train"), apart_from=[EvalSet(test)])
        assert not {2, 9} & set(allowed.draw(28, seed=0).rows.tolist())

    def test_crafted_images_are_the_same_images_with_blocks_permuted(self):
        whole = fit_set(8)
        crafted = whole.crafted(seed=5)
        pixels = torch.from_numpy(whole.source.images).permute(0, 3, 1, 2)
        expected = permute_blocks(pixels, seed=5).permute(0, 2, 3, 1).numpy()
        np.testing.assert_array_equal(crafted.source.images, expected)
        assert crafted.name == "cifar10-crafted"
        assert crafted.source.digest != whole.source.digest
        assert crafted.rows.tolist() == whole.rows.tolist()


class TestSplitOff:
    def test_the_parts_are_disjoint_and_together_all(self):
        whole = make(50, name="imagenet-crop", split="test")
        fit, rest = split_off(whole)
        assert (len(fit), len(rest)) == (10, 40)
        assert (fit.split, rest.split) == ("fit", "test")
        both = [image.tobytes() for part in (fit, rest) for image in part.images]
        assert sorted(both) == sorted(image.tobytes() for image in whole.images)

    def test_it_is_always_the_same(self):
        whole = make(50, name="imagenet-crop", split="test")
        assert split_off(whole)[0].digest == split_off(whole)[0].digest

    def test_the_fit_part_can_be_fitted_on_and_the_rest_cannot(self):
        fit, rest = split_off(make(50, name="imagenet-crop", split="test"))
        assert len(FitSet.of(fit, apart_from=[EvalSet(rest)])) == 10
        with pytest.raises(InputError, match=r"the test split of 'imagenet-crop'"):
            FitSet.of(rest, apart_from=[])

    def test_a_set_too_small_to_split_is_an_error(self):
        with pytest.raises(InputError, match=r"Expected at least 5 images to split, but 'tiny' has 2"):
            split_off(make(2, name="tiny", split="test"))


class TestProtocols:
    def test_full_access_is_one_draw_of_everything(self):
        inside, outside = fit_set(), fit_set(seed=1, name="svhn")
        assert protocols.full_access(inside, outside, seed=3) == [Draw("full-access", inside, outside, 3)]

    def test_few_shot_is_ten_draws_of_25_and_25(self):
        draws = protocols.few_shot(fit_set(), fit_set(seed=1, name="svhn"))
        assert len(draws) == 10
        assert all(len(draw.inliers) == len(draw.outliers) == 25 for draw in draws)
        assert len({draw.inliers.digest() for draw in draws}) == 10
        assert [draw.seed for draw in draws] == list(range(10))

    def test_few_shot_with_another_seed_shares_no_draw(self):
        inside, outside = fit_set(), fit_set(seed=1, name="svhn")
        first, second = ([draw.seed for draw in protocols.few_shot(inside, outside, seed=seed)] for seed in (0, 1))
        assert not set(first) & set(second)

    def test_draws_may_get_more_inliers_those_that_were_there_among_them(self):
        inside = fit_set()
        draws = protocols.few_shot(inside, fit_set(seed=1, name="svhn"))
        more = protocols.with_inliers(draws, inside, 50)
        for few, many in zip(draws, more, strict=True):
            assert (len(many.inliers), many.outliers, many.seed) == (50, few.outliers, few.seed)
            assert set(few.inliers.rows.tolist()) < set(many.inliers.rows.tolist())
        assert len(protocols.with_inliers(draws, inside, 99)[0].inliers) == 60

    def test_few_shot_without_draws_is_an_error(self):
        with pytest.raises(InputError, match=r"Expected `draws` to be at least 1, but got 0"):
            protocols.few_shot(fit_set(), fit_set(seed=1), draws=0)

    def test_zero_shot_has_crafted_images_only(self):
        (draw,) = protocols.zero_shot(fit_set())
        assert draw.outliers.name == "cifar10-crafted"
        assert len(draw.outliers) == len(draw.inliers)

    def test_transfer_refuses_to_test_on_what_it_learnt_from(self):
        inside, outside = fit_set(), fit_set(seed=1, name="cifar100")
        assert protocols.transfer(inside, outside, tested_on=["svhn"])[0].outliers is outside
        with pytest.raises(InputError, match=r"sets that the fit has not seen, but got 'cifar100' for both"):
            protocols.transfer(inside, outside, tested_on=["svhn", "cifar100"])
