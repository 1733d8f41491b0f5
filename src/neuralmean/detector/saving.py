"""Converts a `Detector` to its saved file and back, with all checks."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from neuralmean import __version__
from neuralmean.detector import early_exit
from neuralmean.detector.fitting import GUARANTEES, Source
from neuralmean.detector.groups import GROUPED_BY, LENGTH, starts_of
from neuralmean.detector.kinds import Kinds
from neuralmean.detector.learnt import Learnt
from neuralmean.detector.region_boxes import region_layers
from neuralmean.detector.regions import Regions
from neuralmean.errors import ArtefactError, InputError, ModelMismatchError, NeuralMeanError, NotFittedError
from neuralmean.files.artefact import Artefact
from neuralmean.models.layers import unwrap
from neuralmean.recording.reference import Reference
from neuralmean.scorers import Observation, VectorScorer
from neuralmean.scorers.contract import score_rows
from neuralmean.scorers.kinds import KindScorer
from neuralmean.scorers.regions import RegionScorer
from neuralmean.stats.calibration import Calibration, check_rate
from neuralmean.stats.discrepancy import check_statistic
from neuralmean.stats.held_out_profile import HeldOutProfile
from neuralmean.stats.moments import Moments

if TYPE_CHECKING:
    from neuralmean.detector.detector import Detector

_KIND_NAMES = {f"kinds.{name}" for name in (*KindScorer.learnt, "appearance", "content")}
_FIXED_NAMES = {
    "calibration.groups",
    "calibration.scores",
    "profile.largest",
    "profile.squares",
    *(f"{name}.{part}" for name in ("profile", "scale") for part in ("mean", "m2")),
    "reference.mean",
    "reference.std",
}
_REGION_NAMES = {f"regions.{name}" for name in (*RegionScorer.learnt, "scores", "groups")}
_TYPES = (torch.float32, torch.float64, torch.int32, torch.int64)


def to_artefact(detector: Detector, info: Mapping[str, Any] | None = None) -> Artefact:
    """Return the content of the saved file of `detector`, with `info` replacing its own."""
    scorer = detector.scorer
    if detector.reference is None or detector.calibration is None:
        raise NotFittedError("Expected a fitted detector to save. Call `fit` or `calibrate` first.")
    if not isinstance(scorer, VectorScorer):
        raise InputError(f"Expected a scorer that comes with neuralmean to save, but got {type(scorer).__name__}.")
    tensors = {"calibration.scores": detector.calibration.scores, "reference.mean": detector.reference.mean}
    if detector.statistic != "mean" and detector.reference.std is not None:
        tensors["reference.std"] = detector.reference.std
    profile, kept = detector.profile, {} if detector.scale is None else {"scale": detector.scale}
    if profile is not None:
        kept["profile"] = profile.moments
        tensors |= {"profile.squares": profile.squares, "profile.largest": profile.largest}
    for name, moments in kept.items():
        tensors |= {f"{name}.mean": moments.mean, f"{name}.m2": moments.m2}
    if detector.calibration.group_of is not None:
        tensors["calibration.groups"] = detector.calibration.group_of
    tensors |= {f"scorer.{name}": tensor for name, tensor in scorer.state().items()}
    if (kinds := detector.learnt.kinds) is not None:
        tensors |= {f"kinds.{name}": tensor for name, tensor in kinds.kind_scorer.state().items()}
        tensors |= {"kinds.appearance": kinds.appearance.scores, "kinds.content": kinds.content.scores}
    regions = detector.learnt.regions
    if regions is not None:
        tensors |= {f"regions.{name}": tensor for name, tensor in regions.scorer.state().items()}
        tensors |= {"regions.scores": regions.calibration.scores, "regions.groups": _group_numbers(regions.calibration)}
    header = {
        "regions": None
        if regions is None
        else {
            "false_alarm_rate": regions.calibration.false_alarm_rate,
            "groups": list(regions.calibration.group_names),
        },
        "calibration": {
            "confidence": detector.calibration.confidence,
            "false_alarm_rate": detector.calibration.false_alarm_rate,
            "groups": list(detector.calibration.group_names),
            "grouped_by": detector.learnt.grouped_by,
            "source": detector.learnt.source,
            "threshold": detector.threshold,
        },
        "fingerprint": detector.fingerprint,
        "settings": detector.settings_digest,
        "fitted": detector.fitted,
        "head": detector.head,
        "info": detector.info if info is None else info,
        "layers": [[layer.name, layer.kind, layer.channels] for layer in detector.watched],
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
        ArtefactError: The content is invalid.
    """
    header = artefact.header
    try:
        wanted = [(str(name), str(kind), int(channels)) for name, kind, channels in header["layers"]]
        fitted_class, digest, statistic = str(header["model_class"]), str(header["fingerprint"]), header["statistic"]
        scorer = early_exit.make(header["scorer"]["name"], header["scorer"]["options"])
        head = header["head"]
        _check_model(model, wanted, fitted_class)
        check_statistic(statistic)
        if head is not None and head not in dict(unwrap(model).named_modules()):
            raise ArtefactError(f"the model has no layer {head!r}")
        own = early_exit.full_of(scorer)  # for a `fit` after this
        try:
            detector = kind(model, layers=[name for name, _, _ in wanted], statistic=statistic, scorer=own, head=head)
        except InputError:  # a layer of another kind has the name
            raise ModelMismatchError(_other_model(fitted_class, model)) from None
        found = [(layer.name, layer.kind, layer.channels) for layer in detector.watched]
        if found != wanted:
            raise ModelMismatchError(_other_model(fitted_class, model))
        if detector.fingerprint != digest:
            raise ModelMismatchError(
                f"Expected the {fitted_class} that {path!r} was fitted on, but its weights differ. "
                "Load the weights it was fitted with, or fit again."
            )
        if detector.settings_digest != str(header["settings"]):
            raise ModelMismatchError(
                f"Expected the {fitted_class} that {path!r} was fitted on, but its layers have other settings, such as "
                "strides or epsilons. Build the model as for the fit, or fit again."
            )
        detector.adopt(_read_learnt(detector, artefact, scorer, head))
        detector.info = dict(header["info"])
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
            f"Expected {path!r} to describe a detector, but its content is invalid ({error})."
        ) from None
    return detector


def _read_learnt(detector: Detector, artefact: Artefact, scorer: VectorScorer, head: str | None) -> Learnt:
    """Return what was learnt according to an artefact, after checking that it fits the detector's model."""
    for name, tensor in artefact.tensors.items():
        if tensor.dtype not in _TYPES or not bool(torch.isfinite(tensor).all()):
            raise ArtefactError(f"{name} holds {tensor.dtype} or numbers that are not finite")
    _check_exits(detector, scorer)
    state = {name[7:]: tensor for name, tensor in artefact.tensors.items() if name.startswith("scorer.")}
    scorer.load_state(state)
    calibration, source = _read_calibration(artefact)
    width = len(detector.channels)
    learnt = Learnt(
        reference=_read_reference(detector, artefact),
        scorer=scorer,
        calibration=calibration,
        source=source,
        scale=_moments(artefact, "scale", width) if detector.statistic == "both" else None,
        profile=_read_profile(detector, artefact) if "profile" in artefact.header["moments"] else None,
        head=head,
        facts=dict(artefact.header["fitted"]),
        grouped_by=artefact.header["calibration"]["grouped_by"],
        kinds=_read_kinds(detector, artefact, scorer, calibration.false_alarm_rate),
        regions=_read_regions(detector, artefact),
    )
    _try_scorer(detector, scorer, head)
    known = _FIXED_NAMES | {f"scorer.{name}" for name in scorer.state()}
    known |= _KIND_NAMES if learnt.kinds is not None else set()
    known |= _REGION_NAMES if learnt.regions is not None else set()
    if unknown := set(artefact.tensors) - known:
        raise ArtefactError(f"{sorted(unknown)[0][:40]!r} is unknown")
    return learnt


def _read_reference(detector: Detector, artefact: Artefact) -> Reference:
    n_columns = sum(layer.channels for layer in detector.watched)
    mean = _vector(artefact.tensors, "reference.mean", n_columns)
    std = _vector(artefact.tensors, "reference.std", n_columns) if detector.statistic != "mean" else None
    known = artefact.header["reference"]
    is_from_data = known["source"] == "data"
    moments = Moments(_count(known["count"]), mean, torch.zeros_like(mean)) if is_from_data else None
    return Reference(detector.watched, mean, std, moments)


def _read_profile(detector: Detector, artefact: Artefact) -> HeldOutProfile:
    n_layers = len(detector.watched)
    shares = [_vector(artefact.tensors, f"profile.{name}", n_layers) for name in ("squares", "largest")]
    if not all(bool(((part > 0) & (part <= 1)).all()) for part in shares):
        raise ArtefactError("the shares of the profile are not shares")
    moments = _moments(artefact, "profile", len(detector.channels))
    return HeldOutProfile(detector.column_layers, moments, *shares)


def _read_calibration(artefact: Artefact) -> tuple[Calibration, Source]:
    scores, header = artefact.tensors["calibration.scores"], artefact.header["calibration"]
    rate, source = header["false_alarm_rate"], header["source"]
    check_rate(rate)
    is_sorted = scores.is_floating_point() and scores.dim() == 1 and bool((scores.diff() >= 0).all())
    if source not in GUARANTEES or not is_sorted:
        raise ArtefactError("the calibration is invalid")
    names, grouped_by = header["groups"], header["grouped_by"]
    if not names:
        if grouped_by is not None:
            raise ArtefactError("there are no groups to calibrate by")
        return Calibration.of(scores, rate, confidence=header["confidence"]), source
    if grouped_by not in GROUPED_BY:
        raise ArtefactError("the groups are of an unknown kind")
    if grouped_by == LENGTH:
        starts_of(names)  # raises
    whole = Calibration.of(scores, rate, confidence=header["confidence"])  # with its checks
    return _with_groups(whole, scores, artefact.tensors["calibration.groups"], names), source


def _with_groups(whole: Calibration, scores: Tensor, numbers: Tensor, names: Any) -> Calibration:
    """Return a calibration by group, given the scores, sorted, and the index of the group of each."""
    is_index = numbers.dtype == torch.int64 and numbers.shape == scores.shape
    if not is_index or not 0 <= int(numbers.min()) <= int(numbers.max()) < len(names):
        raise ArtefactError("the groups are not those of the scores")
    return Calibration(scores, whole.false_alarm_rate, whole.confidence, tuple(map(str, names)), numbers)


def _group_numbers(calibration: Calibration) -> Tensor:
    found = calibration.group_of
    return torch.zeros(len(calibration.scores), dtype=torch.int64) if found is None else found


def _read_regions(detector: Detector, artefact: Artefact) -> Regions | None:
    header = artefact.header["regions"]
    if header is None:
        return None
    state = {name[8:]: tensor for name, tensor in artefact.tensors.items() if name.startswith("regions.")}
    scorer = RegionScorer().load_state(state, sum(layer.channels for layer in region_layers(detector.watched)))
    scores = state["scores"]
    if not scores.is_floating_point() or scores.dim() != 1 or bool((scores.diff() < 0).any()):
        raise ArtefactError("the scores of regions are not sorted numbers")
    whole = Calibration.of(scores, header["false_alarm_rate"])
    return Regions(scorer, _with_groups(whole, scores, state["groups"], header["groups"]))


def _read_kinds(detector: Detector, artefact: Artefact, scorer: VectorScorer, rate: float) -> Kinds | None:
    tensors = {name[6:]: tensor for name, tensor in artefact.tensors.items() if name.startswith("kinds.")}
    if not tensors:
        return None
    own = KindScorer().load_state(tensors)
    if own.widths_.tolist() != [layer.channels for layer in detector.watched]:
        raise ArtefactError("the kinds are those of other layers")
    parts = []
    for name in ("appearance", "content"):
        scores = tensors[name]
        if not scores.is_floating_point() or scores.dim() != 1 or bool((scores.diff() < 0).any()):
            raise ArtefactError(f"the held-out scores of {name} are not sorted numbers")
        parts.append(Calibration.of(scores, rate))
    return Kinds(own, early_exit.full_of(scorer), *parts)


def _check_exits(detector: Detector, scorer: VectorScorer) -> None:
    if not isinstance(scorer, early_exit.CascadeScorer):
        return
    if scorer.widths != early_exit.widths_of(detector.watched, scorer.depths):
        raise ArtefactError("the exits do not end with a layer")


def _try_scorer(detector: Detector, scorer: VectorScorer, head: str | None) -> None:
    """Score zeros, so that a state of the wrong shape raises now."""
    logits, feature = None, None
    if head is not None:
        module = unwrap(detector.model).get_submodule(head)
        if not isinstance(module, nn.Linear):
            raise ArtefactError(f"the head {head!r} is not a linear layer but a {type(module).__name__}")
        logits, feature = torch.zeros(1, module.out_features), torch.zeros(1, module.in_features)
    score_rows(scorer, Observation(torch.zeros(1, len(detector.channels)), logits, feature))


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
