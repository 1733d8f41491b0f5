"""A model runs as a graph only where that gives the model's own numbers, and goes its own way elsewhere."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from neuralmean import Detector
from neuralmean.data import Batch, to_batch
from neuralmean.errors import InputError, ModelMismatchError
from neuralmean.layers import select_layers
from neuralmean.observer import FIND_HEAD, Observer
from neuralmean.recorder import RecordingModule
from neuralmean.traced import trace
from tests.conftest import TinyNet, count_hooks

SHAPE = (3, 16, 16)


def observer_of(model, *, variance=False, head=FIND_HEAD):
    return Observer(model.eval(), select_layers(model), variance=variance, head=head)


def images(count, seed=5):
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("variance", [False, True])
@pytest.mark.parametrize("head", [None, FIND_HEAD])
def test_a_graph_gives_the_rows_and_the_output_of_the_model(model, variance, head):
    observer = observer_of(model, variance=variance, head=head)
    traced = trace(observer, images(1))
    for count in (1, 4, 9):
        x = images(count)
        with torch.no_grad():
            output, rows = observer.observe(to_batch(x))
            own_output, own_rows = traced.observe(to_batch(x))
        torch.testing.assert_close(own_output, output)
        for name in ("means", "variances", "output", "feature"):
            expected = getattr(rows, name)
            if expected is None:
                assert getattr(own_rows, name) is None
            else:
                torch.testing.assert_close(getattr(own_rows, name), expected)


class Twice(TinyNet):
    def forward(self, x):
        return super().forward(x) + super().forward(x.flip(-1))


@pytest.mark.parametrize("fold", [False, True])
def test_a_layer_that_runs_twice_has_the_mean_of_both_runs_in_a_graph(fold):
    observer = observer_of(Twice())
    traced = trace(observer, images(1), fold=fold)
    with torch.no_grad():
        torch.testing.assert_close(
            traced.observe(to_batch(images(4)))[1].means, observer.observe(to_batch(images(4)))[1].means
        )


def test_the_graph_is_really_run(model):
    traced = trace(observer_of(model), images(1))
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        traced.observe(to_batch(images(2)))
        assert calls == []
        traced.observe(to_batch(torch.randn(2, 3, 20, 20)))  # another shape: the model itself
    assert calls == [1]


def test_tracing_leaves_the_model_as_it_was(model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    hooks = count_hooks(model)
    observer = Observer(model, select_layers(model), variance=False, head=None)
    trace(observer, images(1))
    assert count_hooks(model) == hooks
    assert all(module.training for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class ByValue(TinyNet):
    def forward(self, x):
        return super().forward(-x) if x.mean() > 0 else super().forward(x)


class BySize(TinyNet):
    def forward(self, x):
        return super().forward(x) if len(x) == 3 else super().forward(x) + 1


class Random(TinyNet):
    def forward(self, x):
        return super().forward(x) + torch.rand(())


class NoTensor(TinyNet):
    def forward(self, x):
        return [int(number) for number in super().forward(x).argmax(1)]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ByValue, "Converting a tensor to a Python boolean"),
        (BySize, "Using len to get tensor shape"),
        (Random, "the graph does not give the model's numbers"),
        (NoTensor, "Iterating over a tensor|its output holds no tensor"),
    ],
)
def test_a_model_that_is_no_fixed_graph_is_not_made_one(kind, reason):
    with pytest.raises(
        InputError, match=f"^Expected {kind.__name__} to be a fixed graph of its input, but.*({reason})"
    ):
        trace(observer_of(kind(), head=None), images(1))


def test_a_model_that_fails_on_the_example_is_left_alone(model):
    with pytest.raises(InputError, match="to be a fixed graph"):
        trace(observer_of(model), torch.zeros(1, 7))


@pytest.mark.parametrize("scorer", ["average", "typicality"])
def test_a_frozen_detector_says_what_it_said_before(model, scorer):
    x = images(40)
    detector = Detector(model, scorer=scorer).fit(x, held_out=images(40, seed=6))
    (output, decision), vectors = detector(x), detector.discrepancy(x)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    assert detector.freeze(x[:1]) is detector
    calls.clear()
    frozen_output, frozen = detector(x)
    torch.testing.assert_close(frozen_output, output)
    torch.testing.assert_close(frozen.score, decision.score, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(detector.discrepancy(x), vectors)
    assert calls == []
    detector.fit(x, held_out=images(40, seed=6))
    assert calls


def test_a_frozen_detector_still_notices_that_the_weights_have_changed(model):
    detector = Detector(model, scorer="average").calibrate(images(40)).freeze(images(1))
    with torch.no_grad():
        model.fc.weight.add_(1)
    with pytest.raises(ModelMismatchError):
        detector(images(2))


@pytest.mark.parametrize("in_place", [False, True], ids=["wrapped", "in place"])
def test_a_compiled_model_is_frozen_without_being_compiled(model, in_place, monkeypatch):
    x, held_out = images(40), images(40, seed=6)
    expected = Detector(model, scorer="typicality").fit(x, held_out=held_out)(x)
    monkeypatch.setattr(RecordingModule, "compiled", lambda twin: twin.forward)  # which takes no minute
    if in_place:
        model.compile(backend="eager")
    detector = Detector(model if in_place else torch.compile(model, backend="eager"), scorer="typicality")
    detector.fit(x, held_out=held_out)
    monkeypatch.setattr(RecordingModule, "compiled", lambda twin: pytest.fail("compiled"))
    output, decision = detector.freeze(x[:1])(x)
    torch.testing.assert_close(output, expected[0])
    torch.testing.assert_close(decision.score, expected[1].score, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        model.fc.weight.add_(1)
    with pytest.raises(ModelMismatchError):
        detector(x)


def test_inputs_of_another_shape_go_through_the_compiled_model(model, monkeypatch):
    calls, compilations = [], []

    def compiled(twin):
        compilations.append(1)
        return lambda *args: calls.append(1) or twin.forward(*args)

    monkeypatch.setattr(RecordingModule, "compiled", compiled)
    detector = Detector(torch.compile(model, backend="eager"), scorer="average").calibrate(images(40))
    detector.freeze(images(1))
    calls.clear()
    detector(images(2))
    assert calls == []
    detector(images(2)[..., :12])
    assert (calls, compilations) == ([1], [1])


def test_a_model_of_which_a_part_is_compiled_is_frozen(model):
    expected = Detector(model, scorer="average").calibrate(images(40))(images(2))
    detector = Detector(model, scorer="average").calibrate(images(40))
    model.fc.compile(backend=lambda *_: pytest.fail("compiled"))
    output, decision = detector.freeze(images(1))(images(2))
    torch.testing.assert_close(output, expected[0])
    torch.testing.assert_close(decision.score, expected[1].score, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_copied_is_told(model):
    detector = Detector(model, scorer="average").calibrate(images(40))
    model.lock = threading.Lock()
    model.compile(backend="eager")
    with pytest.raises(
        InputError, match="Expected a model that can be copied, but TinyNet cannot: cannot pickle '_thread.lock'"
    ):
        detector.freeze(images(1))


def test_a_layer_without_weights_that_is_replaced_takes_effect(model):
    detector, x = Detector(model, scorer="average").calibrate(images(40)).freeze(images(1)), images(3)
    before = detector(x)[0]
    model.relu = nn.Tanh()
    output, decision = detector(x)
    assert torch.equal(output, model(x))
    assert not torch.allclose(output, before)
    assert torch.equal(decision.score, Detector(model, scorer="average").score(x))


def test_a_graph_is_for_models_on_the_cpu(model, monkeypatch):
    traced, x = trace(observer_of(model), images(1)), images(2)
    monkeypatch.setattr("neuralmean.traced.device_of", lambda _: torch.device("cuda"))
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    traced.observe(to_batch(x))
    assert calls == [1]


def test_there_is_no_exit_in_a_graph_behind_a_layer_that_runs_twice(monkeypatch):
    monkeypatch.setattr(RecordingModule, "compiled", lambda twin: twin.forward)
    own = Twice()
    own(images(64))  # in training mode
    model = torch.compile(own.eval(), backend="eager")  # which does not tell that a layer runs twice
    detector = Detector(model, scorer="average").fit(images(40), held_out=images(40, seed=6), early_exit=True)
    with pytest.raises(
        InputError, match="a layer before an exit runs more than once. It runs as it is without a graph"
    ):
        detector.freeze(images(1))


def test_only_a_model_with_a_tensor_as_output_is_frozen():
    x = torch.randn(20, 5, 6)
    detector = Detector(Tokens(), scorer="average").fit(x, held_out=torch.randn(20, 5, 6))
    with pytest.raises(InputError, match="whose output is a tensor to freeze, but got dict"):
        detector.freeze(x)


def test_inputs_with_nan_are_refused_as_ever(model):
    traced = trace(observer_of(model), images(1))
    x = images(3)
    x[1] = torch.nan
    with torch.no_grad(), pytest.raises(InputError, match=r"1 of 3 inputs in `x` \(rows \[1\]\)"):
        traced.observe(to_batch(x))


class WithScale(TinyNet):
    def forward(self, x, scale=1.0):
        return super().forward(x * scale)


def test_a_second_argument_is_not_lost():
    observer = observer_of(WithScale())
    traced, x = trace(observer, images(1)), images(2)
    with torch.no_grad():
        expected, found = (one.observe(Batch((x, torch.tensor(3.0))))[0] for one in (observer, traced))
    assert torch.equal(found, expected)


def test_gradients_are_had_from_the_model(model):
    traced = trace(observer_of(model), images(1))
    output, _ = traced.observe(to_batch(images(2).requires_grad_()))
    assert output.requires_grad


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        for norm in self.norms:
            x = x + norm(x)
        return {"logits": self.head(x.mean(1))}


def test_a_transformer_with_a_dict_output_is_a_graph_too():
    torch.manual_seed(0)
    observer = observer_of(Tokens())
    x = torch.randn(4, 5, 6)
    traced = trace(observer, x[:1])
    with torch.no_grad():
        (expected, rows), (output, own) = observer.observe(to_batch(x)), traced.observe(to_batch(x))
    torch.testing.assert_close(output, expected["logits"])
    torch.testing.assert_close(own.means, rows.means)
