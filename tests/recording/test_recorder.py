from __future__ import annotations

import re
import threading

import pytest
import torch
from torch import nn

from neuralmean.data.batch import to_batch
from neuralmean.errors import InputError, LayerNotFiredError, LayerNotFoundError, ModelInputError
from neuralmean.models.execution import translate_input_errors
from neuralmean.models.layers import Layer, select_layers
from neuralmean.recording import Recorder, RecordingModule, find_head
from neuralmean.recording.sink import Sink
from neuralmean.stats.channels import channel_mean, channel_mean_variance, main_tensor
from tests.conftest import TinyNet, count_hooks


def record(model, x, patterns=None, **options):
    return Recorder(model, select_layers(model, patterns), **options)(to_batch(x))


def _reference_channel_statistics(activation):
    """One number at a time, from the text of the paper: sum over positions, divided by their number."""
    examples, channels = activation.shape[:2]
    means, variances = torch.zeros(examples, channels), torch.zeros(examples, channels)
    for i in range(examples):
        for c in range(channels):
            values = activation[i, c].flatten().double().tolist()
            mean = sum(values) / len(values)
            means[i, c], variances[i, c] = mean, sum((value - mean) ** 2 for value in values) / len(values)
    return means, variances


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 5), (3, 4, 5, 6), (2, 3, 4, 5, 2)], ids=str)
def test_channel_statistics_equal_a_naive_loop(shape):
    activation = torch.randn(shape) * 2 + 3
    means, variances = _reference_channel_statistics(activation.reshape(*shape[:2], -1))
    mean, variance = channel_mean_variance(activation)
    torch.testing.assert_close(channel_mean(activation), means)
    torch.testing.assert_close(mean, means)
    torch.testing.assert_close(variance, variances)


def test_channels_last_tensors_give_the_same_numbers():
    activation = torch.randn(4, 8, 5, 5)
    torch.testing.assert_close(channel_mean(activation.to(memory_format=torch.channels_last)), channel_mean(activation))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_low_precision_is_reduced_in_float32(dtype):
    activation = torch.full((1, 1, 64, 64), 1.0, dtype=dtype)
    activation[0, 0, 0, 0] = 100.0
    expected = torch.tensor([[(4095 + 100) / 4096]])
    mean = channel_mean(activation)
    assert mean.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(mean.float(), expected)


def test_padding_is_left_out():
    tokens = torch.tensor([[[1.0], [3.0], [99.0]], [[5.0], [99.0], [99.0]]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert channel_mean(tokens, channels_last=True, mask=mask).tolist() == [[2.0], [5.0]]
    mean, variance = channel_mean_variance(tokens, channels_last=True, mask=mask)
    assert (mean.tolist(), variance.tolist()) == ([[2.0], [5.0]], [[1.0], [0.0]])


class ByHand(nn.Module):
    """Every activation is known: the batch norm sees 2 x + 1 of an image."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1)
        self.bn = nn.BatchNorm2d(1)
        self.relu = nn.ReLU(inplace=True)
        nn.init.constant_(self.conv.weight, 2.0)
        nn.init.constant_(self.conv.bias, 1.0)

    def forward(self, x):
        return self.relu(self.bn(self.conv(x)))


def test_the_numbers_by_hand():
    image = torch.tensor([[[[0.0, 1.0], [2.0, 5.0]]]])  # 2 x + 1 is 1, 3, 5, 11: mean 5, variance (16 + 4 + 0 + 36) / 4
    recording = record(ByHand(), image, ["bn", "conv"], variance=True)
    assert recording.means["bn"].tolist() == recording.means["conv"].tolist() == [[5.0]]
    assert recording.variances["bn"].tolist() == [[14.0]]


def test_outputs_are_bit_equal_and_hooks_gone(model, images):
    expected = model(images)
    recording = record(model, images, variance=True)
    assert torch.equal(recording.output, expected)
    assert count_hooks(model) == 0


def test_training_flags_and_buffers_are_as_they_were(images):
    model = TinyNet()
    model.train()
    model.bn2.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    record(model, images)
    assert {name: module.training for name, module in model.named_modules()} == {
        "": True, "conv1": True, "bn1": True, "conv2": True, "bn2": False, "relu": True, "fc": True,
    }  # fmt: skip
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class Raises(TinyNet):
    def forward(self, x):
        super().forward(x)
        raise ZeroDivisionError("boom")


def test_a_raising_forward_leaves_the_model_as_it_was(images):
    model = Raises().train()
    with pytest.raises(ZeroDivisionError, match="boom"):
        record(model, images)
    assert count_hooks(model) == 0
    assert all(module.training for module in model.modules())


def test_a_bad_input_leaves_the_model_as_it_was():
    model = TinyNet().train()
    with pytest.raises(ModelInputError, match=r"an input that TinyNet accepts, but got shape \(2, 5, 8, 8\).*channels"):
        record(model, torch.zeros(2, 5, 8, 8))
    assert count_hooks(model) == 0
    assert all(module.training for module in model.modules())


def test_an_error_of_the_model_itself_is_not_dressed_up(images):
    class Fails(TinyNet):
        def forward(self, x):
            raise RuntimeError("the licence server is down")

    with pytest.raises(RuntimeError, match="^the licence server is down$"):
        record(Fails(), images)


def test_the_graph_is_kept_for_the_caller_and_not_for_the_statistics(model, images):
    recording = record(model, images)
    assert recording.output.requires_grad
    assert not recording.means["bn1"].requires_grad
    with torch.no_grad():
        assert not record(model, images).output.requires_grad


def test_a_layer_called_twice_gives_the_mean_of_its_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(1)

        def forward(self, x):
            return self.norm(x) + self.norm(x + 10)

    recording = record(Twice(), torch.tensor([[1.0], [2.0]]), variance=True)
    assert recording.means["norm"].tolist() == [[6.0], [7.0]]
    assert recording.variances["norm"].tolist() == [[0.0], [0.0]]


class Often(nn.Module):
    """Calls its norm three times, with images of three sizes, and then another one."""

    def __init__(self):
        super().__init__()
        self.norm, self.other = nn.BatchNorm2d(2), nn.BatchNorm2d(2)

    def forward(self, x):
        for size in (2, 3, 4):
            self.norm(x[:, :, :size, :size] * size)
        return self.other(x)


@pytest.mark.parametrize("variance", [False, True])
def test_every_call_of_a_layer_counts_as_much(variance):
    model, x = Often().eval(), torch.randn(3, 2, 4, 4)
    shown = [channel_mean_variance(x[:, :, :size, :size] * size) for size in (2, 3, 4)]
    recorder = Recorder(model, select_layers(model), variance=variance)
    for _ in range(2):
        recording = recorder(to_batch(x))
        torch.testing.assert_close(recording.means["norm"], torch.stack([mean for mean, _ in shown]).mean(0))
        torch.testing.assert_close(recording.means["other"], x.mean((2, 3)))
        if variance:
            torch.testing.assert_close(recording.variances["norm"], torch.stack([one for _, one in shown]).mean(0))


def test_an_exit_waits_for_all_of_its_layers_however_often_one_runs():
    class Exits:
        depths = (2,)

        def should_stop(self, index, means):
            self.shown = means
            return True

    model, x, exits = Often().eval(), torch.randn(3, 2, 4, 4), Exits()
    recorder = Recorder(model, select_layers(model))
    expected = recorder(to_batch(x)).mean
    assert recorder(to_batch(x), exits=exits).stopped_at == 0
    torch.testing.assert_close(exits.shown, expected)


def test_a_layer_that_runs_again_behind_the_exit_that_was_shown_it_is_an_error():
    class Exits:
        depths = (1,)

        def should_stop(self, index, means):
            return False

    model, x = Often().eval(), torch.randn(3, 2, 4, 4)
    recorder = Recorder(model, select_layers(model))
    with pytest.raises(
        InputError, match=r"Expected layer 'norm' to be done at the early exit after it, but it ran again\."
    ):
        recorder(to_batch(x), exits=Exits())
    assert count_hooks(model) == 0


def test_a_layer_that_does_not_run_is_named():
    class Skips(TinyNet):
        def forward(self, x):
            return self.bn1(self.conv1(x))

    with pytest.raises(LayerNotFiredError, match="but 'bn2' did not. It may be used in training only"):
        record(Skips(), torch.zeros(1, 3, 8, 8))


def test_a_layer_that_was_removed_is_named(model, images):
    recorder = Recorder(model, select_layers(model))
    del model.bn2
    with pytest.raises(LayerNotFoundError, match="to have the layer 'bn2'"):
        recorder(to_batch(images))
    assert count_hooks(model) == 0


def test_rows_must_be_examples():
    class Folds(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x):
            return self.norm(x.reshape(-1, 2))

    with pytest.raises(InputError, match="one row for each of the 3 inputs in layer 'norm', but its activation has 6"):
        record(Folds(), torch.zeros(3, 4))


def test_channels_must_be_where_they_are_looked_for():
    with pytest.raises(InputError, match="Expected 9 channels in layer 'bn1', but its activation has 4"):
        Recorder(TinyNet(), [Layer("bn1", "batchnorm", 9)])(to_batch(torch.zeros(1, 3, 8, 8)))


def test_a_layer_without_a_tensor_is_an_error():
    class Conv(nn.Conv2d):
        def forward(self, x):
            return None

    with pytest.raises(InputError, match="Expected layer '0' to have a tensor"):
        record(nn.Sequential(Conv(3, 3, 1)), torch.zeros(1, 3, 4, 4))


def test_tuple_and_dict_outputs_pass_through(images):
    class Many(TinyNet):
        def forward(self, x):
            return {"aux": None, "logits": super().forward(x)}, 7

    output = record(Many(), images).output
    assert output[1] == 7
    assert main_tensor(output) is output[0]["logits"]


def test_dict_inputs_reach_the_model_by_keyword():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.norm = nn.LayerNorm(4)

        def forward(self, input_ids, attention_mask=None):
            return self.norm(self.embed(input_ids))

    model = Tokens()
    ids = torch.tensor([[1, 2, 3]])
    expected = (model.embed.weight[1] + model.embed.weight[2]) / 2
    recording = record(model, {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 0]])}, ["norm"])
    torch.testing.assert_close(recording.means["norm"][0], expected.detach())


def test_a_module_called_by_keyword_is_read_too():
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(1)

        def forward(self, x):
            return self.norm(input=x)

    assert record(Keyword(), torch.tensor([[3.0]])).means["norm"].tolist() == [[3.0]]


def test_many_threads_on_one_model_get_the_serial_answers(model, images):
    model.train()  # the hardest case: flags must be put back once, at the end
    recorder = Recorder(model, select_layers(model), head="fc")
    parts = images.split(20)
    serial = [recorder(to_batch(part)) for part in parts]
    results: dict[int, object] = {}

    def work(index):
        for _ in range(100):
            results[index] = recorder(to_batch(parts[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(8):
        assert torch.equal(results[index].output, serial[index].output)
        assert all(torch.equal(results[index].means[name], mean) for name, mean in serial[index].means.items())
    assert count_hooks(model) == 0
    assert all(module.training for module in model.modules())


def test_wrapped_models_give_the_same_numbers(model, images):
    plain, wrapped = record(model, images), record(nn.DataParallel(model), images)
    assert torch.equal(plain.output, wrapped.output)
    assert torch.equal(plain.means["bn2"], wrapped.means["bn2"])


def test_a_bfloat16_model_is_recorded_in_float32():
    model = (
        nn.Sequential(nn.BatchNorm2d(1)).bfloat16().eval()
    )  # no matrix product: its bf16 kernels crash on some machines
    image = torch.full((1, 1, 64, 64), 1.0, dtype=torch.bfloat16)
    image[0, 0, 0, 0] = 100.0
    recording = record(model, image)
    assert recording.output.dtype == torch.bfloat16
    torch.testing.assert_close(recording.means["0"], torch.tensor([[4195 / 4096]]))


def test_the_head_of_a_model_that_is_compiled_in_place_is_found_without_the_compiler(model, images):
    model.compile(backend=lambda *_: pytest.fail("compiled"))
    assert find_head(model, to_batch(images)) == "fc"


def test_the_head_is_found_and_gives_feature_and_logits(model, images):
    assert find_head(model, to_batch(images)) == "fc"
    recording = record(model, images, head="fc")
    torch.testing.assert_close(recording.logits, recording.output.detach())
    torch.testing.assert_close(recording.feature @ model.fc.weight.T + model.fc.bias, recording.logits)
    assert count_hooks(model) == 0


def test_a_model_without_a_linear_end_has_no_head(images):
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 2), nn.Sigmoid())
    assert find_head(model, to_batch(images)) is None
    assert find_head(nn.Conv2d(3, 2, 3), to_batch(images)) is None


@pytest.mark.parametrize("end", [nn.Softmax(1), nn.LogSoftmax(1)], ids=lambda end: type(end).__name__)
def test_the_head_of_a_model_that_returns_probabilities_is_the_layer_before(images, end):
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 4), end)
    assert find_head(model, to_batch(images)) == "2"
    torch.testing.assert_close(record(model, images, ["0"], head="2").logits, model[:3](images).detach())


class PooledConvolution(nn.Module):
    """A 1 x 1 convolution of pooled features gives the logits, as in BiT."""

    def __init__(self, pooled: bool = True) -> None:
        super().__init__()
        self.conv, self.fc, self.pooled = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 1), pooled

    def forward(self, x):
        x = self.conv(x)
        x = self.fc(x.mean((2, 3), keepdim=True) if self.pooled else x)
        return x.flatten(1) if self.pooled else x


def test_a_convolution_of_pooled_features_is_a_head(images):
    model = PooledConvolution()
    assert find_head(model, to_batch(images)) == "fc"
    recording = record(model, images, ["conv"], head="fc")
    torch.testing.assert_close(recording.logits, recording.output.detach())
    torch.testing.assert_close(recording.feature @ model.fc.weight.flatten(1).T + model.fc.bias, recording.logits)


def test_the_last_convolution_of_a_segmentation_model_is_no_head(images):
    assert find_head(PooledConvolution(pooled=False), to_batch(images)) is None


def test_a_squeezed_output_still_has_its_head(images):
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.Unflatten(1, (4, 1)), nn.Flatten())
    assert find_head(model, to_batch(images)) == "1"


def test_a_layer_that_is_watched_and_gives_the_logits_too_is_seen_as_both():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    got = Recorder(model, select_layers(model, ["0", "2"]), head="2")(to_batch(x))
    torch.testing.assert_close(got.means["2"], model(x).detach())
    torch.testing.assert_close(got.logits, model(x).detach())
    assert not any(module._forward_hooks or module._forward_hooks_with_kwargs for module in model.modules())


def test_plain_activations_are_summed_up_and_others_averaged_on_the_spot(model, images, monkeypatch):
    recorder = Recorder(model, select_layers(model))
    averaged = []
    add_any = Sink._add_any
    monkeypatch.setattr(Sink, "_add_any", lambda sink, *args: averaged.append(args[0]) or add_any(sink, *args))
    for x in (images[:6], images[:1], images[:5, :, :6, :6]):
        expected = Recorder(model, select_layers(model), variance=True)(to_batch(x)).mean
        assert averaged == [0, 1]
        averaged.clear()
        assert torch.allclose(recorder(to_batch(x)).mean, expected, atol=1e-6)
        assert averaged == []


def test_inputs_of_ever_new_shapes_do_not_pile_up(model):
    recorder = Recorder(model, select_layers(model))
    for size in range(1, 200):
        recorder(to_batch(torch.zeros(size, 3, 4, 4)))
    assert len(recorder._plan.counts) <= 64


class Repeats(nn.Module):
    """Shows a batch norm every input `n` times."""

    def __init__(self):
        super().__init__()
        self.norm, self.other = nn.BatchNorm2d(1), nn.BatchNorm2d(1)
        self.n = 1

    def forward(self, x):
        return self.norm(x.repeat(self.n, 1, 1, 1)), self.other(x)


@pytest.mark.parametrize("alone", [False, True], ids=["beside another", "alone"])
def test_rows_are_counted_in_every_pass(alone):
    model, x = Repeats().eval(), torch.rand(3, 1, 4, 4)
    recorder = Recorder(model, select_layers(model, ["norm"] if alone else None))
    recorder(to_batch(x))
    recorder(to_batch(torch.rand(6, 1, 4, 4)))  # so that the shape is one that was seen
    model.n = 2  # as many positions as ever, and twice the rows
    with pytest.raises(InputError, match="one row for each of the 3 inputs in layer 'norm', but its activation has 6"):
        recorder(to_batch(x))


@pytest.mark.parametrize("passes", [1, 2])
def test_an_activation_without_positions_has_no_mean(passes):
    class Empty(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(2)

        def forward(self, x):
            return self.norm(x[:, :0])

    model = Empty().eval()
    recorder = Recorder(model, select_layers(model))
    for _ in range(passes):
        assert recorder(to_batch(torch.rand(3, 4, 2))).mean.isnan().all()


@pytest.mark.parametrize("passes", [1, 2])
def test_a_batch_of_nothing_has_means_of_nothing(passes):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    recorder = Recorder(model, select_layers(model))
    for _ in range(passes):
        assert recorder(to_batch(torch.rand(0, 3, 4, 4))).mean.shape == (0, 4)


def test_passes_inside_and_outside_of_inference_mode_follow_each_other(model, images):
    recorder = Recorder(model, select_layers(model))
    expected = recorder(to_batch(images)).mean
    recorder = Recorder(model, select_layers(model))
    with torch.inference_mode():
        inside = [recorder(to_batch(images)).mean for _ in range(2)]
    outside = recorder(to_batch(images)).mean
    with torch.inference_mode():
        inside.append(recorder(to_batch(images)).mean)
    assert all(torch.equal(found, outside) for found in inside)
    assert torch.allclose(outside, expected, atol=1e-6)


def test_an_input_of_a_known_kind_goes_where_the_model_is_by_then(model, images):
    recorder = Recorder(model, select_layers(model))
    expected = recorder(to_batch(images)).mean
    recorder(to_batch(images))
    model.to("meta")
    assert recorder(to_batch(images)).mean.device.type == "meta"
    assert expected.device.type == "cpu"


def test_the_head_may_be_told_later(model, images):
    recorder = Recorder(model, select_layers(model))
    assert [recorder(to_batch(images)).logits for _ in range(2)] == [None, None]
    recorder.head = "fc"
    recording = recorder(to_batch(images))
    assert torch.equal(recording.logits, recording.output.detach())
    assert count_hooks(model) == 0


def test_what_was_kept_of_a_pass_is_not_seen_in_the_next(model, images):
    recorder = Recorder(model, select_layers(model), head="fc")
    first = recorder(to_batch(images))
    kept = first.logits.clone(), first.feature.clone(), first.mean.clone()
    recorder(to_batch(images + 1))
    assert all(map(torch.equal, kept, (first.logits, first.feature, first.mean)))


def test_a_model_that_is_compiled_in_place_later_is_run_so(model, images, monkeypatch):
    recorder = Recorder(model, select_layers(model))
    recorder(to_batch(images))
    monkeypatch.setattr(Recorder, "_run_compiled", lambda *_: "compiled")
    model.compile(backend="eager")
    assert recorder(to_batch(images)) == "compiled"


class Named(TinyNet):
    """Takes its images by name, and perhaps a mask that it does not look at."""

    def forward(self, pixels, attention_mask=None):
        return super().forward(pixels)


def test_inputs_by_name_follow_each_other_with_and_without_a_mask(images):
    model = Named().eval()
    recorder = Recorder(model, select_layers(model))
    mask = torch.ones(len(images), 8)
    for options in ({}, {}, {"attention_mask": mask}, {}, {"attention_mask": mask}):
        for x in (images, images + 1):
            expected = record(model, {"pixels": x}).mean
            torch.testing.assert_close(recorder(to_batch({"pixels": x, **options})).mean, expected)


class Scaled(TinyNet):
    """Remembers where the factor was that came beside its images."""

    def forward(self, pixels, factor=None):
        self.where = None if factor is None else factor.device.type
        return super().forward(pixels)


def test_what_comes_beside_an_input_of_a_known_kind_goes_where_the_model_is(images):
    model = Scaled().eval().to("meta")
    recorder = Recorder(model, select_layers(model))
    for _ in range(2):
        recorder(to_batch(images.to("meta")))
    recorder(to_batch({"pixels": images.to("meta"), "factor": torch.ones(1)}))
    assert model.where == "meta"


def test_a_compiled_model_that_is_converted_gets_a_new_twin(model, images, monkeypatch):
    monkeypatch.setattr(RecordingModule, "compiled", lambda twin: twin.forward)  # which takes no minute
    compiled = torch.compile(model, backend="eager")
    recorder = Recorder(compiled, select_layers(compiled))
    first = recorder(to_batch(images[:4])).mean
    compiled.double()
    second = recorder(to_batch(images[:4].double())).mean
    assert second.dtype is torch.float64
    torch.testing.assert_close(first.double(), second, rtol=1e-4, atol=1e-5)
    held = recorder._compiled
    recorder(to_batch(images[:4].double()))
    assert recorder._compiled is held


def test_an_activation_without_inputs_is_told():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

        def forward(self, x):
            return self.fc(self.conv(x).mean((0, 2, 3)))

    model = Pooled()
    with pytest.raises(
        InputError, match="Expected layer 'fc' to have a tensor of inputs and channels, but it has none"
    ):
        Recorder(model, select_layers(model, ["fc"]))(to_batch(torch.rand(5, 3, 8, 8)))


class TorchRuntimeError(RuntimeError):
    """As the compiler's: it tells of its graph first."""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            TorchRuntimeError("failed to run: FakeTensor(..., size=(2, 4)): got RuntimeError('mat1 shape')"),
            "RuntimeError",
        ),
        (TorchRuntimeError("failed to run: FakeTensor(..., size=(2, 4)): got NotImplementedError('no')"), None),
        (ValueError("expected 4D input (got 3D input)"), "expected 4D input"),
        (ValueError("no such mode"), None),
        (TypeError("forward() got an unexpected keyword argument 'y'"), "forward"),
        (NotImplementedError("size"), None),
    ],
)
def test_what_a_model_says_of_its_input_is_told_in_our_words(model, error, reason):
    def run():
        with translate_input_errors(model, to_batch(torch.rand(2, 4)), "x"):
            raise error

    if reason is None:
        with pytest.raises(type(error), match=re.escape(str(error))):
            run()
    else:
        with pytest.raises(
            ModelInputError, match=rf"`x` to be an input that TinyNet accepts, but got shape \(2, 4\).*: {reason}"
        ):
            run()


def test_layers_without_a_row_for_each_input_are_all_named_with_the_way_to_leave_them_out():
    class Folds(nn.Module):
        """Folds positions into the batch, as LeViT does for its batch norms."""

        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.BatchNorm2d(3)
            self.tokens = nn.ModuleList([nn.BatchNorm1d(3) for _ in range(4)])

        def forward(self, x):
            x = self.stem(x).flatten(2).transpose(1, 2)
            for norm in self.tokens:
                x = norm(x.flatten(0, 1)).reshape_as(x)
            return x.mean(1)

    model, x = Folds().eval(), torch.randn(2, 3, 4, 4)
    cure = re.escape('layers=["!tokens.*"]')
    with pytest.raises(InputError, match=rf"layer 'tokens.0', 'tokens.1', 'tokens.2' and 1 more, but .* 32\..*{cure}"):
        record(model, x)
    assert record(model, x, ["!tokens.*"]).layers == (Layer("stem", "batchnorm", 3),)
