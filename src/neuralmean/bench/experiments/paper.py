"""The paper's numbers (Dong et al., CVPR 2022), each with its table or figure.

Only numbers that the paper prints; values are not estimated from its bar charts (figures 4 to 7).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Printed:
    """One cell of the paper, in percent; None where the paper does not print the metric."""

    where: str
    experiment: str
    model: str
    id: str
    ood: str
    method: str
    auroc: float | None
    tnr95: float | None = None
    accuracy: float | None = None
    setting: str | None = None


@dataclass(frozen=True)
class Timing:
    """One line of the paper's table of times, ResNet-34 on a GTX 1080 Ti."""

    method: str
    fit_seconds: float | None
    latency_ms: float


def _table1() -> Iterator[Printed]:
    cells = {
        ("cifar10", "svhn"): {"dk": 82.4, "cntk": 71.3, "scntk": 84.9, "ours-lr": 99.9},
        ("svhn", "cifar10"): {"dk": 21.4, "cntk": 51.9, "scntk": 80.3, "ours-lr": 99.8},
    }
    for (inside, outside), methods in cells.items():
        for method, auroc in methods.items():
            yield Printed("Table 1", "statistical", "convnet4", inside, outside, method, auroc)


def _table2() -> Iterator[Printed]:
    models = ("resnet34", "moco-resnet34", "vgg19", "vit", "densenet100")
    cells = {
        "lsun-crop": (
            (95.8, 99.2, 95.6),
            (99.1, 99.8, 98.1),
            (96.4, 99.3, 95.7),
            (94.0, 98.7, 94.6),
            (90.6, 98.3, 93.6),
        ),
        "svhn": ((96.4, 99.2, 95.9), (99.9, 99.9, 99.9), (99.9, 99.9, 99.1), (99.8, 99.9, 99.2), (95.8, 99.2, 95.4)),
        "textures": (
            (91.7, 98.5, 93.4),
            (97.8, 99.5, 96.7),
            (96.1, 99.1, 95.6),
            (91.4, 98.3, 93.5),
            (93.0, 98.6, 94.0),
        ),
        "imagenet-crop": (
            (93.7, 98.7, 94.4),
            (99.9, 99.9, 99.1),
            (94.0, 98.9, 94.5),
            (89.0, 98.1, 93.0),
            (94.3, 98.8, 94.7),
        ),
    }
    for outside, row in cells.items():
        for model, (tnr95, auroc, accuracy) in zip(models, row, strict=True):
            # The table does not say which detector it shows; both of ours are compared with it.
            for method in ("ours-lr", "ours-mlp"):
                yield Printed("Table 2", "transfer", model, "cifar10", outside, method, auroc, tnr95, accuracy)


def _table3() -> Iterator[Printed]:
    methods = ("msp", "odin", "mahalanobis", "ours-lr")
    cells = {
        ("cifar100", "resnet34", "svhn"): (79.5, 70.7, 92.4, 94.2),
        ("cifar100", "resnet34", "lsun-crop"): (75.8, 85.6, 98.2, 99.9),
        ("cifar100", "resnet34", "imagenet-crop"): (77.2, 87.8, 98.0, 99.9),
        ("svhn", "resnet34", "cifar10"): (92.9, 92.1, 99.3, 99.8),
        ("svhn", "resnet34", "lsun-resize"): (91.6, 89.4, 99.9, 99.9),
        ("svhn", "resnet34", "imagenet-resize"): (93.5, 92.0, 99.9, 99.9),
        ("cifar100", "densenet100", "svhn"): (82.7, 85.2, 90.3, 93.3),
        ("cifar100", "densenet100", "lsun-crop"): (70.8, 85.5, 98.0, 99.9),
        ("cifar100", "densenet100", "imagenet-crop"): (71.6, 84.8, 94.1, 99.6),
    }
    for (inside, model, outside), row in cells.items():
        for method, auroc in zip(methods, row, strict=True):
            yield Printed("Table 3", "more-datasets", model, inside, outside, method, auroc)


def _table6() -> Iterator[Printed]:
    methods = ("energy", "gram", "g-odin", "1d", "ours-mlp")
    cells = {
        "isun": ((60.4, 92.2, 87.0), (99.3, 99.8, 98.1), (95.3, 98.9, 95.6), (76.9, 86.3, 92.9), (99.7, 99.9, 98.6)),
        "svhn": ((58.4, 90.6, 85.5), (97.6, 99.5, 96.7), (89.5, 97.8, 92.9), (86.2, 95.1, 88.9), (97.7, 99.6, 96.6)),
        "textures": (
            (41.1, 85.5, 80.8),
            (88.0, 97.5, 91.9),
            (81.4, 95.0, 88.9),
            (72.4, 91.1, 84.9),
            (94.0, 98.9, 94.6),
        ),
        "lsun-crop": (
            (89.2, 98.0, 93.8),
            (89.8, 97.8, 92.6),
            (93.9, 98.8, 94.0),
            (77.1, 92.9, 86.5),
            (93.9, 98.8, 94.5),
        ),
        "imagenet-crop": (
            (67.4, 93.6, 88.7),
            (96.7, 99.2, 96.1),
            (90.8, 98.2, 94.3),
            (81.9, 94.6, 88.5),
            (96.1, 99.2, 95.6),
        ),
        "cifar100": (
            (43.1, 87.1, 80.7),
            (32.9, 79.0, 71.7),
            (36.3, 85.5, 79.3),
            (57.4, 87.2, 80.8),
            (63.8, 90.1, 83.4),
        ),
    }
    for outside, row in cells.items():
        for method, (tnr95, auroc, accuracy) in zip(methods, row, strict=True):
            yield Printed("Table 6", "zero-shot", "resnet34", "cifar10", outside, method, auroc, tnr95, accuracy)


def _text() -> Iterator[Printed]:
    pair = ("resnet34", "cifar10", "cifar100")
    for method, auroc in (("ours-mlp", 95.4), ("ours-mlp-nvd", 95.3), ("ours-mlp-nmd+nvd", 95.6)):
        yield Printed("Sec. 5.7", "variance", *pair, method, auroc)
    # The ablation's NMD is the detector of figure 4.
    yield Printed("Sec. 5.7", "full-access", *pair, "ours-mlp", 95.4)
    yield Printed("Sec. 3.2", "batch-size", "resnet34", "cifar10", "svhn", "ours-avg", 99.9, setting="batch 4")


PRINTED: tuple[Printed, ...] = (*_table1(), *_table2(), *_table3(), *_table6(), *_text())

TIMINGS_IN = "Table 5"
TIMINGS: tuple[Timing, ...] = (
    Timing("gram", 330.0, 370.0),
    Timing("mahalanobis", 1397.0, 25.7),
    Timing("odin", 1270.0, 16.0),
    Timing("g-odin", 1830.0, 22.1),
    Timing("oe", 560.0, 6.72),
    Timing("good", 756 * 60.0, 47.4),
    Timing("acet", 201 * 60.0, 6.89),
    Timing("energy-ft", 620.0, 7.24),
    Timing("plain", None, 6.72),
    Timing("ours-mlp", 94.0, 7.54),
)

_BY_CELL = {(p.experiment, p.model, p.id, p.ood, p.method, p.setting): p for p in PRINTED}


def printed_for(row: Mapping[str, Any]) -> Printed | None:
    """Return the paper's values for the row's model, or None."""
    return _BY_CELL.get((row["experiment"], row["model"], row["id"], row["ood"], row["method"], _setting_of(row)))


def printed_for_resnet34(row: Mapping[str, Any]) -> Printed | None:
    """Return the paper's values for ResNet-34 if the row's model is a smaller residual network, otherwise None."""
    if printed_for(row) is not None or not str(row["model"]).startswith("resnet"):
        return None
    return printed_for({**row, "model": "resnet34"})


def timing(method: str) -> Timing | None:
    """Return the paper's times of a method, or None."""
    return next((line for line in TIMINGS if line.method == method), None)


def _setting_of(row: Mapping[str, Any]) -> str | None:
    setting = row.get("setting")
    return setting if isinstance(setting, str) else None
