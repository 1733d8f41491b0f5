"""Recording gives the numbers of hooks that call `mean`, whatever the model, the layout and the call."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from neuralmean.data.batch import to_batch
from neuralmean.errors import LayerNotFiredError
from neuralmean.models.layers import select_layers
from neuralmean.recording import Recorder, RecordingModule
from tests.conftest import TinyNet, count_hooks, make_trained


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(3))

    def forward(self, x):
        for norm in self.norms:
            x = x + norm(x)
        return x.mean(1)


class Dense(nn.Module):
    """Inputs of later norms begin with those of earlier ones."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(4 + 2 * i) for i in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(4 + 2 * i, 2, 3, padding=1) for i in range(3))

    def forward(self, x):
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = torch.cat([x, conv(norm(x).relu())], dim=1)
        return x


class Mixed(nn.Module):
    """A layer without positions, one called twice and one in double precision."""

    def __init__(self):
        super().__init__()
        self.image, self.flat, self.wide = nn.BatchNorm2d(4), nn.BatchNorm1d(4), nn.BatchNorm1d(4).double()

    def forward(self, x):
        x = self.image(self.image(x) + 1)
        return self.wide(self.flat(x.mean((2, 3))).double())


def _reference_means(model, x):
    """Hooks that call `mean`, one by one, on a model that is already in evaluation mode."""
    found, handles = {}, []
    layers = select_layers(model)
    for layer in layers:
        dims = 1 if layer.channels_last else (2, 3)

        def hook(module, args, name=layer.name, dims=dims):
            value = args[0].detach()
            found.setdefault(name, []).append(value if value.dim() == 2 else value.mean(dims))

        handles.append(model.get_submodule(layer.name).register_forward_pre_hook(hook))
    model(x)
    for handle in handles:
        handle.remove()
    return torch.cat([torch.stack(found[layer.name]).mean(0).double() for layer in layers], dim=1)


CASES = {
    "batch norm": (make_trained, (5, 3, 8, 8)),
    "layer norm": (Tokens, (5, 7, 6)),
    "concatenated": (Dense, (5, 4, 8, 8)),
    "mixed": (Mixed, (5, 4, 8, 8)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("passes", [1, 3], ids=["first pass", "later pass"])
def test_means_equal_hooks_that_call_mean(name, passes):
    make, shape = CASES[name]
    model, x = make().eval(), torch.randn(shape)
    recorder = Recorder(model, select_layers(model))
    for _ in range(passes):
        recording = recorder(to_batch(x))
    torch.testing.assert_close(recording.mean.double(), _reference_means(model, x), rtol=1e-5, atol=1e-5)
    assert count_hooks(model) == 0


def test_channels_last_memory_gives_the_same_means():
    model, x = make_trained(), torch.randn(6, 3, 8, 8)
    expected = _reference_means(model, x)
    recorder = Recorder(model.to(memory_format=torch.channels_last), select_layers(model))
    for _ in range(2):
        recording = recorder(to_batch(x.contiguous(memory_format=torch.channels_last)))
        torch.testing.assert_close(recording.mean.double(), expected, rtol=1e-5, atol=1e-5)


def test_batches_of_changing_size_and_image_size_do_not_mix():
    model = make_trained()
    recorder = Recorder(model, select_layers(model))
    for shape in [(2, 3, 8, 8), (5, 3, 8, 8), (2, 3, 8, 8), (2, 3, 12, 10), (2, 3, 8, 8), (1, 3, 4, 4)]:
        x = torch.randn(shape)
        torch.testing.assert_close(
            recorder(to_batch(x)).mean.double(), _reference_means(model, x), rtol=1e-5, atol=1e-5
        )


def test_by_layer_and_concatenated_are_the_same_numbers():
    model = make_trained()
    recording = Recorder(model, select_layers(model), variance=True)(to_batch(torch.randn(4, 3, 8, 8)))
    assert torch.equal(torch.cat(list(recording.means.values()), dim=1), recording.mean)
    assert torch.equal(torch.cat(list(recording.variances.values()), dim=1), recording.variance)


def test_a_recording_is_not_changed_by_the_next_one():
    model = make_trained()
    recorder = Recorder(model, select_layers(model))
    first = recorder(to_batch(torch.zeros(3, 3, 8, 8)))
    kept = first.mean.clone()
    recorder(to_batch(torch.ones(3, 3, 8, 8)))
    assert torch.equal(first.mean, kept)


def test_a_layer_that_was_replaced_is_the_one_that_is_read():
    model, x = make_trained(), torch.randn(3, 3, 8, 8)
    recorder = Recorder(model, select_layers(model))
    recorder(to_batch(x))
    model.bn1 = nn.BatchNorm2d(4).eval()
    torch.testing.assert_close(recorder(to_batch(x)).mean.double(), _reference_means(model, x), rtol=1e-5, atol=1e-5)


def test_a_module_that_was_added_is_put_back_into_training_mode():
    model = TinyNet().train()
    recorder = Recorder(model, select_layers(model))
    recorder(to_batch(torch.randn(2, 3, 8, 8)))
    model.extra = nn.Dropout()
    recorder(to_batch(torch.randn(2, 3, 8, 8)))
    assert all(module.training for module in model.modules())


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_scripted_part_is_put_into_evaluation_mode_and_back():
    part = torch.jit.script(nn.Sequential(nn.Dropout(0.5)))
    model, x = nn.Sequential(nn.BatchNorm2d(3), part).eval(), torch.ones(2, 3, 8, 8)
    recorder = Recorder(model, select_layers(model, "0"))
    part.train()
    with torch.no_grad():
        output = recorder(to_batch(x)).output
    assert (output > 0).all()
    assert part.training
    assert not model.training


@pytest.mark.parametrize("grad", [True, False], ids=["with gradients", "without"])
def test_recording_carries_no_gradient_and_leaves_the_output_bit_equal(grad):
    model, x = make_trained(), torch.randn(4, 3, 8, 8, requires_grad=True)
    recorder = Recorder(model, select_layers(model))
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            recording = recorder(to_batch(x))
        assert torch.equal(recording.output, model(x))
    assert recording.output.requires_grad is grad
    assert not recording.mean.requires_grad


def test_bfloat16_activations_are_summed_in_float32():
    model = nn.Sequential(nn.BatchNorm2d(1)).bfloat16().eval()
    image = torch.full((1, 1, 64, 64), 1.0, dtype=torch.bfloat16)
    image[0, 0, 0, 0] = 100.0
    recorder = Recorder(model, select_layers(model))
    for _ in range(2):
        recording = recorder(to_batch(image))
    assert recording.mean.dtype == torch.float32
    torch.testing.assert_close(recording.mean, torch.tensor([[4195 / 4096]]))


def test_threads_with_different_batch_sizes_do_not_mix():
    model = make_trained().train()
    recorder = Recorder(model, select_layers(model))
    parts = [torch.randn(size, 3, 8, 8) for size in (1, 2, 3, 5)]
    serial = [recorder(to_batch(part)).mean for part in parts]
    wrong = []

    def work(index):
        for _ in range(50):
            if not torch.equal(recorder(to_batch(parts[index])).mean, serial[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert count_hooks(model) == 0
    assert all(module.training for module in model.modules())


class StopsAt:
    """Exits that stop at one of them, and remember what they were shown."""

    def __init__(self, depths, stop):
        self.depths, self.stop, self.shown = depths, stop, {}

    def should_stop(self, index, means):
        self.shown[index] = means
        return index == self.stop


class Counts(TinyNet):
    """Counts how far it came."""

    reached = 0

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        self.reached += 1
        x = self.relu(self.bn2(self.conv2(x)))
        self.reached += 1
        return self.fc(x.mean((2, 3)))


def test_a_pass_can_be_stopped_at_an_exit_and_the_model_is_as_it_was():
    model, x = Counts().train(), torch.randn(3, 3, 8, 8)
    recorder = Recorder(model, select_layers(model), head="fc")
    full = recorder(to_batch(x))
    model.reached = 0
    exits = StopsAt([1], stop=0)
    recording = recorder(to_batch(x), exits=exits)
    assert (recording.output, recording.stopped_at, recording.logits) == (None, 0, None)
    assert [layer.name for layer in recording.layers] == ["bn1"]
    torch.testing.assert_close(recording.mean, full.mean[:, :4])
    torch.testing.assert_close(exits.shown[0], full.mean[:, :4])
    assert model.reached == 0
    assert count_hooks(model) == 0
    assert all(module.training for module in model.modules())
    again = recorder(to_batch(x))
    assert (again.stopped_at, len(again.layers)) == (None, 2)
    torch.testing.assert_close(again.mean, full.mean)


def test_a_pass_that_is_not_stopped_is_whole():
    model, x = make_trained(), torch.randn(3, 3, 8, 8)
    recorder = Recorder(model, select_layers(model))
    exits = StopsAt([1, 2], stop=None)
    recording = recorder(to_batch(x), exits=exits)
    assert torch.equal(recording.output, model(x))
    assert recording.stopped_at is None
    torch.testing.assert_close(exits.shown[1], recording.mean)


def test_layers_that_run_twice_are_known_afterwards():
    model = Mixed().eval()
    recorder = Recorder(model, select_layers(model))
    assert recorder.repeated == frozenset()
    recorder(to_batch(torch.randn(2, 4, 8, 8)))
    assert recorder.repeated == {0}


def test_the_copy_for_compilers_shares_tensors_and_leaves_the_model_without_hooks():
    model, x = make_trained(), torch.randn(4, 3, 8, 8)
    twin = RecordingModule(model, select_layers(model), variance=True, head="fc")
    found = twin((x,), {}, None)
    expected = Recorder(model, select_layers(model), variance=True, head="fc")(to_batch(x))
    for part, name in zip(found, ("output", "mean", "variance", "feature", "logits"), strict=True):
        torch.testing.assert_close(part, getattr(expected, name))
    assert twin.model.conv1.weight is model.conv1.weight
    assert count_hooks(model) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_gives_the_same_means():
    model, x = make_trained(), torch.randn(4, 3, 8, 8)
    recorder = Recorder(torch.compile(model), select_layers(model), head="fc")
    with torch.no_grad():
        try:
            recording = recorder(to_batch(x))
        except torch._dynamo.exc.BackendCompilerFailed as error:
            pytest.skip(f"torch.compile does not work here: {error}")
        torch.testing.assert_close(recording.mean.double(), _reference_means(model, x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(recording.output, model(x))
        assert recorder(to_batch(x[:3])).mean.shape == (3, 10)
    assert count_hooks(model) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_many_compiled_models_do_not_use_up_what_the_compiler_allows_one():
    x = torch.rand(4, 3, 8, 8)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for width in range(4, 8):
            model = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU()).eval()
            expected = Recorder(model, select_layers(model))(to_batch(x)).mean
            compiled = torch.compile(model)
            found = Recorder(compiled, select_layers(compiled))(to_batch(x)).mean
            torch.testing.assert_close(found, expected)


def _compiled(model):
    return Recorder(torch.compile(model), select_layers(model), head="fc")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_whose_layer_was_replaced_is_compiled_anew():
    model, x = make_trained(), torch.randn(4, 3, 8, 8)
    recorder = _compiled(model)
    with torch.no_grad():
        recorder(to_batch(x))
        model.fc = nn.Linear(model.fc.in_features, 7)
        found = recorder(to_batch(x))
        torch.testing.assert_close(found.output, model(x))
    assert found.logits.shape == (4, 7)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_that_was_converted_or_written_to_is_as_it_is_then():
    model, x = make_trained(), torch.randn(4, 3, 8, 8)
    recorder = _compiled(model)
    with torch.no_grad():
        recorder(to_batch(x))
        model.fc.weight.mul_(2)
        model.conv1.weight.add_(1)
        torch.testing.assert_close(recorder(to_batch(x)).output, model(x))
        model.to(memory_format=torch.channels_last)  # replaces what is in the tensors
        torch.testing.assert_close(recorder(to_batch(x)).output, model(x))
        model.double()
        found = recorder(to_batch(x.double()))
        assert found.output.dtype is torch.float64
        torch.testing.assert_close(found.output, model(x.double()))
        torch.testing.assert_close(found.mean.double(), _reference_means(model, x.double()), rtol=1e-5, atol=1e-5)


class Alternating(nn.Module):
    """Remembers how often it ran."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc, self.is_odd = nn.BatchNorm2d(3), nn.Linear(3, 2), False

    def forward(self, x):
        self.is_odd = not self.is_odd
        y = self.norm(x if self.is_odd else 2 * x + 1)
        return self.fc(y.mean((2, 3)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_may_change_itself():
    x = torch.randn(4, 3, 8, 8)
    recorder = _compiled(Alternating().eval())
    with torch.no_grad():
        means = [recorder(to_batch(x)).mean for _ in range(4)]
    for mean, expected in zip(means, [x, 2 * x + 1, x, 2 * x + 1], strict=True):
        torch.testing.assert_close(mean, expected.mean((2, 3)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_says_which_layer_never_ran():
    model, x = make_trained(), torch.randn(4, 3, 8, 8)
    model.unused = nn.BatchNorm2d(3)
    recorder = _compiled(model)
    with torch.no_grad(), pytest.raises(LayerNotFiredError, match="'unused' did not"):
        recorder(to_batch(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("error::UserWarning")
def test_a_layer_inside_a_compiled_part_is_said_not_to_run():
    model, x = (
        nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))).eval(),
        torch.randn(2, 3, 8, 8),
    )
    expected = model(x)
    recorder = Recorder(model, select_layers(model))
    model[1].compile(backend="eager")
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(LayerNotFiredError, match="'1.1' did not"):
                recorder(to_batch(x))
        assert torch.equal(model(x), expected)
