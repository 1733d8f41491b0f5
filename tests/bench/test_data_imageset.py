"""`ImageSet` and how pictures of other sizes become 32 x 32."""

import numpy as np
import pytest
from PIL import Image

from neuralmean.bench.data import ImageSet
from neuralmean.bench.data.imageset import fit_image, fit_images
from neuralmean.errors import InputError


def _images(n=5, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, 32, 32, 3), np.uint8)


def _set(n=5, seed=0):
    return ImageSet.of(_images(n, seed), np.arange(n), name="cifar10", split="test")


class TestDigest:
    def test_is_the_same_for_the_same_images(self):
        assert _set().digest == _set().digest
        assert len(_set().digest) == 64

    def test_changes_with_one_pixel_one_label_and_the_order(self):
        images = _images()
        images[4, 31, 31, 2] ^= 1
        digests = {
            _set().digest,
            ImageSet.of(images, np.arange(5), name="cifar10", split="test").digest,
            ImageSet.of(_images(), np.array([0, 1, 2, 3, 5]), name="cifar10", split="test").digest,
            ImageSet.of(_images(), None, name="cifar10", split="test").digest,
            _set().take(np.array([1, 0, 2, 3, 4])).digest,
        }
        assert len(digests) == 5

    def test_does_not_depend_on_how_the_array_lies_in_memory(self):
        columns = np.asfortranarray(_images())
        assert ImageSet.of(columns, np.arange(5, dtype=np.uint8), name="x", split="test").digest == _set().digest


def test_sets_can_be_compared_and_kept_in_dicts():
    one, other = _set(), _set()
    assert one == one
    assert one != other
    assert {one: 1}[one] == 1


class TestLimit:
    def test_draws_rows_in_their_old_order(self):
        part = _set(50).limit(20)
        assert part.labels.tolist() == sorted(set(part.labels.tolist()))
        assert len(part) == 20
        assert np.array_equal(part.images, _images(50)[part.labels])
        assert part.labels.tolist() != list(range(20))

    def test_depends_on_the_seed_alone(self):
        assert _set(50).limit(20, seed=3).digest == _set(50).limit(20, seed=3).digest
        assert _set(50).limit(20, seed=3).digest != _set(50).limit(20, seed=4).digest

    def test_keeps_a_set_that_is_no_larger(self):
        whole = _set()
        assert whole.limit(5) is whole

    def test_wants_at_least_one(self):
        with pytest.raises(InputError, match="Expected `n` to be at least 1, but got 0"):
            _set().limit(0)


@pytest.mark.parametrize(
    "images",
    [np.zeros((2, 32, 32, 1), np.uint8), np.zeros((2, 32, 32, 3)), np.zeros((0, 32, 32, 3), np.uint8)],
    ids=["grey", "floats", "empty"],
)
def test_other_images_are_refused(images):
    with pytest.raises(InputError, match=r"Expected 'x' to be uint8 images of shape \(N, H, W, 3\)"):
        ImageSet.of(images, None, name="x", split="test")


@pytest.mark.parametrize("labels", [np.zeros(4, int), np.zeros(5), np.zeros((5, 1), int)], ids=str)
def test_other_labels_are_refused(labels):
    with pytest.raises(InputError, match="Expected one whole number per image as labels of 'x'"):
        ImageSet.of(_images(), labels, name="x", split="test")


class TestFitting:
    def test_leaves_32_by_32_as_it_is(self):
        image = _images(1)[0]
        assert np.array_equal(fit_image(Image.fromarray(image), "resize"), image)

    def test_crop_takes_the_middle(self):
        pixels = np.zeros((36, 40, 3), np.uint8)
        pixels[2:34, 4:36] = _images(1)[0]
        assert np.array_equal(fit_image(Image.fromarray(pixels), "crop"), _images(1)[0])

    def test_resize_scales_the_shorter_side_and_takes_the_middle(self):
        # 64 high, 128 wide: scaled to 32 x 64, of which columns 16 to 48 stay. Left half black, right half white.
        pixels = np.zeros((64, 128, 3), np.uint8)
        pixels[:, 64:] = 255
        out = fit_image(Image.fromarray(pixels), "resize")
        assert out.shape == (32, 32, 3)
        assert (out[:, :15] == 0).all()
        assert (out[:, 17:] == 255).all()

    def test_crop_scales_what_is_smaller(self):
        assert fit_image(Image.new("RGB", (10, 20), (7, 7, 7)), "crop").tolist() == np.full((32, 32, 3), 7).tolist()

    @pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "CMYK"])
    def test_every_mode_becomes_colour(self, mode):
        assert fit_image(Image.new(mode, (32, 32)), "resize").shape == (32, 32, 3)

    def test_is_what_torchvision_does(self):
        transforms = pytest.importorskip("torchvision.transforms")
        both = transforms.Compose([transforms.Resize(32), transforms.CenterCrop(32)])
        for width, height in ((300, 451), (640, 301), (33, 32), (31, 47)):
            image = Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8))
            assert np.array_equal(fit_image(image, "resize"), np.asarray(both(image)))

    def test_arrays_go_through_the_same(self):
        images = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), np.uint8)
        out = fit_images(images, "resize")
        assert np.array_equal(out[1], fit_image(Image.fromarray(images[1]), "resize"))
