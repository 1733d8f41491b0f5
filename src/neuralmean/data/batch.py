"""Converts data of any supported kind into batches for the model.

Tensors, arrays, frames of pandas and polars, data loaders, datasets and iterables of batches become a stream of
`Batch`es. Independent of layers and scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from neuralmean.errors import InputError

BATCH_SIZE = 64
_SMALLEST_SIDE = 16

_WANTED = (
    "a tensor, an array, a DataFrame, a DataLoader, a Dataset or an iterable of batches (x, (x, y) or a dict of inputs)"
)


@dataclass(frozen=True)
class Batch:
    """The arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> Tensor:
        """The first tensor among the arguments: the input, or the first image of a list."""
        for value in (*(self.images or self.args), *self.kwargs.values()):
            if isinstance(value, Tensor) and value.dim() > 0:
                return value
        raise InputError(f"Expected a batch that holds a tensor, but got {self.kwargs or self.args!r}.")

    @property
    def mask(self) -> Tensor | None:
        """The attention mask of token models, (N, T), if one was given; 0 marks padding."""
        mask = self.kwargs.get("attention_mask")
        return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None

    @property
    def lengths(self) -> Tensor | None:
        """How many tokens each input has, padding left out, int64 (N,); None if the inputs are not tokens."""
        if self.mask is not None:
            return (self.mask != 0).sum(dim=1).cpu()
        x = None if self.images is not None else self.first
        if x is None or x.dim() != 2 or x.is_floating_point() or x.is_complex():
            return None
        return torch.full((len(x),), x.shape[1])

    @property
    def images(self) -> list[Tensor] | None:
        """The images (C, H, W) if the model takes a list of them, as detection models do; otherwise None."""
        return self.args[0] if self.args and isinstance(self.args[0], list) else None

    def __len__(self) -> int:
        return len(self.first if self.images is None else self.images)

    def take(self, rows: slice | Tensor) -> Batch:
        """Return some of the examples, given a slice or indices."""
        if self.images is not None:
            chosen = range(len(self))[rows] if isinstance(rows, slice) else rows.tolist()
            return Batch(([self.images[row] for row in chosen], *self.args[1:]), self.kwargs)
        size = len(self)
        return self.each(lambda value: value[rows] if value.dim() > 0 and len(value) == size else value)

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with `change` applied to each of its tensors."""

        def changed(value: Any) -> Any:
            if isinstance(value, list) and value and isinstance(value[0], Tensor):
                return [change(item) for item in value]
            return change(value) if isinstance(value, Tensor) else value

        return Batch(tuple(map(changed, self.args)), {key: changed(value) for key, value in self.kwargs.items()})

    def to(self, device: torch.device) -> Batch:
        """Return the batch with its tensors on `device`."""
        if (
            not self.kwargs
            and len(self.args) == 1
            and isinstance(self.args[0], Tensor)
            and self.args[0].device == device
        ):
            return self
        return self.each(lambda value: _move(value, device))


def to_batch(value: Any) -> Batch:
    """Convert `x`, `(x, y)` or a dict of keyword inputs into a `Batch`; labels are dropped.

    Example:
        >>> len(to_batch((torch.zeros(4, 3, 8, 8), torch.zeros(4))))
        4
    """
    if isinstance(value, Batch):
        return value
    if isinstance(value, Tensor):
        return Batch((_dense(value),))
    if isinstance(value, np.ndarray):
        return Batch((_to_tensor(value),))
    if isinstance(value, Mapping):
        return Batch((), {str(key): _to_input(item) for key, item in value.items()})
    if _is_frame(value):
        return Batch((_frame_tensor(value),))
    if isinstance(value, (tuple, list)) and len(value) > 0:
        if _are_images(value):
            return Batch((list(value),))
        if isinstance(value[0], (Tensor, np.ndarray, Mapping)) or _is_frame(value[0]) or _are_images(value[0]):
            return to_batch(value[0])
    raise InputError(f"Expected a batch to be x, (x, y) or a dict of inputs, but got {_describe(value)}.")


def call_batch(x: Any, inputs: Mapping[str, Any]) -> Batch:
    """Return the positional and keyword inputs of a call as a batch."""
    if x is None:
        return to_batch(inputs)
    batch = to_batch(x)
    return Batch(batch.args, {**batch.kwargs, **inputs}) if inputs else batch


def to_batches(data: Any, *, name: str = "data", batch_size: int = BATCH_SIZE) -> Iterator[Batch]:
    """Yield the batches of `data`.

    Args:
        data: A tensor, an array, a DataLoader, a Dataset or an iterable of batches.
        name: The argument's name in error messages.
        batch_size: Rows per batch if the data is one tensor, array, frame or dataset.

    Raises:
        InputError: The data is of an unsupported kind, or empty.
    """
    _check_size(batch_size)
    empty = True
    for batch in _iterate(data, name, batch_size):
        if len(batch):
            empty = False
            yield batch
    if empty:
        raise InputError(f"Expected `{name}` to hold at least one example, but it is empty.")


def count_batches(data: Any, *, batch_size: int = BATCH_SIZE) -> int | None:
    """Return how many batches `to_batches` will yield, or None if that is unknown; for progress bars."""
    _check_size(batch_size)
    whole = _whole(data)
    try:
        if whole is not None:
            return -(-len(whole) // batch_size)
        if isinstance(data, Dataset) and not isinstance(data, DataLoader):
            return -(-len(data) // batch_size)  # type: ignore[arg-type]
        return len(data)
    except (TypeError, NotImplementedError, InputError):
        return None


def count_rows(data: Any) -> int | None:
    """Return how many examples `data` has, if that is known without reading it; for a loader, up to one batch too many."""
    whole = _whole(data)
    try:
        if whole is not None:
            return len(whole)
        if isinstance(data, DataLoader) and data.batch_size is None:
            data = data.batch_sampler  # torch's loader has both attributes
        if isinstance(data, Dataset):
            return len(data)  # type: ignore[arg-type]
        if isinstance(data, (list, tuple)):
            return sum(len(to_batch(batch)) for batch in data)
        rows: int = len(data) * data.batch_size
        return rows
    except (TypeError, AttributeError, NotImplementedError, InputError):
        return None


def check_input(batch: Batch, name: str, *, tokens: bool = False) -> None:
    """Raise if `batch` cannot be an input of the model: it holds labels, or integers where floats are expected.

    Args:
        batch: The batch.
        name: The argument's name in error messages.
        tokens: Whether the model takes integers (it has an embedding).
    """
    x = batch.first
    if tokens:
        return
    if x.dim() < 2:
        hint = "Are these labels? Pass the inputs alone."
        if x.is_floating_point():
            hint = f"For one input, add a batch dimension: `{name}[None]`. If these are labels, pass the inputs alone."
        raise InputError(
            f"Expected `{name}` to hold inputs of the model with shape (N, ...), but got shape {tuple(x.shape)} of "
            f"{x.dtype}. {hint}"
        )
    if not (x.is_floating_point() or x.is_complex()):
        raise InputError(
            f"Expected `{name}` to hold floats, prepared as for training, but got {x.dtype}. "
            "Scale integer images first, usually x.float() / 255 and then the normalisation the model was trained with."
        )


def _iterate(data: Any, name: str, batch_size: int) -> Iterator[Batch]:
    whole = _whole(data)
    if whole is not None:
        for start in range(0, len(whole), batch_size):
            yield whole.take(slice(start, start + batch_size))
    elif isinstance(data, DataLoader):
        yield from map(to_batch, data)
    elif isinstance(data, Dataset):
        yield from map(to_batch, DataLoader(data, batch_size=batch_size))
    elif isinstance(data, Iterable) and not isinstance(data, (str, bytes, Tensor, np.ndarray)):
        yield from map(to_batch, data)
    else:
        hint = " To read images from a folder, see `neuralmean.data.images`." if isinstance(data, (str, bytes)) else ""
        raise InputError(f"Expected `{name}` to be {_WANTED}, but got {_describe(data)}.{hint}")


def _check_size(batch_size: Any) -> None:
    if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
        raise InputError(f"Expected `batch_size` to be a whole number of at least 1, but got {batch_size!r}.")


def _whole(data: Any) -> Batch | None:
    """Return data that is one object as one batch: a tensor, an array, a dict of tensors or an (x, y) pair."""
    if isinstance(data, (Tensor, np.ndarray)):
        return to_batch(data) if data.ndim > 0 else None
    if isinstance(data, Mapping) or _is_frame(data) or _are_images(data):
        return to_batch(data)
    if isinstance(data, tuple) and len(data) == 2:
        x, y = data
        if isinstance(x, (Tensor, np.ndarray)) and isinstance(y, (Tensor, np.ndarray)) and y.ndim == 1 < x.ndim:
            return to_batch(x) if len(x) == len(y) else None
    return None


def _are_images(value: Any) -> bool:
    """Whether these are images (C, H, W), as detection models take them, and not an (x, y) pair.

    Two images of one size in a list look like a pair of sequences. They count as images if they are not tiny.
    """
    if not isinstance(value, (tuple, list)) or not value:
        return False
    if not all(isinstance(item, Tensor) and not item.is_nested and item.dim() == 3 for item in value):
        return False
    alike = len({(len(item), item.dtype) for item in value}) == 1 and value[0].is_floating_point()
    if not alike or len(value[0]) not in (1, 3):
        return False
    if len(value) != 2 or len({item.shape for item in value}) > 1:
        return True
    return isinstance(value, list) and min(value[0].shape[1:]) >= _SMALLEST_SIDE


def _is_frame(value: Any) -> bool:
    """Whether this is a DataFrame of pandas or polars, without importing either."""
    return hasattr(value, "columns") and hasattr(value, "to_numpy")


def _frame_tensor(frame: Any) -> Tensor:
    """Return a table of numbers as float32, (N, columns)."""
    names = list(frame.columns)
    if not names or len(set(names)) < len(names):
        raise InputError(f"Expected a DataFrame with unique column names, but got {names}.")
    columns = [frame[name].to_numpy() for name in names]
    for name, column in zip(names, columns, strict=True):
        if column.dtype.kind not in "biuf":
            raise InputError(
                f"Expected a DataFrame of numbers, but column {name!r} holds {frame[name].dtype}. "
                "Encode or drop it, and fill in missing values, as for training."
            )
    return torch.from_numpy(np.column_stack(columns).astype(np.float32))


def _to_input(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _to_tensor(value)
    return _dense(value) if isinstance(value, Tensor) else value


def _dense(tensor: Tensor) -> Tensor:
    if tensor.is_nested:
        raise InputError(
            "Expected a dense tensor, but got a nested one. Pad it with `to_padded_tensor`, or pass batches."
        )
    if tensor.layout != torch.strided:
        raise InputError("Expected a dense tensor, but got a sparse one. Convert it with `to_dense()`.")
    return tensor


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.is_meta and device.type != "meta":
        raise InputError("Expected a tensor with values, but got one on the meta device, which has none.")
    return tensor.to(device)


def _to_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype == object:
        raise InputError(
            "Expected an array of numbers, but got one of dtype object. Stack the examples to one shape first."
        )
    if array.dtype == np.float64:  # numpy's default type, which models rarely use
        array = array.astype(np.float32)
    try:
        return torch.from_numpy(np.ascontiguousarray(array))
    except (TypeError, ValueError):  # strings, dates or another byte order
        raise InputError(
            f"Expected an array of a type that torch supports, but got one of dtype {array.dtype}."
        ) from None


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
