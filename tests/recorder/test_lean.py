"""Layers are stood in for while a pass is recorded: same bits, and nothing stays behind."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from neuralmean.data import to_batch
from neuralmean.errors import InputError
from neuralmean.layers import Layer, select_layers
from neuralmean.recorder import Recorder, lean, stand_ins
from neuralmean.recorder.lean import lean_forward, norm_and_sum
from neuralmean.running import is_compiled, uncompiled

SHAPES = {nn.BatchNorm1d: (5, 4, 7), nn.BatchNorm2d: (5, 4, 6, 7), nn.BatchNorm3d: (5, 4, 3, 6, 7)}


def trained_norm(kind, **options):
    torch.manual_seed(0)
    layer = kind(4, **options)
    for tensor in (*layer.parameters(), layer.running_mean):
        nn.init.normal_(tensor)
    nn.init.uniform_(layer.running_var, 0.5, 2.0)
    return layer.eval()


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": None, "eps": 1e-3}])
def test_a_batch_norm_gives_the_same_bits(kind, options):
    layer, x = trained_norm(kind, **options), torch.randn(SHAPES[kind])
    assert torch.equal(lean_forward(layer)(vars(layer), x), layer(x))


@pytest.mark.parametrize("options", [{}, {"elementwise_affine": False}, {"bias": False, "eps": 1e-2}])
def test_a_layer_norm_gives_the_same_bits(options):
    layer, x = nn.LayerNorm((6, 4), **options), torch.randn(3, 5, 6, 4)
    assert torch.equal(lean_forward(layer)(vars(layer), x), layer(x))


def test_a_batch_norm_without_statistics_has_to_be_called_itself():
    layer, x = nn.BatchNorm2d(4, track_running_stats=False).eval(), torch.randn(5, 4, 6, 6)
    assert lean_forward(layer)(vars(layer), x) is None
    assert norm_and_sum(vars(layer), x) == (None, None)


def test_weights_that_were_replaced_or_changed_are_the_ones_that_count():
    layer, x = trained_norm(nn.BatchNorm2d), torch.randn(5, 4, 6, 6)
    forward = lean_forward(layer)
    layer.weight = nn.Parameter(torch.rand(4))
    layer.running_mean = torch.rand(4)
    layer.eps = 0.5
    assert torch.equal(forward(vars(layer), x), layer(x))


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
}
OTHER_LAYOUTS = {
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "transposed": lambda x: x.transpose(2, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"eps": 1e-3}])
@pytest.mark.parametrize("step", [1, 2, 5, 9])
def test_a_batch_norm_in_steps_gives_the_same_bits_and_the_sums(layout, options, step, monkeypatch):
    monkeypatch.setattr(lean, "_STEP", step * 4 * 6 * 7)
    layer, x = trained_norm(nn.BatchNorm2d, **options), LAYOUTS[layout](torch.randn(5, 4, 6, 7))
    with torch.no_grad():
        output, sums = norm_and_sum(vars(layer), x)
        assert torch.equal(output, layer(x))
    assert output.stride() == layer(x).stride()
    torch.testing.assert_close(sums, x.sum((2, 3)), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "dims"), [(nn.BatchNorm1d, (1, 4)), (nn.BatchNorm2d, (3, 5)), (nn.BatchNorm3d, (4, 6))]
)
def test_a_batch_norm_says_itself_what_is_wrong_with_its_input(kind, dims):
    layer = trained_norm(kind)
    for n in dims:
        assert lean_forward(layer)(vars(layer), torch.randn([4] * n)) is None
        with pytest.raises(ValueError, match="expected"):
            layer(torch.randn([4] * n))


@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_numbers_that_are_not_in_order_are_not_normalised_in_steps(layout):
    layer, x = trained_norm(nn.BatchNorm2d), OTHER_LAYOUTS[layout](torch.randn(5, 4, 6, 7))
    with torch.no_grad():
        output, sums = norm_and_sum(vars(layer), x)
    assert torch.equal(output, layer(x))
    assert sums is None


def test_an_image_too_few_is_not_normalised_in_steps():
    with torch.no_grad():
        assert norm_and_sum(vars(trained_norm(nn.BatchNorm2d)), torch.randn(4, 6, 7)) == (None, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_only_single_precision_is_normalised_in_steps(dtype):
    layer, x = trained_norm(nn.BatchNorm2d).to(dtype), torch.randn(5, 4, 6, 7, dtype=dtype)
    with torch.no_grad():
        output, sums = norm_and_sum(vars(layer), x)
    assert torch.equal(output, layer(x))
    assert sums is None


CONVOLUTIONS = {
    "plain": {},
    "stride and padding": {"stride": 2, "padding": 1},
    "same": {"padding": "same", "dilation": 2},
    "groups": {"groups": 2, "bias": False},
}


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@pytest.mark.parametrize(("kind", "dims"), [(nn.Conv1d, 1), (nn.Conv2d, 2), (nn.Conv3d, 3)])
def test_a_convolution_gives_the_same_bits(kind, dims, options):
    layer, x = kind(4, 6, 3, **options), torch.randn(2, 4, *[7] * dims)
    assert torch.equal(lean_forward(layer)(vars(layer), x), layer(x))


def test_a_convolution_with_padding_of_its_own_has_to_be_called_itself():
    layer = nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect")
    assert lean_forward(layer)(vars(layer), torch.randn(2, 4, 7, 7)) is None


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_gives_the_same_bits(bias):
    layer, x = nn.Linear(4, 6, bias=bias), torch.randn(2, 5, 4)
    assert torch.equal(lean_forward(layer)(vars(layer), x), layer(x))


ACTIVATIONS = [nn.ReLU(), nn.ReLU(inplace=True), nn.GELU(), nn.GELU(approximate="tanh")]


@pytest.mark.parametrize("layer", ACTIVATIONS, ids=str)
def test_an_activation_gives_the_same_bits_in_the_same_place(layer):
    x, y = torch.randn(2, 5, 4).repeat(2, 1, 1, 1)
    output = lean_forward(layer)(vars(layer), x)
    assert torch.equal(output, layer(y))
    assert torch.equal(x, y)
    assert (output is x) is getattr(layer, "inplace", False)


@pytest.mark.parametrize("layer", [nn.Dropout().eval(), nn.Identity()], ids=str)
def test_a_layer_that_does_nothing_gives_what_it_gets(layer):
    x = torch.randn(2, 4)
    assert lean_forward(layer)(vars(layer), x) is x
    assert torch.equal(layer(x), x)


@pytest.mark.parametrize("layer", [nn.Conv2d(4, 4, 1), nn.Linear(4, 4)])
def test_a_layer_whose_weight_is_kept_elsewhere_has_to_be_called_itself(layer):
    weight = layer.weight.detach().clone()
    del layer.weight
    layer.weight = weight  # no parameter any more
    assert lean_forward(layer)(vars(layer), torch.randn(2, 4, 4, 4)) is None


class Loud(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize("layer", [Loud(4), nn.SyncBatchNorm(4), nn.GroupNorm(2, 4), nn.ConvTranspose2d(4, 4, 1)])
def test_any_other_layer_goes_its_own_way(layer):
    assert lean_forward(layer) is None


def make_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)).eval()


def recorder_of(model):
    recorder = Recorder(model, select_layers(model))
    with torch.no_grad():
        recorder(to_batch(torch.randn(2, 3, 8, 8)))  # shapes are known from now on
    return recorder


def stood_in(model):
    return [name for name, module in model.named_modules() if "_compiled_call_impl" in module.__dict__]


def test_layers_are_stood_in_for_during_the_pass_only():
    model = make_net()
    recorder, x = recorder_of(model), torch.randn(2, 3, 8, 8)
    during = []
    model[2].register_forward_hook(lambda *_: during.extend(stood_in(model)))
    with torch.no_grad():
        recording = recorder(to_batch(x))
        assert torch.equal(recording.output, model(x))
    assert during[:4] == ["0", "1", "3", "4"]
    assert stood_in(model) == []


def test_a_pass_that_raises_leaves_no_stand_in():
    model = make_net()
    recorder = recorder_of(model)

    def fail(*_):
        raise KeyError("no")

    model[3].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        recorder(to_batch(torch.randn(2, 3, 8, 8)))
    assert stood_in(model) == []


def test_a_forward_of_the_user_s_own_stays_and_is_read_by_a_hook():
    model, x = make_net(), torch.randn(2, 3, 8, 8)
    plain = recorder_of(model)(to_batch(x)).mean
    model[1].forward = lambda x: nn.BatchNorm2d.forward(model[1], x) * 1
    mine = model[1].forward
    assert torch.equal(recorder_of(model)(to_batch(x)).mean, plain)
    assert model[1].forward is mine


def test_a_forward_that_comes_later_is_called():
    model, x, seen = make_net(), torch.randn(2, 3, 8, 8), []
    recorder = recorder_of(model)
    model[1].forward = lambda x: seen.append(1) or nn.BatchNorm2d.forward(model[1], x) * 2
    with torch.no_grad():
        found = recorder(to_batch(x))
        assert seen == [1]
        assert torch.equal(found.output, model(x))


def test_hooks_of_the_user_see_what_they_always_see():
    model, x = make_net(), torch.randn(2, 3, 8, 8)
    recorder, seen = recorder_of(model), []
    model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[1].register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        model(x)
        recording = recorder(to_batch(x))
    assert torch.equal(seen[0], seen[1])
    with torch.no_grad():
        assert torch.allclose(recording.means["1"], (model[0](x) + 1).mean((2, 3)), atol=1e-6)


def test_a_thread_that_records_while_another_does_has_its_numbers_too():
    model = make_net()
    recorder, other = recorder_of(model), recorder_of(model)
    x, y = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        expected = [recorder(to_batch(x)).mean, other(to_batch(y)).mean]
    inside: list = []

    def in_between(*_):
        if not inside and threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: inside.append(_record(other, y)))
            thread.start()
            thread.join()

    model[2].register_forward_hook(in_between)
    with torch.no_grad():
        outer = recorder(to_batch(x)).mean
    assert torch.equal(outer, expected[0])
    assert torch.equal(inside[0], expected[1])
    assert stood_in(model) == []


def _record(recorder, x):
    with torch.no_grad():
        return recorder(to_batch(x)).mean


def test_gradients_flow_as_they_do_without():
    model, x = make_net(), torch.randn(2, 3, 8, 8)
    recorder = recorder_of(model)
    model(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    recorder(to_batch(x)).output.square().sum().backward()
    assert all(torch.equal(parameter.grad, one) for parameter, one in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_large_activations_are_read_in_steps_with_the_same_numbers(mode, monkeypatch):
    model, x = make_net(), torch.randn(7, 3, 8, 8)
    with torch.no_grad():
        expected = recorder_of(model)(to_batch(x))
    monkeypatch.setattr(stand_ins, "LARGE", 100)
    # Two inputs of the first norm and six of the second, of 144 and 64 numbers each.
    monkeypatch.setattr(lean, "_STEP", 400)
    seen, norm = [], torch.native_batch_norm
    monkeypatch.setattr(
        torch, "native_batch_norm", lambda x, *rest, **out: seen.append(len(x)) or norm(x, *rest, **out)
    )
    recorder = recorder_of(model)
    seen.clear()
    with mode():
        recording = recorder(to_batch(x))
    assert torch.equal(recording.output, expected.output)
    assert torch.equal(recording.mean, expected.mean)
    assert seen == ([] if mode is torch.enable_grad else [2, 2, 2, 1, 6, 1])


def test_a_layer_that_is_not_watched_has_its_hooks_and_its_own_forward():
    model, x, seen = make_net(), torch.randn(2, 3, 8, 8), []
    recorder = recorder_of(model)
    model[0].register_forward_hook(lambda module, args, output: output + 1)
    convolve = model[3].forward
    model[3].forward = lambda x: seen.append(1) or convolve(x) * 2
    with torch.no_grad():
        assert torch.equal(recorder(to_batch(x)).output, model(x))
    assert seen == [1, 1]


def test_hooks_for_all_layers_of_all_models_see_every_layer():
    model, x, seen = make_net(), torch.randn(2, 3, 8, 8), []
    recorder = recorder_of(model)
    expected = recorder(to_batch(x)).mean
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        with torch.no_grad():
            found = recorder(to_batch(x)).mean
    finally:
        handle.remove()
    assert seen == [*model, model]
    torch.testing.assert_close(found, expected)


class Dropping(nn.Module):
    """Keeps its dropout on, whatever it is told."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm2d(3), nn.Dropout(0.5)

    def forward(self, x):
        self.drop.train()
        return self.drop(self.norm(x))


def test_a_layer_that_the_model_itself_puts_in_training_mode_is_in_training_mode():
    model, x = Dropping().eval(), torch.ones(2, 3, 8, 8)
    recorder = recorder_of(model)
    with torch.no_grad():
        output = recorder(to_batch(x)).output
    assert 0.3 < (output == 0).float().mean() < 0.7


def test_a_batch_norm_that_is_not_watched_says_what_is_wrong_with_its_input():
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Flatten(1), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    recorder = Recorder(model, select_layers(model, "2"))
    with torch.no_grad():
        recorder(to_batch(torch.randn(3, 4, 1, 1)))
        with pytest.raises(ValueError, match="expected 4D input"):
            recorder(to_batch(torch.randn(3, 4)))


def test_a_wrapper_that_is_compiled_in_place_is_taken_for_a_compiled_model(model):
    wrapped = nn.DataParallel(model)
    assert not is_compiled(wrapped)
    wrapped.compile(backend="eager")
    assert is_compiled(wrapped)


def test_a_model_is_not_taken_for_a_compiled_one_while_stand_ins_are_there(model, images):
    model.lock = threading.Lock()  # it could not be copied
    seen = []

    def look(*_):
        seen.append((bool(stood_in(model)), uncompiled(model) is model))

    recorder = Recorder(model, select_layers(model))
    model.register_forward_hook(look)
    recorder(to_batch(images))
    assert seen == [(True, True)]
    model.conv1.compile(backend="eager")
    with pytest.raises(InputError, match="can be copied"):
        uncompiled(model)


def test_a_model_that_is_a_single_layer_is_not_taken_for_a_compiled_one():
    model, x, during = nn.Conv2d(3, 4, 1).eval(), torch.randn(2, 3, 8, 8), []
    recorder = recorder_of(model)
    model.register_forward_hook(lambda *_: during.append(is_compiled(model)))
    recorder(to_batch(x))
    assert during == [False]


def test_a_copy_made_during_a_pass_is_of_the_model_alone():
    model, x, copies = make_net(), torch.randn(2, 3, 8, 8), []
    recorder = recorder_of(model)
    model[2].register_forward_hook(lambda *_: copies.append(copy.deepcopy(model)))
    recorder(to_batch(x))
    assert stood_in(copies[0]) == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_watched_convolution_is_stood_in_for_and_read_behind_hooks(mode):
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3)).eval(), torch.randn(2, 3, 8, 8)
    recorder = recorder_of(model)
    with mode():
        first, second = model[0](x), model(x)
        found = recorder(to_batch(x))
        assert torch.equal(found.output, second)
        torch.testing.assert_close(found.mean, torch.cat([first.mean((2, 3)), second.mean((2, 3))], 1))
        model[2].register_forward_hook(lambda module, args, output: output + 3)
        torch.testing.assert_close(recorder(to_batch(x)).means["2"], second.mean((2, 3)) + 3)
    assert stood_in(model) == []


def test_a_hook_that_comes_during_the_pass_is_heard():
    model, x, seen = make_net(), torch.randn(2, 3, 8, 8), []
    recorder = recorder_of(model)
    with torch.no_grad():
        expected = recorder(to_batch(x)).mean

    def register(*_):
        if not seen:
            model[4].register_forward_hook(lambda *_: seen.append(1))

    model[0].register_forward_hook(register)
    with torch.no_grad():
        torch.testing.assert_close(recorder(to_batch(x)).mean, expected)
    assert seen == [1]


def test_a_layer_is_stood_in_for_again_once_its_hook_is_gone():
    model, x, seen, during = make_net(), torch.randn(2, 3, 8, 8), [], []
    recorder = recorder_of(model)
    model[2].register_forward_hook(lambda *_: during.append(stood_in(model)))
    for _ in range(2):
        handle = model[4].register_forward_hook(lambda *_: seen.append(1))
        recorder(to_batch(x))
        handle.remove()
        recorder(to_batch(x))
    assert seen == [1, 1]
    assert during == [["0", "1", "3"], ["0", "1", "3", "4"]] * 2


@pytest.mark.parametrize("hooks", [(False, False), (False, True), (True, False), (True, True)], ids=str)
def test_a_pass_inside_a_pass_has_its_own_numbers(hooks):
    model, x, y, inside = make_net(), torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8), []
    recorder = Recorder(model, select_layers(model), variance=hooks[0])  # variances are read by hooks
    other = Recorder(model, select_layers(model, ["0", "1", "3", "4"]), variance=hooks[1])
    with torch.no_grad():
        expected = [[one(to_batch(data)).mean for _ in range(2)] for one, data in ((recorder, x), (other, y))]

        def in_between(*_):
            if not inside:
                inside.append(None)
                inside.append(other(to_batch(y)).mean)

        model[2].register_forward_hook(in_between)
        torch.testing.assert_close(recorder(to_batch(x)).mean, expected[0][1])
        torch.testing.assert_close(inside[1], expected[1][1])
    assert recorder.repeated == other.repeated == frozenset()
    assert stood_in(model) == []


def test_a_layer_by_two_names_is_read_by_both():
    norm = nn.BatchNorm2d(3)
    model, x = nn.ModuleDict({"a": norm, "b": norm, "c": nn.Conv2d(3, 3, 1)}).eval(), torch.randn(2, 3, 8, 8)
    model.forward = lambda x: model["c"](model["a"](x))
    recorder = Recorder(model, [Layer("a", "batchnorm", 3), Layer("b", "batchnorm", 3)])
    with torch.no_grad():
        for _ in range(2):
            found = recorder(to_batch(x))
            torch.testing.assert_close(found.mean, x.mean((2, 3)).repeat(1, 2))
    assert recorder.repeated == frozenset()


def test_a_head_that_is_watched_too_gives_feature_and_logits():
    model, x = nn.Sequential(nn.Conv2d(3, 4, 8), nn.Flatten(), nn.Linear(4, 5)).eval(), torch.randn(2, 3, 8, 8)
    recorder = Recorder(model, [Layer("0", "convolution", 4), Layer("2", "linear", 5)], head="2")
    with torch.no_grad():
        for _ in range(2):
            found = recorder(to_batch(x))
            torch.testing.assert_close(found.logits, model(x))
            torch.testing.assert_close(found.feature, model[:2](x))
            torch.testing.assert_close(found.means["2"], model(x))


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
        nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True), nn.Identity(), nn.GELU()),
    ],
    ids=["no statistics", "circular", "in place", "activations"],
)
def test_whatever_a_layer_does_the_output_is_the_model_s_own(layer):
    model, x = nn.Sequential(layer, nn.Flatten()).eval(), torch.randn(2, 3, 8, 8)
    recorder = Recorder(model, select_layers(model))
    with torch.no_grad():
        expected = model(x)
        for _ in range(2):
            assert torch.equal(recorder(to_batch(x)).output, expected)


class Waits(nn.Module):
    """Waits in the middle of a pass if it is told to."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.inside, self.go_on = threading.Event(), threading.Event()

    def forward(self, x):
        x = self.first(x)
        if threading.current_thread() is not threading.main_thread():
            self.inside.set()
            assert self.go_on.wait(10)
        return self.second(x)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: nn.Linear(1, 1).register_forward_hook(lambda *_: None),
        lambda model: setattr(model, "first", copy.deepcopy(model.first)),
    ],
    ids=["a hook comes", "a layer is replaced"],
)
def test_what_changes_while_another_thread_records_makes_later_passes_go_by_hooks(change):
    model, x = Waits().eval(), torch.randn(2, 3, 4, 4)
    recorder = recorder_of(model)
    expected = [recorder(to_batch(x)).mean for _ in range(2)][-1]
    found = []
    thread = threading.Thread(target=lambda: found.append(recorder(to_batch(x[:1])).mean))
    thread.start()
    assert model.inside.wait(10)
    change(model)
    try:
        other = [recorder(to_batch(x)).mean for _ in range(2)]
    finally:
        model.go_on.set()
        thread.join()
    torch.testing.assert_close(torch.cat([*found, *other]), torch.cat([expected[:1], expected, expected]))


class Between(nn.Module):
    """Does something in the middle of a pass, once, without a hook that anybody could see."""

    def __init__(self, run):
        super().__init__()
        self.run, self.done = run, None

    def forward(self, x):
        if self.done is None:
            self.done = False
            self.done = self.run()
        return x


@pytest.mark.parametrize("in_thread", [False, True], ids=["in the same thread", "in another"])
def test_a_recorder_that_finds_the_stand_ins_of_another_reads_by_hooks_and_leaves_them(in_thread):
    x, y = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    model, seen = make_net(), []

    def run():
        before = stood_in(model)
        if in_thread:
            thread = threading.Thread(target=lambda: seen.append(_record(other, y)))
            thread.start()
            thread.join()
        else:
            seen.append(_record(other, y))
        assert stood_in(model) == before == ["0", "1", "3", "4"]
        return True

    model[2] = Between(run)
    model[2].done = True
    recorder, other = recorder_of(model), recorder_of(model)  # both know where to stand in
    model[2].done = None
    with torch.no_grad():
        outer = recorder(to_batch(x))
    assert model[2].done
    expected = [_record(Recorder(model, select_layers(model)), data) for data in (x, y)]
    torch.testing.assert_close(outer.mean, expected[0])
    torch.testing.assert_close(seen[0], expected[1])
    assert stood_in(model) == []


class Loose(torch.Tensor):
    """Tells which functions it is given to."""

    seen: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_tensor_of_another_kind_goes_through_the_layer_itself():
    model, x = make_net(), torch.randn(2, 3, 8, 8)
    recorder = recorder_of(model)
    with torch.no_grad():
        expected = recorder(to_batch(x))
        found = recorder(to_batch(x.as_subclass(Loose)))
    assert nn.functional.batch_norm in Loose.seen  # and not what it calls
    assert type(found.output) is Loose
    torch.testing.assert_close(found.output.as_subclass(torch.Tensor), expected.output)
    torch.testing.assert_close(torch.Tensor(found.mean), expected.mean)
