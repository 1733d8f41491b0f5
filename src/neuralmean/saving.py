"""Between a `Detector` and its saved file: what goes into the header and the tensors, and back with every check."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from neuralmean import cascade
from neuralmean.artefact import Artefact
from neuralmean.baseline import Baseline
from neuralmean.calibration import Calibration, check_rate
from neuralmean.discrepancy import check_statistic, vector_layers
from neuralmean.errors import ArtefactError, InputError, ModelMismatchError, NeuralMeanError, NotFittedError
from neuralmean.fitting import GUARANTEES, score_rows
from neuralmean.layers import unwrap
from neuralmean.moments import Moments
from neuralmean.reference import Reference
from neuralmean.scorers import Observation, VectorScorer
from neuralmean.version import __version__

if TYPE_CHECKING:
    from neuralmean.detector import Detector

_TYPES = (torch.float32, torch.float64, torch.int32, torch.int64)


def to_artefact(detector: Detector, info: Mapping[str, Any] | None = None) -> Artefact:
    """Return what the saved file of `detector` holds, with `info` in place of its own."""
    scorer = detector.scorer
    if detector.reference is None or detector.calibration is None:
        raise NotFittedError("Expected a fitted detector to save. Call `fit` or `calibrate` first.")
    if not isinstance(scorer, VectorScorer):
        raise InputError(f"Expected a scorer that comes with neuralmean to save, but got {type(scorer).__name__}.")
    tensors = {"calibration.scores": detector.calibration.scores, "reference.mean": detector.reference.mean}
    if detector.statistic != "mean" and detector.reference.std is not None:
        tensors["reference.std"] = detector.reference.std
    baseline, kept = detector.baseline, {} if detector.scale is None else {"scale": detector.scale}
    if baseline is not None:
        kept["baseline"] = baseline.moments
        tensors |= {"baseline.squares": baseline.squares, "baseline.largest": baseline.largest}
    for name, moments in kept.items():
        tensors |= {f"{name}.mean": moments.mean, f"{name}.m2": moments.m2}
    tensors |= {f"scorer.{name}": tensor for name, tensor in scorer.state().items()}
    header = {
        "calibration": {
            "false_alarm_rate": detector.calibration.false_alarm_rate,
            "source": detector.calibration_source,
            "threshold": detector.threshold,
        },
        "fingerprint": detector._watch.digest,
        "fitted": detector.fitted,
        "head": detector.head,
        "info": detector.info if info is None else info,
        "layers": [[layer.name, layer.kind, layer.channels] for layer in detector._layers],
        "model_class": type(unwrap(detector.model)).__name__,
        "reference": {"source": detector.reference.source, "count": detector.reference.count},
        "moments": {name: moments.count for name, moments in kept.items()},
        "scorer": {"name": scorer.name, "options": scorer.get_options()},
        "statistic": detector.statistic,
        "versions": {"neuralmean": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    return Artefact(header, tensors)


def from_artefact(kind: type[Detector], artefact: Artefact, model: nn.Module, path: str) -> Detector:
    """Return the detector that an artefact describes, for `model`.

    Raises:
        ModelMismatchError: The model is another one, or has other weights.
        ArtefactError: The content makes no sense.
    """
    header = artefact.header
    try:
        wanted = [(str(name), str(kind), int(channels)) for name, kind, channels in header["layers"]]
        fitted_class, digest, statistic = str(header["model_class"]), str(header["fingerprint"]), header["statistic"]
        scorer = cascade.make(header["scorer"]["name"], header["scorer"]["options"])
        head = header["head"]
        _check_model(model, wanted, fitted_class)
        check_statistic(statistic)
        own = cascade.full_of(scorer)  # for a `fit` after this
        try:
            detector = kind(model, layers=[name for name, _, _ in wanted], statistic=statistic, scorer=own)
        except InputError:  # a layer of another kind has the name
            raise ModelMismatchError(_other_model(fitted_class, model)) from None
        found = [(layer.name, layer.kind, layer.channels) for layer in detector._layers]
        if found != wanted:
            raise ModelMismatchError(_other_model(fitted_class, model))
        if detector._watch.digest != digest:
            raise ModelMismatchError(
                f"Expected the {fitted_class} that {path!r} was fitted on, but its weights differ. "
                "Load the weights it was fitted with, or fit again."
            )
        _fill(detector, artefact, scorer, head)
    except ModelMismatchError:
        raise
    except (
        NeuralMeanError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        ArithmeticError,
    ) as error:
        raise ArtefactError(
            f"Expected {path!r} to describe a detector, but its content makes no sense ({error})."
        ) from None
    return detector


def _fill(detector: Detector, artefact: Artefact, scorer: VectorScorer, head: Any) -> None:
    header, tensors = artefact.header, artefact.tensors
    for name, tensor in tensors.items():
        if tensor.dtype not in _TYPES or not bool(torch.isfinite(tensor).all()):
            raise ArtefactError(f"{name} holds {tensor.dtype} or numbers that are not finite")
    n_columns = sum(layer.channels for layer in detector._layers)
    mean = _vector(tensors, "reference.mean", n_columns)
    std = _vector(tensors, "reference.std", n_columns) if detector.statistic != "mean" else None
    moments, count = None, header["reference"]["count"]
    if header["reference"]["source"] == "data":
        moments = Moments(_count(count), mean, torch.zeros_like(mean))
    detector.reference = Reference(detector._layers, mean, std, moments)
    width = len(detector.channels)
    if detector.statistic == "both":
        detector.scale = _moments(artefact, "scale", width)
    if "baseline" in header["moments"]:
        squares, largest = (
            _vector(tensors, f"baseline.{name}", len(detector.layers)) for name in ("squares", "largest")
        )
        if not all(bool(((part > 0) & (part <= 1)).all()) for part in (squares, largest)):
            raise ArtefactError("the shares of the baseline are not shares")
        columns = vector_layers(detector._layers, detector.statistic)
        detector.baseline = Baseline(columns, _moments(artefact, "baseline", width), squares, largest)
    scores = tensors["calibration.scores"]
    rate, source = header["calibration"]["false_alarm_rate"], header["calibration"]["source"]
    check_rate(rate)
    if (
        source not in GUARANTEES
        or not scores.is_floating_point()
        or scores.dim() != 1
        or not bool((scores.diff() >= 0).all())
    ):
        raise ArtefactError("the calibration is not one")
    detector.calibration = Calibration.of(scores, rate)
    detector.calibration_source = source
    if isinstance(scorer, cascade.CascadeScorer) and scorer.widths != cascade.widths_of(
        detector._layers, scorer.depths
    ):
        raise ArtefactError("the exits are not behind layers")
    scorer.load_state({name[7:]: tensor for name, tensor in tensors.items() if name.startswith("scorer.")})
    detector.scorer = scorer
    if head is not None and head not in dict(unwrap(detector.model).named_modules()):
        raise ArtefactError(f"the model has no layer {head!r}")
    detector.head, detector._head_choice = head, head
    detector._observer = detector._make_observer(head)
    detector.fitted, detector.info = dict(header["fitted"]), dict(header["info"])
    output, feature = None, None
    if head is not None and isinstance(module := unwrap(detector.model).get_submodule(head), nn.Linear):
        output, feature = torch.zeros(1, module.out_features), torch.zeros(1, module.in_features)
    score_rows(
        scorer, Observation(torch.zeros(1, width), output, feature)
    )  # a state of the wrong shape shows itself now


def _check_model(model: nn.Module, wanted: list[tuple[str, str, int]], fitted_class: str) -> None:
    if not isinstance(model, nn.Module):
        raise ModelMismatchError(f"Expected the model that the detector was fitted on, but got {type(model).__name__}.")
    names = dict(unwrap(model).named_modules())
    if any(name not in names for name, _, _ in wanted):
        raise ModelMismatchError(_other_model(fitted_class, model))


def _other_model(fitted_class: str, model: nn.Module) -> str:
    got = type(unwrap(model)).__name__
    return f"Expected the {fitted_class} that the detector was fitted on, but got a {got} with other layers."


def _vector(tensors: dict[str, Tensor], name: str, width: int) -> Tensor:
    tensor = tensors[name]
    if tensor.shape != (width,) or tensor.dtype != torch.float64:
        raise ArtefactError(f"{name} is not {width} finite numbers")
    return tensor


def _moments(artefact: Artefact, name: str, width: int) -> Moments:
    mean, m2 = (_vector(artefact.tensors, f"{name}.{part}", width) for part in ("mean", "m2"))
    if bool((m2 < 0).any()):
        raise ArtefactError(f"{name} has deviations below zero")
    return Moments(_count(artefact.header["moments"][name]), mean, m2)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**53:
        raise ArtefactError(f"{value!r} is not a number of examples")
    return value
