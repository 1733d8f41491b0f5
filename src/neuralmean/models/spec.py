"""Turns a model spec, typed by a user or read from a saved file, into a model with weights and preprocessing.

A spec is `package.module:callable` (called without arguments), `timm:NAME`, `torchvision:NAME`, `bench:NAME` or `hf:DIR`,
a folder of a model of Hugging Face. Nothing is ever downloaded and nothing unpickled: weights come from a safetensors file
or a torch file with tensors only.

A spec from a saved file is not trusted. With `trusted=False` it may name a model of timm,
torchvision or the benchmark, the folder of a model whose class is that of the installed transformers, or a subclass of
`nn.Module` in an installed package, and nothing else: no function, and nothing of the standard library or this library.
Modules of the working folder are not even imported unless the user allows it (`local_code=True`).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from neuralmean.data.preprocessing import Preprocessing, import_quietly
from neuralmean.errors import ArtefactError, InputError
from neuralmean.models.huggingface import Tokenizer, load_folder
from neuralmean.models.layers import has_running_mean
from neuralmean.models.sources import find_source
from neuralmean.models.weights import Builder, load_weights, read_weights

__all__ = ["ResolvedModel", "is_untrained", "resolve"]

PREFIXES = ("timm", "torchvision", "bench")
FORMS = "`package.module:callable`, `timm:NAME`, `torchvision:NAME`, `bench:NAME` or `hf:DIR`"
_FOLDER = "hf"  # a folder of a Hugging Face model with weights and tokenizer
_TRUSTED, _LOCAL, _INSTALLED = "trusted", "local", "installed"
DEMO = "neuralmean.cli.demo:DigitNet"  # the part of this library that a saved file may name
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class ResolvedModel:
    """A model with weights and preprocessing.

    Attributes:
        model: The model, in eval mode, on the CPU.
        spec: The spec that it was built from.
        preprocessing: The preprocessing of its images; None if unknown.
        weights_path: File of its weights; None if they are those of the callable or folder, or random.
        tokenizer: Converts texts to inputs; None if the model does not take texts.
        has_classes: False if the model is known to have no classes.
    """

    model: nn.Module
    spec: str
    preprocessing: Preprocessing | None
    weights_path: Path | None
    tokenizer: Tokenizer | None = None
    has_classes: bool = True


def resolve(
    spec: str,
    *,
    weights: str | Path | None = None,
    trusted: bool = True,
    local_code: bool = False,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    size: tuple[int, int] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> ResolvedModel:
    """Build the model that `spec` names, load its weights, and determine its preprocessing.

    Preprocessing comes from the arguments, otherwise from the metadata of a safetensors file (`mean`, `std`, `size`),
    otherwise from the `preprocessing` attribute of the callable or from timm's or torchvision's evaluation settings.
    The model of timm, torchvision or the benchmark is built with the number of classes of the weights. A model without
    weights gets random ones, with a fixed seed.

    Args:
        spec: The model; see this module's description.
        weights: A safetensors file, or a torch file with a state dict, bare or under `state_dict`.
        trusted: Whether the spec comes from the user rather than from a file.
        local_code: Whether such a spec may name a class or a function in a module of the working folder.
        mean: Mean of each channel, on a scale of 0 to 1.
        std: Standard deviation of each channel.
        size: Height and width of the model's input.
        settings: Other fields of `Preprocessing` to set: `crop`, `crop_fraction`, `interpolation`.

    Example:
        >>> resolve("torch.nn:Identity").model
        Identity()
    """
    kind, name = _split(spec)
    if kind == _FOLDER:
        return _from_folder(name, spec, weights, trusted=trusted, mean=mean, std=std, size=size)
    path = None if weights is None else Path(weights)
    with torch.random.fork_rng(devices=[]):
        rules = _TRUSTED if trusted else _LOCAL if local_code else _INSTALLED
        with _without_working_folder() if rules == _INSTALLED else nullcontext():
            build = _builder(kind, name, spec, rules)  # the first import may draw random numbers
        loaded = None if path is None else read_weights(path)
        torch.manual_seed(0)
        model = build(None)
        if loaded is not None:
            is_known = kind in PREFIXES or find_source(kind) is not None
            expected = f"Expected {str(path)!r} to hold the weights of {spec!r}"
            model = load_weights(model, loaded.tensors, rebuild=build if is_known else None, expected=expected)
    preprocessing = _preprocessing(
        _own_preprocessing(kind, name, model, build),
        {} if loaded is None else loaded.metadata,
        mean=mean,
        std=std,
        size=size,
        usual_size=None if (source := find_source(kind)) is None else source.size,
    )
    if settings:
        if preprocessing is None:
            raise InputError(
                "Expected mean, std and size of the model's images along with how they are cropped. Give them."
            )
        preprocessing = replace(preprocessing, **settings)
    model.eval()  # `eval` need not return the model
    return ResolvedModel(model, spec, preprocessing, path)


def _from_folder(
    folder: str,
    spec: str,
    weights: str | Path | None,
    *,
    trusted: bool,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    size: tuple[int, int] | None,
) -> ResolvedModel:
    if weights is not None:
        raise InputError(f"Expected {spec!r} without weights, as the folder has them. Leave the weights out.")
    model, tokenizer, has_classes = load_folder(folder, trusted=trusted)
    preprocessing = _preprocessing(None, {}, mean=mean, std=std, size=size, usual_size=None)
    return ResolvedModel(model.eval(), spec, preprocessing, None, tokenizer, has_classes)


def is_untrained(resolved: ResolvedModel) -> bool:
    """Return whether the model certainly has random weights: none were given, or its batch norms are as they were made."""
    if resolved.weights_path is not None:
        return False
    kind, _ = _split(resolved.spec)
    if kind == _FOLDER:
        return False
    if kind in PREFIXES or find_source(kind) is not None:
        return True
    # Not by their counts of batches, which files of weights often lack.
    norms: list[Any] = [module for module in resolved.model.modules() if has_running_mean(module)]
    return bool(norms) and all(bool((one.running_mean == 0).all() and (one.running_var == 1).all()) for one in norms)


def _split(spec: str) -> tuple[str, str]:
    kind, mark, name = spec.partition(":")
    if not mark or not kind or not name:
        hint = f" Did you mean 'timm:{spec}'?" if re.fullmatch(r"[a-z0-9_.]+", spec) else ""
        raise InputError(f"Expected a model as {FORMS}, but got {spec!r}.{hint}")
    if kind.endswith(".py") or "/" in kind or "\\" in kind:
        module = kind.replace("\\", "/").removesuffix(".py").strip("./").replace("/", ".")
        raise InputError(f"Expected a module and not a file, but got {spec!r}. Did you mean '{module}:{name}'?")
    return kind, name


def _builder(kind: str, name: str, spec: str, rules: str) -> Builder:
    if kind == "timm":
        return _timm_builder(name)
    if kind == "torchvision":
        return _torchvision_builder(name)
    if (source := find_source(kind)) is not None:
        return source.builder(name)
    factory = _find_callable(kind, name, spec, rules)

    def build(classes: int | None) -> nn.Module:
        return _call(factory, spec)

    build.preprocessing = getattr(factory, "preprocessing", None)  # type: ignore[attr-defined]
    return build


def _timm_builder(name: str) -> Builder:
    timm = import_quietly("timm", "timm")
    # `hf-hub:` and `local-dir:` names would make timm fetch a model; only registered names pass.
    if not re.fullmatch(r"[\w.-]+", name) or not timm.is_model(name):
        raise InputError(
            f"Expected the name of a timm model, but got {name!r}.{_did_you_mean(name, timm.list_models())}"
        )

    def build(classes: int | None) -> nn.Module:
        try:
            model: nn.Module = timm.create_model(
                name, pretrained=False, **({} if classes is None else {"num_classes": classes})
            )
        except RuntimeError as error:
            raise InputError(f"Expected the name of a timm model, but got {name!r}: {error}") from error
        return model

    return build


def _torchvision_builder(name: str) -> Builder:
    models = import_quietly("torchvision.models", "torchvision")
    known = models.list_models()
    if name not in known:
        raise InputError(f"Expected the name of a torchvision model, but got {name!r}.{_did_you_mean(name, known)}")
    options: dict[str, Any] = {"weights": None}
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        options["weights_backbone"] = None  # otherwise torchvision downloads the backbone of a detector
    if name in ("inception_v3", "googlenet"):
        options["init_weights"] = False  # otherwise it warns, and initialises weights for half a minute

    def build(classes: int | None) -> nn.Module:
        model: nn.Module = models.get_model(name, **options, **({} if classes is None else {"num_classes": classes}))
        return model

    return build


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    by_lower = {one.lower(): one for one in known}
    close = [by_lower[match] for match in difflib.get_close_matches(name.lower(), list(by_lower), n=3)]
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def _find_callable(module_name: str, name: str, spec: str, rules: str) -> Any:
    if not _DOTTED.fullmatch(module_name) or not _DOTTED.fullmatch(name):
        raise InputError(f"Expected a model as {FORMS}, but got {spec!r}.")
    if rules != _TRUSTED:
        _refuse_foreign_module(module_name, name, spec)
    if rules == _INSTALLED and spec != DEMO and not _is_installed(module_name):
        raise InputError(
            f"Expected the file to name a model of an installed package, but it names {spec!r}. If the file and the code in this "
            "folder are yours, name the model with --model, or pass --trust-local-code."
        )
    module = _import(module_name, spec, local=rules != _INSTALLED)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise InputError(
                f"Expected {module_name!r} to have {name!r}, but it does not.{_did_you_mean(part, dir(found))}"
            )
        found = getattr(found, part)
    if rules != _TRUSTED:
        _refuse_foreign_object(module, found, spec, may_be_function=rules == _LOCAL)
    if not callable(found):
        raise InputError(
            f"Expected {spec!r} to be something that makes a model, but it is of type {type(found).__name__}."
        )
    return found


def _import(name: str, spec: str, *, local: bool) -> ModuleType:
    # As with `python -m`, modules of the working folder can be named.
    folder = str(Path.cwd())
    if local and folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise InputError(
                f"Expected to import {name!r} for {spec!r}, but it needs {error.name!r}, which is not installed."
            ) from error
        hint = _did_you_mean(name, PREFIXES)
        raise InputError(
            f"Expected a model as {FORMS}, but got {spec!r} and there is no module {name!r}.{hint} "
            "Install it, or run this in the folder that holds it."
        ) from error
    except Exception as error:
        raise InputError(
            f"Expected to import {name!r} for {spec!r}, but it raised {type(error).__name__}: {error}"
        ) from error


def _refuse_foreign_module(module: str, name: str, spec: str) -> None:
    """Raise, before anything is imported, for a module that a file may not name."""
    parts = module.split(".")
    if spec == DEMO:
        return
    if parts[0] in sys.stdlib_module_names or parts[0] in sys.builtin_module_names or parts[0] == "neuralmean":
        raise InputError(
            f"Expected the file to name a model, but it names {spec!r}, which is part of Python or of this library. "
            "Do not use the file, or name the model yourself."
        )
    if "." in name or any(part.startswith("__") for part in (*parts, name)):
        raise InputError(
            f"Expected the file to name a model, but it names {spec!r}. Do not use the file, or name the model yourself."
        )


def _is_installed(module: str) -> bool:
    """Whether a module belongs to an installed distribution, found without importing anything."""
    return module.split(".")[0] in importlib.metadata.packages_distributions()


@contextmanager
def _without_working_folder() -> Generator[None]:
    """Exclude the working folder from imports in this block: it may hold what looks like an installed package."""
    before = sys.path[:]
    here = Path.cwd().resolve()
    sys.path[:] = [entry for entry in before if entry and Path(entry).resolve() != here]
    try:
        yield
    finally:
        sys.path[:] = before


def _refuse_foreign_object(module: ModuleType, found: Any, spec: str, *, may_be_function: bool) -> None:
    if isinstance(found, type) and issubclass(found, nn.Module):
        return
    if not may_be_function:
        raise InputError(
            f"Expected the file to name a class derived from `nn.Module`, but it names {spec!r}. If you trust it, name the model "
            "with --model."
        )
    installed = {"site-packages", "dist-packages"} & set(Path(module.__file__ or "site-packages").parts)
    if not (inspect.isfunction(found) and found.__module__ == module.__name__) or installed:
        raise InputError(
            f"Expected the file to name an `nn.Module` class or a function of your own modules, but it names {spec!r}. "
            "If you trust it, name the model yourself."
        )


def _call(factory: Any, spec: str) -> nn.Module:
    if isinstance(factory, nn.Module):
        return factory
    try:
        model = factory()
    except Exception as error:
        raise InputError(
            f"Expected {spec!r} to make a model when called without arguments, but it raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise InputError(f"Expected {spec!r} to return a torch.nn.Module, but it returned {type(model).__name__}.")
    return model


def _own_preprocessing(kind: str, name: str, model: nn.Module, build: Builder) -> Preprocessing | None:
    said = getattr(build, "preprocessing", None)
    if isinstance(said, Preprocessing):
        return said
    if isinstance(said, Mapping):
        return Preprocessing.from_json(said)
    try:
        if kind == "torchvision":
            return Preprocessing.for_torchvision(name)
        return Preprocessing.for_timm(model) if getattr(model, "pretrained_cfg", None) else None
    except (InputError, KeyError, TypeError):
        return None  # unknown for detection models and models without published weights


def _preprocessing(
    own: Preprocessing | None,
    metadata: dict[str, str],
    *,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    size: tuple[int, int] | None,
    usual_size: tuple[int, int] | None,
) -> Preprocessing | None:
    mean = mean if mean is not None else _numbers(metadata, "mean")
    std = std if std is not None else _numbers(metadata, "std")
    size = size if size is not None else _size(metadata)
    if mean is None and std is None and size is None:
        return own
    if own is None and (mean is None or std is None):
        missing = " and ".join(key for key, value in (("mean", mean), ("std", std)) if value is None)
        raise InputError(f"Expected mean and std of the model's images, but got no {missing}. Give both.")
    if own is None:
        return Preprocessing(size or usual_size, tuple(mean or ()), tuple(std or ()), channels=len(mean or ()))
    mean, std = tuple(own.mean if mean is None else mean), tuple(own.std if std is None else std)
    return replace(own, size=size or own.size, mean=mean, std=std, channels=len(mean))


def _numbers(metadata: dict[str, str], key: str) -> tuple[float, ...] | None:
    """Parse numbers such as `0.5,0.5,0.5`, with or without brackets."""
    if key not in metadata:
        return None
    try:
        return tuple(float(part) for part in re.split(r"[,x\s]+", metadata[key].strip("[]() ")))
    except ValueError as error:
        raise ArtefactError(
            f"Expected the {key!r} that the weights file gives to be numbers, but got {metadata[key]!r}. "
            "Give mean, std and size yourself."
        ) from error


def _size(metadata: dict[str, str]) -> tuple[int, int] | None:
    sides = _numbers(metadata, "size")
    return None if sides is None else (int(sides[0]), int(sides[-1]))
