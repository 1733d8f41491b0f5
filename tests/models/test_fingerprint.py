from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from neuralmean.errors import ModelMismatchError
from neuralmean.models.fingerprint import WeightsGuard, fingerprint


def test_the_same_weights_have_the_same_fingerprint(model):
    assert fingerprint(model) == fingerprint(copy.deepcopy(model)) == fingerprint(nn.DataParallel(model))
    assert fingerprint(model) == fingerprint(model.to(memory_format=torch.channels_last))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.fc.bias.add_(1e-6),
        lambda m: m.bn1.running_mean.add_(1e-6),
        lambda m: setattr(m, "fc", nn.Linear(6, 3)),
        lambda m: setattr(m.fc, "bias", nn.Parameter(m.fc.bias.detach() + 1)),
        lambda m: m.load_state_dict({name: value + 1 for name, value in m.state_dict().items()}),
        lambda m: setattr(m.fc, "bias", None),
        lambda m: m.fc.register_buffer("further", torch.ones(2)),
    ],
    ids=["parameter", "buffer", "module", "replaced", "loaded", "removed", "added"],
)
def test_a_change_is_noticed(model, change):
    watch = WeightsGuard(model)
    watch.check()
    with torch.no_grad():
        change(model)
    assert fingerprint(model) != watch.digest
    with pytest.raises(ModelMismatchError, match="the model's weights have changed since"):
        watch.check()


def test_the_same_weights_loaded_again_are_fine(model):
    watch = WeightsGuard(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    watch.check()
    model.to(torch.float64).to(torch.float32)
    watch.check()


def test_weights_made_in_inference_mode_are_watched_too(model):
    with torch.inference_mode():
        made = copy.deepcopy(model)
    assert made.fc.bias.is_inference()
    watch = WeightsGuard(made)
    watch.check()
    made.fc.bias = nn.Parameter(torch.ones(3))
    with pytest.raises(ModelMismatchError, match="the model's weights have changed since"):
        watch.check()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_pass_in_training_mode_is_noticed(mode):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    watch = WeightsGuard(model)
    model.train()
    with mode():
        model(torch.rand(4, 3, 8, 8))
    model.eval()
    with pytest.raises(ModelMismatchError):
        watch.check()


def test_a_copy_knows_the_weights_that_were_and_not_those_that_are():
    model = nn.Sequential(nn.Linear(2, 2))
    watch = WeightsGuard(model)
    copied = copy.deepcopy(watch)
    copied.check()
    with torch.no_grad():
        model[0].weight.add_(1)  # nobody has looked since
    late = copy.deepcopy(watch)
    with pytest.raises(ModelMismatchError):
        late.check()
    copied.check()  # it has a model of its own


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_part_is_watched():
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    watch = WeightsGuard(model)
    watch.check()
    with torch.no_grad():
        model[1].weight.add_(1)
    with pytest.raises(ModelMismatchError):
        watch.check()


def test_a_buffer_that_is_one_number_of_many_is_looked_at_too():
    model = nn.Linear(2, 1)
    numbers = torch.arange(6.0).reshape(1, 2, 3)
    model.register_buffer("one", numbers[:, 1, 2])  # contiguous, with a stride of 6
    before = fingerprint(model)
    numbers[0, 1, 2] = 7
    assert fingerprint(model) != before
