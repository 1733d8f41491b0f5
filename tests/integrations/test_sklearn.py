"""The scikit-learn wrapper, checked by scikit-learn's own `check_estimator`, and `Detector` under `clone`."""

from __future__ import annotations

import joblib
import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from torch import nn

from neuralmean import Detector
from neuralmean.errors import InputError
from neuralmean.integrations.sklearn import OutlierDetector
from tests.conftest import make_trained

# What `check_estimator` asks for that a torch model cannot give, whatever wraps it.
EXPECTED_FAILURES = {
    "check_estimators_overwrite_params": "joblib gives two copies of the same torch model different hashes",
}


class AnyWidth(nn.Module):
    """A model that takes rows of any length, as scikit-learn's checks send rows of many lengths."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv1d(1, 8, 3, padding=1), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(torch.relu(self.bn(self.conv(x[:, None]))).mean(2))


@pytest.fixture
def rows():
    return np.random.default_rng(0).normal(size=(300, 10))


@pytest.fixture
def table_model():
    model = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        for _ in range(60):
            model(torch.randn(64, 10))
    return model.eval()


@pytest.mark.filterwarnings("ignore")  # the checks fit without held-out data, and warn of what they skip
def test_scikit_learns_own_checks_pass_but_for_those_listed():
    # 0.25: most checks fit on about 20 rows, too few for a threshold at 5 %.
    estimator = OutlierDetector(AnyWidth().eval(), scorer="average", false_alarm_rate=0.25)
    results = check_estimator(estimator, expected_failed_checks=EXPECTED_FAILURES, on_skip=None, on_fail=None)
    failed = {result["check_name"]: str(result["exception"]) for result in results if result["status"] == "failed"}
    assert not failed
    assert {result["check_name"] for result in results if result["status"] == "xfail"} == set(EXPECTED_FAILURES)
    assert sum(result["status"] == "passed" for result in results) >= 40


def test_the_expected_failure_is_joblibs(table_model):
    assert joblib.hash(table_model) != joblib.hash(clone(table_model, safe=False))


@pytest.mark.filterwarnings("ignore")
def test_with_a_model_of_fixed_width_only_the_width_fails(table_model):
    results = check_estimator(
        OutlierDetector(table_model, scorer="average", false_alarm_rate=0.25), on_skip=None, on_fail=None
    )
    failed = {result["check_name"]: str(result["exception"]) for result in results if result["status"] == "failed"}
    other = {name for name, why in failed.items() if "mat1 and mat2 shapes" not in why and "ModelInputError" not in why}
    assert other <= {"check_fit2d_1feature", *EXPECTED_FAILURES}  # a row of one number has the wrong width as well


def test_signs_and_offset_are_scikit_learns(table_model, rows):
    estimator = OutlierDetector(table_model, scorer="average").fit(rows[:200], held_out=rows[200:])
    x = np.vstack([rows[:5], 50 + rows[:5]])
    decision = estimator.detector_.predict(torch.from_numpy(x).float())
    np.testing.assert_allclose(estimator.score_samples(x), -decision.score.double().numpy())
    np.testing.assert_allclose(estimator.decision_function(x), estimator.score_samples(x) - estimator.offset_)
    np.testing.assert_array_equal(estimator.predict(x) == -1, decision.is_ood.numpy())
    assert (estimator.predict(x)[5:] == -1).all()


def test_it_works_in_a_pipeline_and_a_search(table_model, rows):
    outlier = OutlierDetector(table_model, scorer="average")
    pipeline = make_pipeline(StandardScaler(), outlier)
    pipeline.fit(rows[:200], outlierdetector__held_out=rows[200:])
    assert pipeline.predict(rows + 100).tolist() == [-1] * len(rows)

    def share_of_inliers(estimator, x, y=None):
        return (estimator.predict(x) == 1).mean()

    with pytest.warns(UserWarning, match="held"):
        search = GridSearchCV(outlier, {"statistic": ["mean", "variance"]}, scoring=share_of_inliers, cv=2).fit(
            np.repeat(rows, 2, axis=0)
        )
    assert search.best_params_["statistic"] in ("mean", "variance")


def test_rows_become_images(images):
    flat = images.flatten(1).numpy()
    estimator = OutlierDetector(make_trained(), input_shape=(3, 8, 8), scorer="average")
    estimator.fit(flat[:200], held_out=flat[200:])
    direct = estimator.detector_.score(images[:4]).double().numpy()
    np.testing.assert_allclose(estimator.score_samples(flat[:4]), -direct, rtol=1e-6)
    with pytest.raises(InputError, match=r"Expected rows of 192 numbers for `input_shape` \(3, 8, 8\), but got 3"):
        estimator.fit(np.zeros((30, 3)))


def test_an_unfitted_one_says_so(table_model, rows):
    with pytest.raises(NotFittedError, match="not fitted yet"):
        OutlierDetector(table_model).predict(rows)


def test_a_detector_can_be_cloned_and_its_parameters_set(model, images):
    detector = Detector(model, layers="bn*", statistic="both", scorer="average").fit(
        images[:200], held_out=images[200:]
    )
    copy = clone(detector)
    assert copy.calibration is None
    assert copy.model is not model
    assert {**copy.get_params(), "model": None} == {**detector.get_params(), "model": None}
    assert copy.set_params(statistic="mean").statistic == "mean"
    with pytest.raises(InputError, match="Expected parameters out of"):
        copy.set_params(statistics="mean")
