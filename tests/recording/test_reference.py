from __future__ import annotations

import pytest
import torch
from torch import nn

from neuralmean.errors import InputError, NeuralMeanWarning
from neuralmean.recording.reference import Reference
from tests.conftest import TinyNet


def _reference_mean_and_std(model, layer, images):
    """All activations of a channel in one heap: the paper's Eq. 4 and the appendix on NVD."""
    kept = []
    handle = model.get_submodule(layer).register_forward_pre_hook(
        lambda module, args: kept.append(args[0].detach().double())
    )
    model(images)
    handle.remove()
    heap = kept[0].transpose(0, 1).flatten(1)
    return heap.mean(1), heap.std(1, correction=0)


def test_buffers_are_read_as_they_are(model):
    reference = Reference.from_batchnorm(model)
    torch.testing.assert_close(reference.mean, torch.cat([model.bn1.running_mean, model.bn2.running_mean]).double())
    torch.testing.assert_close(reference.std, torch.cat([model.bn1.running_var, model.bn2.running_var]).double().sqrt())
    assert (reference.source, reference.count) == ("batchnorm", None)


def test_one_pass_equals_the_heap_of_all_activations(model, images):
    reference = Reference.from_data(model, None, images, batch_size=7)
    for layer, columns in (("bn1", slice(0, 4)), ("bn2", slice(4, 10))):
        mean, std = _reference_mean_and_std(model, layer, images)
        torch.testing.assert_close(reference.mean[columns], mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(reference.std[columns], std, rtol=1e-5, atol=1e-6)
    assert (reference.source, reference.count) == ("data", 300)


def test_batching_does_not_matter(model, images):
    one, many = (Reference.from_data(model, None, images, batch_size=size) for size in (300, 11))
    torch.testing.assert_close(one.mean, many.mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(one.std, many.std, rtol=1e-6, atol=1e-7)


def test_the_sum_of_two_references_is_the_reference_of_both(model, images):
    parts = [Reference.from_data(model, ["bn2"], part, batch_size=10) for part in (images[:120], images[120:])]
    whole = Reference.from_data(model, ["bn2"], images, batch_size=10)
    total = parts[0] + parts[1]
    torch.testing.assert_close(total.mean, whole.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(total.std, whole.std, rtol=1e-12, atol=1e-12)
    assert total.count == 300


def test_trained_buffers_are_close_to_the_data(model, images):
    free, measured = Reference.from_batchnorm(model), Reference.from_data(model, None, images)
    torch.testing.assert_close(free.mean, measured.mean, rtol=0.1, atol=0.05)
    torch.testing.assert_close(free.std, measured.std, rtol=0.1, atol=0.05)


def test_layers_without_buffers_are_an_error(model):
    with pytest.raises(InputError, match=r"but 'conv1' \(convolution\) has none. Use `Reference.from_data`"):
        Reference.from_batchnorm(model, ["conv1"])
    with pytest.raises(InputError, match="but '0' "):
        Reference.from_batchnorm(nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)))


def test_untouched_buffers_are_a_warning():
    with pytest.warns(NeuralMeanWarning, match="running means are all 0, as in a model that was never trained"):
        Reference.from_batchnorm(TinyNet())


def test_buffers_do_not_add_up(model, images):
    with pytest.raises(InputError, match="batch-norm buffers do not say how many examples they hold"):
        Reference.from_batchnorm(model) + Reference.from_data(model, None, images)


def test_references_of_other_layers_do_not_add_up(model, images):
    with pytest.raises(InputError, match="Expected references of the same layers"):
        Reference.from_data(model, ["bn1"], images) + Reference.from_data(model, ["bn2"], images)


def test_only_references_add_up(model):
    with pytest.raises(TypeError):
        Reference.from_batchnorm(model) + 1


def test_an_empty_pass_is_an_error(model, images):
    with pytest.raises(InputError, match="Expected `data` to hold at least one example"):
        Reference.from_data(model, None, images[:0])
