from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from neuralmean import Detector
from neuralmean.errors import InputError, ModelMismatchError
from neuralmean.models.fingerprint import WeightsGuard, fingerprint, settings_digest


def test_the_same_weights_have_the_same_fingerprint(model):
    assert fingerprint(model) == fingerprint(copy.deepcopy(model)) == fingerprint(nn.DataParallel(model))
    assert fingerprint(model) == fingerprint(model.to(memory_format=torch.channels_last))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.fc.bias.add_(1e-6),
        lambda m: m.bn1.running_mean.add_(1e-6),
        lambda m: setattr(m, "fc", nn.Linear(6, 3)),
        lambda m: setattr(m.fc, "bias", nn.Parameter(m.fc.bias.detach() + 1)),
        lambda m: m.load_state_dict({name: value + 1 for name, value in m.state_dict().items()}),
        lambda m: setattr(m.fc, "bias", None),
        lambda m: m.fc.register_buffer("further", torch.ones(2)),
    ],
    ids=["parameter", "buffer", "module", "replaced", "loaded", "removed", "added"],
)
def test_a_change_is_noticed(model, change):
    watch = WeightsGuard(model)
    watch.check()
    with torch.no_grad():
        change(model)
    assert fingerprint(model) != watch.digest
    with pytest.raises(ModelMismatchError, match="the model's weights have changed since"):
        watch.check()


def test_the_same_weights_loaded_again_are_fine(model):
    watch = WeightsGuard(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    watch.check()
    model.to(torch.float64).to(torch.float32)
    watch.check()


def test_weights_made_in_inference_mode_are_watched_too(model):
    with torch.inference_mode():
        made = copy.deepcopy(model)
    assert made.fc.bias.is_inference()
    watch = WeightsGuard(made)
    watch.check()
    made.fc.bias = nn.Parameter(torch.ones(3))
    with pytest.raises(ModelMismatchError, match="the model's weights have changed since"):
        watch.check()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_pass_in_training_mode_is_noticed(mode):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    watch = WeightsGuard(model)
    model.train()
    with mode():
        model(torch.rand(4, 3, 8, 8))
    model.eval()
    with pytest.raises(ModelMismatchError):
        watch.check()


def test_a_copy_knows_the_weights_that_were_and_not_those_that_are():
    model = nn.Sequential(nn.Linear(2, 2))
    watch = WeightsGuard(model)
    copied = copy.deepcopy(watch)
    copied.check()
    with torch.no_grad():
        model[0].weight.add_(1)  # nobody has looked since
    late = copy.deepcopy(watch)
    with pytest.raises(ModelMismatchError):
        late.check()
    copied.check()  # it has a model of its own


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_part_is_watched():
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    watch = WeightsGuard(model)
    watch.check()
    with torch.no_grad():
        model[1].weight.add_(1)
    with pytest.raises(ModelMismatchError):
        watch.check()


def test_a_buffer_that_is_one_number_of_many_is_looked_at_too():
    model = nn.Linear(2, 1)
    numbers = torch.arange(6.0).reshape(1, 2, 3)
    model.register_buffer("one", numbers[:, 1, 2])  # contiguous, with a stride of 6
    before = fingerprint(model)
    numbers[0, 1, 2] = 7
    assert fingerprint(model) != before


def _fused_step(kind):
    def step(model):
        optimizer = kind(model.parameters(), lr=0.1, fused=True)
        model(torch.rand(4, 3, 8, 8)).sum().backward()
        optimizer.step()

    return step


def _write_by_numpy(model):
    model.conv1.weight.detach().numpy()[...] = 7


def _write_to_bfloat16(model):
    model.fc.weight.detach().view(torch.int32).numpy()[...] = 7


@pytest.mark.parametrize(
    "change",
    [
        _fused_step(torch.optim.Adam),
        _fused_step(torch.optim.SGD),
        _write_by_numpy,
        _write_to_bfloat16,
        lambda m: m.conv1.weight.data.mul_(2),
        lambda m: m.bn2.running_mean.numpy().fill(3),
    ],
    ids=["fused_adam", "fused_sgd", "numpy", "viewed", "data", "numpy_buffer"],
)
def test_a_write_that_torch_does_not_count_is_noticed_on_the_cpu(model, change):
    watch = WeightsGuard(model)
    watch.check()
    change(model)
    with pytest.raises(ModelMismatchError, match="the model's weights have changed since"):
        watch.check()


class _Louder(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.bn1, "eps", 1.0),
        lambda m: setattr(m.conv1, "stride", (2, 2)),
        lambda m: setattr(m.conv1, "padding_mode", "circular"),
        lambda m: setattr(m, "relu", nn.GELU()),
        lambda m: setattr(m.conv1, "forward", lambda x: x),
        lambda m: setattr(m, "forward", lambda x: x),
        lambda m: setattr(m.conv1, "__class__", _Louder),
    ],
    ids=["eps", "stride", "padding_mode", "module", "forward", "own_forward", "class"],
)
def test_other_settings_and_other_code_are_noticed(model, change):
    watch = WeightsGuard(model)
    change(model)
    for _ in range(2):
        with pytest.raises(ModelMismatchError, match="a layer, its settings or its `forward` have changed since"):
            watch.check()


OF_TORCH = {
    "alpha": (nn.ELU(), 0.5),
    "max_val": (nn.ReLU6(), 3.0),
    "beta": (nn.Softplus(), 2),
    "lambd": (nn.Softshrink(), 0.1),
    "value": (nn.Threshold(0.1, 0.0), 1.0),
    "divisor_override": (nn.AvgPool2d(2), 3),
    "batch_first": (nn.MultiheadAttention(4, 2), True),
    "size": (nn.Upsample(size=(4, 4)), (8, 8)),
    "track_running_stats": (nn.InstanceNorm2d(3, track_running_stats=True), False),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_other_settings_of_layers_of_torch_are_noticed(name):
    module, value = OF_TORCH[name]
    model = nn.Sequential(module, nn.Linear(4, 4))
    guard = WeightsGuard(model)
    before = settings_digest(model)
    setattr(module, name, value)
    assert settings_digest(model) != before
    with pytest.raises(ModelMismatchError, match="a layer, its settings or its `forward` have changed since"):
        guard.check()


def test_usual_settings_of_layers_of_torch_are_left_out(monkeypatch):
    layers = [
        nn.BatchNorm2d(3),
        nn.ReLU6(),
        nn.ELU(),
        nn.Softplus(),
        nn.MaxPool2d(2),
        nn.AvgPool2d(2),
        nn.Embedding(3, 4),
    ]
    model = nn.Sequential(
        *layers, nn.Upsample(scale_factor=2), nn.MultiheadAttention(4, 2), nn.TransformerEncoderLayer(4, 2)
    )
    before = settings_digest(model)
    monkeypatch.setattr("neuralmean.models.fingerprint._SETTINGS_OF_TORCH", {})
    assert settings_digest(model) == before


def test_what_a_module_remembers_of_a_pass_is_no_change(model):
    model.size = model.value = 3
    watch = WeightsGuard(model)
    model.size, model.value = 4, 5
    model.seen = torch.ones(3)
    model.bn1.momentum = 0.5
    watch.check()
    model.train()
    watch.check()


def test_settings_do_not_depend_on_names_of_classes_or_wrappers(model):
    own = type("Renamed", (type(model),), {})
    renamed = copy.deepcopy(model)
    renamed.__class__ = own
    assert settings_digest(model) == settings_digest(renamed) == settings_digest(nn.DataParallel(model))
    assert settings_digest(model) == settings_digest(nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model)))


def test_a_saved_detector_is_not_loaded_for_a_model_with_other_settings(model, images, tmp_path):
    Detector(model, scorer="average").calibrate(images).save(tmp_path / "a.nmd")
    model.conv2.stride = (2, 2)
    with pytest.raises(ModelMismatchError, match="its layers have other settings, such as strides"):
        Detector.load(tmp_path / "a.nmd", model)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_model_without_values_or_with_packed_ones_is_told(model):
    with pytest.raises(InputError, match="is on the meta device"):
        Detector(model.to("meta"))
    packed = nn.Sequential(nn.BatchNorm2d(3))
    packed.register_buffer("packed", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8))
    with pytest.raises(InputError, match="'packed' is quantised"):
        Detector(packed)
    sparse = nn.Sequential(nn.BatchNorm2d(3))
    sparse.register_buffer("many", torch.eye(2).to_sparse())
    with pytest.raises(InputError, match="'many' is sparse or nested"):
        Detector(sparse)


def test_bfloat16_and_strided_weights_have_probes():
    model = nn.Linear(64, 3).to(torch.bfloat16)
    model.weight = nn.Parameter(model.weight.detach().t())
    watch = WeightsGuard(model)
    model.weight.detach().view(torch.int16).numpy()[...] = 5
    with pytest.raises(ModelMismatchError):
        watch.check()
