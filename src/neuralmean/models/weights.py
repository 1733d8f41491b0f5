"""Weights of a model from a file: safetensors, or a torch file with tensors only, never a pickle that runs code.

Building the model is the job of `spec`. Weights must match the model exactly:
a missing or additional tensor is an error that names a few.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from neuralmean.errors import ArtefactError

__all__ = ["Builder", "Weights", "is_on_a_network", "load_weights", "read_weights"]

Builder = Callable[[int | None], nn.Module]  # number of classes, None for the model's own -> untrained model

_WRAPPERS = ("module.", "_orig_mod.")  # the prefixes that DataParallel and torch.compile add to every name
_STATE_KEYS = ("state_dict", "model_state_dict", "model")


@dataclass(frozen=True)
class Weights:
    """Tensors by name, and the metadata of their file."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def is_on_a_network(path: str) -> bool:
    r"""Return whether Windows may read a path as one of another machine, which would get the user's password hash.

    Example:
        >>> is_on_a_network(r"\\host\share"), is_on_a_network("/tmp/share")
        (True, False)
    """
    return path.replace("\\", "/").startswith(("//", "/??/"))


def read_weights(path: str | Path) -> Weights:
    """Return the tensors of a safetensors or torch file, recognised by its content, without running any code."""
    path = Path(path)
    if not path.is_file():
        raise ArtefactError(f"Expected {str(path)!r} to be a file with weights, but there is no such file.")
    try:
        with path.open("rb") as handle:
            start = handle.read(9)
    except OSError as error:
        raise ArtefactError(f"Expected to read the weights in {str(path)!r}, but {error.strerror or error}.") from error
    weights = _read_safetensors(path) if start[8:] == b"{" else Weights(_read_torch(path), {})
    if not weights.tensors:
        raise ArtefactError(
            f"Expected {str(path)!r} to hold the tensors of a model, but it holds none. Save `model.state_dict()`."
        )
    return weights


def _read_safetensors(path: Path) -> Weights:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as handle:
            return Weights({key: handle.get_tensor(key) for key in handle.keys()}, dict(handle.metadata() or {}))  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ArtefactError(f"Expected {str(path)!r} to be a safetensors file, but it is damaged: {error}.") from error


def _read_torch(path: Path) -> dict[str, Tensor]:
    try:
        # A handle rather than the path: torch would decide by the extension.
        with path.open("rb") as handle:
            held = torch.load(handle, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's message would suggest running the code in the file
        raise ArtefactError(
            f"Expected {str(path)!r} to be a safetensors file, or a torch file with nothing but tensors, but it is neither: it "
            "holds more, or something else. Save `model.state_dict()`, best as safetensors."
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # other bytes may raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200].rstrip(".")
        raise ArtefactError(
            f"Expected {str(path)!r} to be a file with weights, but it cannot be read: {reason}."
        ) from error
    for key in _STATE_KEYS:
        if isinstance(held, dict) and isinstance(held.get(key), dict):
            held = held[key]
    if not isinstance(held, dict):
        raise ArtefactError(
            f"Expected {str(path)!r} to hold a state dict, but it holds a {type(held).__name__}. Save `model.state_dict()`."
        )
    return {str(key): value for key, value in held.items() if isinstance(value, Tensor)}


def load_weights(
    model: nn.Module, tensors: dict[str, Tensor], *, rebuild: Builder | None = None, expected: str
) -> nn.Module:
    """Load the tensors into the model, or into a new one with their number of classes.

    Args:
        model: The model; its own weights are replaced.
        tensors: Weights by name; prefixes of DataParallel, torch.compile and Lightning are removed.
        rebuild: Builds the model for another number of classes; None uses the given model.
        expected: Start of the error message if they do not fit.
    """
    tensors = _unwrap(tensors, model)
    classes = None if rebuild is None else _other_classes(model, tensors)
    if rebuild is not None and classes is not None:
        model = rebuild(classes)
    own = {key: value.shape for key, value in model.state_dict().items()}
    # Counters of batches are unused at test time and missing in old files.
    missing = sorted(key for key in set(own) - set(tensors) if not key.endswith("num_batches_tracked"))
    unknown = sorted(set(tensors) - set(own))
    reshaped = sorted(
        f"{key} {tuple(tensors[key].shape)} for {tuple(own[key])}"
        for key in set(own) & set(tensors)
        if tensors[key].shape != own[key]
    )
    facts = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for names, what in ((missing, "missing"), (unknown, "unknown"), (reshaped, "of another shape"))
        if names
    ]
    if facts:
        raise ArtefactError(
            f"{expected}, but of its tensors {', '.join(facts)}. Check that model and weights belong together."
        )
    model.load_state_dict(tensors, strict=False)
    return model


def _unwrap(tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Strip the prefix of a wrapper from all names, unless the model's own names have it."""
    own = set(model.state_dict())
    for prefix in (*_WRAPPERS, *_WRAPPERS, "model."):
        if tensors and all(key.startswith(prefix) for key in tensors) and not own & set(tensors):
            tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    return tensors


def _other_classes(model: nn.Module, tensors: dict[str, Tensor]) -> int | None:
    """Return the number of classes of the weights if they differ from the model in nothing else."""
    own = model.state_dict()
    differing = [
        (own[key].shape, tensors[key].shape) for key in own if key in tensors and own[key].shape != tensors[key].shape
    ]
    if any(a[1:] != b[1:] or not a for a, b in differing) or len({(a[0], b[0]) for a, b in differing}) != 1:
        return None
    return int(differing[0][1][0])
