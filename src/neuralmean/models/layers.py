"""Selects the layers to watch, and says how each is read.

Implements the automatic choice, the matching of names and globs, and where each kind of layer has its channels. Modules
are inspected, never run.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from neuralmean.errors import InputError, LayerNotFoundError

Kind = Literal["batchnorm", "convolution", "layernorm", "norm", "linear"]

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)  # wrappers that hold the model as `module`
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYER_NORMS: tuple[type[nn.Module], ...] = (nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Layer:
    """One watched layer: its dotted name, and how its channels are read."""

    name: str
    kind: Kind
    channels: int

    @property
    def reads_input(self) -> bool:
        """Whether the layer's input is read (norms) rather than its output (convolutions, linear layers)."""
        return self.kind in ("batchnorm", "layernorm", "norm")

    @property
    def channels_last(self) -> bool:
        """Whether the channels are the last dimension (tokens) rather than the second one (images)."""
        return self.kind in ("layernorm", "linear")


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DataParallel, DistributedDataParallel and `torch.compile` wrappers."""
    while True:
        if isinstance(model, WRAPPERS):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = cast(nn.Module, model._orig_mod)
        else:
            return model


def select_layers(model: nn.Module, patterns: str | Sequence[str] | None = None) -> tuple[Layer, ...]:
    """Return the layers to watch, in the order in which the model defines them.

    Args:
        model: The model, wrapped or not; names are those of the module inside the wrappers.
        patterns: Dotted names or globs (`"layer3.*.bn2"`); those that begin with `!` leave layers out (`"!aux.*"`). None, or
            only the latter, chooses: batch norms if there are any; else convolutions or layer norms, whichever there are more
            of; else linear layers.

    Raises:
        LayerNotFoundError: The model has no layer of a name, or a glob matches nothing.
        InputError: The model has no layer that can be watched, or a named layer cannot be.
    """
    core = unwrap(model)
    if isinstance(core, torch.jit.ScriptModule):
        raise InputError(
            "Expected a model that runs layer by layer, but got one that was scripted or traced. Pass the original model."
        )
    readable = [layer for name, module in core.named_modules() if (layer := _describe(name, module)) is not None]
    if patterns is None:
        return _choose(readable, type(core).__name__)
    names = [patterns] if isinstance(patterns, str) else list(patterns)
    if not names:
        raise InputError(
            "Expected `layers` to name at least one layer, but got none. Leave it out for the automatic choice."
        )
    if not all(isinstance(name, str) for name in names):
        raise InputError(f"Expected `layers` to be names or globs of layers, but got {names!r}.")
    wanted: set[str] = set()
    unwanted: set[str] = set()
    for pattern in names:
        (unwanted if pattern.startswith("!") else wanted).update(_match(core, readable, pattern.removeprefix("!")))
    base = [layer for layer in readable if layer.name in wanted] if wanted else _choose(readable, type(core).__name__)
    kept = tuple(layer for layer in base if layer.name not in unwanted)
    if not kept:
        raise InputError(f"Expected `layers` to leave some of {len(base)} layers to watch, but {names} leave none.")
    return kept


def leave_out(names: Sequence[str], layers: Sequence[Layer]) -> str:
    """Return how to leave some of the watched layers out, as an argument to `Detector`.

    Example:
        >>> layers = [Layer(name, "batchnorm", 4) for name in ("bn1", "aux.bn1", "aux.bn2")]
        >>> leave_out(["aux.bn1", "aux.bn2"], layers), leave_out(["bn1"], layers)
        ('layers=["!aux.*"]', 'layers=["!bn1"]')
    """
    parts = [name.split(".") for name in names]
    depth = next((i for i, same in enumerate(zip(*parts, strict=False)) if len(set(same)) > 1), 0) if names[1:] else 0
    shared = ".".join(parts[0][:depth])
    if shared and all(layer.name in names for layer in layers if layer.name.startswith(f"{shared}.")):
        return f'layers=["!{shared}.*"]'
    shown = ", ".join(f'"!{name}"' for name in names[:3])
    return f"layers=[{shown}{', …' if len(names) > 3 else ''}]"


def column_names(layers: Sequence[Layer]) -> list[str]:
    """Name every column of a vector over `layers`: `"layer1.0.bn1[3]"` is channel 3 of that layer."""
    return [f"{layer.name}[{channel}]" for layer in layers for channel in range(layer.channels)]


def layer_slices(layers: Sequence[Layer]) -> dict[str, slice]:
    """Return the slice of each layer's columns in a vector over `layers`."""
    slices, start = {}, 0
    for layer in layers:
        slices[layer.name] = slice(start, start + layer.channels)
        start += layer.channels
    return slices


def has_running_mean(module: nn.Module) -> bool:
    """Whether `module` keeps a running mean and variance of its input, as batch norms do."""
    return isinstance(getattr(module, "running_mean", None), Tensor) and isinstance(
        getattr(module, "running_var", None), Tensor
    )


def _describe(name: str, module: nn.Module) -> Layer | None:
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        raise InputError(
            f"Expected an initialised model, but {name!r} is lazy. Run the model once on real input first."
        )
    if isinstance(module, torch.jit.ScriptModule):
        return None  # a scripted module calls its layers without hooks
    if isinstance(module, _BatchNorm):
        return Layer(name, "batchnorm", module.num_features)
    if has_running_mean(module):  # frozen batch norms of other libraries
        return Layer(name, "batchnorm", len(torch.as_tensor(module.running_mean)))
    if isinstance(module, _CONVOLUTIONS):
        return Layer(name, "convolution", module.out_channels)
    if isinstance(module, _LAYER_NORMS):
        shape = tuple(module.normalized_shape)  # type: ignore[arg-type]
        # In timm's LayerNorm2d and norms over (C, H, W) the channels are the second dimension, as in a convolution.
        is_image = len(shape) > 1 or type(module).__name__.endswith("2d")
        return Layer(name, "norm" if is_image else "layernorm", shape[0] if is_image else shape[-1])
    if isinstance(module, nn.GroupNorm):
        return Layer(name, "norm", module.num_channels)
    # Attention uses the weight of its last layer without calling it.
    if isinstance(module, nn.Linear) and type(module) is not NonDynamicallyQuantizableLinear:
        return Layer(name, "linear", module.out_features)
    return None


def _choose(readable: Sequence[Layer], model_name: str) -> tuple[Layer, ...]:
    by_kind: dict[str, list[Layer]] = {}
    for layer in readable:
        by_kind.setdefault(layer.kind, []).append(layer)
    norms = [layer for layer in readable if layer.kind in ("layernorm", "norm")]
    convolutions = by_kind.get("convolution", [])
    if "batchnorm" in by_kind:
        chosen = by_kind["batchnorm"]
    elif convolutions or norms:
        # Counted, as a vision transformer's patch embedding is a convolution.
        chosen = norms if len(norms) > len(convolutions) else convolutions
    else:
        chosen = by_kind.get("linear", [])
    if not chosen:
        raise InputError(
            f"Expected a model with batch-norm, convolution, layer-norm or linear layers, but {model_name} has none. "
            "Pass the module that computes the features."
        )
    return tuple(chosen)


def _match(core: nn.Module, readable: Sequence[Layer], pattern: str) -> list[str]:
    names = [layer.name for layer in readable]
    if pattern in names:
        return [pattern]
    matches = [name for name in names if fnmatchcase(name, pattern)]
    if matches:
        return matches
    known = dict(core.named_modules())
    if pattern in known:
        inside = [name for name in names if name.startswith(f"{pattern}.")][:3]
        hint = f" Inside it there are {', '.join(map(repr, inside))}." if inside else ""
        raise InputError(
            f"Expected layers of a kind that has channels (norms, convolutions, linear), but {pattern!r} is a "
            f"{type(known[pattern]).__name__}.{hint}"
        )
    close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
    hint = (
        f" Did you mean {' or '.join(map(repr, close))}?" if close else f" It has {', '.join(map(repr, names[:5]))}, …"
    )
    raise LayerNotFoundError(f"Expected every layer to be a layer of {type(core).__name__}, but got {pattern!r}.{hint}")
