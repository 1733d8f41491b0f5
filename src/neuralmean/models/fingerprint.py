"""Detects changes to a model's weights, settings and code."""

from __future__ import annotations

import hashlib
import operator
from itertools import chain, compress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from neuralmean.errors import InputError, ModelMismatchError
from neuralmean.files.artefact import add_tensor
from neuralmean.models.layers import unwrap

_version = operator.attrgetter("_version")
_values_of = operator.methodcaller("values")  # a scripted module has no plain dicts
_bytes_of = operator.methodcaller("tobytes")

# Attributes of modules that change what the module computes. The list is fixed so that saved files can be compared
# across versions of torch.
_SETTINGS = (
    "align_corners",
    "approximate",
    "ceil_mode",
    "count_include_pad",
    "dilation",
    "dim",
    "end_dim",
    "eps",
    "groups",
    "head_dim",
    "kernel_size",
    "mode",
    "negative_slope",
    "norm_first",
    "normalized_shape",
    "num_groups",
    "num_heads",
    "output_padding",
    "output_size",
    "padding",
    "padding_mode",
    "scale",
    "scale_factor",
    "start_dim",
    "stride",
    "upscale_factor",
)
# Attributes with names that modules of other packages may use for anything: they count in layers of torch only. With each
# its usual value, which is left out of the digest.
_SETTINGS_OF_TORCH: dict[str, Any] = {
    "alpha": 1.0,
    "batch_first": False,
    "beta": 1.0,
    "bidirectional": False,
    "divisor_override": None,
    "downscale_factor": None,
    "k": None,
    "lambd": 0.5,
    "lower": None,
    "max_norm": None,
    "max_val": 6.0,
    "min_val": 0.0,
    "nonlinearity": None,
    "norm_type": 2.0,
    "num_layers": 1,
    "recompute_scale_factor": None,
    "return_indices": False,
    "size": None,
    "threshold": 20.0,
    "track_running_stats": True,
    "unflattened_size": None,
    "upper": None,
    "value": None,
}
_ALWAYS_COUNTS = object()
_PLAIN = (bool, int, float, str, type(None))
_N_PROBES = 8


def fingerprint(model: nn.Module) -> str:
    """Return a digest of every parameter and buffer of `model`: names, types, shapes and values.

    Raises:
        InputError: The model's weights cannot be read: they are on the meta device, sparse or quantised.
    """
    digest = hashlib.sha256()
    for name, value in sorted(unwrap(model).state_dict().items()):
        if isinstance(value, Tensor):
            _check_readable(name, value)
            add_tensor(digest, name, value)
    return digest.hexdigest()


def settings_digest(model: nn.Module) -> str:
    """Return a digest of the settings of the torch layers in `model`: kinds, strides, padding, epsilons and so on.

    Classes of other packages are left out, so that code may be moved or renamed; their settings count.
    """
    described = [
        f"{name}:{_kind(module)}:{_settings(module)!r}" for name, module in unwrap(model).named_modules() if name
    ]
    return hashlib.sha256("\n".join(described).encode()).hexdigest()


class WeightsGuard:
    """Detects when a model has changed.

    A check takes microseconds if nothing has changed. It detects tensors that were replaced, moved or written to,
    modules that were added, removed or replaced, changed settings (`eps`, `stride` and the like), and a replaced
    `forward` or class. On the CPU it also compares a few numbers of each tensor, which reveals writes that torch does
    not count: fused optimizers, numpy, `.data`.

    It cannot detect such writes on another device or to numbers that are not probed, forward hooks, replaced functions
    that a module calls (such as the activation function of a transformer layer), and settings of modules that are not
    torch's under names that torch does not use.
    """

    def __init__(self, model: nn.Module) -> None:
        self._core = unwrap(model)
        self.digest = fingerprint(model)
        self.settings = settings_digest(model)
        self._remember()

    def __reduce__(self) -> tuple[Any, ...]:
        # For copies and other processes: a copy compares the weights once before it relies on them.
        return WeightsGuard, (self._core,), {"digest": self.digest, "settings": self.settings, "_mark": None}

    def check(self) -> None:
        """Raise `ModelMismatchError` if the model has changed."""
        found = self._values()
        if (
            not any(self._empty)
            and self._are_held(found)
            and self._mark_of(found) == self._mark
            and b"".join(map(_bytes_of, self._probes)) == self._probed
            and list(map(len, self._attributes)) == self._lengths
            and list(map(type, self._modules)) == self._types
            and [get(own) for get, own in self._getters] == self._settings
        ):
            return
        if fingerprint(self._core) != self.digest:
            raise ModelMismatchError(
                "Expected the weights that the detector was made for, but the model's weights have changed since. "
                "Make a new Detector and `fit` it."
            )
        if settings_digest(self._core) != self.settings or (
            self._mark is not None and _code(self._core) != self._codes
        ):
            raise ModelMismatchError(
                "Expected the layers that the detector was made for, but a layer, its settings or its `forward` have "
                "changed since. Make a new Detector and `fit` it."
            )
        self._remember()

    def _remember(self) -> None:
        modules = list(self._core.modules())
        stores: list[dict[str, Any]] = [store for m in modules for store in (m._parameters, m._buffers, m._modules)]
        self._stores = [store for store in stores if store]
        self._empty = [store for store in stores if not store]  # half of them, and faster to iterate
        self._held = self._values()
        # A batch norm in training mode writes its running mean without telling torch: only its batch counter shows it.
        self._are_watched = [isinstance(value, Tensor) for value in self._held]
        # A tensor of inference mode has no version.
        pairs = zip(self._held, self._are_watched, strict=True)
        self._are_counted = [watched and not value.is_inference() for value, watched in pairs]
        self._mark: int | None = self._mark_of(self._held)
        self._probes = [probe for value in compress(self._held, self._are_watched) if len(probe := _probe(value))]
        self._probed = b"".join(map(_bytes_of, self._probes))
        self._remember_code(modules)

    def _remember_code(self, modules: list[nn.Module]) -> None:
        self._modules, self._attributes = modules, [vars(module) for module in modules]
        self._lengths, self._types = list(map(len, self._attributes)), list(map(type, modules))
        named = [(own, _names_of_settings(module)) for own, module in zip(self._attributes, modules, strict=True)]
        self._getters = [(operator.itemgetter(*names), own) for own, names in named if names]
        self._settings = [get(own) for get, own in self._getters]
        self._codes = _code(self._core)

    # The following runs before every forward pass, so it avoids Python code per tensor.
    def _values(self) -> list[Any]:
        return list(chain.from_iterable(map(_values_of, self._stores)))

    def _are_held(self, found: list[Any]) -> bool:
        try:
            return found == self._held  # identity first: equality is slow
        except Exception:  # comparing tensors returns a tensor  # noqa: BLE001
            return False

    def _mark_of(self, values: list[Any]) -> int:
        """Return a hash of the tensors' addresses and version counters."""
        places = map(Tensor.data_ptr, compress(values, self._are_watched))
        return hash((*places, *map(_version, compress(values, self._are_counted))))


def _check_readable(name: str, value: Tensor) -> None:
    if value.is_meta:
        raise InputError(
            f"Expected a model with weights, but {name!r} is on the meta device. Load the weights, or move the model with "
            "`to_empty` and initialise it."
        )
    if value.layout != torch.strided or value.is_nested or value.is_quantized:
        kind = "quantised" if value.is_quantized else "sparse or nested"
        raise InputError(
            f"Expected a model with dense weights of floating-point numbers, but {name!r} is {kind}. Make the detector for the "
            "model as it was before the conversion."
        )


def _probe(value: Tensor) -> np.ndarray[Any, Any]:
    """Return a view of a few numbers of a tensor on the CPU as bytes; empty for other tensors."""
    size = value.numel() * value.element_size()
    if value.device.type != "cpu" or value.layout != torch.strided or value.is_quantized or not size:
        return np.empty(0, np.uint8)
    held = torch.empty(0, dtype=torch.uint8).set_(value.detach().untyped_storage()).numpy()
    start = value.storage_offset() * value.element_size()
    rows = held[start : start + size]  # for a tensor with gaps, the beginning of its memory
    rows = rows[: len(rows) // value.element_size() * value.element_size()].reshape(-1, value.element_size())
    return rows[:: max(1, -(-len(rows) // _N_PROBES))]


def _kind(module: nn.Module) -> str:
    if isinstance(module, _BatchNorm):
        return "BatchNorm"  # synchronised or not, it is the same in evaluation mode
    kind = type(module)
    return kind.__name__ if kind.__module__.startswith("torch.nn.") else ""


def _names_of_settings(module: nn.Module) -> tuple[str, ...]:
    names = (*_SETTINGS, *_SETTINGS_OF_TORCH) if _kind(module) else _SETTINGS
    own = vars(module)
    return tuple(name for name in names if name in own)


def _settings(module: nn.Module) -> dict[str, Any]:
    own = vars(module)
    plain = {name: own[name] for name in _names_of_settings(module) if _is_plain(own[name])}
    return {name: value for name, value in plain.items() if value != _SETTINGS_OF_TORCH.get(name, _ALWAYS_COUNTS)}


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _code(core: nn.Module) -> list[tuple[Any, Any]]:
    """Return what runs when each module is called: its class, and its own `forward` if it has one."""
    return [(type(module), vars(module).get("forward")) for module in core.modules()]
