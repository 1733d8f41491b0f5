from __future__ import annotations

import pytest
import torch
from torch import nn

from neuralmean.data import to_batch
from neuralmean.layers import Layer, select_layers
from neuralmean.observer import Observer
from neuralmean.recorder import Recorder, RecordingModule
from neuralmean.recorder.behind import read_behind
from neuralmean.traced import _freeze, _Graph, _make_script


def set_up(norm, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(norm.num_features, generator=generator) + 0.1)
        norm.weight[::2] *= -1
        norm.bias.copy_(torch.randn(norm.num_features, generator=generator))
        norm.running_mean.copy_(3 * torch.randn(norm.num_features, generator=generator))
        norm.running_var.copy_(torch.rand(norm.num_features, generator=generator) * 4)
    return norm.eval()


def network():
    """Convolutions with foldable norms, an in-place activation after each."""
    layers = []
    for seed in range(3):
        layers += [nn.Conv2d(3, 3, 3, padding=1), set_up(nn.BatchNorm2d(3), seed), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)).eval()


def test_the_mean_before_follows_from_the_mean_behind():
    norm, x = set_up(nn.BatchNorm2d(5)), torch.randn(4, 5, 6, 6) * 2 + 1
    behind = read_behind(nn.Sequential(norm), [Layer("0", "batchnorm", 5)])
    assert not behind.layers[0].reads_input
    for row, channel in [(0, 0), (3, 1), (2, 4)]:  # one number at a time, as the formula says
        out = norm(x)[row, channel].mean().item()
        before = out * behind.factor[channel].item() + behind.offset[channel].item()
        assert before == pytest.approx(x[row, channel].mean().item(), abs=1e-5)


@pytest.mark.parametrize("value", [0.0, 1e-4])
def test_a_layer_where_a_channel_is_nearly_switched_off_is_read_before(value):
    norm = set_up(nn.BatchNorm2d(5))
    layer = Layer("0", "batchnorm", 5)
    with torch.no_grad():
        norm.weight[2], norm.bias[2] = value, 0.5
    assert read_behind(nn.Sequential(norm), [layer]) is None
    other = read_behind(nn.Sequential(norm, set_up(nn.BatchNorm2d(5))), [layer, Layer("1", "batchnorm", 5)])
    assert [one.reads_input for one in other.layers] == [True, False]
    assert other.factor[:5].tolist() == [1.0] * 5
    assert other.offset[:5].tolist() == [0.0] * 5


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(3, affine=False),
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.SyncBatchNorm(3),
        type("Own", (nn.BatchNorm2d,), {})(3),
    ],
    ids=["no affine map", "no running mean", "another class", "a subclass"],
)
def test_what_is_no_plain_batch_norm_is_read_before(norm):
    assert read_behind(nn.Sequential(norm), [Layer("0", "batchnorm", 3)]) is None


def test_other_layers_are_read_where_they_were():
    assert read_behind(nn.Sequential(nn.Conv2d(3, 3, 1)), [Layer("0", "convolution", 3)]) is None


def test_a_module_that_reads_behind_gives_the_recorders_means():
    model, x = network(), torch.randn(4, 3, 8, 8)
    layers = select_layers(model)
    with torch.no_grad():
        expected = Recorder(model, layers)(to_batch(x))
        module = RecordingModule(model, layers, variance=False, head=None, behind=True)
        output, mean, *_ = module((x,), {}, None)
    torch.testing.assert_close(mean, expected.mean, rtol=1e-5, atol=1e-5)
    assert torch.equal(output, expected.output)


def test_variances_are_read_before():
    model, x = network(), torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        expected = Recorder(model, select_layers(model), variance=True)(to_batch(x))
        module = RecordingModule(model, select_layers(model), variance=True, head=None, behind=True)
        _, mean, variance, *_ = module((x,), {}, None)
    torch.testing.assert_close(variance, expected.variance)
    torch.testing.assert_close(mean, expected.mean)


def test_a_frozen_graph_has_no_batch_norm_left():
    model, x = network(), torch.randn(2, 3, 8, 8)
    observer = Observer(model, select_layers(model), variance=False, head=None)
    graph = _freeze(_make_script(_Graph(observer, fold=True, depths=()), x)[0], fold=True)
    assert not [node for node in graph.graph.nodes() if "batch_norm" in node.kind()]
