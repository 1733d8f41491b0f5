"""All methods of the benchmark, by name; they share one interface.

A method is one file with one subclass of `Method`; `_makers` lists them in the order of tables.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from neuralmean.bench.baselines.acet import Acet
from neuralmean.bench.baselines.ash import Ash
from neuralmean.bench.baselines.base import Context, Method, Read, View
from neuralmean.bench.baselines.cntk import Cntk
from neuralmean.bench.baselines.dk import DeepKernel
from neuralmean.bench.baselines.energy import Energy
from neuralmean.bench.baselines.energy_ft import EnergyFineTuned
from neuralmean.bench.baselines.fdbd import Fdbd
from neuralmean.bench.baselines.gen import Gen
from neuralmean.bench.baselines.godin import GeneralizedOdin
from neuralmean.bench.baselines.good import Good
from neuralmean.bench.baselines.gram import Gram
from neuralmean.bench.baselines.knn import Knn
from neuralmean.bench.baselines.mahalanobis import Mahalanobis, MahalanobisId
from neuralmean.bench.baselines.mds import MdsPlus, RmdsPlus
from neuralmean.bench.baselines.measure import Cost
from neuralmean.bench.baselines.msp import Msp
from neuralmean.bench.baselines.nac import Nac
from neuralmean.bench.baselines.nci import Nci
from neuralmean.bench.baselines.nnguide import NnGuide
from neuralmean.bench.baselines.odin import Odin
from neuralmean.bench.baselines.oe import OutlierExposure
from neuralmean.bench.baselines.one_d import OneDimensional
from neuralmean.bench.baselines.ours import NeuralMean, scorers_known
from neuralmean.bench.baselines.react import React
from neuralmean.bench.baselines.rmds import Rmds
from neuralmean.bench.baselines.scale import Scale
from neuralmean.bench.baselines.scntk import Scntk
from neuralmean.bench.baselines.she import She
from neuralmean.bench.baselines.vim import Vim
from neuralmean.bench.models.registry import suggestion
from neuralmean.errors import InputError

__all__ = ["Context", "Cost", "DeepKernel", "Method", "NeuralMean", "Read", "View", "make", "names", "resolve"]


def _makers() -> dict[str, Callable[[], Method]]:
    known = scorers_known()
    own: list[Callable[[], Method]] = [partial(NeuralMean, scorer) for scorer in known]
    for scorer in ("mlp", "logistic"):
        if scorer in known:
            own += [partial(NeuralMean, scorer, statistic="variance"), partial(NeuralMean, scorer, statistic="both")]
    from_features = (
        Knn,
        Vim,
        React,
        Ash,
        Scale,
        Rmds,
        MdsPlus,
        RmdsPlus,
        Gen,
        Fdbd,
        Nci,
        NnGuide,
        She,
        Nac,
        DeepKernel,
    )
    from_images = (Odin, Mahalanobis, MahalanobisId, Gram, Cntk, Scntk)
    fine_tuned = (OutlierExposure, EnergyFineTuned, GeneralizedOdin, OneDimensional, Acet, Good)
    return {maker().name: maker for maker in (Msp, Energy, *from_images, *fine_tuned, *from_features, *own)}


def names() -> list[str]:
    """Names of all methods, in the order of tables."""
    return list(_makers())


def make(name: str) -> Method:
    """Return a new method.

    Args:
        name: One of `names()`, or `package.module:Class` for a class of yours: a subclass of `Method`, or a scorer with
            `fit` and `score`, as for `Detector(scorer=...)`.

    Raises:
        InputError: There is no such method.

    Example:
        >>> make("msp").title
        'MSP'
    """
    if ":" in name:
        return _own(name)
    makers = _makers()
    if name not in makers:
        raise InputError(f"Expected the name of a method, but got {name!r}. {suggestion(name, makers)}")
    return makers[name]()


def resolve(wanted: list[str] | None, offered: list[str] | tuple[str, ...]) -> list[str]:
    """Return which of an experiment's methods to run.

    Args:
        wanted: Names, or None for all. `"quick"` means all whose fit takes seconds, without fine-tuning. A method of
            yours, `package.module:Class`, can be added to any experiment.
        offered: The methods that the experiment compares, in the order of its table; unknown names are skipped.
    """
    there = [name for name in offered if name in _makers()]
    if wanted is None:
        return there
    chosen = [name for name in wanted if name != "quick"]
    for name in chosen:
        make(name)
    quick = [name for name in there if not make(name).heavy and not make(name).fine_tunes] if "quick" in wanted else []
    own = [name for name in dict.fromkeys(chosen) if ":" in name]
    return [*(name for name in there if name in chosen or name in quick), *own]


def _own(spec: str) -> Method:
    """Return a new instance of the class that `package.module:Class` names."""
    module_name, _, name = spec.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)  # like `python -m`, so that modules in the working folder are found
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise InputError(
            f"Expected to import {module_name!r} for the method {spec!r}, but got {type(error).__name__}: {error}. "
            "Install the package, or run this in the folder that holds it."
        ) from error
    if isinstance(found, type) and issubclass(found, Method):
        return found()
    if isinstance(found, type) and callable(getattr(found, "fit", None)) and callable(getattr(found, "score", None)):
        return NeuralMean(found)
    raise InputError(
        f"Expected {spec!r} to be a subclass of `neuralmean.bench.baselines.Method` or a class with `fit` and `score`, but it "
        f"is {'missing' if found is None else repr(found)}."
    )
