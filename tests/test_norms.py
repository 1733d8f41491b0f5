"""Norms that no convolution takes in, and means of tensors side by side, in a frozen graph: same numbers, less work."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuralmean import Detector
from neuralmean.data import to_batch
from neuralmean.errors import InputError
from neuralmean.packing import can_pack
from tests.test_packing import freeze, images, kinds

pytestmark = pytest.mark.skipif(not can_pack(), reason="torch was built without oneDNN")


def unusual(norm):
    """Give a norm statistics of its own: channels that rise and fall, and one that is dead."""
    for values in (norm.weight, norm.bias, norm.running_mean):
        nn.init.normal_(values)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    with torch.no_grad():
        norm.weight[0] = 0
    return norm


class Dense(nn.Module):
    """Each layer normalises all that came before, side by side, and adds four channels."""

    def __init__(self, activation=F.relu, depth=3, **convolution):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.activation = nn.Conv2d(3, 4, 3, padding=1), activation
        self.norms = nn.ModuleList(unusual(nn.BatchNorm2d(4 * (i + 1))) for i in range(depth))
        self.convs = nn.ModuleList(nn.Conv2d(4 * (i + 1), 4, **{"kernel_size": 1, **convolution}) for i in range(depth))

    def forward(self, x):
        x = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = torch.cat([x, conv(self.activation(norm(x)))], 1)
        return x


def graph_of(traced):
    return traced._graph._made[True, torch.get_num_threads()].graph


@pytest.mark.parametrize("activation", [F.relu, F.relu_, nn.ReLU(inplace=True)], ids=["relu", "in place", "a layer"])
def test_norm_and_relu_before_a_convolution_are_a_comparison(activation):
    found = kinds(freeze(Dense(activation)))
    assert found.count("aten::clamp") == 3
    assert not {"aten::batch_norm", "aten::relu", "aten::relu_", "aten::addcmul"} & set(found)


def test_norms_without_channels_that_fall_have_one_bound():
    model = Dense()
    for norm in model.norms:
        nn.init.uniform_(norm.weight, 0.5, 2)
    assert kinds(freeze(model)).count("aten::clamp_min") == 3


@pytest.mark.parametrize(
    ("activation", "convolution"),
    [
        (F.relu, {"kernel_size": 3, "padding": 1}),
        (F.relu, {"groups": 4}),
        (F.gelu, {}),
        (lambda x: F.relu(x) + x, {}),
    ],
    ids=["pads", "groups", "another activation", "somebody else looks"],
)
def test_other_norms_are_worked_out_once(activation, convolution):
    found = kinds(freeze(Dense(activation, **convolution)))
    assert found.count("aten::addcmul") == 3
    assert not {"aten::batch_norm", "aten::clamp", "aten::clamp_min"} & set(found)


def test_each_activation_is_read_once_however_many_layers_see_it():
    graph = graph_of(freeze(Dense(depth=4)))
    read = [node.inputsAt(0).node().kind() for node in graph.findAllNodes("aten::mean")]
    assert read == ["mkldnn::_convolution_pointwise"] * 4


class WritesLater(Dense):
    """Changes an activation once it has been joined with others, which no mean may show."""

    def forward(self, x):
        x = self.stem(x)
        y = self.convs[0](F.relu(self.norms[0](x)))
        joined = torch.cat([x, y], 1)
        y.mul_(3)
        return torch.cat([joined, self.convs[1](F.relu(self.norms[1](joined))), y], 1)


def test_an_activation_that_is_written_to_later_counts_as_it_was():
    traced = freeze(WritesLater(depth=2))
    read = [node.inputsAt(0).node().kind() for node in graph_of(traced).findAllNodes("aten::mean")]
    assert read == ["mkldnn::_convolution_pointwise", "aten::cat"]
    assert "aten::clamp" in kinds(traced)


class WritesBetween(Dense):
    """Changes what a norm looked at before the ReLU behind the norm runs."""

    def forward(self, x):
        x = self.stem(x)
        y = self.norms[0](x)
        x.mul_(3)
        return self.convs[0](F.relu(y)) + x


def test_a_norm_whose_input_is_written_to_is_no_comparison():
    assert "aten::addcmul" in kinds(freeze(WritesBetween(depth=1)))


class Flat(nn.Module):
    """A norm of rows, not of images."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3), unusual(nn.BatchNorm1d(4)), nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(F.relu(self.norm(self.conv(x).mean((2, 3)))))


def test_norms_of_rows_are_left_alone():
    assert "aten::batch_norm" in kinds(freeze(Flat()))


@pytest.mark.parametrize("convolution", [{}, {"kernel_size": 3, "padding": 1}], ids=["comparison", "product"])
def test_nan_is_seen(convolution):
    model = Dense(**convolution)
    traced, x = freeze(model), images(2)
    x[1, 0, 3, 3] = torch.nan
    with pytest.raises(InputError, match=r"1 of 2 inputs in `x` \(rows \[1\]\) give NaN"):
        traced.observe(to_batch(x))
    with torch.no_grad():
        assert traced._graph(x)[0][1].isnan().any()  # also where only the output is looked at


def test_early_exits_of_a_dense_network_decide_as_without_freezing():
    model = Dense(depth=8).eval()
    detector = Detector(model, scorer="average").fit(images(200), held_out=images(100, seed=6), early_exit=True)
    strange = [images(1, seed) * scale for seed in range(10) for scale in (1, 3, 30)]
    with torch.no_grad():
        expected = [detector(x) for x in strange]
        detector.freeze(images(1))
        for x, (output, decision) in zip(strange, expected, strict=True):
            found, own = detector(x)
            assert (found is None) == (output is None)
            torch.testing.assert_close(own.score, decision.score, rtol=1e-3, atol=1e-3)
    assert any(output is None for output, _ in expected)
    assert any(output is not None for output, _ in expected)
