import json
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

import neuralmean
from neuralmean.data.preprocessing import Preprocessing, as_8bit
from neuralmean.errors import InputError, MissingExtraError

PLAIN = Preprocessing(None, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
HALVES = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


@pytest.fixture(scope="module")
def timm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("timm")


@pytest.fixture(scope="module")
def torchvision():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchvision.models")
        return pytest.importorskip("torchvision")


def _noise(height, width, channels=3, seed=0):
    shape = (height, width, channels) if channels > 1 else (height, width)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def test_pixels_are_scaled_then_centred_then_divided():
    image = Image.new("RGB", (1, 1), (255, 0, 51))
    preprocessing = Preprocessing(None, mean=(0.5, 0.5, 0.0), std=(0.5, 0.25, 0.1))
    # 255/255 - 0.5 over 0.5, 0 - 0.5 over 0.25, 51/255 over 0.1
    assert preprocessing(image).flatten().tolist() == pytest.approx([1.0, -2.0, 2.0])


def test_a_tensor_is_float32_channels_first_and_contiguous():
    tensor = PLAIN(_noise(4, 6))
    assert tensor.shape == (3, 4, 6)
    assert tensor.dtype == torch.float32
    assert PLAIN.apply_array(np.zeros((2, 4, 6, 3), np.uint8)).is_contiguous()


@pytest.mark.parametrize("size", [None, (8, 8), (5, 7), (12, 12)], ids=str)
@pytest.mark.parametrize("crop_fraction", [1.0, 0.8])
@pytest.mark.parametrize(("from_channels", "channels"), [(3, 3), (1, 1), (4, 3), (3, 1), (1, 3)])
def test_arrays_and_images_give_the_same_bits(size, crop_fraction, from_channels, channels):
    settings = Preprocessing(size, (0.4,) * channels, (0.3,) * channels, "bicubic", crop_fraction, channels)
    shape = (3, 8, 8, from_channels)
    array = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    images = [Image.fromarray(row[:, :, 0] if from_channels == 1 else row) for row in array]
    expected = torch.stack([settings(image) for image in images])
    assert torch.equal(settings.apply_array(array), expected)


def test_an_image_of_the_right_size_is_not_resampled():
    image = _noise(8, 8)
    assert np.array_equal(Preprocessing((8, 8), **HALVES).pixels(image), np.asarray(image))


def test_arrays_that_need_no_change_are_not_copied_by_pixels():
    array = np.zeros((2, 8, 8, 3), np.uint8)
    assert Preprocessing((8, 8), **HALVES).array_pixels(array) is array


def test_inputs_are_left_alone():
    array = np.full((2, 8, 8, 3), 7, np.uint8)
    Preprocessing((8, 8), **HALVES).apply_array(array)
    assert (array == 7).all()


def test_an_array_that_may_not_be_written_to_is_read_without_a_warning():
    array = np.full((1, 2, 2, 3), 255, np.uint8)
    array.flags.writeable = False
    assert PLAIN.apply_array(array).unique().tolist() == [1.0]


def test_no_images_give_no_rows_of_the_right_shape():
    assert Preprocessing((4, 5), **HALVES).apply_array(np.zeros((0, 9, 9, 3), np.uint8)).shape == (0, 3, 4, 5)


@pytest.mark.parametrize("shape", [(60, 40), (40, 60), (33, 33), (32, 47), (500, 33), (31, 32)], ids=str)
@pytest.mark.parametrize("crop_fraction", [1.0, 0.875, 224 / 232])
def test_resizing_is_that_of_torchvision(torchvision, shape, crop_fraction):
    image = _noise(*shape)
    size = 28 if crop_fraction != 224 / 232 else 224
    transforms = torchvision.transforms
    resize = {1.0: 28, 0.875: 32, 224 / 232: 232}[crop_fraction]
    expected = transforms.Compose(
        [
            transforms.Resize(resize, antialias=True),
            transforms.CenterCrop(size),
            transforms.ToTensor(),
            transforms.Normalize((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)),
        ]
    )(image)
    settings = Preprocessing((size, size), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), crop_fraction=crop_fraction)
    assert torch.equal(settings(image), expected)


@pytest.mark.parametrize("crop", ["center", "squash", "border"])
@pytest.mark.parametrize("shape", [(60, 40), (41, 60), (32, 32), (20, 21)], ids=str)
@pytest.mark.parametrize("crop_fraction", [1.0, 0.9, 1.15])
def test_resizing_is_that_of_timm(timm, crop, shape, crop_fraction):
    from timm.data import create_transform

    image = _noise(*shape)
    expected = create_transform(
        (3, 32, 32),
        interpolation="bicubic",
        crop_pct=crop_fraction,
        crop_mode=crop,
        mean=(0.5, 0.4, 0.3),
        std=(0.2,) * 3,
    )(image)
    settings = Preprocessing((32, 32), (0.5, 0.4, 0.3), (0.2,) * 3, "bicubic", crop_fraction, crop=crop)
    assert torch.equal(settings(image), expected)


def test_a_wide_input_takes_the_part_that_fills_it():
    # 40 x 100 into 20 x 30: the ratios are 2 and 3.33, so halve and cut 50 columns to 30.
    image = _noise(40, 100)
    expected = image.resize((50, 20), Image.Resampling.BILINEAR).crop((10, 0, 40, 20))
    assert np.array_equal(Preprocessing((20, 30), **HALVES).pixels(image), np.asarray(expected))


def test_an_image_that_is_all_edge_is_refused_before_it_fills_the_memory():
    with pytest.raises(InputError, match="Expected an image that is not all edge, but got 2000000 x 1 pixels"):
        Preprocessing((224, 224), **HALVES)(Image.new("RGB", (2_000_000, 1)))


def test_settings_survive_json():
    settings = Preprocessing((32, 48), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bicubic", 0.875, crop="squash")
    assert Preprocessing.from_json(json.loads(json.dumps(settings.to_json()))) == settings
    assert Preprocessing.from_json(PLAIN.to_json()) == PLAIN


@pytest.mark.parametrize(
    "raw",
    [{}, {"size": None, "mean": [0] * 3}, {"size": None, "mean": [0] * 3, "std": [1] * 3, "shell": "rm"}, "size", [1]],
    ids=["empty", "no_std", "unknown_key", "text", "list"],
)
def test_other_keys_than_its_own_are_refused(raw):
    with pytest.raises(InputError, match="Expected preprocessing to have size, mean, std and only the keys"):
        Preprocessing.from_json(raw)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": (0, 32)}, "Expected `size` to be None or a height and a width from 1 to 16384, but got (0, 32)."),
        ({"size": (32, 10**9)}, "Expected `size` to be None or a height and a width"),
        ({"size": 32}, "Expected `size` to be None or a height and a width"),
        ({"size": (32.0, 32)}, "Expected `size` to be None or a height and a width"),
        ({"mean": (0.5,)}, "Expected `mean` to be 3 finite number(s), one for each channel, but got (0.5,)."),
        ({"mean": "abc"}, "Expected `mean` to be 3 finite number(s)"),
        ({"mean": (0.5, float("nan"), 0.5)}, "Expected `mean` to be 3 finite number(s)"),
        ({"std": (1, 1, float("inf"))}, "Expected `std` to be 3 finite number(s)"),
        ({"std": (1.0, 0.0, 1.0)}, "Expected every `std` to be above 0, but got [1.0, 0.0, 1.0]."),
        ({"crop_fraction": 0.0}, "Expected `crop_fraction` to be between 0.05 and 2, but got 0.0."),
        ({"crop_fraction": 2.1}, "Expected `crop_fraction` to be between 0.05 and 2, but got 2.1."),
        ({"crop_fraction": "1"}, "Expected `crop_fraction` to be between 0.05 and 2, but got '1'."),
        ({"channels": 4}, "Expected `channels` to be 1 (greyscale) or 3 (RGB), but got 4."),
        ({"interpolation": "magic"}, "Expected `interpolation` to be one of ['bilinear', 'bicubic'], but got 'magic'."),
        ({"crop": []}, "Expected `crop` to be one of ['center', 'squash', 'border'], but got []."),
    ],
    ids=lambda value: str(value)[:30],
)
def test_values_out_of_range_are_refused(change, message):
    raw = {"size": (8, 8), "mean": (0.5, 0.5, 0.5), "std": (1.0, 1.0, 1.0), **change}
    with pytest.raises(InputError, match=re.escape(message)):
        Preprocessing(**raw)
    with pytest.raises(InputError, match=re.escape(message.split(", but")[0])):
        Preprocessing.from_json(raw)


@pytest.mark.parametrize(
    "array", [np.zeros((2, 8, 8, 3), np.float32), np.zeros((8, 8, 3), np.uint8), np.zeros((2, 8, 8, 2), np.uint8)]
)
def test_arrays_that_are_not_images_are_refused(array):
    with pytest.raises(InputError, match=r"Expected images as uint8 with shape \(N, H, W, C\)"):
        PLAIN.apply_array(array)


@pytest.mark.parametrize("channels", [1, 3])
def test_sixteen_bits_become_eight_over_the_whole_range(channels):
    # 257 * k is k exactly; the half-way points round up.
    values = np.array([[0, 128, 129, 257, 257 * 100, 65_535]], np.uint16)
    image = as_8bit(Image.fromarray(values), channels)
    row = np.asarray(image).reshape(6, -1)
    assert row[:, 0].tolist() == [0, 0, 1, 1, 100, 255]
    assert image.mode == {1: "L", 3: "RGB"}[channels]


def test_wide_integers_in_the_range_of_sixteen_bits_are_read_alike():
    values = np.array([[0, 257 * 7, 65_535]], np.int32)
    assert np.asarray(as_8bit(Image.fromarray(values), 1)).tolist() == [[0, 7, 255]]


@pytest.mark.parametrize("value", [-1, 65_536], ids=["negative", "too_large"])
def test_integers_without_an_agreed_range_are_refused(value):
    with pytest.raises(InputError, match="Expected integer pixels between 0 and 65535"):
        as_8bit(Image.fromarray(np.array([[value]], np.int32)))


def test_floats_are_taken_as_zero_to_one():
    assert np.asarray(as_8bit(Image.fromarray(np.array([[0.0, 0.2, 1.0]], np.float32)), 1)).tolist() == [[0, 51, 255]]


@pytest.mark.parametrize("value", [1.5, -0.1, np.nan], ids=str)
def test_floats_out_of_range_are_refused(value):
    with pytest.raises(InputError, match="Expected floating-point pixels between 0 and 1"):
        as_8bit(Image.fromarray(np.array([[value]], np.float32)))


def test_transparent_parts_become_white_whatever_colour_they_hide():
    image = Image.new("RGBA", (3, 1))
    image.putpixel((0, 0), (255, 0, 0, 255))
    image.putpixel((1, 0), (255, 0, 0, 0))
    image.putpixel((2, 0), (0, 0, 0, 51))  # a fifth of black on white
    assert np.asarray(as_8bit(image)).tolist() == [[[255, 0, 0], [255, 255, 255], [204, 204, 204]]]


@pytest.mark.parametrize(("mode", "colour"), [("LA", (0, 0)), ("PA", (0, 0))], ids=str)
def test_other_modes_with_transparency_become_white_too(mode, colour):
    assert np.asarray(as_8bit(Image.new(mode, (1, 1), colour))).tolist() == [[[255, 255, 255]]]


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("1", (1, 1), 1), [255, 255, 255]),
        (Image.new("L", (1, 1), 9), [9, 9, 9]),
        (Image.new("CMYK", (1, 1), (0, 255, 255, 0)), [255, 0, 0]),
        (Image.new("HSV", (1, 1), (0, 255, 255)), [255, 0, 0]),
        (Image.new("YCbCr", (1, 1), (255, 128, 128)), [255, 255, 255]),
        (Image.new("RGB", (1, 1), (1, 2, 3)).quantize(), [1, 2, 3]),
    ],
    ids=["1", "L", "CMYK", "HSV", "YCbCr", "P"],
)
def test_every_mode_becomes_rgb(image, expected):
    assert np.asarray(as_8bit(image)).tolist() == [[expected]]


def test_a_mode_that_cannot_be_shown_is_refused(monkeypatch):
    def refuse(self, mode):
        raise ValueError("conversion not supported")

    monkeypatch.setattr(Image.Image, "convert", refuse)  # which modes Pillow can convert depends on its version
    with pytest.raises(InputError, match="Expected an image that can be shown as RGB, but got mode 'LAB'"):
        as_8bit(Image.new("LAB", (1, 1)))


def test_timm_models_say_how_they_were_evaluated(timm):
    model = timm.create_model("resnet18", pretrained=False)
    expected = Preprocessing((224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bicubic", 0.95)
    assert Preprocessing.for_timm(model) == expected
    assert Preprocessing.for_timm("resnet18") == expected


def test_every_timm_configuration_can_be_read(timm):
    seen = {Preprocessing.for_timm(name).crop for name in timm.list_models(pretrained=True)[::7]}
    assert {"center", "squash"} <= seen


def test_a_model_that_is_not_of_timm_is_refused(timm):
    with pytest.raises(InputError, match="Expected a timm model with a `pretrained_cfg`, but got Linear"):
        Preprocessing.for_timm(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vit_b_16", "inception_v3", "efficientnet_b3"])
@pytest.mark.parametrize("shape", [(300, 400), (700, 500)], ids=str)
def test_torchvision_models_are_evaluated_like_torchvision_does(torchvision, name, shape):
    image = _noise(*shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = torchvision.models.get_model_weights(name).DEFAULT.transforms()(image)
    assert torch.equal(Preprocessing.for_torchvision(name)(image), expected)


def test_an_unknown_torchvision_model_is_refused(torchvision):
    with pytest.raises(
        InputError, match="Expected the name of a torchvision model with published weights, but got 'rsn'"
    ):
        Preprocessing.for_torchvision("rsn")


@pytest.mark.parametrize("name", ["fasterrcnn_resnet50_fpn", "fcn_resnet50", "r3d_18"])
def test_a_torchvision_model_that_does_not_classify_images_is_refused(torchvision, name):
    with pytest.raises(InputError, match="Expected a torchvision model that classifies images"):
        Preprocessing.for_torchvision(name)


@pytest.mark.parametrize(
    ("package", "build"),
    [("timm", lambda: Preprocessing.for_timm("resnet18")), ("torchvision", lambda: Preprocessing.for_torchvision("x"))],
    ids=["timm", "torchvision"],
)
def test_a_package_that_is_not_installed_is_named_with_its_cure(monkeypatch, package, build):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=f"Install it with `pip install {package}`"):
        build()


def test_nothing_is_imported_that_decoding_does_not_need():
    code = (
        "import sys, types; package = types.ModuleType('neuralmean'); package.__path__ = [sys.argv[1]]; "
        "sys.modules['neuralmean'] = package; import neuralmean.data.preprocessing; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, *neuralmean.__path__], check=False).returncode == 0
