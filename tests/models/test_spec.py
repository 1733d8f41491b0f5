import re
import socket
import sys
import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import ArtefactError, InputError, MissingExtraError
from neuralmean.models.spec import ResolvedModel, is_untrained, resolve
from neuralmean.models.weights import load_weights, read_weights

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}

USER_MODULE = """
import functools
import os
import subprocess
from torch import nn
from collections import OrderedDict


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 3)
        self.bn = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.bn(self.fc(x))

    @classmethod
    def large(cls):
        return cls()


def build():
    return Net()


def needs_more(depth):
    return Net()


def not_a_model():
    return {"weights": 1}


built = Net()
number = 3
imported_function = os.getcwd
partial = functools.partial(build)
plain_class = OrderedDict
"""


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(autouse=True)
def _own_path(monkeypatch):
    """Whatever a test imports from its folder is forgotten after it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("user_"):
            del sys.modules[name]


@pytest.fixture
def user_code(tmp_path, monkeypatch):
    (tmp_path / "user_models.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def timm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("timm")


@pytest.fixture(scope="module")
def torchvision():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torchvision.models")


def _net_state(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {
        "fc.weight": torch.randn(3, 2, generator=generator),
        "fc.bias": torch.randn(3, generator=generator),
        "bn.weight": torch.ones(3),
        "bn.bias": torch.zeros(3),
        "bn.running_mean": torch.randn(3, generator=generator),
        "bn.running_var": torch.ones(3),
    }


class TestOwnCode:
    @pytest.mark.parametrize("name", ["Net", "build", "built", "Net.large", "partial"])
    def test_a_class_a_function_or_a_model_of_the_working_folder(self, user_code, name):
        found = resolve(f"user_models:{name}")
        assert type(found.model).__name__ == "Net"
        assert not found.model.training
        assert (found.spec, found.preprocessing, found.weights_path) == (f"user_models:{name}", None, None)

    def test_a_module_in_a_package(self, user_code):
        (user_code / "user_package").mkdir()
        (user_code / "user_package" / "__init__.py").write_text("")
        (user_code / "user_package" / "nets.py").write_text(USER_MODULE)
        assert type(resolve("user_package.nets:Net").model).__name__ == "Net"

    def test_a_model_without_weights_is_always_the_same_and_chance_is_left_alone(self, user_code):
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        first, second = (resolve("user_models:Net").model.fc.weight for _ in range(2))
        assert torch.equal(first, second)
        assert torch.equal(torch.rand(3), expected)

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            (
                "resnet18",
                "`bench:NAME` or `hf:DIR`, but got 'resnet18'. Did you mean 'timm:resnet18'?",
            ),
            ("My Model", "but got 'My Model'."),
            ("timm:", "Expected a model as `package.module:callable`"),
            (":Net", "Expected a model as `package.module:callable`"),
            ("user_models:Net()", "Expected a model as `package.module:callable`"),
            ("user_models:", "Expected a model as `package.module:callable`"),
            (
                "./src/user_models.py:Net",
                "Expected a module and not a file, but got './src/user_models.py:Net'. Did you mean 'src.user_models:Net'?",
            ),
            ("tim:resnet18", "there is no module 'tim'. Did you mean 'timm'?"),
            (
                "user_nowhere.nets:Net",
                "there is no module 'user_nowhere.nets'. Install it, or run this in the folder that holds it.",
            ),
            ("user_models.deeper:Net", "there is no module 'user_models.deeper'"),
            ("user_models:Nett", "Expected 'user_models' to have 'Nett', but it does not. Did you mean 'Net'?"),
            (
                "user_models:number",
                "Expected 'user_models:number' to be something that makes a model, but it is of type int.",
            ),
            (
                "user_models:not_a_model",
                "Expected 'user_models:not_a_model' to return a torch.nn.Module, but it returned dict.",
            ),
            (
                "user_models:needs_more",
                "to make a model when called without arguments, but it raised TypeError: needs_more() missing 1",
            ),
        ],
        ids=lambda value: value[:25],
    )
    def test_what_is_not_a_model_is_refused_with_a_cure(self, user_code, spec, message):
        with pytest.raises(InputError, match=re.escape(message)):
            resolve(spec)

    def test_a_module_that_raises_says_so(self, user_code):
        (user_code / "user_broken.py").write_text("raise RuntimeError('no licence')")
        with pytest.raises(InputError, match="but it raised RuntimeError: no licence"):
            resolve("user_broken:Net")

    def test_a_module_that_needs_another_names_it(self, user_code):
        (user_code / "user_needy.py").write_text("import user_absent_package")
        with pytest.raises(InputError, match="but it needs 'user_absent_package', which is not installed"):
            resolve("user_needy:Net")


class TestSpecsFromAFile:
    @pytest.mark.parametrize("name", ["Net", "build"])
    def test_the_users_own_class_or_function_is_built_if_the_user_says_so(self, user_code, name):
        found = resolve(f"user_models:{name}", trusted=False, local_code=True)
        assert type(found.model).__name__ == "Net"

    @pytest.mark.parametrize("spec", ["user_models:Net", "user_models:build", "user_trap:Net", "user_trap.inner:Net"])
    def test_nothing_of_the_working_folder_is_imported(self, user_code, spec):
        sys.modules.pop("user_models", None)
        (user_code / "user_trap.py").write_text("raise SystemExit('it was run')")
        with pytest.raises(InputError, match="to name a model of an installed package, .* pass --trust-local-code"):
            resolve(spec, trusted=False)
        assert "user_models" not in sys.modules

    def test_a_file_with_the_name_of_an_installed_package_does_not_take_its_place(self, user_code, monkeypatch):
        """In the working folder it would come first in `python -m neuralmean`."""
        (user_code / "xdist.py").write_text("raise SystemExit('it was run')")
        for name in [name for name in sys.modules if name == "xdist" or name.startswith("xdist.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(str(user_code))
        monkeypatch.syspath_prepend("")
        before = sys.path[:]
        with pytest.raises(InputError, match="Expected the file to name a class derived from `nn.Module`"):
            resolve("xdist:is_xdist_worker", trusted=False)
        assert sys.path == before

    def test_a_module_class_of_an_installed_package_is_built(self):
        assert isinstance(resolve("torch.nn:Identity", trusted=False).model, nn.Identity)

    @pytest.mark.parametrize(
        "spec",
        [
            "os:getcwd",
            "os.path:curdir",
            "subprocess:Popen",
            "builtins:exit",
            "sys:exit",
            "antigravity:geohash",
            "neuralmean.cli:main",
        ],
    )
    def test_python_and_this_library_are_refused_before_they_are_imported(self, spec):
        with pytest.raises(InputError, match="which is part of Python or of this library"):
            resolve(spec, trusted=False)
        assert "antigravity" not in sys.modules

    @pytest.mark.parametrize(
        "spec", ["user_models:Net.large", "user_models:__builtins__", "pytest.__main__:x", "__main__:x"]
    )
    def test_names_that_lead_elsewhere_are_refused(self, user_code, spec):
        with pytest.raises(InputError, match="Expected the file to name a model, but it names"):
            resolve(spec, trusted=False)

    @pytest.mark.parametrize("name", ["imported_function", "os", "partial", "plain_class", "built"])
    def test_what_is_not_the_users_own_function_is_refused(self, user_code, name):
        with pytest.raises(InputError, match="class or a function of your own modules, but it names"):
            resolve(f"user_models:{name}", trusted=False, local_code=True)

    @pytest.mark.parametrize("spec", ["torch.hub:list", "torch:manual_seed", "numpy:ndarray"])
    @pytest.mark.parametrize("local_code", [False, True])
    def test_functions_of_installed_packages_are_refused(self, spec, local_code):
        with pytest.raises(InputError, match="Expected the file to name a"):
            resolve(spec, trusted=False, local_code=local_code)

    def test_known_models_are_built(self, timm, torchvision):
        for spec in ("timm:resnet18", "torchvision:resnet18", "bench:resnet20"):
            assert isinstance(resolve(spec, trusted=False).model, nn.Module)

    @pytest.mark.parametrize(
        "name", ["hf-hub:timm/resnet18.a1_in1k", "hf_hub:a/b", "local-dir:/tmp/x", "../x", "timm/resnet18"]
    )
    def test_names_that_make_timm_fetch_something_are_refused(self, timm, name):
        with pytest.raises(InputError, match="Expected the name of a timm model, but got"):
            resolve(f"timm:{name}", trusted=False)


class TestKnownModels:
    def test_timm_models_bring_their_preprocessing(self, timm):
        found = resolve("timm:resnet18")
        assert found.preprocessing == Preprocessing((224, 224), **IMAGENET, interpolation="bicubic", crop_fraction=0.95)
        assert not found.model.training

    def test_the_tag_of_a_timm_model_chooses_its_preprocessing(self, timm):
        assert resolve("timm:resnet18.tv_in1k").preprocessing == Preprocessing(
            (224, 224), **IMAGENET, crop_fraction=0.875
        )

    def test_torchvision_models_bring_their_preprocessing(self, torchvision):
        found = resolve("torchvision:resnet18")
        assert found.preprocessing == Preprocessing((224, 224), **IMAGENET, crop_fraction=0.875)
        assert found.model.fc.out_features == 1000

    @pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
    def test_torchvision_models_with_random_weights_come_without_a_warning(self, torchvision, name):
        assert not resolve(f"torchvision:{name}").model.training

    def test_a_torchvision_detector_downloads_no_backbone_and_has_no_preprocessing(self, torchvision):
        assert resolve("torchvision:fcn_resnet50").preprocessing is None

    def test_benchmark_models_are_built(self):
        found = resolve("bench:resnet20")
        assert found.model.linear.out_features == 10
        assert found.preprocessing is None

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("timm:resnet81", "Expected the name of a timm model, but got 'resnet81'. Did you mean 'resnet"),
            (
                "timm:resnet18.nope",
                "Expected the name of a timm model, but got 'resnet18.nope': Invalid pretrained tag",
            ),
            (
                "torchvision:resnet81",
                "Expected the name of a torchvision model, but got 'resnet81'. Did you mean 'resnet",
            ),
            ("bench:resnet57", "Expected the name of a model, but got 'resnet57'. Did you mean 'resnet56'"),
        ],
    )
    def test_an_unknown_name_gets_a_suggestion(self, timm, torchvision, spec, message):
        with pytest.raises(InputError, match=re.escape(message)):
            resolve(spec)

    @pytest.mark.parametrize("package", ["timm", "torchvision"])
    def test_a_package_that_is_not_installed_is_named_with_its_cure(self, monkeypatch, package):
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingExtraError, match=f"Install it with `pip install {package}`"):
            resolve(f"{package}:resnet18")


class TestPreprocessing:
    def test_arguments_win_over_the_file_and_the_file_over_the_model(self, timm, tmp_path):
        state = resolve("timm:resnet18").model.state_dict()
        save_file(state, tmp_path / "w.safetensors", metadata={"mean": "0.1,0.2,0.3", "std": "[0.4, 0.5, 0.6]"})
        found = resolve("timm:resnet18", weights=tmp_path / "w.safetensors").preprocessing
        assert found == Preprocessing((224, 224), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bicubic", 0.95)
        found = resolve(
            "timm:resnet18", weights=tmp_path / "w.safetensors", mean=(0, 0, 0), size=(64, 96)
        ).preprocessing
        assert found == Preprocessing((64, 96), (0.0, 0.0, 0.0), (0.4, 0.5, 0.6), "bicubic", 0.95)

    def test_arguments_are_enough_for_a_model_that_says_nothing(self, user_code):
        found = resolve("user_models:Net", mean=(0.5, 0.5, 0.5), std=(1, 1, 1), size=(32, 32))
        assert found.preprocessing == Preprocessing((32, 32), (0.5, 0.5, 0.5), (1, 1, 1))
        grey = resolve("user_models:Net", mean=(0.5,), std=(1,)).preprocessing
        assert grey == Preprocessing(None, (0.5,), (1.0,), channels=1)

    def test_benchmark_weights_bring_normalisation_and_size(self, tmp_path):
        state = resolve("bench:convnet4").model.state_dict()
        save_file(state, tmp_path / "w.safetensors", metadata={"mean": "0.1,0.2,0.3", "std": "0.4,0.5,0.6"})
        found = resolve("bench:convnet4", weights=tmp_path / "w.safetensors")
        assert found.preprocessing == Preprocessing((32, 32), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))

    def test_a_file_may_say_the_size_too(self, user_code):
        metadata = {"mean": "0,0,0", "std": "1,1,1", "size": "48x64"}
        save_file(_net_state(), "w.safetensors", metadata=metadata)
        assert resolve("user_models:Net", weights="w.safetensors").preprocessing.size == (48, 64)

    def test_a_model_of_timm_from_own_code_brings_its_preprocessing(self, timm, user_code):
        (user_code / "user_timm.py").write_text("import timm\ndef build():\n    return timm.create_model('resnet18')\n")
        assert resolve("user_timm:build").preprocessing == Preprocessing.for_timm("resnet18")

    @pytest.mark.parametrize(
        "given", [{"mean": (0, 0, 0)}, {"std": (1, 1, 1)}, {"size": (32, 32)}], ids=["mean", "std", "size"]
    )
    def test_half_of_it_is_refused(self, user_code, given):
        with pytest.raises(
            InputError, match="Expected mean and std of the model's images, but got no (mean|std|mean and std)"
        ):
            resolve("user_models:Net", **given)

    def test_numbers_in_a_file_that_are_none_are_refused(self, user_code):
        save_file(_net_state(), "w.safetensors", metadata={"mean": "a,b,c", "std": "1,1,1"})
        with pytest.raises(
            ArtefactError, match="Expected the 'mean' that the weights file gives to be numbers, but got 'a,b,c'"
        ):
            resolve("user_models:Net", weights="w.safetensors")


class TestWeights:
    @pytest.mark.parametrize(
        "form", ["safetensors", "torch", "legacy", "under_state_dict", "with_other_things", "half"]
    )
    @pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "model."])
    def test_weights_end_up_in_the_model(self, user_code, form, prefix):
        state = _net_state()
        saved = {prefix + key: value for key, value in state.items()}
        path = user_code / ("w.safetensors" if form == "safetensors" else "w.pth")
        if form == "safetensors":
            save_file(saved, path)
        elif form == "half":
            torch.save({key: value.double() for key, value in saved.items()}, path)
        else:
            wrapped = {
                "torch": saved,
                "legacy": saved,
                "under_state_dict": {"state_dict": saved},
                "with_other_things": {"model_state_dict": saved, "epoch": 3},
            }[form]
            torch.save(wrapped, path, _use_new_zipfile_serialization=form != "legacy")
        found = resolve("user_models:Net", weights=path)
        assert found.weights_path == path
        for key, value in state.items():
            assert torch.equal(found.model.state_dict()[key], value)

    def test_the_content_decides_and_not_the_name(self, user_code):
        save_file(_net_state(), user_code / "w.pth")
        torch.save(_net_state(), user_code / "w.safetensors")
        for name in ("w.pth", "w.safetensors"):
            assert set(read_weights(user_code / name).tensors) == set(_net_state())

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda state: state.pop("fc.bias"), "1 missing (fc.bias)"),
            (lambda state: state.update(extra=torch.zeros(1)), "1 unknown (extra)"),
            (
                lambda state: state.update({"fc.weight": torch.zeros(5, 2)}),
                "1 of another shape (fc.weight (5, 2) for (3, 2))",
            ),
            (
                lambda state: [state.update({f"x{i}": torch.zeros(1)}) for i in range(5)] + [state.pop("bn.bias")],
                "1 missing (bn.bias), 5 unknown (x0, x1, x2, ...)",
            ),
        ],
        ids=["missing", "unknown", "shape", "several"],
    )
    def test_weights_that_do_not_fit_are_named(self, user_code, change, message):
        state = _net_state()
        change(state)
        torch.save(state, user_code / "w.pth")
        path = str(user_code / "w.pth")
        expected = f"Expected {path!r} to hold the weights of 'user_models:Net', but of its tensors {message}. Check"
        with pytest.raises(ArtefactError, match=re.escape(expected)):
            resolve("user_models:Net", weights=user_code / "w.pth")

    def test_weights_that_do_not_fit_leave_the_model_as_it_was(self):
        model = nn.Linear(2, 3)
        before = model.weight.clone()
        with pytest.raises(ArtefactError, match="missing"):
            load_weights(model, {"weight": torch.zeros(3, 2)}, expected="Expected")
        assert torch.equal(model.weight, before)

    @pytest.mark.parametrize(
        "spec", ["timm:resnet18", "torchvision:resnet18", "bench:resnet20", "torchvision:googlenet"]
    )
    def test_the_number_of_classes_is_that_of_the_weights(self, timm, torchvision, tmp_path, spec):
        kind, name = spec.split(":")
        if kind == "timm":
            model = timm.create_model(name, num_classes=7)
        elif kind == "torchvision":
            model = torchvision.get_model(
                name, weights=None, num_classes=7, **({"init_weights": False} if name == "googlenet" else {})
            )
        else:
            from neuralmean.bench import models

            model = models.build(name, num_classes=7)
        torch.save(model.state_dict(), tmp_path / "w.pth")
        found = resolve(spec, weights=tmp_path / "w.pth").model
        image = torch.rand(1, 3, 32, 32)
        assert found(image).shape == (1, 7)
        assert torch.equal(found(image), model.eval()(image))

    def test_weights_of_another_architecture_are_refused(self, timm, tmp_path):
        torch.save(timm.create_model("resnet34").state_dict(), tmp_path / "w.pth")
        with pytest.raises(ArtefactError, match=r"of its tensors \d+ unknown \(layer1\.2"):
            resolve("timm:resnet18", weights=tmp_path / "w.pth")

    def test_a_pickle_that_would_run_code_is_not_run(self, user_code):
        class Boom:
            def __reduce__(self):
                import os

                return (os.mkdir, (str(user_code / "boom"),))

        torch.save({"state_dict": Boom()}, user_code / "w.pth")
        with pytest.raises(ArtefactError, match="a torch file with nothing but tensors, but it is neither"):
            read_weights(user_code / "w.pth")
        assert not (user_code / "boom").exists()

    def test_a_whole_pickled_model_is_refused_with_a_cure(self, user_code):
        torch.save(nn.Linear(1, 1), user_code / "w.pth")
        with pytest.raises(ArtefactError, match=r"Save `model\.state_dict\(\)`, best as safetensors"):
            read_weights(user_code / "w.pth")

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda path: None, "but there is no such file"),
            (lambda path: path.write_bytes(b""), "to be a file with weights, but it cannot be read"),
            (
                lambda path: path.write_bytes(b"rubbish" * 10),
                "to be a file with weights, but it cannot be read",
            ),
            (lambda path: path.write_bytes(b"\xff" * 8 + b"{rubbish"), "to be a safetensors file, but it is damaged"),
            (lambda path: save_file({}, path), "to hold the tensors of a model, but it holds none"),
            (lambda path: torch.save({"epoch": 3}, path), "to hold the tensors of a model, but it holds none"),
            (lambda path: torch.save([1, 2], path), "to hold a state dict, but it holds a list"),
        ],
        ids=["missing", "empty", "rubbish", "damaged", "no_tensors", "no_tensors_torch", "list"],
    )
    def test_files_without_weights_are_refused(self, tmp_path, make, message):
        make(tmp_path / "w")
        with pytest.raises(ArtefactError, match=message):
            read_weights(tmp_path / "w")

    def test_a_file_that_is_cut_short_is_refused(self, user_code):
        for save, name in ((save_file, "w.safetensors"), (torch.save, "w.pth")):
            save(_net_state(), user_code / name)
            data = (user_code / name).read_bytes()
            (user_code / name).write_bytes(data[: len(data) * 2 // 3])
            with pytest.raises(ArtefactError, match="Expected"):
                read_weights(user_code / name)


@pytest.mark.real
def test_the_trained_resnet56_is_built_from_its_name_and_file(weights_root):
    found = resolve("bench:resnet56", weights=weights_root / "resnet56-cifar10.safetensors")
    assert found.preprocessing == Preprocessing((32, 32), **IMAGENET)
    assert found.model.linear.out_features == 10


def test_a_model_with_its_own_weights_is_trained_whatever_its_counts_of_batches():
    def resolved(statistics):
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        model[1].running_mean += statistics  # and no batch was counted, as in many files of weights
        return ResolvedModel(model, "mine:build", None, None)

    assert is_untrained(resolved(0.0))
    assert not is_untrained(resolved(0.5))
