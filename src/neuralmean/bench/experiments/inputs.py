"""The user's inputs: a folder of image sets, a folder of weights, and models and sets given by name.

Models beyond the paper's have their own input size: pictures in folders are decoded as the model expects, arrays are
resized before the pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from neuralmean.bench import data, models
from neuralmean.bench.data import ImageSet
from neuralmean.bench.models import TrainedModel, load_weights
from neuralmean.bench.protocols import split_off
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import InputError, NeuralMeanWarning


class Inputs:
    """The available sets and models.

    Args:
        data_root: Folder of the image sets; optional if `sets` is given.
        weights_root: Folder of weights, safetensors files that name architecture and data set; optional if `chosen` has specs.
        chosen: Models to use; all if empty. Names of architectures or installed models, or specs such as
            `timm:resnet50@resnet50.safetensors` and `package.module:build`.
        sets: Your own image sets, by name: a folder of pictures, an `.npz` or `.npy` file, or a folder with `train` and
            `test` (or `val`).
        id_set: The training set of the models given as specs.
    """

    def __init__(
        self,
        data_root: Path | str,
        weights_root: Path | str,
        *,
        chosen: Sequence[str] = (),
        sets: Mapping[str, Path] | None = None,
        id_set: str | None = None,
    ) -> None:
        self.data_root, self.weights_root = Path(data_root), Path(weights_root)
        own_models = any(":" in one for one in chosen)
        for folder, what, replaced in ((self.data_root, "data", sets), (self.weights_root, "weights", own_models)):
            if not folder.is_dir() and not replaced:
                raise InputError(
                    f"Expected the {what} folder {str(folder)!r} to exist, but it does not. Name the folder of your {what}."
                )
        self.weights = _find_weights(self.weights_root)
        self.own_sets = dict(sets or {})
        self.id_set = id_set
        self._specs = {models.spec_name(one): one for one in chosen if ":" in one}
        self._names = [_known(one) for one in chosen if ":" not in one]
        self._sets: dict[tuple[str, str, Preprocessing | None], ImageSet] = {}
        self._models: dict[tuple[str, str], TrainedModel] = {}

    @property
    def specs(self) -> list[str]:
        """Names of the models that were given as specs."""
        return list(self._specs)

    @property
    def photo_models(self) -> list[str]:
        """Names of the models of photos: those given as specs, and installed ones."""
        return [*self._specs, *(name for name in models.installed_names() if self.wants(name))]

    def wants(self, model: str) -> bool:
        """Whether a model is among the chosen ones."""
        return not (self._specs or self._names) or model in self._specs or model in self._names

    def has_set(self, name: str) -> bool:
        """Whether a set is available with all splits that an experiment needs."""
        if name in self.own_sets:
            return True
        return self.data_root.is_dir() and all(
            data.locate(name, split, self.data_root) is not None for split in data.dataset(name).counts
        )

    def has_model(self, model: str, inside: str) -> bool:
        """Whether a model trained on the set `inside` is available."""
        return (model, inside) in self.weights or model in self._specs or model in models.installed_names()

    def fit_part(self, name: str, model: str | None = None) -> ImageSet:
        """The images that methods may learn from: the train split, or a part split off if there is none.

        Args:
            name: The set.
            model: The model for whose input size pictures are decoded; None for 32 x 32.
        """
        return self._load(name, "fit", self._rules(model))

    def test_part(self, name: str, model: str | None = None) -> ImageSet:
        """The images to test on; never overlaps with `fit_part`."""
        return self._load(name, "test", self._rules(model))

    def whole(self, name: str, model: str) -> ImageSet:
        """All images of an OOD set from which no method learns."""
        rules = self._rules(model)
        if name in self.own_sets:
            return data.read(self.own_sets[name], name=name, rules=rules)
        return data.load(name, "test", self.data_root, rules=rules)

    def trained(self, model: str, inside: str) -> TrainedModel:
        """The model of this name trained on the set `inside`."""
        key = (model, inside)
        if key not in self._models:
            if model in self._specs:
                self._models[key] = models.load_spec(self._specs[model])
            elif model in models.LITE:
                self._models[key] = models.load_installed(model)
            elif key in self.weights:
                self._models[key] = load_weights(self.weights[key])
            else:
                held = ", ".join(f"{name} on {on}" for name, on in self.weights) or "none"
                raise InputError(
                    f"Expected weights of {model!r} trained on {inside!r} in {str(self.weights_root)!r}, but there are only: "
                    f"{held}. Train them with `nmd bench train {model} --id {inside}`."
                )
        return self._models[key]

    def _rules(self, model: str | None) -> Preprocessing | None:
        """Preprocessing of pictures for a model; None for the paper's models, whose sets are 32 x 32."""
        if model is None or not (model in self._specs or model in models.LITE):
            return None
        trained = self.trained(model, self.id_set or "")
        return None if trained.size == data.SIZE else trained.preprocessing

    def _load(self, name: str, part: str, rules: Preprocessing | None) -> ImageSet:
        if (name, part, rules) not in self._sets:
            if name in self.own_sets:
                pair = self._read_own(name, rules)
            elif "train" in data.dataset(name).counts:
                split = "train" if part == "fit" else "test"
                pair = {part: data.load(name, split, self.data_root, rules=rules)}
            else:
                fit, test = split_off(data.load(name, "test", self.data_root, rules=rules))
                pair = {"fit": fit, "test": test}
            self._sets.update({(name, key, rules): images for key, images in pair.items()})
        return self._sets[name, part, rules]

    def _read_own(self, name: str, rules: Preprocessing | None) -> dict[str, ImageSet]:
        path = self.own_sets[name]
        tests = [path / part for part in ("test", "val") if (path / part).is_dir()]
        if (path / "train").is_dir() and tests:
            return {
                "fit": data.read(path / "train", name=name, split="train", rules=rules),
                "test": data.read(tests[0], name=name, rules=rules),
            }
        fit, test = split_off(data.read(path, name=name, rules=rules))
        return {"fit": fit, "test": test}


def _known(name: str) -> str:
    """Return the name of a model, or raise if there is no such model."""
    if name not in models.LITE:
        models.architecture(name)
    return name


def _find_weights(root: Path) -> dict[tuple[str, str], Path]:
    """Weights files by architecture and data set; the first by name if there are several."""
    found: dict[tuple[str, str], Path] = {}
    for path in sorted(root.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as handle:
                metadata = dict(handle.metadata() or {})
        except (SafetensorError, OSError) as error:
            warnings.warn(f"{path.name} cannot be read and is skipped: {error}.", NeuralMeanWarning, stacklevel=3)
            continue
        if "architecture" not in metadata or "dataset" not in metadata:
            continue
        try:
            inside = data.dataset(metadata["dataset"]).name
        except InputError:
            continue  # trained on a set unknown to the benchmark
        found.setdefault((metadata["architecture"], inside), path)
    return found
