"""`bench.models`: every architecture by name, shape and size; weights and the errors of weights that do not fit."""

import os
import pickle
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from neuralmean.bench import models
from neuralmean.errors import ArtefactError, InputError

MEAN, STD = (0.5, 0.25, 0.125), (0.5, 0.25, 2.0)
METADATA = {"architecture": "resnet20", "dataset": "CIFAR-10", "mean": "0.5,0.25,0.125", "std": "0.5,0.25,2.0"}

# Parameters, and layers that the library watches: batch norms, else layer norms (ViT) or convolutions (VGG). The papers
# print 0.27M, 0.46M, 0.66M, 0.85M, 1.7M (He et al., table 6), 2.2M and 36.5M (WideResNet), 0.8M (DenseNet).
SIZES = {
    "convnet4": (3_709_810, 4),
    "resnet20": (269_722, 19),
    "resnet32": (464_154, 31),
    "resnet44": (658_586, 43),
    "resnet56": (853_018, 55),
    "resnet110": (1_727_962, 109),
    "resnet18": (11_173_962, 20),
    "resnet34": (21_282_122, 36),
    "wideresnet40-2": (2_243_546, 37),
    "wideresnet28-10": (36_479_194, 25),
    "densenet100": (769_162, 99),
    "vgg19": (20_554_826, 16),
    "vit": (2_697_610, 19),
    "moco-resnet34": (21_276_992, 36),
}


@pytest.fixture
def weights(tmp_path):
    """Write a file as the trainer does, and return its path and the model it was made of."""

    def write(name="resnet20", num_classes=10, metadata=METADATA, drop=()):
        torch.manual_seed(0)
        model = models.build(name, num_classes=num_classes)
        path = tmp_path / f"{name}.safetensors"
        state = {key: value for key, value in model.state_dict().items() if key not in drop}
        save_file(state, path, metadata)
        return path, model

    return write


def test_every_architecture_is_listed():
    assert set(models.names()) == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_parameters_and_layers_are_those_of_the_paper(name):
    with torch.device("meta"):
        model = models.build(name)
    parameters, layers = SIZES[name]
    kinds = {"vgg19": nn.Conv2d, "vit": nn.LayerNorm}
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert sum(isinstance(module, kinds.get(name, nn.BatchNorm2d)) for module in model.modules()) == layers


@pytest.mark.parametrize("name", sorted(set(SIZES) - {"moco-resnet34"}))
def test_logits_have_one_column_per_class(name):
    with torch.device("meta"):
        model = models.build(name, num_classes=7)
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    assert not model.training


def test_moco_encoder_ends_in_features():
    with torch.device("meta"):
        assert models.build("moco-resnet34")(torch.zeros(2, 3, 32, 32)).shape == (2, 512)


@pytest.mark.parametrize("name", ["convnet4", "resnet20", "resnet18", "wideresnet40-2", "densenet100", "vgg19", "vit"])
def test_logits_do_not_depend_on_their_neighbours(name):
    torch.manual_seed(0)
    model = models.build(name)
    x = torch.rand(3, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(x)[1:2], model(x[1:2]), rtol=1e-4, atol=1e-5)


def test_shortcut_of_the_cifar_resnet_takes_every_second_pixel_between_zero_channels():
    block = models.build("resnet20").layer2[0]
    nn.init.zeros_(block.bn2.weight)  # silence the branch: what is left is the shortcut
    x = torch.rand(1, 16, 4, 4)
    with torch.no_grad():
        out = block(x)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert out[:, :8].abs().sum() == out[:, 24:].abs().sum() == 0


def _reference_attention(x, attention):
    """Softmax attention, head by head, in float64."""
    weight, bias = attention.qkv.weight.double(), attention.qkv.bias.double()
    width = x.shape[-1]
    query, key, value = (x.double() @ weight.T + bias).split(width, dim=-1)
    size = width // attention.heads
    heads = []
    for start in range(0, width, size):
        q, k, v = (part[..., start : start + size] for part in (query, key, value))
        heads.append((q @ k.transpose(1, 2) / size**0.5).softmax(-1) @ v)
    return torch.cat(heads, -1) @ attention.proj.weight.double().T + attention.proj.bias.double()


def test_attention_is_softmax_attention():
    torch.manual_seed(0)
    attention = models.build("vit").blocks[0].attn
    x = torch.randn(2, 5, 192)
    with torch.no_grad():
        torch.testing.assert_close(attention(x), _reference_attention(x, attention).float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet35", "Expected the name of a model, but got 'resnet35'. Did you mean 'resnet"),
        ("WideResNet40-2", "but got 'WideResNet40-2'. Did you mean 'wideresnet40-2'"),
        ("qqq", "but got 'qqq'. Known names: convnet4, resnet20,"),
    ],
)
def test_unknown_name_suggests_another(name, message):
    with pytest.raises(InputError, match=re.escape(message)):
        models.build(name)


def test_one_class_is_refused():
    with pytest.raises(InputError, match="Expected `num_classes` to be at least 2, but got 1"):
        models.build("resnet20", num_classes=1)


class TestPreprocess:
    def test_is_divide_subtract_divide(self):
        images = np.array([[[[255, 0, 51]]]], np.uint8)
        out = models.preprocess(images, mean=MEAN, std=STD)
        # red is 1, green 0, blue a fifth: half over half, minus a quarter over a quarter, 0.075 over two
        torch.testing.assert_close(out, torch.tensor([1.0, -1.0, 0.0375]).view(1, 3, 1, 1))

    def test_puts_colours_first_and_leaves_the_images_alone(self):
        images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
        before = images.copy()
        out = models.preprocess(images, mean=(0, 0, 0), std=(1, 1, 1))
        assert out.shape == (2, 3, 32, 32)
        assert out[1, 2, 3, 4] == pytest.approx(before[1, 3, 4, 2] / 255)
        assert np.array_equal(images, before)

    @pytest.mark.parametrize(
        "images",
        [np.zeros((1, 32, 32, 3), np.float32), np.zeros((32, 32, 3), np.uint8), np.zeros((1, 3, 32, 32), np.uint8)],
    )
    def test_refuses_other_arrays(self, images):
        with pytest.raises(InputError, match=re.escape(f"but got {images.dtype} {images.shape}")):
            models.preprocess(images, mean=MEAN, std=STD)

    def test_images_of_other_sizes_are_resized_to_the_models(self):
        trained = models.untrained("resnet20", mean=MEAN, std=STD)
        small = np.random.default_rng(0).integers(0, 256, (2, 28, 28, 3), np.uint8)
        enlarged = np.stack(
            [np.asarray(Image.fromarray(one).resize((32, 32), Image.Resampling.BILINEAR)) for one in small]
        )
        assert torch.equal(trained.preprocess(small), models.preprocess(enlarged, mean=MEAN, std=STD))

    def test_images_of_the_models_size_are_not_cropped_again(self):
        trained = replace(models.untrained("resnet20", mean=MEAN, std=STD), crop_fraction=0.5)
        images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
        assert torch.equal(trained.preprocess(images), models.preprocess(images, mean=MEAN, std=STD))


class TestLoading:
    def test_brings_back_weights_and_normalisation(self, weights):
        path, model = weights()
        trained = models.load_weights(path)
        x = torch.rand(2, 3, 32, 32)
        with torch.no_grad():
            torch.testing.assert_close(trained.model(x), model(x))  # laid out otherwise in memory, so not bit for bit
        held, given = trained.model.state_dict(), model.state_dict()
        assert all(torch.equal(held[key], given[key]) for key in given)
        assert (trained.name, trained.num_classes, trained.size) == ("resnet20", 10, 32)
        assert (trained.mean, trained.std) == (MEAN, STD)
        assert trained.metadata["dataset"] == "CIFAR-10"
        assert not trained.model.training

    @pytest.mark.parametrize("name", ["convnet4", "densenet100", "vit"])
    def test_reads_the_number_of_classes_off_the_file(self, weights, name):
        path, _ = weights(name, num_classes=100, metadata={**METADATA, "architecture": name})
        assert models.load_weights(path).num_classes == 100

    def test_needs_no_batch_counters(self, weights):
        counters = [key for key in models.build("resnet20").state_dict() if key.endswith("num_batches_tracked")]
        path, _ = weights(drop=counters)
        assert len(counters) == 19
        assert models.load("resnet20", path).num_classes == 10

    def test_leaves_the_random_state_alone(self, weights):
        path, _ = weights()
        state = torch.random.get_rng_state()
        models.load_weights(path)
        assert torch.equal(torch.random.get_rng_state(), state)

    def test_half_precision_becomes_single(self, tmp_path):
        state = {key: value.half() for key, value in models.build("resnet20").state_dict().items() if value.dim()}
        save_file(state, tmp_path / "half.safetensors", METADATA)
        model = models.load_weights(tmp_path / "half.safetensors").model
        assert {value.dtype for value in model.parameters()} == {torch.float32}
        assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
        assert all(parameter.requires_grad for parameter in model.parameters())

    def test_model_without_class_head_has_no_classes(self, weights):
        path, _ = weights("moco-resnet34", metadata={**METADATA, "architecture": "moco-resnet34"})
        assert models.load_weights(path).num_classes == 0

    def test_takes_a_list_in_brackets(self, weights):
        path, _ = weights(metadata={**METADATA, "mean": "[0.5, 0.25, 0.125]"})
        assert models.load_weights(path).mean == MEAN

    def test_reads_torch_files_when_told_what_they_are(self, tmp_path):
        model = models.build("resnet20")
        path = tmp_path / "model.pt"
        torch.save({"state_dict": {f"module.{key}": value for key, value in model.state_dict().items()}}, path)
        trained = models.load("resnet20", path, mean=MEAN, std=STD)
        assert torch.equal(trained.model.linear.weight, model.linear.weight)
        assert trained.std == STD


class TestRefusing:
    def test_says_that_the_file_names_another_architecture(self, weights):
        path, _ = weights()
        with pytest.raises(ArtefactError, match="to hold weights of 'resnet32', but it says 'resnet20'"):
            models.load("resnet32", path)

    def test_names_what_does_not_fit_when_the_file_is_silent(self, weights):
        path, _ = weights(metadata={})
        with pytest.raises(ArtefactError, match="of 'resnet32', but of its tensors 60 missing"):
            models.load("resnet32", path, mean=MEAN, std=STD)

    def test_names_the_missing_head(self, weights):
        path, _ = weights(metadata={})
        with pytest.raises(ArtefactError, match=re.escape("of 'convnet4', but it has no matrix 'fc.weight'")):
            models.load("convnet4", path, mean=MEAN, std=STD)

    def test_names_a_tensor_of_another_shape(self, weights):
        path, _ = weights("wideresnet28-10", metadata={})
        with pytest.raises(ArtefactError, match="to hold weights of 'wideresnet40-2', but of its tensors"):
            models.load("wideresnet40-2", path, mean=MEAN, std=STD)

    def test_wants_the_architecture(self, weights):
        path, _ = weights(metadata={})
        with pytest.raises(ArtefactError, match="to name its architecture in its metadata, but it does not"):
            models.load_weights(path)

    def test_does_not_know_every_architecture(self, weights):
        path, _ = weights(metadata={**METADATA, "architecture": "resnet21"})
        with pytest.raises(ArtefactError, match="a known architecture, but it says 'resnet21'"):
            models.load_weights(path)

    @pytest.mark.parametrize("key", ["mean", "std"])
    def test_wants_the_normalisation(self, weights, key):
        path, _ = weights(metadata={name: value for name, value in METADATA.items() if name != key})
        with pytest.raises(ArtefactError, match=f"to state the {key} of its model's normalisation"):
            models.load_weights(path)

    @pytest.mark.parametrize("text", ["0.5,0.5", "a,b,c", "nan,0.5,0.5"])
    def test_wants_three_numbers(self, weights, text):
        path, _ = weights(metadata={**METADATA, "mean": text})
        with pytest.raises(ArtefactError, match=f"to be three numbers, but got '{text}'"):
            models.load_weights(path)

    def test_wants_a_positive_spread(self):
        with pytest.raises(InputError, match="Expected `std` to be three positive numbers"):
            models.untrained("resnet20", mean=MEAN, std=(1.0, 0.0, 1.0))

    def test_wants_a_file(self, tmp_path):
        with pytest.raises(ArtefactError, match="to be a file with weights, but there is none"):
            models.load_weights(tmp_path / "none.safetensors")

    @pytest.mark.parametrize("keep", [0, 7, 500, 100_000])
    def test_says_that_the_file_is_damaged(self, weights, keep):
        path, _ = weights()
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(ArtefactError, match="to be a safetensors file, but it is damaged"):
            models.load_weights(path)

    def test_runs_no_code_of_a_hostile_torch_file(self, tmp_path):
        class Hostile:
            def __reduce__(self):
                return Path.touch, (tmp_path / "ran",)

        path = tmp_path / "model.pth"
        torch.save({"weight": Hostile()}, path, pickle_module=pickle)
        with pytest.raises(ArtefactError, match="with nothing but tensors, but it is not"):
            models.load("resnet20", path, mean=MEAN, std=STD)
        assert not (tmp_path / "ran").exists()

    def test_wants_a_state_dict(self, tmp_path):
        path = tmp_path / "model.pth"
        torch.save([torch.zeros(2)], path)
        with pytest.raises(ArtefactError, match="to hold a state dict, but got list"):
            models.load("resnet20", path, mean=MEAN, std=STD)


class TestUntrained:
    def test_depends_on_its_seed_alone(self):
        state = torch.random.get_rng_state()
        first, again, other = (models.untrained("resnet20", seed=seed, mean=MEAN, std=STD) for seed in (1, 1, 2))
        assert torch.equal(first.model.conv1.weight, again.model.conv1.weight)
        assert not torch.equal(first.model.conv1.weight, other.model.conv1.weight)
        assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.real
@pytest.mark.parametrize(
    ("file", "dataset", "accuracy"),
    [
        ("resnet20-cifar10", "cifar10", 91.73),
        ("resnet32-cifar10", "cifar10", 92.63),
        ("resnet44-cifar10", "cifar10", 93.10),
        ("resnet56-cifar10", "cifar10", 93.39),
        ("densenet100-cifar10", "cifar10", 94.54),
        # The README of the weights says 73.9, which every fifth image of the set gives; all of them give 75.06.
        ("densenet100-cifar100", "cifar100", 75.06),
        ("convnet4-cifar10", "cifar10", 78.5),
    ],
)
def test_accuracy_on_the_real_test_set(file, dataset, accuracy):
    root, folder = os.environ.get("NEURALMEAN_DATA"), os.environ.get("NEURALMEAN_WEIGHTS")
    if not root or not folder:
        pytest.skip("set NEURALMEAN_DATA and NEURALMEAN_WEIGHTS")
    held = np.load(Path(root) / f"{dataset}-test.npz")
    trained = models.load_weights(Path(folder) / f"{file}.safetensors")
    images, labels = held["images"], torch.from_numpy(held["labels"].astype(np.int64))
    right = 0
    with torch.inference_mode():
        for start in range(0, len(images), 250):
            logits = trained.model(trained.preprocess(images[start : start + 250]))
            right += int((logits.argmax(1) == labels[start : start + 250]).sum())
    assert 100 * right / len(images) == pytest.approx(accuracy, abs=0.1)
