"""What the peers cost on the same model, and how well they do: pytorch-ood's methods beside ours.

AUROC needs NEURALMEAN_DATA and NEURALMEAN_WEIGHTS; without them only the cost is measured.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import subjects
from benchmarks.timing import in_a_row, interleave
from neuralmean import Detector
from neuralmean.errors import CalibrationWarning
from neuralmean.stats.metrics import evaluate

SETS = ("svhn-test", "cifar100-test", "imagenet-resize")
Score = Callable[[Tensor], Tensor]


class _Stem(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(model.conv1, model.bn1, model.relu)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layers(x))


class _Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3))


def run(*, name: str, batches: tuple[int, ...], n_fit: int, n_test: int, seconds: float) -> list[dict[str, Any]]:
    """Return one row for each method: cost ratios by batch, and AUROC by OOD set where there are images.

    `name` is one of the residual networks: the peers want the model in pieces that run one after the other.
    """
    trained = subjects.load_trained(name)
    model: Any = trained.model.eval() if trained is not None else subjects.build(name)
    known = None if trained is None else subjects.real_images(trained, "cifar10-train", n_fit)
    fit_x, fit_y = known if known is not None else (subjects.images(n_fit), torch.arange(n_fit) % 10)
    methods = dict(_methods(model, fit_x, fit_y))
    rows: list[dict[str, Any]] = [{"method": method, "model": name} for method in methods]
    for size in batches:
        x = subjects.images(size, seed=5)
        with torch.no_grad():
            calls = {method: partial(score, x) for method, score in {"plain": model, **methods}.items()}
            timings = interleave(calls, baseline="plain", seconds=seconds, calls=in_a_row(size))
        for row in rows:
            row[f"batch {size}"] = timings[str(row["method"])].to_dict()
    if trained is not None and known is not None:
        _add_auroc(rows, methods, trained, n_test)
    for row in rows:
        costs = ", ".join(f"batch {size} {row[f'batch {size}']['ratio']:.3f}" for size in batches)
        print(f"{name:12s} {row['method']:24s} {costs}, AUROC {row.get('auroc', {})}", flush=True)
    return rows


def _methods(model: Any, fit_x: Tensor, fit_y: Tensor) -> Iterator[tuple[str, Score]]:
    for scorer in ("average", "typicality"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CalibrationWarning)
            detector, frozen = (Detector(model, scorer=scorer).fit(fit_x) for _ in range(2))
        yield f"neuralmean {scorer}", partial(_answer, detector)
        yield f"neuralmean {scorer}, frozen", partial(_answer, frozen.freeze(fit_x[:1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pytorch_ood import detector as peers
    stages = [_Stem(model), *(getattr(model, f"layer{i}") for i in range(1, 5) if hasattr(model, f"layer{i}"))]
    linear: nn.Linear = model.fc if hasattr(model, "fc") else model.linear
    encoder, head = nn.Sequential(*stages, _Pool()), nn.Sequential(_Pool(), linear)
    loader = DataLoader(TensorDataset(fit_x, fit_y), batch_size=64)
    yield "MaxSoftmax", peers.MaxSoftmax(model).predict
    yield "Energy", peers.EnergyBased(model).predict
    yield "ODIN", _with_gradients(peers.ODIN(model).predict)
    width = linear.in_features
    made = {
        "Mahalanobis, all stages": peers.MultiMahalanobis([*stages]),
        "Gram": peers.Gram(head, stages, 10),
        "KNN": peers.KNN(encoder, k=max(1, len(fit_x) // 40)),
        "ViM": peers.ViM(encoder, d=width // 2, w=linear.weight.detach(), b=linear.bias.detach()),
    }
    for name, peer in made.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peer.fit(loader)
        yield name, peer.predict


def _answer(detector: Detector, x: Tensor) -> Tensor:
    return detector(x)[1].score


def _with_gradients(score: Score) -> Score:
    def call(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return score(x)

    return call


def _add_auroc(rows: list[dict[str, Any]], methods: dict[str, Score], trained: Any, n_test: int) -> None:
    inside = subjects.real_images(trained, "cifar10-test", n_test)
    outside = {name: subjects.real_images(trained, name, n_test) for name in SETS}
    if inside is None:
        return
    for row in rows:
        score = methods[str(row["method"])]
        usual = _score_all(score, inside[0])
        row["auroc"] = {
            name: round(evaluate(usual.numpy(), _score_all(score, found[0]).numpy()).auroc, 2)
            for name, found in outside.items()
            if found is not None
        }


def _score_all(score: Score, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([score(part).detach().flatten() for part in torch.split(x, 100)])
