"""A model with its weights and the preprocessing it expects, read from one file.

The metadata of safetensors files has `architecture`, `dataset`, `mean`, `std` and the trainer's notes. Torch files have
none, so name and normalisation must be given. Nothing is ever unpickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from neuralmean.bench.models.registry import architecture, build, names, suggestion
from neuralmean.data.preprocessing import Interpolation, Preprocessing
from neuralmean.errors import ArtefactError, InputError

SIZE = 32
Triple = tuple[float, float, float]


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A model in eval mode with its preprocessing.

    Args:
        model: The model; maps (N, 3, size, size) to (N, num_classes), or to features if `num_classes` is 0.
        name: The model's name in `models.names()`.
        num_classes: Number of logits; 0 for a model without a class head.
        mean: Mean per colour, subtracted from images scaled to [0, 1].
        std: Standard deviation per colour, by which the result is divided.
        size: Height and width of the input; images of other sizes are resized.
        metadata: Other metadata of the file (data set, accuracy, recipe, source).
        interpolation: How images of other sizes are resampled.
        crop_fraction: Share of the resized image's side that the central crop keeps.
    """

    model: nn.Module
    name: str
    num_classes: int
    mean: Triple
    std: Triple
    size: int = SIZE
    metadata: Mapping[str, str] = field(default_factory=dict)
    interpolation: Interpolation = "bilinear"
    crop_fraction: float = 1.0

    @property
    def preprocessing(self) -> Preprocessing:
        """The preprocessing of images, as the library's own type."""
        sides = (self.size, self.size)
        return Preprocessing(sides, self.mean, self.std, self.interpolation, self.crop_fraction)

    def preprocess(self, images: npt.NDArray[np.uint8]) -> Tensor:
        """Resize images (N, H, W, 3) to the model's input size and normalise them, (N, 3, size, size).

        Images that have this size already, as they were decoded for the model, are not cropped again.
        """
        pixels = images if images.shape[1:3] == (self.size, self.size) else self.preprocessing.array_pixels(images)
        return preprocess(pixels, mean=self.mean, std=self.std)


def preprocess(images: npt.NDArray[np.uint8], *, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Divide by 255, subtract `mean`, divide by `std`, for ID and OOD images alike.

    Args:
        images: Images, uint8, shape (N, H, W, 3).
        mean: Mean per colour.
        std: Standard deviation per colour.

    Returns:
        Float32 images, shape (N, 3, H, W), in channels-last memory format, like the models.

    Example:
        >>> preprocess(np.full((1, 1, 1, 3), 255, np.uint8), mean=(0.5, 0.5, 0.0), std=(0.5, 0.25, 1.0)).flatten()
        tensor([1., 2., 1.])
    """
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3:
        raise InputError(f"Expected uint8 images of shape (N, H, W, 3), but got {images.dtype} {images.shape}.")
    pixels = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).float() / 255
    offset, scale = (torch.tensor(values, dtype=torch.float32).view(1, 3, 1, 1) for values in (mean, std))
    return ((pixels - offset) / scale).contiguous(memory_format=torch.channels_last)


def load_weights(path: Path | str) -> TrainedModel:
    """Read a trained model from a safetensors file that names its architecture and normalisation.

    Args:
        path: The file, as written by the trainer.
    """
    tensors, metadata = _read(Path(path))
    if "architecture" not in metadata:
        raise ArtefactError(
            f"Expected {Path(path).name} to name its architecture in its metadata, but it does not. "
            "Say which it is: `models.load(name, path, mean=..., std=...)`."
        )
    return _assemble(metadata["architecture"], tensors, metadata, Path(path))


def load(
    name: str, weights: Path | str, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> TrainedModel:
    """Read the weights of a model of known name from a safetensors or torch file.

    Args:
        name: One of `names()`.
        weights: The file.
        mean: Mean per colour, if the file does not state it.
        std: Standard deviation per colour, likewise.
    """
    path = Path(weights)
    architecture(name)
    tensors, metadata = _read(path)
    held = metadata.get("architecture", name)
    if held != name:
        raise ArtefactError(
            f"Expected {path.name} to hold weights of {name!r}, but it says {held!r}. "
            f"Build the model that it belongs to, or pass a file of {name!r}."
        )
    given = {"mean": mean, "std": std}
    texts = {key: ",".join(map(str, values)) for key, values in given.items() if values is not None}
    return _assemble(name, tensors, {**metadata, **texts}, path)


def untrained(
    name: str, *, num_classes: int = 10, seed: int = 0, mean: Sequence[float], std: Sequence[float]
) -> TrainedModel:
    """Build a model with random weights that depend on `seed` alone, without changing torch's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _colours_last(build(name, num_classes=num_classes))
    classes = 0 if architecture(name).head is None else num_classes
    return TrainedModel(
        model, name, classes, _triple(mean, "mean"), _triple(std, "std"), SIZE, {"untrained": str(seed)}
    )


def _colours_last(model: nn.Module) -> nn.Module:
    """Convert the weights to channels-last memory format: up to 1.5 times as fast on CPUs, no slower on GPUs."""
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a weights file."""
    if not path.is_file():
        raise ArtefactError(f"Expected {str(path)!r} to be a file with weights, but there is none.")
    if path.suffix != ".safetensors":
        return _read_torch(path), {}
    try:
        with safe_open(path, framework="pt") as handle:
            return {key: handle.get_tensor(key) for key in handle.keys()}, dict(handle.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ArtefactError(f"Expected {path.name} to be a safetensors file, but it is damaged: {error}.") from error


def _read_torch(path: Path) -> dict[str, Tensor]:
    """Tensors of a torch file: a state dict, bare or under `state_dict`, also of a data-parallel model."""
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ArtefactError(
            f"Expected {path.name} to be a torch file with nothing but tensors, but it is not: {reason} "
            "Save the model's `state_dict()`, best as safetensors."
        ) from error
    if isinstance(held, dict) and isinstance(held.get("state_dict"), dict):
        held = held["state_dict"]
    if not isinstance(held, dict) or not all(isinstance(value, Tensor) for value in held.values()):
        raise ArtefactError(
            f"Expected {path.name} to hold a state dict, but got {type(held).__name__} of other things."
        )
    return {key.removeprefix("module."): value for key, value in held.items()}


def _assemble(name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], path: Path) -> TrainedModel:
    if name not in names():
        raise ArtefactError(
            f"Expected {path.name} to hold weights of a known architecture, but it says {name!r}. "
            f"{suggestion(name, names())}"
        )
    head = architecture(name).head
    classes = _count_classes(head, tensors, name, path)
    # Built on the meta device, then given the file's tensors, to spare random initialisation and torch's random state.
    with torch.device("meta"):
        model = build(name, num_classes=classes or 2)
    _check_shapes(name, model, tensors, path)
    expected = model.state_dict()
    zeros = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in expected.items() if _counter(key)}
    held = {key: value.to(expected[key].dtype) for key, value in tensors.items()}
    model.load_state_dict(zeros | held, assign=True)
    _colours_last(model)
    for key in ("mean", "std"):
        if key not in metadata:
            raise ArtefactError(
                f"Expected {path.name} to state the {key} of its model's normalisation, but it does not. "
                f"Pass `mean` and `std` to `models.load`."
            )
    mean, std = (_parse(metadata[key], key, path) for key in ("mean", "std"))
    return TrainedModel(model, name, classes, mean, std, SIZE, dict(metadata))


def _count_classes(head: str | None, tensors: Mapping[str, Tensor], name: str, path: Path) -> int:
    if head is None:
        return 0
    weight = tensors.get(f"{head}.weight")
    if weight is None or weight.ndim != 2:
        raise ArtefactError(_foreign(name, path, f"it has no matrix '{head}.weight'"))
    return len(weight)


def _check_shapes(name: str, model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise unless the file has exactly the model's parameters and buffers, in their shapes."""
    expected = {key: value.shape for key, value in model.state_dict().items()}
    missing = sorted(key for key in set(expected) - set(tensors) if not _counter(key))
    extra = sorted(set(tensors) - set(expected))
    other = [key for key in sorted(set(tensors) & set(expected)) if tensors[key].shape != expected[key]]
    facts = [
        f"{len(keys)} {what}, e.g. {keys[0]!r}"
        for keys, what in ((missing, "missing"), (extra, "unknown"), (other, "of another shape"))
        if keys
    ]
    if facts:
        raise ArtefactError(_foreign(name, path, f"of its tensors {'; '.join(facts)}"))


def _counter(key: str) -> bool:
    """Whether this is a batch norm's count of batches, unused at test time and often missing."""
    return key.endswith("num_batches_tracked")


def _foreign(name: str, path: Path, fact: str) -> str:
    return f"Expected {path.name} to hold weights of {name!r}, but {fact}. Pass the weights of this architecture."


def _parse(text: str, key: str, path: Path) -> Triple:
    """Parse three numbers such as `0.5,0.5,0.5`, with or without brackets."""
    try:
        return _triple([float(part) for part in text.strip("[]() ").split(",")], key)
    except ValueError as error:
        raise ArtefactError(
            f"Expected the {key!r} of {path.name} to be three numbers, but got {text!r}. Pass `mean` and `std`."
        ) from error


def _triple(values: Sequence[float], key: str) -> Triple:
    if len(values) != 3 or not np.isfinite(values).all() or (key == "std" and min(values) <= 0):
        kind = "three positive numbers" if key == "std" else "three numbers"
        raise InputError(f"Expected `{key}` to be {kind}, one per colour, but got {values!r}.")
    return float(values[0]), float(values[1]), float(values[2])
