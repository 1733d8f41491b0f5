"""The mean of tensors side by side is their means side by side, in a compiled graph too."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from neuralmean.data import to_batch
from neuralmean.layers import select_layers
from neuralmean.recorder import Recorder
from neuralmean.recorder.arranging import Arrange
from neuralmean.recorder.joined import split_means

ATEN = torch.ops.aten


def means_read(graph):
    return [node.args[0] for node in graph.find_nodes(op="call_function", target=ATEN.mean.dim)]


def split(function, *inputs):
    """Return the graph of a function before and after."""
    before, after = make_fx(function)(*inputs), make_fx(function)(*inputs)
    split_means(after.graph)
    after.graph.lint()
    after.recompile()
    return before, after


def test_each_part_is_read_once():
    def dense(a, b, c):
        first = torch.cat([a, b], 1)
        second = torch.cat([first, c], 1)
        return a.mean((2, 3)), first.mean((2, 3)), second.mean((2, 3)), torch.cat([second, a], 1).mean((2, 3))

    inputs = torch.randn(2, 3, 4, 4), torch.randn(2, 5, 4, 4), torch.randn(2, 1, 4, 4)
    before, after = split(dense, *inputs)
    assert len(means_read(before.graph)) == 4
    assert [node.op for node in means_read(after.graph)] == ["placeholder"] * 3
    for one, other in zip(before(*inputs), after(*inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: torch.cat([a, b], 2).mean((2, 3)),  # positions side by side
        lambda a, b: torch.cat([a, b], 1).mean((1, 2)),  # over channels
        lambda a, b: torch.cat([a, b], 1).mean((-2, -1), keepdim=True),
        lambda a, b: torch.cat([a, b]).mean((2, 3)),  # examples below each other
        lambda a, b: torch.cat([a, b], 1).relu().mean((2, 3)),
        lambda a, b: torch.cat([a, b.double()], 1).mean((2, 3)),
        lambda a, b: torch.cat([torch.empty(0), a, b], 1).mean((2, 3)),
        lambda a, b: (a + b).mean((2, 3)),
    ],
)
def test_any_other_mean_is_left_alone(function):
    before, after = split(function, torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4))
    assert str(after.graph) == str(before.graph)


def test_means_of_other_kinds_are_not_mixed_up():
    def both(a, b):
        whole = torch.cat([a, b], 1)
        return whole.mean((2, 3)), whole.mean((2,)), whole.mean((2, 3), dtype=torch.float64)

    inputs = torch.randn(2, 3, 4, 4), torch.randn(2, 2, 4, 4)
    before, after = split(both, *inputs)
    assert len(means_read(after.graph)) == 6
    for one, other in zip(before(*inputs), after(*inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


class Dense(nn.Module):
    """Layers that see all before them, one of which writes to what it was given."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(nn.Conv2d(width, 4, 3, padding=1) for width in (3, 7, 11))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in (3, 7, 11))

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            new = conv(norm(x).relu())
            x = torch.cat([x, new], 1)
            new.zero_()  # what is in `x` stays what it was
        x.mul_(2)
        return x


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("is_early", [False, True])
def test_a_compiled_dense_network_gives_the_same_means(is_early, monkeypatch):
    if is_early:  # a torch whose compiler takes no passes of this kind
        monkeypatch.setitem(sys.modules, "neuralmean.recorder.arranging", None)
    arrange, read = Arrange.__call__, []
    monkeypatch.setattr(Arrange, "__call__", lambda self, graph: (arrange(self, graph), read.extend(means_read(graph))))
    monkeypatch.setattr(Arrange, "uuid", lambda self: None)  # not from the cache, where nothing is split any more
    model, x = Dense().eval(), torch.randn(4, 3, 8, 8)
    compiled = torch.compile(model)
    with torch.no_grad():
        expected = Recorder(model, select_layers(model))(to_batch(x))
        found = Recorder(compiled, select_layers(compiled))(to_batch(x))
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.output, expected.output)
    assert [node.target for node in read] == ([] if is_early else ["arg0_1", *[ATEN.convolution.default] * 2])
