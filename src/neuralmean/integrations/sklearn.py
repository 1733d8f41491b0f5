"""A detector as a scikit-learn outlier detector, for pipelines, searches and comparisons with scikit-learn's own.

`Detector` itself works with `clone`, `get_params` and `set_params`. `OutlierDetector` adds scikit-learn's calls: rows of
numbers in, +1 (in-distribution) and -1 (OOD) out, and scores whose sign is the opposite of the detector's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, OutlierMixin
from sklearn.utils.validation import check_array, check_is_fitted, validate_data
from torch import Tensor, nn
from typing_extensions import Self

from neuralmean.data.batch import BATCH_SIZE
from neuralmean.detector.detector import Detector
from neuralmean.errors import InputError

__all__ = ["OutlierDetector"]


class OutlierDetector(OutlierMixin, BaseEstimator):  # type: ignore[misc]
    """A model with its detector, as a scikit-learn outlier detector.

    Args:
        model: A trained model whose inputs are rows of numbers, or rows reshaped to `input_shape`. It is never changed.
        input_shape: Shape of one input, such as (3, 32, 32); each row is reshaped to it. None passes rows on as they are.
        false_alarm_rate: Share of in-distribution inputs that may be flagged.
        layers: As for `Detector`.
        statistic: As for `Detector`.
        scorer: As for `Detector`.
        head: As for `Detector`.
        batch_size: Rows per forward pass.

    Attributes:
        detector_: The fitted `Detector`.
        offset_: Minus the detector's threshold: `decision_function` is `score_samples - offset_`.
        n_features_in_: Number of columns seen in `fit`.

    Example:
        >>> rows = np.random.default_rng(0).normal(size=(200, 2))
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        >>> _ = [model(torch.from_numpy(rows).float()) for _ in range(50)]  # instead of training
        >>> outliers = OutlierDetector(model, scorer="average").fit(rows[:100], held_out=rows[100:])
        >>> outliers.predict([[0.0, 0.0], [90.0, -90.0]])
        array([ 1, -1])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        input_shape: Sequence[int] | None = None,
        false_alarm_rate: float = 0.05,
        layers: str | Sequence[str] | None = None,
        statistic: str = "mean",
        scorer: Any = None,
        head: str | bool | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> None:
        # scikit-learn's convention: the constructor only stores its arguments, so that `clone` works.
        self.model = model
        self.input_shape = input_shape
        self.false_alarm_rate = false_alarm_rate
        self.layers = layers
        self.statistic = statistic
        self.scorer = scorer
        self.head = head
        self.batch_size = batch_size

    def fit(self, X: ArrayLike, y: Any = None, *, held_out: ArrayLike | None = None) -> Self:  # noqa: N803
        """Learn from in-distribution rows and return the estimator.

        Args:
            X: In-distribution rows, shape (N, n_features).
            y: Ignored; scikit-learn passes it.
            held_out: In-distribution rows that the model was not trained on, which set the threshold. Without them a part of
                `X` is used, with a warning on how reliable that is.
        """
        rows = validate_data(self, X, dtype=np.float32, ensure_min_samples=2)
        options: dict[str, Any] = {"false_alarm_rate": self.false_alarm_rate, "batch_size": self.batch_size}
        if held_out is not None:
            options["held_out"] = self._inputs(check_array(held_out, dtype=np.float32))
        detector = Detector(
            self.model, layers=self.layers, statistic=self.statistic, scorer=self.scorer, head=self.head
        )
        self.detector_ = detector.fit(self._inputs(rows), **options)
        self.offset_ = -self.detector_.threshold
        return self

    def score_samples(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803
        """Return how normal each row is, shape (N,): minus the detector's score, so lower = more OOD, as in scikit-learn."""
        check_is_fitted(self)
        rows = validate_data(self, X, dtype=np.float32, reset=False)
        return -self.detector_.score(self._inputs(rows), batch_size=self.batch_size).double().numpy()

    def decision_function(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803
        """Return `score_samples - offset_`, shape (N,): below zero = OOD."""
        scores = self.score_samples(X)
        return scores - self.offset_

    def predict(self, X: ArrayLike) -> NDArray[np.int64]:  # noqa: N803
        """Return +1 for each in-distribution row and -1 for each OOD row, shape (N,)."""
        return np.where(self.decision_function(X) < 0, -1, 1)

    def _inputs(self, rows: NDArray[np.float32]) -> Tensor:
        inputs = torch.from_numpy(rows if rows.flags.writeable else rows.copy())
        if self.input_shape is None:
            return inputs
        shape = tuple(self.input_shape)
        if int(np.prod(shape)) != rows.shape[1]:
            raise InputError(
                f"Expected rows of {int(np.prod(shape))} numbers for `input_shape` {shape}, but got {rows.shape[1]}."
            )
        return inputs.reshape(-1, *shape)
