from __future__ import annotations

import pytest
import torch
from torch import nn

from neuralmean.errors import InputError, LayerNotFoundError
from neuralmean.models.layers import Layer, column_names, layer_slices, select_layers, unwrap
from tests.conftest import TinyNet


def names(model, patterns=None):
    return [layer.name for layer in select_layers(model, patterns)]


def test_batch_norms_are_chosen_where_there_are_any():
    assert names(TinyNet()) == ["bn1", "bn2"]
    assert all(layer.reads_input for layer in select_layers(TinyNet()))


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm], ids=lambda n: n.__name__
)
def test_every_kind_of_batch_norm_is_found(norm):
    assert select_layers(nn.Sequential(nn.Linear(2, 2), norm(5))) == (Layer("1", "batchnorm", 5),)


def test_convolutions_are_chosen_without_batch_norm():
    vgg = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(16, 2))
    assert select_layers(vgg) == (Layer("0", "convolution", 8), Layer("2", "convolution", 16))
    assert not select_layers(vgg)[0].reads_input


@pytest.mark.parametrize("conv", [nn.Conv1d, nn.Conv2d, nn.Conv3d], ids=lambda c: c.__name__)
def test_every_kind_of_convolution_is_found(conv):
    assert select_layers(nn.Sequential(conv(2, 7, 1))) == (Layer("0", "convolution", 7),)


def test_layer_norms_win_over_the_single_convolution_of_a_vision_transformer():
    vit = nn.Sequential(nn.Conv2d(3, 8, 4), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))
    assert names(vit) == ["1", "3"]


def test_linear_layers_are_the_last_resort():
    assert select_layers(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))) == (
        Layer("0", "linear", 5),
        Layer("2", "linear", 2),
    )


def test_a_frozen_batch_norm_of_another_library_counts_as_one():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(3))
            self.register_buffer("running_var", torch.ones(3))

    assert select_layers(nn.Sequential(nn.Conv2d(3, 3, 1), Frozen())) == (Layer("1", "batchnorm", 3),)


def test_globs_and_names_come_in_the_order_of_the_model():
    assert names(TinyNet(), ["fc", "conv*"]) == ["conv1", "conv2", "fc"]
    assert names(TinyNet(), "bn?") == ["bn1", "bn2"]


def test_an_exclamation_mark_leaves_layers_out():
    assert names(TinyNet(), "!bn1") == ["bn2"]
    assert names(TinyNet(), ["conv*", "fc", "!conv1"]) == ["conv2", "fc"]
    with pytest.raises(LayerNotFoundError, match="but got 'bn11'. Did you mean 'bn1'"):
        names(TinyNet(), "!bn11")
    with pytest.raises(InputError, match=r"to leave some of 2 layers to watch, but \['!bn\*'\] leave none"):
        names(TinyNet(), "!bn*")


def test_a_typo_gets_a_suggestion():
    with pytest.raises(LayerNotFoundError, match=r"layer of TinyNet, but got 'bn11'\. Did you mean 'bn1'"):
        select_layers(TinyNet(), ["bn11"])


def test_a_glob_that_matches_nothing_lists_what_there_is():
    with pytest.raises(LayerNotFoundError, match=r"but got 'zzzz\*'\. It has 'conv1', 'bn1'"):
        select_layers(TinyNet(), ["zzzz*"])


def test_a_container_cannot_be_watched_and_the_message_says_what_is_inside():
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
    with pytest.raises(InputError, match=r"but '0' is a Sequential\. Inside it there are '0\.0', '0\.1'"):
        select_layers(model, ["0"])


def test_no_layers_asked_for_is_an_error():
    with pytest.raises(InputError, match="Expected `layers` to name at least one layer, but got none"):
        select_layers(TinyNet(), [])


def test_a_model_with_nothing_to_watch_is_an_error():
    with pytest.raises(InputError, match="but ReLU has none"):
        select_layers(nn.ReLU())


def test_a_lazy_model_is_an_error():
    with pytest.raises(InputError, match="but '0' is lazy"):
        select_layers(nn.Sequential(nn.LazyBatchNorm2d()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrappers_are_looked_through():
    model = TinyNet()
    assert unwrap(nn.DataParallel(model)) is model
    assert unwrap(torch.compile(nn.DataParallel(model))) is model
    assert names(nn.DataParallel(model)) == ["bn1", "bn2"]


def test_columns_are_named_and_located():
    layers = (Layer("a", "batchnorm", 2), Layer("b", "linear", 1))
    assert column_names(layers) == ["a[0]", "a[1]", "b[0]"]
    assert layer_slices(layers) == {"a": slice(0, 2), "b": slice(2, 3)}


def test_a_norm_over_image_channels_is_read_as_an_image():
    class LayerNorm2d(nn.LayerNorm):
        pass

    model = nn.Sequential(LayerNorm2d(4), nn.LayerNorm((5, 8, 8)), nn.GroupNorm(2, 6))
    assert select_layers(model) == (Layer("0", "norm", 4), Layer("1", "norm", 5), Layer("2", "norm", 6))
    assert not select_layers(model)[0].channels_last


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("convert", [torch.jit.script, lambda model: torch.jit.trace(model, torch.rand(2, 3, 8, 8))])
def test_a_scripted_model_is_told_and_a_scripted_part_is_not_watched(model, convert):
    with pytest.raises(InputError, match="but got one that was scripted or traced"):
        select_layers(convert(model))
    whole = nn.Sequential(nn.BatchNorm2d(3), convert(model))
    assert [layer.name for layer in select_layers(whole)] == ["0"]
