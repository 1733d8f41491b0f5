"""Running a model: evaluation mode, device, compilation, and helpful errors."""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Iterable, Mapping
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from neuralmean.data.batch import Batch
from neuralmean.errors import InputError, ModelInputError
from neuralmean.models.layers import WRAPPERS, unwrap

_training = operator.itemgetter("training")
_values_of = operator.methodcaller("values")
_eval_lock = threading.Lock()
# Modules in training mode that threads keep in evaluation mode, by id, and how many threads.
_eval_users: dict[int, int] = {}


class Modules(list[nn.Module]):
    """Every module of a model, with a cheap check before each pass that the list is still complete."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__(core.modules())
        self.core = core
        stores: list[Mapping[str, nn.Module | None]] = [module._modules for module in self]
        self._leaves = [children for children in stores if not children]  # faster to iterate
        self._children = [children for children in stores if children]
        self._known = [dict(children) for children in self._children]
        self._tensors: list[dict[str, Any]] = [own for m in self for own in (m._parameters, m._buffers) if own]
        attributes = [vars(module) for module in self]
        self._flags = [own for own in attributes if "training" in own]  # a scripted module stores them elsewhere
        self._others = [module for module, own in zip(self, attributes, strict=True) if "training" not in own]

    def are_all(self) -> bool:
        """Return whether no module was added, replaced or removed."""
        return not any(self._leaves) and self._children == self._known

    def tensors(self) -> list[Tensor | None]:
        """Return every current parameter and buffer."""
        return list(chain.from_iterable(map(_values_of, self._tensors)))

    def are_training(self) -> bool:
        """Return whether any module is in training mode."""
        return any(map(_training, self._flags)) or any(module.training for module in self._others)


class eval_mode:  # noqa: N801 - reads as what it does; a generator would take twice as long
    """Keep a model in evaluation mode inside the block; the last of several threads to leave restores the flags."""

    __slots__ = ("_held", "_modules")

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._held: list[nn.Module] = []  # whose flags are to be restored

    def __enter__(self) -> None:
        modules = self._modules
        with _eval_lock:
            if not _eval_users and not modules.are_training():
                return
            self._held = [module for module in modules if module.training or id(module) in _eval_users]
            for module in self._held:
                _eval_users[id(module)] = _eval_users.get(id(module), 0) + 1
                module.training = False

    def __exit__(self, *_: object) -> None:
        if not self._held:
            return
        with _eval_lock:
            for module in self._held:
                _eval_users[id(module)] -= 1
                if not _eval_users[id(module)]:
                    del _eval_users[id(module)]
                    module.training = True


def shared_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model with its own modules, hooks and flags that shares the model's tensors.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> other = shared_copy(model)
        >>> other is model, other.weight is model.weight
        (False, True)

    Raises:
        InputError: The model holds a computed tensor, which torch cannot copy, or another object that cannot be copied.
    """
    try:
        return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    except TypeError as error:  # locks, files, generators
        raise InputError(
            f"Expected a model that can be copied, but {type(model).__name__} cannot: {error}. Keep that outside of the model."
        ) from error
    except RuntimeError as error:
        if "deepcopy" not in str(error):
            raise
        raise InputError(
            f"Expected a model that can be copied, but {type(model).__name__} holds a tensor that it computed: an activation, "
            "or a weight of old-style `weight_norm` or `prune`. Detach it, or make it permanent."
        ) from error


def device_of(modules: Iterable[nn.Module]) -> torch.device:
    """Return the device of the first parameter or buffer of these modules."""
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                return tensor.device
    return torch.device("cpu")


def check_device(device: str | torch.device) -> torch.device:
    """Return the device, or raise if tensors cannot be moved to it.

    Raises:
        InputError: There is no such device on this machine.
    """
    try:
        found = torch.device(device)
        torch.zeros(1).to(found).cpu()  # the meta device fails at the last step
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error).strip().splitlines() or [""])[0][:150].rstrip(".")
        raise InputError(
            f"Expected a device of this machine, such as 'cpu' or 'cuda:0', but got {str(device)!r} ({reason})."
        ) from error
    return found


def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` was applied to `model`, or to what it wraps."""
    while isinstance(model, WRAPPERS):
        if _is_compiled_in_place(model):
            return True
        model = model.module
    return "_orig_mod" in model._modules or _is_compiled_in_place(model)


def _is_compiled_in_place(module: nn.Module) -> bool:
    """Whether a module's own `compile` was called."""
    call = module._compiled_call_impl
    return call is not None and not isinstance(call, MethodType)


def uncompiled(model: nn.Module) -> nn.Module:
    """Return a model that runs layer by layer: a copy with the same tensors if any part was compiled."""
    core = unwrap(model)
    return shared_copy(core) if is_compiled(model) or any(map(_is_compiled_in_place, core.modules())) else model


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_SIGNS = {
    "RuntimeError": (
        "channels",
        "size",
        "dimension",
        "shape",
        "same dtype",
        "should be the same",
        "scalar type",
        "D input",
    ),
    "TypeError": ("argument",),
}
_SIGNS["ValueError"] = _SIGNS["TorchRuntimeError"] = _SIGNS["RuntimeError"]


class translate_input_errors:  # noqa: N801 - as `eval_mode`
    """Translate errors of a model about its input inside the block; other errors pass unchanged.

    Args:
        core: The model.
        batch: The inputs.
        name: Name of the inputs in error messages.

    Raises:
        ModelInputError: The input has a shape or type that the model cannot take.
    """

    __slots__ = ("_batch", "_core", "_name")

    def __init__(self, core: nn.Module, batch: Batch, name: str) -> None:
        self._core, self._batch, self._name = core, batch, name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is None or not (kind.__name__ in _SIGNS or issubclass(kind, InputError)):
            return
        said, hint = str(error), self._hint()
        if kind.__name__ == "TorchRuntimeError":  # the compiler's message begins with the whole graph
            said = said.partition(": got ")[2] or said
        is_about_input = any(sign in said for sign in _SIGNS.get(kind.__name__, ()))
        if not (is_about_input or (hint and issubclass(kind, InputError))):
            return
        x, reason = self._batch.first, said.splitlines()[0][:200].rstrip(".")
        raise ModelInputError(
            f"Expected `{self._name}` to be an input that {type(self._core).__name__} accepts, but got "
            f"{'a list of images' if self._batch.images else 'shape'} {tuple(x.shape)} of {x.dtype}: {reason}.{hint}"
        ) from error

    def _hint(self) -> str:
        """Return a sentence on what may be wrong with the shape; empty if that is unknown."""
        if self._batch.images is not None:
            return " If the model takes images of one size, pass `torch.stack(images)`."
        for module in self._core.modules():
            if isinstance(module, _CONVOLUTIONS):
                n_dims = len(module.kernel_size) + 2
                is_one = self._batch.first.dim() == n_dims - 1
                return f" Is it one input without a batch dimension? Pass `{self._name}[None]`." if is_one else ""
        return ""
