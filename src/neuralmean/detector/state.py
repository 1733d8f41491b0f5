"""What a detector consists of: a model with its watched layers, the constructor's arguments, and what was learnt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from typing_extensions import Self

from neuralmean.detector import fitting, html
from neuralmean.detector.learnt import FitSetup, Learnt
from neuralmean.errors import InputError, NotFittedError
from neuralmean.models.fingerprint import WeightsGuard
from neuralmean.models.layers import Layer, has_running_mean, select_layers, unwrap
from neuralmean.recording.observer import Observer
from neuralmean.recording.reference import Reference
from neuralmean.scorers import Scorer
from neuralmean.stats.calibration import Calibration
from neuralmean.stats.discrepancy import Statistic, Vectors, check_statistic, vector_layers, vector_names
from neuralmean.stats.held_out_profile import HeldOutProfile
from neuralmean.stats.moments import Moments


class DetectorState:
    """The state of a `Detector`, to which the detector adds what can be done with it."""

    def __init__(
        self,
        model: nn.Module,
        *,
        layers: str | Sequence[str] | None = None,
        statistic: str = "mean",
        scorer: str | Scorer | None = None,
        reference: Reference | None = None,
        head: str | bool | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"Expected `model` to be a torch.nn.Module, but got {type(model).__name__}.")
        self._params: dict[str, Any] = {
            "layers": layers,
            "statistic": statistic,
            "scorer": scorer,
            "reference": reference,
            "head": head,
        }
        self.model = model
        self.statistic: Statistic = check_statistic(statistic)
        if layers is None and reference is not None:
            layers = [layer.name for layer in reference.layers]
        self.watched: tuple[Layer, ...] = select_layers(model, layers)
        if reference is not None and reference.layers != self.watched:
            raise InputError("Expected a reference of the watched layers. Make it with the same `layers`.")
        if isinstance(head, str) and head not in dict(unwrap(model).named_modules()):
            raise InputError(f"Expected `head` to be a layer of {type(unwrap(model)).__name__}, but got {head!r}.")
        fitting.check_scorer(scorer)  # a wrong name fails here rather than in `fit`
        self.info: dict[str, Any] = {}
        self._reset()

    def _reset(self) -> None:
        """Start from the current model with nothing learnt."""
        self._weights_guard = WeightsGuard(self.model)
        reference = self._params["reference"] or self._free_reference()
        # Until `fit`, the only scorer that needs no data: the paper's average.
        scorer = fitting.choose_scorer(self._params["scorer"] or "average", None)
        self.adopt(Learnt(reference, scorer))

    def _free_reference(self) -> Reference | None:
        core = unwrap(self.model)
        if all(has_running_mean(core.get_submodule(layer.name)) for layer in self.watched):
            return Reference.from_batchnorm(self.model, list(self.layers))
        return None

    def adopt(self, learnt: Learnt, observer: Observer | None = None) -> None:
        """Replace what was learnt, after `fit` or from a saved file.

        Args:
            learnt: What was learnt on this model and these layers.
            observer: Runs the model; None makes a new one.
        """
        self.learnt = learnt
        self._observer = observer or self.setup.observer(learnt.head)
        self._vectors = Vectors(self.statistic, learnt.reference, learnt.scale)

    @property
    def calibration_source(self) -> fitting.Source | None:
        """Where the calibration scores come from; None before `fit`."""
        return self.learnt.source

    @property
    def setup(self) -> FitSetup:
        """The constructor's arguments, as `learn` takes them."""
        return FitSetup(
            self.model,
            self.watched,
            self.statistic,
            self._params["scorer"],
            self.learnt.reference,
            self._params["head"],
        )

    # What was learnt.

    @property
    def reference(self) -> Reference | None:
        """Channel statistics of the training data; None if they are unknown until `fit`."""
        return self.learnt.reference

    @property
    def scorer(self) -> Scorer:
        """The scorer, which turns vectors into scores."""
        return self.learnt.scorer

    @property
    def calibration(self) -> Calibration | None:
        """The held-out scores and the threshold; None before `fit`."""
        return self.learnt.calibration

    @property
    def scale(self) -> Moments | None:
        """Moments of the vectors, with which those of `statistic="both"` are standardised."""
        return self.learnt.scale

    @property
    def profile(self) -> HeldOutProfile | None:
        """Statistics of held-out data, for `Monitor`; None without held-out data."""
        return self.learnt.profile

    @property
    def head(self) -> str | None:
        """Name of the layer that gives the logits; None if the scorer does not need them."""
        return self.learnt.head

    @property
    def fitted(self) -> dict[str, Any]:
        """When the detector was fitted, and on how many examples."""
        return self.learnt.facts

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the watched layers."""
        return tuple(layer.name for layer in self.watched)

    @property
    def channels(self) -> list[str]:
        """Names of the columns of the discrepancy vector: `"bn1[3]"` is channel 3 of layer bn1."""
        return vector_names(self.watched, self.statistic)

    @property
    def column_layers(self) -> Tensor:
        """Index in `layers` of each column of the discrepancy vector, shape (D,)."""
        return vector_layers(self.watched, self.statistic)

    @property
    def fingerprint(self) -> str:
        """Digest of the weights that the detector was made for."""
        return self._weights_guard.digest

    @property
    def settings_digest(self) -> str:
        """Digest of the settings of the model's layers (strides, epsilons) that the detector was made for."""
        return self._weights_guard.settings

    @property
    def threshold(self) -> float:
        """The score above which an input is flagged."""
        return self.calibrated().threshold

    @property
    def false_alarm_rate(self) -> float:
        """The share of in-distribution inputs that may be flagged."""
        return self.calibrated().false_alarm_rate

    @property
    def guarantee(self) -> str:
        """A sentence on when the false-alarm rate holds."""
        confidence = self.calibrated().confidence
        own = fitting.GUARANTEES[self.learnt.source or "held_out"]
        if confidence is None or self.learnt.source != "held_out":
            return own
        return f"{own} It holds for this threshold with a confidence of {100 * confidence:g} %."

    def calibrated(self) -> Calibration:
        """Return the calibration, or raise if there is none yet."""
        if self.learnt.calibration is None:
            raise NotFittedError("The detector has no threshold yet. Call `fit` or `calibrate` first.")
        return self.learnt.calibration

    def check_weights(self) -> None:
        """Raise `ModelMismatchError` if the model's weights have changed since the detector was made."""
        self._weights_guard.check()

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the constructor's arguments, as scikit-learn's `clone` reads them."""
        return {"model": self.model, **self._params}

    def set_params(self, **params: Any) -> Self:
        """Change constructor arguments; what was learnt is forgotten."""
        known = self.get_params()
        unknown = sorted(set(params) - set(known))
        if unknown:
            raise InputError(f"Expected parameters out of {sorted(known)}, but got {unknown}.")
        if params:
            known.update(params)
            self.__init__(known.pop("model"), **known)  # type: ignore[misc]
        return self

    def _repr_html_(self) -> str:
        return html.detector_table(self)

    def __repr__(self) -> str:
        name, scorer = type(unwrap(self.model)).__name__, getattr(self.scorer, "name", type(self.scorer).__name__)
        state = "not calibrated" if self.calibration is None else f"threshold {self.threshold:.4g}"
        return f"Detector({name}: {len(self.watched)} layers, {len(self.channels)} channels, {scorer}, {state})"
