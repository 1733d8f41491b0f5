"""One method under one protocol: fit, score, measure, and cache the scores.

The key of cached scores covers everything they depend on, including the library's source: editing any code that a fit
can reach invalidates them, but not the features, which cost the most.
"""

from __future__ import annotations

import hashlib
import json
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

import neuralmean
from neuralmean.bench.baselines.base import Context, Method, Reader, View
from neuralmean.bench.baselines.measure import Cost, metered
from neuralmean.bench.models import TrainedModel
from neuralmean.bench.protocols import Draw, EvalSet, FitSet
from neuralmean.errors import InputError, NeuralMeanWarning
from neuralmean.files.atomic import write_atomically
from neuralmean.models.fingerprint import fingerprint

Scores = npt.NDArray[np.float64]
_PAGES = tuple(f"bench/{name}.py" for name in ("report", "plots", "gaps", "titles"))
_BESIDE = ("cli/", "service/", "report/", "bench/experiments/", *_PAGES)


@dataclass(frozen=True)
class Scored:
    """Scores of one set, (N,), higher = more OOD, or their terms, (N, T), and what they cost."""

    scores: Scores
    fit: Cost
    score: Cost


def fit_method(method: Method, trained: TrainedModel, draw: Draw, reader: Reader, scratch: Path | None = None) -> Cost:
    """Fit `method` on a draw and return the cost.

    A draw consists of `FitSet`s, which contain no test image.
    """
    with metered(trained.model) as watch:

        def view(images: FitSet) -> View:
            return View(trained, images.source, images.rows, reads=method.reads, reader=reader, meter=watch.meter)

        outliers = view(draw.outliers) if method.uses_outliers and draw.outliers is not None else None
        method.fit(Context(trained, view(draw.inliers), outliers, draw.seed, scratch))
    return watch.cost


def score_set(method: Method, trained: TrainedModel, images: EvalSet, reader: Reader) -> tuple[Scores, Cost]:
    """Score every image of a set with a fitted method."""
    with metered(trained.model) as watch:
        view = View(trained, images.source, None, reads=method.reads, reader=reader, meter=watch.meter)
        scores = method.score(view)
    shape = _shape(method, images)
    if not isinstance(scores, Tensor) or scores.shape != shape:
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise InputError(f"Expected {method.name!r} to return a tensor of shape {shape}, but got {got}.")
    return scores.detach().cpu().double().numpy(), watch.cost


def run_trial(
    make: Callable[[], Method],
    trained: TrainedModel,
    draw: Draw,
    judged: Sequence[EvalSet],
    reader: Reader,
    *,
    cache: Path | None = None,
) -> list[Scored]:
    """Fit a new method once and score every set of `judged`, using the cache.

    Args:
        make: Creates the method.
        trained: The model.
        draw: The data to fit on.
        judged: The sets to score.
        reader: The source of the features.
        cache: Folder of cached scores; None disables the cache.
    """
    method = make()
    paths = [None if cache is None else cache / f"{_key(method, trained, draw, one)}.npz" for one in judged]
    found = [
        None if path is None else _load(path, _shape(method, one)) for path, one in zip(paths, judged, strict=True)
    ]
    if all(scored is not None for scored in found):
        return [scored for scored in found if scored is not None]
    scratch = None if cache is None else cache.parent / "scratch" / _fit_key(method, trained, draw)
    cost = fit_method(method, trained, draw, reader, scratch)
    results = []
    for path, one, old in zip(paths, judged, found, strict=True):
        if old is None:
            scores, score_cost = score_set(method, trained, one, reader)
            old = Scored(scores, cost, score_cost)
            if path is not None:
                _save(path, old)
        results.append(old)
    return results


def sources() -> list[Path]:
    """The library's source files, except those that no fit reaches: commands, service, reports, experiments.

    `bench/train`, with which methods train, is included. Methods must not be defined in `bench/experiments`.
    """
    root = Path(neuralmean.__file__).parent
    return [path for path in sorted(root.rglob("*.py")) if not path.relative_to(root).as_posix().startswith(_BESIDE)]


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Digest of the source code that scores depend on."""
    root = Path(neuralmean.__file__).parent
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _own_source(method: Method) -> str | None:
    """Return the source of a user's method, so that editing it invalidates its cached scores."""
    import inspect

    kind = method.defined_by or type(method)
    if kind.__module__.partition(".")[0] == "neuralmean":
        return None
    try:
        return inspect.getsource(inspect.getmodule(kind) or kind)
    except (OSError, TypeError):
        return None


def _fit_key(method: Method, trained: TrainedModel, draw: Draw) -> str:
    learns = method.learns_from_inliers(trained)
    facts = [
        code_digest(),
        method.name,
        f"{type(method).__module__}:{type(method).__qualname__}",
        _own_source(method),
        method.version,
        trained.name,
        fingerprint(trained.model),
        [*trained.mean, *trained.std],
        draw.inliers.digest() if learns else None,
        draw.outliers.digest() if method.uses_outliers and draw.outliers is not None else None,
        draw.seed if learns or method.uses_outliers else None,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _key(method: Method, trained: TrainedModel, draw: Draw, judged: EvalSet) -> str:
    return hashlib.sha256(f"{_fit_key(method, trained, draw)} {judged.digest()}".encode()).hexdigest()[:32]


def _save(path: Path, scored: Scored) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    costs = json.dumps([asdict(scored.fit), asdict(scored.score)])
    with write_atomically(path) as handle:
        np.savez(handle, scores=scored.scores, costs=np.array(costs))


def _shape(method: Method, images: EvalSet) -> tuple[int, ...]:
    return (len(images), method.n_terms) if method.n_terms else (len(images),)


def _load(path: Path, shape: tuple[int, ...]) -> Scored | None:
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as held:  # a zip file, whose members have checksums
            scores, costs = held["scores"], json.loads(str(held["costs"]))
        if scores.shape != shape:
            raise ValueError(f"{scores.shape} scores instead of {shape}")
        fit, score = (Cost(**cost) for cost in costs)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        warnings.warn(
            f"The scores cached in {str(path)!r} are damaged ({error}). They are computed again.",
            NeuralMeanWarning,
            stacklevel=3,
        )
        return None
    return Scored(scores, fit, score)
