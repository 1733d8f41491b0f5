"""Hugging Face Transformers: a `Trainer` callback that fits a detector, and image processors as `Preprocessing`.

Everything else needs no bridge: `detector(**inputs)` takes what a tokenizer or a processor returns, and `fit` takes it
too. Needs `pip install neuralmean[huggingface]`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from neuralmean.data.preprocessing import Preprocessing
from neuralmean.detector.detector import Detector
from neuralmean.errors import InputError, MissingExtraError

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingExtraError(
        "The Hugging Face integration needs the 'transformers' package. "
        "Install it with `pip install neuralmean[huggingface]`."
    ) from error

__all__ = ["DetectorCallback", "preprocessing_of"]

_INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers, which processors store
_LABELS = frozenset({"label", "labels", "label_ids", "start_positions", "end_positions"})


class DetectorCallback(TrainerCallback):  # type: ignore[misc]
    """Fits a detector on the training data when training ends: `Trainer(callbacks=[DetectorCallback()])`.

    In a distributed training each process fits on its own share of the data, and the first one saves.

    Args:
        path: Where to save the detector; None only keeps it as `detector`.
        held_out: In-distribution batches that the model was not trained on, which set the threshold. None takes the data that
            the trainer last evaluated on; if there is none, a part of the training data, with a warning on how reliable that is.
        false_alarm_rate: Share of in-distribution inputs that may be flagged.
        make: Returns a detector for the trained model, such as `partial(Detector, scorer="average")`.
        info: JSON values to save with the detector (model spec, preprocessing).

    Attributes:
        detector: The fitted detector; None until training ends.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        held_out: Any = None,
        false_alarm_rate: float = 0.05,
        make: Callable[[nn.Module], Detector] = Detector,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.held_out = held_out
        self.false_alarm_rate = false_alarm_rate
        self.make = make
        self.info = info
        self.detector: Detector | None = None

    def on_train_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Fit the detector and save it; `Trainer` calls this."""
        model, training = known["model"], known["train_dataloader"]
        held_out = self.held_out if self.held_out is not None else known.get("eval_dataloader")
        self.detector = self.make(model).fit(
            ModelInputs(training, model),
            held_out=None if held_out is None else ModelInputs(held_out, model),
            false_alarm_rate=self.false_alarm_rate,
        )
        if self.path is not None and state.is_world_process_zero:
            self.detector.save(self.path, info=self.info)


class ModelInputs:
    """The batches of a loader without labels and other entries that the model's `forward` does not accept.

    Args:
        batches: Yields dicts, as the loaders of a `Trainer` do; other batches pass unchanged.
        model: The model that the batches are for.
    """

    def __init__(self, batches: Iterable[Any], model: nn.Module) -> None:
        self._batches = batches
        taken = inspect.signature(model.forward).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
        self._taken = None if takes_any else frozenset(taken)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            yield {key: batch[key] for key in batch if self._is_input(key)} if isinstance(batch, Mapping) else batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def _is_input(self, key: str) -> bool:
        return key not in _LABELS and (self._taken is None or key in self._taken)


def preprocessing_of(processor: Any) -> Preprocessing:
    """Return the `Preprocessing` that an image processor applies, to be saved with a detector.

    Args:
        processor: An image processor, or a processor that has one as `image_processor`.

    Raises:
        InputError: The processor does more than resize, crop the centre, rescale to 0 to 1 and normalise.
    """
    processor = getattr(processor, "image_processor", processor)
    name = type(processor).__name__
    if not getattr(processor, "do_normalize", False) or not getattr(processor, "do_rescale", True):
        raise InputError(f"Expected an image processor that rescales and normalises, but {name} does not.")
    if abs(getattr(processor, "rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise InputError(
            f"Expected {name} to rescale pixels by 1/255, but it rescales by {processor.rescale_factor!r}. "
            "Pass a `Preprocessing` with mean and std on a scale of 0 to 1."
        )
    if getattr(processor, "do_pad", None):
        raise InputError(f"Expected an image processor without padding, but {name} pads. Prepare the images yourself.")
    size, crop, fraction = _geometry(processor, name)
    mean, std = processor.image_mean, processor.image_std
    return Preprocessing(
        size,
        tuple(mean),
        tuple(std),
        interpolation=_interpolation(processor, name),  # type: ignore[arg-type]
        crop=crop,  # type: ignore[arg-type]
        crop_fraction=fraction,
        channels=len(mean),
    )


def _geometry(processor: Any, name: str) -> tuple[tuple[int, int] | None, str, float]:
    """Return size, crop and crop fraction for `Preprocessing`."""
    if not getattr(processor, "do_resize", False):
        if getattr(processor, "do_center_crop", False):
            raise InputError(
                f"Expected {name} to resize before it crops, but it only crops. Prepare the images yourself."
            )
        return None, "center", 1.0
    resized = _sides(processor.size)
    if getattr(processor, "do_center_crop", False):
        crop = _sides(processor.crop_size)
        if isinstance(resized, int) and isinstance(crop, tuple):
            return crop, "center", min(crop) / resized
    elif isinstance(resized, tuple):
        return resized, "squash", 1.0
    elif isinstance(resized, int) and getattr(processor, "crop_pct", None):
        # ConvNeXT's rule: from 384 pixels on the image is squashed, below it is cropped.
        side = (resized, resized)
        return (side, "squash", 1.0) if resized >= 384 else (side, "center", processor.crop_pct)
    raise InputError(
        f"Expected {name} to resize to one size, or to a shortest edge and crop its centre, but it does something else. "
        "Prepare the images yourself."
    )


def _sides(size: Any) -> tuple[int, int] | int | None:
    """Return height and width, or the length of the shortest edge."""
    known = size if isinstance(size, Mapping) else vars(size)
    if known.get("height") and known.get("width"):
        return int(known["height"]), int(known["width"])
    return int(known["shortest_edge"]) if known.get("shortest_edge") else None


def _interpolation(processor: Any, name: str) -> str:
    if not getattr(processor, "do_resize", False):
        return "bilinear"  # nothing is resampled
    found = _INTERPOLATIONS.get(int(processor.resample))
    if found is None:
        raise InputError(f"Expected {name} to resample bilinearly or bicubically, but got {processor.resample!r}.")
    return found
