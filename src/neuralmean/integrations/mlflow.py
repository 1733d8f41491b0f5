"""MLflow: log a detector, its report and its metrics; load the detector as a pyfunc model.

A logged detector is a folder with the saved detector and the model's weights, both safetensors: nothing is pickled. Loading
builds the model from its spec under the rules for saved files. Needs `pip install neuralmean[mlflow]`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from neuralmean import __version__
from neuralmean.data.batch import BATCH_SIZE
from neuralmean.detector.detector import Detector
from neuralmean.detector.saved import open_saved
from neuralmean.errors import InputError, MissingExtraError
from neuralmean.models.layers import unwrap
from neuralmean.report import write_report
from neuralmean.stats.metrics import evaluate

try:
    import mlflow
except ImportError as error:
    raise MissingExtraError(
        "The MLflow integration needs the 'mlflow' package. Install it with `pip install neuralmean[mlflow]`."
    ) from error

__all__ = ["DetectorModel", "load_detector", "log_detector", "log_report", "log_results"]

DETECTOR = "detector.nmd"
WEIGHTS = "weights.safetensors"


def log_detector(detector: Detector, name: str = "detector", *, model: str | None = None) -> Any:
    """Log a fitted detector with its model's weights to the active run, and return MLflow's `ModelInfo`.

    Its parameters and its threshold are logged to the run.

    Args:
        detector: A fitted detector.
        name: Name of the logged model.
        model: How to build the model again, as a spec (`timm:NAME`, `package.module:callable`); None takes the detector's
            `info["model"]`. Only a model of timm, torchvision or the benchmark, or a class of an
            installed package, can be loaded without naming it again: see `load_detector`.
    """
    calibration = detector.calibrated()
    spec = model or detector.info.get("model")
    if not isinstance(spec, str):
        raise InputError(
            "Expected a spec to build the model from, but the detector has none. "
            "Pass `model`, such as 'timm:resnet18' or 'package.module:callable'."
        )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "detector"
        place.mkdir()
        tensors = {key: value.detach().cpu().clone() for key, value in unwrap(detector.model).state_dict().items()}
        save_file(tensors, place / WEIGHTS)
        known = dict(detector.info)
        detector.save(place / DETECTOR, info={"model": spec, "weights": WEIGHTS})
        detector.info = known  # the caller's detector stays unchanged
        logged = mlflow.pyfunc.log_model(
            name=name,
            loader_module=__name__,
            data_path=str(place),
            pip_requirements=[f"neuralmean[mlflow]=={__version__}"],
        )
    mlflow.log_params(
        {
            "detector.model": spec,
            "detector.scorer": getattr(detector.scorer, "name", type(detector.scorer).__name__),
            "detector.statistic": detector.statistic,
            "detector.n_layers": len(detector.layers),
            "detector.n_channels": len(detector.channels),
            "detector.false_alarm_rate": calibration.false_alarm_rate,
        }
    )
    mlflow.log_metric("detector.threshold", calibration.threshold)
    return logged


def log_results(
    detector: Detector, id_data: Any, ood_sets: Mapping[str, Any], *, batch_size: int = BATCH_SIZE
) -> dict[str, float]:
    """Log how well a detector separates sets of data, and return the logged metrics, in percent.

    Logs `NAME.auroc`, `NAME.tnr95` and `NAME.flagged` for each set, and `id.flagged`.

    Args:
        detector: A fitted detector.
        id_data: In-distribution data that the detector was not fitted on.
        ood_sets: Out-of-distribution data, by name.
        batch_size: Rows per forward pass if the data is one tensor, array, frame or dataset.
    """
    inside = detector.predict(id_data, batch_size=batch_size)
    found = {"id.flagged": 100 * inside.is_ood.double().mean().item()}
    for name, data in ood_sets.items():
        outside = detector.predict(data, batch_size=batch_size)
        figures = evaluate(inside.score.numpy(), outside.score.numpy())
        found[f"{name}.auroc"], found[f"{name}.tnr95"] = figures.auroc, figures.tnr95
        found[f"{name}.flagged"] = 100 * outside.is_ood.double().mean().item()
    mlflow.log_metrics(found)
    return found


def log_report(detector: Detector, id_images: Any, ood_sets: Mapping[str, Any], *, limit: int | None = None) -> None:
    """Write the HTML report of a detector and log it to the active run as `report.html`; see `write_report`."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_report(detector, id_images, ood_sets, Path(folder) / "report.html", limit=limit)
        mlflow.log_artifact(str(path))


class DetectorModel:
    """The model that `mlflow.pyfunc.load_model` returns.

    Args:
        detector: A calibrated detector with its model.
    """

    def __init__(self, detector: Detector) -> None:
        self.detector = detector

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Return a DataFrame with `score`, `p_value` and `is_ood` for each row of an array or a DataFrame of numbers."""
        import pandas as pd

        decision = self.detector.predict(model_input)
        columns = {"score": decision.score, "p_value": decision.p_value, "is_ood": decision.is_ood}
        return pd.DataFrame({name: np.asarray(values.cpu()) for name, values in columns.items()})


def load_detector(uri: str, *, model: str | None = None) -> Detector:
    """Return a logged detector with its model.

    Args:
        uri: Where it was logged, such as `runs:/RUN_ID/detector`.
        model: Spec of the model, overriding the file: only a spec that you type may name any function or
            module.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(mlflow.artifacts.download_artifacts(uri, dst_path=folder))
        found = sorted(place.rglob(DETECTOR))
        if len(found) != 1:
            raise InputError(f"Expected {uri!r} to be a model that `log_detector` logged, but it is not.")
        return open_saved(found[0], model=model, weights=found[0].parent / WEIGHTS).detector


def _load_pyfunc(data_path: str) -> DetectorModel:
    """Open a logged detector; MLflow calls this with the folder that `log_detector` logged.

    Takes no `model_config`: MLflow stores that with the model, so a spec in it cannot be trusted.
    """
    folder = Path(data_path)
    return DetectorModel(open_saved(folder / DETECTOR, weights=folder / WEIGHTS).detector)
