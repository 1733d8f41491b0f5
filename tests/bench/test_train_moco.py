"""Momentum contrast on a toy encoder, its augmentation, and accuracy by neighbours."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from neuralmean.bench.train import Recipe
from neuralmean.bench.train.augment import jitter_colours, mix, random_resized_crop, shift_and_flip, two_crops_view
from neuralmean.bench.train.loop import Setting, run
from neuralmean.bench.train.moco import MoCo, contrast, linear_accuracy
from neuralmean.errors import InputError

RECIPE = Recipe(epochs=1, batch_size=4, queue=6, key_momentum=0.9, temperature=0.5)


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _encoder():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 5, 3, stride=8), nn.BatchNorm2d(5), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _moco(**changes):
    return MoCo(_encoder(), features=5, recipe=replace(RECIPE, **changes), mean=(0.5,) * 3, std=(0.5,) * 3)


def _reference_contrast(queries, keys, queue, temperature):
    """Eq. 1 of the paper, one query at a time."""
    losses = []
    for query, key in zip(queries.tolist(), keys.tolist(), strict=True):
        positive = np.exp(np.dot(query, key) / temperature)
        negative = sum(np.exp(np.dot(query, other) / temperature) for other in queue.tolist())
        losses.append(-np.log(positive / (positive + negative)))
    return np.mean(losses)


def test_loss_is_that_of_the_paper():
    torch.manual_seed(0)
    queries, keys, queue = torch.randn(3, 4), torch.randn(3, 4), torch.randn(7, 4)
    assert float(contrast(queries, keys, queue, 0.7)) == pytest.approx(
        _reference_contrast(queries, keys, queue, 0.7), rel=1e-5
    )


class TestMoCo:
    def test_keys_take_the_place_of_the_oldest(self):
        moco = _moco()
        before = moco.queue.clone()
        keys = []
        for step in range(2):
            moco.loss(torch.rand(4, 3, 32, 32, generator=_generator(step)), None, _generator(step))
            keys.append(moco._keys.clone())
            moco.after_step()
        # Six places: keys 0 to 3, then 4 and 5, and round to 0 and 1.
        assert torch.equal(moco.queue[4:6], keys[1][:2])
        assert torch.equal(moco.queue[0:2], keys[1][2:])
        assert torch.equal(moco.queue[2:4], keys[0][2:])
        assert int(moco.place) == 2
        assert not torch.equal(moco.queue, before)

    def test_key_encoder_follows(self):
        moco = _moco()
        with torch.no_grad():
            moco.query[1][0].weight.add_(1.0)
        before = moco.key[1][0].weight.clone()
        moco.after_step()
        torch.testing.assert_close(moco.key[1][0].weight, before + 0.1)

    def test_no_gradient_reaches_keys_or_queue(self):
        moco = _moco()
        moco.loss(torch.rand(4, 3, 32, 32), None, _generator()).backward()
        assert all(parameter.grad is None for parameter in moco.key.parameters())
        assert all(parameter.grad is not None for parameter in moco.query.parameters())

    def test_keys_come_back_in_the_order_of_the_images(self):
        moco = _moco()
        images = torch.rand(4, 3, 32, 32)
        # All in one group: batch norm sees the same images, so shuffling must not show.
        first, second = moco._encode_keys(images, _generator(1)), moco._encode_keys(images, _generator(2))
        torch.testing.assert_close(first, second)

    def test_state_goes_round(self):
        moco, other = _moco(), _moco()
        moco.loss(torch.rand(4, 3, 32, 32), None, _generator())
        moco.after_step()
        other.load_state({key: value.clone() for key, value in moco.state().items()})
        assert all(torch.equal(value, other.state()[key]) for key, value in moco.state().items())

    def test_queue_shorter_than_a_batch_is_refused(self):
        with pytest.raises(
            InputError, match="Expected the queue to hold at least one batch, but got 3 for a batch of 4"
        ):
            _moco(queue=3)

    def test_interrupted_run_goes_on_to_the_same_weights(self, tmp_path):
        class StopError(Exception):
            pass

        def stop(at):
            raise StopError

        recipe = replace(RECIPE, epochs=3, learning_rate=0.1)
        images = torch.randint(256, (16, 3, 32, 32), dtype=torch.uint8, generator=_generator())
        setting = Setting(checkpoint=tmp_path / "a", identity={}, checkpoint_seconds=0.0)
        undisturbed, resumed = _moco(), _moco()
        run(undisturbed, images, None, recipe, setting)
        stopped = replace(setting, checkpoint=tmp_path / "b", progress=stop)
        with pytest.raises(StopError):
            run(_moco(), images, None, recipe, stopped)
        run(resumed, images, None, recipe, replace(stopped, progress=None))
        assert all(torch.equal(value, resumed.state()[key]) for key, value in undisturbed.state().items())
        assert not torch.equal(undisturbed.queue, _moco().queue)

    def test_a_step_down_the_gradient_lowers_the_loss(self):
        moco = _moco()
        images = torch.rand(4, 3, 32, 32, generator=_generator())
        before = moco.loss(images, None, _generator(1))
        before.backward()
        with torch.no_grad():
            for parameter in moco.parameters():
                parameter -= 0.01 * parameter.grad
        assert moco.loss(images, None, _generator(1)).item() < before.item()


class TestLinearAccuracy:
    def test_classes_that_a_plane_separates_are_told_apart(self):
        # The first column decides and the second, a thousand times as large, says nothing.
        features = torch.tensor([[1.0, 1000.0], [0.9, -1000.0], [-1.0, 1000.0], [-0.9, -1000.0]])
        labels = torch.tensor([0, 0, 1, 1])
        test = torch.tensor([[2.0, 500.0], [-3.0, 900.0], [1.0, -800.0]])
        assert linear_accuracy(features, labels, test, torch.tensor([0, 1, 1])) == pytest.approx(200 / 3)

    def test_classes_that_no_plane_separates_are_not(self):
        features = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0]])
        assert linear_accuracy(features, torch.tensor([0, 0, 1, 1]), features, torch.tensor([0, 0, 1, 1])) <= 75.0


class TestAugmentation:
    def test_shift_moves_whole_pixels_and_mirrors_edges(self):
        image = torch.arange(16.0).view(1, 1, 4, 4)
        padded = nn.functional.pad(image, (1, 1, 1, 1), mode="reflect")
        windows = [padded[:, :, top : top + 4, left : left + 4] for top in range(3) for left in range(3)]
        seen = set()
        for seed in range(60):
            out = shift_and_flip(image, pixels=1, flip=True, generator=_generator(seed))
            matches = [(i, f) for i, w in enumerate(windows) for f in (0, 1) if torch.equal(out, w.flip(3) if f else w)]
            assert matches
            seen.update(matches)
        assert len(seen) == 18

    def test_nothing_asked_nothing_done(self):
        images = torch.rand(3, 3, 8, 8)
        assert torch.equal(shift_and_flip(images, pixels=0, flip=False, generator=_generator()), images)

    def test_images_differ_from_each_other(self):
        images = torch.rand(1, 3, 32, 32).expand(16, -1, -1, -1)
        out = shift_and_flip(images, pixels=4, flip=True, generator=_generator())
        assert len({image.numpy().tobytes() for image in out}) > 8

    @pytest.mark.parametrize("change", [shift_and_flip, two_crops_view], ids=lambda function: function.__name__)
    def test_depends_on_the_generator_alone_and_leaves_its_input(self, change):
        images = torch.rand(4, 3, 32, 32)
        before = images.clone()
        more = {"pixels": 4} if change is shift_and_flip else {}
        first, again, other = (change(images, flip=True, generator=_generator(seed), **more) for seed in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert torch.equal(images, before)
        assert first.shape == images.shape

    def test_mixing_keeps_targets_in_step_with_images(self):
        images = torch.eye(4).view(4, 4, 1, 1)
        mixed, targets = mix(images, torch.eye(4), alpha=1.0, generator=_generator())
        torch.testing.assert_close(mixed.view(4, 4), targets)
        torch.testing.assert_close(targets.sum(1), torch.ones(4))
        assert ((targets > 0) & (targets < 1)).any()

    def test_whole_image_crop_is_the_image(self):
        images = torch.rand(2, 3, 8, 8)
        out = random_resized_crop(images, smallest=1.0, flip=False, generator=_generator())
        # The area is all of it; only the aspect ratio is drawn, and sides end at the border.
        assert out.shape == images.shape
        flat = torch.full((2, 3, 8, 8), 0.3)
        torch.testing.assert_close(random_resized_crop(flat, smallest=0.2, flip=True, generator=_generator()), flat)

    def test_crop_is_a_part_of_the_image(self):
        ramp = torch.linspace(0, 1, 32).view(1, 1, 1, 32).expand(64, 1, 32, 32)
        out = random_resized_crop(ramp, smallest=0.2, flip=False, generator=_generator())
        width = out[:, 0, 0, -1] - out[:, 0, 0, 0]
        # The narrowest crop has a fifth of the area at 3:4, a share of sqrt(0.15) = 0.387 of the width.
        assert width.min() > 0.36
        assert width.max() <= 1.0
        assert width.std() > 0.05

    def test_colours_of_grey_images_only_change_in_brightness_and_contrast(self):
        grey = torch.rand(8, 1, 8, 8).expand(-1, 3, -1, -1)
        out = jitter_colours(grey, generator=_generator())
        torch.testing.assert_close(out[:, 0], out[:, 1], rtol=0, atol=1e-4)
        torch.testing.assert_close(out[:, 0], out[:, 2], rtol=0, atol=1e-4)
        assert not torch.allclose(out, grey)

    def test_no_strength_no_change(self):
        images = torch.rand(4, 3, 8, 8)
        torch.testing.assert_close(jitter_colours(images, generator=_generator(), strength=0.0, hue=0.0), images)

    def test_colours_stay_in_range(self):
        out = jitter_colours(torch.rand(16, 3, 8, 8), generator=_generator())
        assert out.min() >= 0
        assert out.max() <= 1
