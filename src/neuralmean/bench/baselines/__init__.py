"""Every method that is measured, behind one interface, found by name.

A method is one file with one subclass of `Method`; `_makers` below lists them all, in the order of tables.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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
from neuralmean.bench.baselines.measure import Cost
from neuralmean.bench.baselines.msp import Msp
from neuralmean.bench.baselines.nac import Nac
from neuralmean.bench.baselines.odin import Odin
from neuralmean.bench.baselines.oe import OutlierExposure
from neuralmean.bench.baselines.one_d import OneDimensional
from neuralmean.bench.baselines.ours import NeuralMean, scorers_known
from neuralmean.bench.baselines.react import React
from neuralmean.bench.baselines.rmds import Rmds
from neuralmean.bench.baselines.scale import Scale
from neuralmean.bench.baselines.scntk import Scntk
from neuralmean.bench.baselines.vim import Vim
from neuralmean.bench.models.registry import suggestion
from neuralmean.errors import InputError

__all__ = ["Context", "Cost", "Method", "NeuralMean", "Read", "View", "make", "names", "resolve"]


def _makers() -> dict[str, Callable[[], Method]]:
    known = scorers_known()
    own: list[Callable[[], Method]] = [partial(NeuralMean, scorer) for scorer in known]
    for scorer in ("mlp", "logistic"):
        if scorer in known:
            own += [partial(NeuralMean, scorer, statistic="variance"), partial(NeuralMean, scorer, statistic="both")]
    from_features = (Knn, Vim, React, Ash, Scale, Rmds, Gen, Fdbd, Nac, DeepKernel)
    from_images = (Odin, Mahalanobis, MahalanobisId, Gram, Cntk, Scntk)
    fine_tuned = (OutlierExposure, EnergyFineTuned, GeneralizedOdin, OneDimensional, Acet, Good)
    return {maker().name: maker for maker in (Msp, Energy, *from_images, *fine_tuned, *from_features, *own)}


def names() -> list[str]:
    """Names of all methods, in the order of tables."""
    return list(_makers())


def make(name: str) -> Method:
    """Return a new method.

    Raises:
        InputError: No such method.

    Example:
        >>> make("msp").title
        'MSP'
    """
    makers = _makers()
    if name not in makers:
        raise InputError(f"Expected the name of a method, but got {name!r}. {suggestion(name, makers)}")
    return makers[name]()


def resolve(wanted: list[str] | None, offered: list[str] | tuple[str, ...]) -> list[str]:
    """Return which of the methods that an experiment offers are to run.

    Args:
        wanted: Names, or None for all. `"quick"` stands for all whose fit takes seconds, without fine-tuning.
        offered: What the experiment can use, in the order of its table; names of methods that are not there yet are
            left out.
    """
    there = [name for name in offered if name in _makers()]
    if wanted is None:
        return there
    chosen = {name for name in wanted if name != "quick"}
    for name in chosen:
        make(name)
    quick = [name for name in there if not make(name).heavy and not make(name).fine_tunes] if "quick" in wanted else []
    return [name for name in there if name in chosen or name in quick]
