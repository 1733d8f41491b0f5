"""Opens a saved detector together with its model, for the command, the service and the workers."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from neuralmean.data.preprocessing import Preprocessing
from neuralmean.detector.detector import Detector
from neuralmean.detector.saving import from_artefact
from neuralmean.errors import InputError
from neuralmean.files.artefact import Artefact
from neuralmean.models.huggingface import Tokenizer
from neuralmean.models.spec import resolve
from neuralmean.models.weights import is_on_a_network

COMPILING_S = 60.0
"""Approximate cost of freezing."""
SAVED_SHARE = 0.1
"""Minimum share of the time of large batches that a frozen graph saves (docs/speed.md)."""

LEAST_BATCHES = 50
"""Fewer batches are not worth timing two."""


@dataclass(frozen=True)
class SavedDetector:
    """A detector with its model, and the preprocessing of its images or the tokenizer of its texts."""

    detector: Detector
    preprocessing: Preprocessing | None
    tokenizer: Tokenizer | None = None

    def need_preprocessing(self) -> Preprocessing:
        """Return the preprocessing, or raise if it is unknown."""
        if self.preprocessing is None:
            raise InputError(
                "Expected the file or the model to describe the preprocessing, but neither does. "
                "Fit again with --mean, --std and --size."
            )
        return self.preprocessing

    def need_tokenizer(self) -> Tokenizer:
        """Return the tokenizer, or raise if the model does not take texts."""
        if self.tokenizer is None:
            raise InputError(
                "Expected a detector of a model that takes texts, fitted with `hf:DIR`, but this one takes something else."
            )
        return self.tokenizer

    def freeze(self) -> None:
        """Run the model as one graph, which is faster; see `Detector.freeze`.

        Raises:
            InputError: The size of the model's input is unknown, or the model is not a fixed graph.
        """
        example = None if self.preprocessing is None else self.preprocessing.example()
        if example is None:
            raise InputError(
                "Expected a model whose inputs are images of one size to freeze, but neither the file nor the model states "
                "their size. Fit again with --size, or leave out --freeze."
            )
        try:
            self.detector.freeze(example)
        except InputError as error:
            raise InputError(f"{error} Leave out --freeze.") from error

    def freeze_if_worth(self, n_inputs: int, batch_size: int) -> bool:
        """Freeze the detector if scoring this many inputs takes long enough to pay for compiling; return whether it is frozen.

        Args:
            n_inputs: Number of inputs.
            batch_size: Batch size of the passes to come.
        """
        example = None if self.preprocessing is None else self.preprocessing.example()
        if example is None or n_inputs < LEAST_BATCHES * batch_size:
            return False
        batch = example.expand(batch_size, *example.shape[1:]).contiguous()
        self.detector.score(batch, batch_size=batch_size)
        begin = time.perf_counter()
        self.detector.score(batch, batch_size=batch_size)
        if (time.perf_counter() - begin) * n_inputs / batch_size * SAVED_SHARE < COMPILING_S:
            return False
        with suppress(InputError):
            self.detector.freeze(example)
        return self.detector.is_frozen


def open_saved(
    path: str | Path,
    *,
    model: str | None = None,
    weights: str | Path | None = None,
    rate: float | None = None,
    device: str | None = None,
    trust_local_code: bool = False,
) -> SavedDetector:
    """Read a saved detector and build the model that it was fitted on.

    Args:
        path: The saved file; its header holds the model's spec, the path of its weights and the preprocessing.
        model: Spec of the model, overriding the file.
        weights: Weights of the model, overriding the file.
        rate: False-alarm rate, overriding that of the fit.
        device: Where the model runs; None leaves it where it was built, on the CPU.
        trust_local_code: Whether the file may name a model in a module of the working folder, which is then imported.

    Raises:
        InputError: The file does not name its model, or the model cannot be rebuilt.
        ModelMismatchError: The model was rebuilt but is not the one of the fit.
    """
    artefact = Artefact.read(path)
    info = artefact.header.get("info")
    info = info if isinstance(info, dict) else {}
    spec = model or info.get("model")
    if not isinstance(spec, str):
        raise InputError(f"Expected {str(path)!r} to say which model it belongs to, but it does not. Pass the model.")
    resolved = resolve(
        spec,
        weights=_find_weights(Path(path), info, weights),
        trusted=model is not None,
        local_code=trust_local_code,
    )
    raw = info.get("preprocessing")
    preprocessing = Preprocessing.from_json(raw) if isinstance(raw, dict) else resolved.preprocessing
    with torch.inference_mode(False):  # as in `fit`
        detector = from_artefact(Detector, artefact, resolved.model, str(path))
    if device is not None:
        detector.to(device)
    return SavedDetector(detector if rate is None else detector.set_rate(rate), preprocessing, resolved.tokenizer)


def _find_weights(path: Path, info: dict[str, object], weights: str | Path | None) -> Path | None:
    if weights is not None:
        return Path(weights)
    remembered = info.get("weights")
    if not isinstance(remembered, str):
        return None
    beside = path.parent / Path(remembered).name
    for candidate in (beside,) if is_on_a_network(remembered) else (Path(remembered), beside):
        with suppress(OSError, ValueError):  # an impossible path
            if candidate.is_file():
                return candidate
    raise InputError(
        f"Expected the model's weights at {remembered[:200]!r}, as when {str(path)!r} was fitted, but they are not there. "
        "Pass them with --weights."
    )
