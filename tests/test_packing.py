"""A frozen graph is arranged for the processor, and says what the model says."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuralmean import Detector
from neuralmean.data import to_batch
from neuralmean.layers import select_layers
from neuralmean.observer import Observer
from neuralmean.packing import can_pack, pack
from neuralmean.traced import trace

SHAPE = (3, 12, 12)
pytestmark = pytest.mark.skipif(not can_pack(), reason="torch was built without oneDNN")


def images(count, seed=5):
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """Two convolutions with norms, and whatever `between` does with what they make."""

    def __init__(self, between=None, **convolution):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, **{"padding": 1, **convolution})
        self.other_norm = nn.BatchNorm2d(8)
        self.between = between or F.relu
        for norm in (self.norm, self.other_norm):
            nn.init.uniform_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2)

    def forward(self, x):
        return self.other_norm(self.second(self.between(self.norm(self.first(x)))))


def kinds(traced):
    """Return what operations the graph for one input has, or the only graph."""
    made = getattr(traced._graph, "_made", None)
    graph = traced._graph if made is None else made[True, torch.get_num_threads()]
    return [node.kind() for node in graph.graph.nodes()]


def freeze(model):
    """Return a frozen observer of a model, after having compared it with the model for one image and for several."""
    observer = Observer(model.eval(), select_layers(model), variance=False, head=None)
    traced = trace(observer, images(1), fold=True)
    with torch.no_grad():
        for count in (1, 4, 11):
            x = images(count)
            output, rows = observer.observe(to_batch(x))
            for _ in range(2):  # a graph that writes to what it needs again is right once
                found, own = traced.observe(to_batch(x))
                torch.testing.assert_close(found, output, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(own.means, rows.means, rtol=1e-4, atol=1e-5)
            assert torch.equal(x, images(count))
    return traced


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"stride": 2},
        {"dilation": 2},
        {"groups": 4},
        {"groups": 8},
        {"bias": False},
        {"kernel_size": 1, "padding": 0},
    ],
    ids=str,
)
def test_convolutions_have_their_weights_laid_out_once(how):
    size = how.pop("kernel_size", 3)
    model = Net()
    model.second = nn.Conv2d(8, 8, size, **{"padding": 1, **how})
    found = kinds(freeze(model))
    assert found.count("mkldnn::_convolution_pointwise") == 2
    assert "aten::_convolution" not in found
    assert "aten::batch_norm" not in found


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(8, 8, 3, padding="same"), nn.ConvTranspose2d(8, 8, 3), nn.Conv2d(8, 8, 3, padding_mode="reflect")],
    ids=["same", "transposed", "reflect"],
)
def test_other_convolutions_are_right_as_well(layer):
    model = Net()
    model.second = layer
    assert "mkldnn::_convolution_pointwise" in kinds(freeze(model))


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        return x + self.inner(x.mean((2, 3), keepdim=True))


def test_a_convolution_of_single_positions_is_left_to_torch():
    found = kinds(freeze(Net(Gate())))
    assert found.count("aten::_convolution") == 1
    assert found.count("mkldnn::_convolution_pointwise") == 2


def test_one_layer_that_runs_twice_is_packed_twice():
    model = Net()
    model.between = lambda x: model.second(F.relu(model.second(x)))
    observer = Observer(model.eval(), select_layers(model, ["norm"]), variance=False, head=None)
    traced = trace(observer, images(1), fold=True)
    assert kinds(traced).count("mkldnn::_convolution_pointwise") == 4
    with torch.no_grad():
        torch.testing.assert_close(traced.observe(to_batch(images(4)))[0], model(images(4)), rtol=1e-4, atol=1e-5)


class Tokens(nn.Module):
    """Linear layers, small and large, with a GELU."""

    def __init__(self, activation):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(256)
        self.up, self.down, self.head = nn.Linear(256, 512), nn.Linear(512, 256, bias=False), nn.Linear(256, 4)
        self.places = nn.Parameter(torch.randn(1, 6, 256))
        self.activation = activation

    def forward(self, x):
        x = x.flatten(1)[:, :256].unsqueeze(1) + self.places
        x = x + self.down(self.activation(self.up(self.norm(x))))
        return self.head(x.mean(1))


@pytest.mark.parametrize(
    ("activation", "left"),
    [
        (nn.GELU(), 0),
        (nn.GELU(approximate="tanh"), 0),
        (nn.ReLU(), 1),
        (nn.ReLU(inplace=True), 1),
        (nn.SiLU(), 1),
    ],
    ids=str,
)
def test_large_linear_layers_go_to_onednn_with_what_follows_them(activation, left):
    found = kinds(freeze(Tokens(activation)))
    assert found.count("mkldnn::_linear_pointwise") == 2
    assert found.count("aten::linear") == 1  # the head is small
    assert sum(found.count(f"aten::{name}") for name in ("gelu", "relu", "relu_", "silu")) == left


# In place or not: what is looked at again must stay as it was.


def _keeps_both(x):
    return F.relu(x) * 2 + x


def _twice(x):
    return x + x


def _scaled(x):
    return torch.add(F.relu(x), x.square(), alpha=3)


def _scaled_second(x):
    return torch.add(x.square(), F.relu(x), alpha=3)


def _through_a_view(x):
    seen = x[:, :, ::2]
    return F.relu(x) + seen.mean()


def _larger_than_itself(x):
    return F.relu(x.mean((2, 3), keepdim=True)) + x


def _in_place_already(x):
    y = F.relu_(x)
    return F.relu(y + 1) + x


@pytest.mark.parametrize(
    "between",
    [
        _keeps_both,
        _twice,
        _scaled,
        _scaled_second,
        _through_a_view,
        _larger_than_itself,
        _in_place_already,
        torch.neg,
        lambda x: x,
    ],
)
def test_nothing_is_overwritten_that_is_needed_again(between):
    assert "mkldnn::_convolution_pointwise" in kinds(freeze(Net(between)))


@pytest.mark.parametrize("activation", [F.relu, F.relu_, F.gelu], ids=["relu", "relu_", "gelu"])
def test_nan_is_seen_behind_an_activation(activation):
    model = Net(activation).eval()
    model.norm = nn.Identity()  # nothing between the convolution and the activation
    x = images(4)
    x[2] = torch.nan
    detector = Detector(model, layers="other_norm", scorer="average").calibrate(images(20)).freeze(images(1))
    assert "mkldnn::_convolution_pointwise" in kinds(detector._observer)
    with pytest.raises(ValueError, match=r"1 of 4 inputs in `x` \(rows \[2\]\)"):
        detector(x)
    tokens = Tokens(activation).eval()
    with torch.no_grad():
        graph = trace(Observer(tokens, select_layers(tokens), variance=False, head=None), images(1), fold=True)._graph
        assert graph(x)[0].isnan().any(1).tolist() == [False, False, True, False]


def test_a_relu_and_a_sum_write_where_their_input_lies():
    found = kinds(freeze(Net(lambda x: F.relu(x) + x.square())))
    assert found.count("aten::relu_") == 0  # `square` looks at it later
    found = kinds(freeze(Net()))
    assert found.count("aten::relu_") == 1
    found = kinds(freeze(Net(lambda x: F.relu(F.relu(x) + 1 + F.avg_pool2d(x, 1)))))
    assert found.count("aten::add_") == 2
    assert found.count("aten::add") == 1  # behind the means


def test_an_image_as_output_lies_in_memory_as_the_model_has_it():
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model = Net().to(memory_format=memory_format)
        x = images(3).to(memory_format=memory_format)
        detector = Detector(model, scorer="average").calibrate(images(20)).freeze(x)
        assert detector(x)[0].is_contiguous(memory_format=memory_format)
        with torch.no_grad():
            assert model.eval()(x).stride() == detector(x)[0].stride()


def test_an_output_without_positions_lies_in_memory_as_the_model_has_it():
    model = nn.Sequential(Net(), nn.Flatten(2)).eval()
    x = images(3)
    detector = Detector(model, scorer="average").calibrate(images(20)).freeze(x)
    with torch.no_grad():
        assert detector(x)[0].stride() == model(x).stride()


class CountsOnOrder(Net):
    def forward(self, x):
        return super().forward(x).view(-1, 8 * 12 * 12)


def test_a_model_that_counts_on_the_order_in_memory_is_frozen_without_another_order():
    found = kinds(freeze(CountsOnOrder()))
    assert "mkldnn::_convolution_pointwise" not in found
    assert "aten::_convolution" in found


def test_shapes_that_do_not_belong_to_the_graph_leave_its_convolutions_alone():
    with torch.no_grad():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch would have us use something else
            script = torch.jit.freeze(torch.jit.trace(Net().eval(), images(1), check_trace=False))
        pack(script.graph, [[1, 3, 12, 12]])
        assert len(script.graph.findAllNodes("aten::_convolution")) == 2
        torch.testing.assert_close(script(images(2)), Net().eval()(images(2)), rtol=1e-4, atol=1e-5)


def test_there_is_a_graph_for_one_image_and_one_for_several_and_others_for_other_threads():
    traced, threads = freeze(Net()), torch.get_num_threads()
    assert set(traced._graph._made) == {(True, threads), (False, threads)}
    expected = traced.observe(to_batch(images(1)))[1].means
    try:
        torch.set_num_threads(threads + 1)
        found = traced.observe(to_batch(images(1)))[1].means
    finally:
        torch.set_num_threads(threads)
    assert set(traced._graph._made) == {(True, threads), (False, threads), (True, threads + 1)}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_graph_that_several_threads_need_is_made_once_and_leaves_no_filter_of_warnings(monkeypatch):
    traced, threads, filters = freeze(Net()), torch.get_num_threads(), list(warnings.filters)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 7)
    made, make = [], type(traced._graph)._make
    monkeypatch.setattr(type(traced._graph), "_make", lambda self, size: made.append(size) or make(self, size))
    start = threading.Barrier(4)

    def run():
        start.wait(10)
        traced.observe(to_batch(images(1)))

    tasks = [threading.Thread(target=run) for _ in range(4)]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join()
    assert made == [1]
    assert warnings.filters == filters


def test_under_autocast_the_model_runs_as_ever():
    model = Tokens(F.silu).eval()
    traced = trace(Observer(model, select_layers(model), variance=False, head=None), images(1), fold=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(traced.observe(to_batch(images(2)))[0], model(images(2)))


class SqueezesTooMuch(Net):
    def __init__(self):
        super().__init__()
        self.last = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.last(super().forward(x).mean((2, 3), keepdim=True).squeeze())


def test_a_model_that_cannot_take_a_single_image_is_frozen_for_several():
    model = SqueezesTooMuch().eval()
    traced = trace(Observer(model, select_layers(model), variance=False, head=None), images(2), fold=True)
    with torch.no_grad():
        torch.testing.assert_close(traced.observe(to_batch(images(4)))[0], model(images(4)), rtol=1e-4, atol=1e-5)


def test_who_has_switched_the_kernels_off_does_not_get_them():
    torch._C._set_mkldnn_enabled(False)  # as `torch.backends.mkldnn.flags` does, with a warning about GPUs
    try:
        assert not can_pack()
        found = kinds(freeze(Net()))
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert not any("mkldnn" in kind.lower() for kind in found)


class AsksForSize(Net):
    """As timm's transformers do: a tracer takes the question for one about data."""

    def forward(self, x):
        count, _, height, width = x.shape
        if height != 12 or x.size(-1) != width or x.size(dim=2) != 12:
            raise ValueError("another size")
        return super().forward(x).reshape(count, 8, height * width).mean(2)


class AsksForCount(Net):
    def forward(self, x):
        return super().forward(x) if x.size(0) < 4 else -super().forward(x)


def test_a_model_that_asks_for_the_size_of_its_images_is_frozen():
    assert "mkldnn::_convolution_pointwise" in kinds(freeze(AsksForSize()))


class AsksForCountElsewhere(Net):
    """Has the images in the second dimension, as some transformers do."""

    def forward(self, x):
        x = super().forward(x).flatten(2).permute(2, 0, 1)
        return x.mean(0) / max(x.shape[1], 6)


@pytest.mark.parametrize("kind", [AsksForCount, AsksForCountElsewhere])
def test_a_model_that_asks_how_many_images_there_are_is_not(kind):
    detector = Detector(kind(), scorer="average").calibrate(images(20))
    with pytest.raises(ValueError, match="Converting a tensor to a Python boolean"):
        detector.freeze(images(1))
