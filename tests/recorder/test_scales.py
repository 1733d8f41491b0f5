"""What batch norms divide by is worked out once, and is the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from neuralmean.data import to_batch
from neuralmean.layers import select_layers
from neuralmean.recorder import Recorder
from neuralmean.recorder.arranging import Arrange
from neuralmean.recorder.scales import divide_once

ATEN = torch.ops.aten
N_NORMS = 9  # one more than torch's compiler would put in a loop


def norm(x, variance, epsilon=1e-5):
    scale = (variance + epsilon).sqrt().reciprocal()
    return x * (scale * 1)[:, None, None]


def rearranged(function, *inputs):
    """Return the graph of a function before and after, and whether anything was done."""
    before, after = make_fx(function)(*inputs), make_fx(function)(*inputs)
    divide_once(after.graph)
    after.graph.lint()
    after.recompile()
    return before, after, any(node.target is ATEN.cat.default for node in after.graph.nodes)


def inputs(size=(8, 4, 64, 64), count=N_NORMS):
    torch.manual_seed(0)
    return torch.randn(size), *(torch.rand(size[1]) + 0.1 for _ in range(count))


def all_norms(x, *variances):
    for index, variance in enumerate(variances):
        x = norm(x, variance, 10.0**-index)
    return x


def test_divisors_are_worked_out_ahead_and_are_the_same_bit_for_bit():
    before, after, done = rearranged(all_norms, *inputs())
    assert done
    assert torch.equal(before(*inputs()), after(*inputs()))
    targets = [node.target for node in after.graph.nodes if node.op == "call_function"]
    assert targets.count(ATEN.reciprocal.default) == N_NORMS
    assert max(i for i, target in enumerate(targets) if target is ATEN.reciprocal.default) < 3 * N_NORMS


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (all_norms, inputs(count=N_NORMS - 1)),  # few: the compiler would put them in the loops all the same
        (all_norms, inputs(size=(1, 4, 64, 64))),  # small activations
        (
            lambda x, *v: all_norms(x, *(one.square() for one in v)),
            inputs(),
        ),  # variances that are worked out themselves
        (lambda x, *v: all_norms(x, *(one.double() for one in v)), inputs()),
        (lambda x, *v: x * torch.stack([one.reciprocal() for one in v]).sum(), inputs()),
        (lambda x, *v: x * torch.stack([one.sqrt().reciprocal() for one in v]).sum(), inputs()),
        (lambda x, *v: [norm(x, one, one.exp()) for one in v], inputs()),  # an epsilon that is worked out, too
        (lambda x, *v: [(one + 1).sqrt().reciprocal().chunk(2) for one in v], inputs()),
        (lambda x, *v: [(one + 1).sqrt().reciprocal() for one in v], inputs()),  # asked for as they are
    ],
    ids=["few", "small", "computed", "double", "no-root", "no-epsilon", "epsilon", "chunks", "output"],
)
def test_anything_else_is_left_alone(function, given):
    before, after, _ = rearranged(function, *given)
    assert str(after.graph) == str(before.graph)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for _ in range(N_NORMS)))
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.running_var, 0.5, 2)

    def forward(self, x):
        return self.layers(x)


def test_a_divisor_that_is_also_asked_for_is_still_there():
    def both(x, *variances):
        return all_norms(x, *variances), (variances[0] + 1.0).sqrt().reciprocal()

    before, after, done = rearranged(both, *inputs())
    assert done
    for one, other in zip(before(*inputs()), after(*inputs()), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_network_gives_the_same_numbers_bit_for_bit(monkeypatch):
    arrange, done = Arrange.__call__, []
    monkeypatch.setattr(Arrange, "__call__", lambda self, graph: (arrange(self, graph), done.append(str(graph))))
    monkeypatch.setattr(Arrange, "uuid", lambda self: None)  # not from the cache
    model, x = Deep().eval(), torch.randn(8, 3, 80, 80)
    compiled = torch.compile(model)
    with torch.no_grad():
        plain, found = compiled(x), Recorder(compiled, select_layers(compiled))(to_batch(x))
        assert torch.equal(found.output, plain)
        model.layers[0][1].running_var.mul_(2)  # the graph has the model's tensors, not what they once were
        changed = Recorder(compiled, select_layers(compiled))(to_batch(x)).output
        assert torch.equal(changed, compiled(x))
        assert not torch.equal(changed, plain)
    assert "aten.slice.Tensor" in done[0]
