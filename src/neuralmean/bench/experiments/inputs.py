"""What the user has: image sets under one folder, weights under another. Looks, loads, and says what is missing."""

from __future__ import annotations

import warnings
from pathlib import Path

from safetensors import SafetensorError, safe_open

from neuralmean.bench import data
from neuralmean.bench.data import ImageSet
from neuralmean.bench.models import TrainedModel, load_weights
from neuralmean.bench.protocols import split_off
from neuralmean.errors import InputError, NeuralMeanWarning


class Inputs:
    """The sets and models at hand.

    Args:
        data_root: Folder of the image sets.
        weights_root: Folder of weights, safetensors files that name architecture and data set.
    """

    def __init__(self, data_root: Path | str, weights_root: Path | str) -> None:
        self.data_root, self.weights_root = Path(data_root), Path(weights_root)
        for folder, what in ((self.data_root, "data"), (self.weights_root, "weights")):
            if not folder.is_dir():
                raise InputError(
                    f"Expected the {what} folder {str(folder)!r} to be there, but it is not. Name the folder of your {what}."
                )
        self.weights = _find_weights(self.weights_root)
        self._sets: dict[tuple[str, str], ImageSet] = {}
        self._models: dict[tuple[str, str], TrainedModel] = {}

    def has_set(self, name: str) -> bool:
        """Whether all parts of a set that an experiment needs are there."""
        return all(data.locate(name, split, self.data_root) is not None for split in data.dataset(name).counts)

    def fit_part(self, name: str) -> ImageSet:
        """The part of a set that methods may learn from: its train part, or one split off where it has none."""
        return self._load(name, "fit")

    def test_part(self, name: str) -> ImageSet:
        """The part of a set to judge by; never overlaps with `fit_part`."""
        return self._load(name, "test")

    def trained(self, model: str, inside: str) -> TrainedModel:
        """The model of this name trained on the set `inside`."""
        key = (model, inside)
        if key not in self.weights:
            held = ", ".join(f"{name} on {on}" for name, on in self.weights) or "none"
            raise InputError(
                f"Expected weights of {model!r} trained on {inside!r} in {str(self.weights_root)!r}, but there are only: "
                f"{held}. Train them with `nmd bench train {model} --id {inside}`."
            )
        if key not in self._models:
            self._models[key] = load_weights(self.weights[key])
        return self._models[key]

    def _load(self, name: str, part: str) -> ImageSet:
        if (name, part) not in self._sets:
            if "train" in data.dataset(name).counts:
                self._sets[name, part] = data.load(name, "train" if part == "fit" else "test", self.data_root)
            else:
                fit, test = split_off(data.load(name, "test", self.data_root))
                self._sets[name, "fit"], self._sets[name, "test"] = fit, test
        return self._sets[name, part]


def _find_weights(root: Path) -> dict[tuple[str, str], Path]:
    """Weights files by architecture and data set; of several for the same pair the first by name."""
    found: dict[tuple[str, str], Path] = {}
    for path in sorted(root.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as handle:
                metadata = dict(handle.metadata() or {})
        except (SafetensorError, OSError) as error:
            warnings.warn(f"{path.name} cannot be read and is left out: {error}.", NeuralMeanWarning, stacklevel=3)
            continue
        if "architecture" not in metadata or "dataset" not in metadata:
            continue
        try:
            inside = data.dataset(metadata["dataset"]).name
        except InputError:
            continue  # trained on something that is no set of the paper
        found.setdefault((metadata["architecture"], inside), path)
    return found
