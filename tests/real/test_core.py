"""What the core must show on real images: `make real` prints each figure.

NEURALMEAN_DATA is a folder with `<set>.npz` files, NEURALMEAN_WEIGHTS one with the trained models.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from neuralmean import Detector, Reference
from neuralmean.bench import models
from neuralmean.data.batch import to_batch
from neuralmean.models.layers import select_layers
from neuralmean.recording import Recorder
from neuralmean.recording.observer import Observer
from neuralmean.scorers import AverageScorer, make_scorer
from neuralmean.stats.discrepancy import discrepancy, pool_batch
from neuralmean.stats.metrics import evaluate

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def resnet56(roots):
    return models.load("resnet56", roots[1] / "resnet56-cifar10.safetensors")


@pytest.fixture(scope="module")
def read(roots, resnet56):
    def images(name, limit=None):
        with np.load(roots[0] / f"{name}.npz") as file:
            return resnet56.preprocess(file["images"][:limit])

    return images


@pytest.fixture(scope="module")
def vectors(resnet56, read):
    """NMD vectors of a set, each computed once."""
    reference, layers = Reference.from_batchnorm(resnet56.model), select_layers(resnet56.model)
    observer, known = Observer(resnet56.model, layers, variance=False, head=None), {}

    def of(name, limit=10_000):
        if name not in known:
            rows = observer.observe_all(read(name, limit), name=name, batch_size=128)
            known[name] = discrepancy(rows.means, None, reference, "mean")
        return known[name]

    return of


def auroc(inliers, outliers):
    return evaluate(inliers.numpy(), outliers.numpy()).auroc


def show(what, value):
    print(f"\n    {what}: {value}", end="")  # noqa: T201


def _naive_means(model, x):
    """Channel means from stored activations, a loop over examples and channels: the paper's Eq. 3."""
    kept, handles = {}, []
    layers = select_layers(model)
    for layer in layers:
        module = model.get_submodule(layer.name)
        if layer.reads_input:
            handles.append(
                module.register_forward_pre_hook(lambda m, a, n=layer.name: kept.update({n: a[0].detach().clone()}))
            )
        else:
            handles.append(
                module.register_forward_hook(lambda m, a, o, n=layer.name: kept.update({n: o.detach().clone()}))
            )
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    columns = []
    for layer in layers:
        activation = kept[layer.name].double()
        if layer.channels_last:
            activation = activation.transpose(1, -1)
        positions = activation[0, 0].numel()
        columns += [[activation[i, c].sum().item() / positions for c in range(layer.channels)] for i in range(len(x))]
    rows = len(x)
    return torch.cat([torch.tensor(columns[k * rows : (k + 1) * rows]) for k in range(len(layers))], dim=1)


@pytest.mark.parametrize("name", ["resnet56", "densenet100", "vgg19", "vit"])
def test_vectors_equal_a_naive_loop(roots, read, name):
    weights = roots[1] / f"{name}-cifar10.safetensors"
    model = (models.load(name, weights).model if weights.exists() else models.build(name)).eval()
    x = read("cifar10-test", 8)
    means = (
        Observer(model, select_layers(model), variance=False, head=None).observe_all(x, name="x", batch_size=8).means
    )
    difference = (means - _naive_means(model, x)).abs().max().item()
    show(f"{name}: {means.shape[1]} channels, largest difference to a naive loop", f"{difference:.1e}")
    assert difference < 1e-5


def test_average(vectors):
    scorer, inliers, outliers = AverageScorer(), vectors("cifar10-test"), vectors("svhn-test")
    single = auroc(scorer.score(inliers), scorer.score(outliers))
    batches = [torch.cat([pool_batch(part, None)[0] for part in rows.split(4)]) for rows in (inliers, outliers)]
    four = auroc(*map(scorer.score, batches))
    show("average, SVHN, one image / batches of 4", f"{single:.2f} / {four:.2f}")
    assert single == pytest.approx(95.9, abs=0.3)
    assert four >= 99.9


@pytest.mark.parametrize(
    ("scorer", "ood", "least"), [("logistic", "svhn", 99.9), ("logistic", "cifar100", 90.3), ("mlp", "cifar100", 92.0)]
)
def test_with_the_outliers_own_training_set(vectors, scorer, ood, least):
    start = time.perf_counter()
    fitted = make_scorer(scorer).fit(vectors("cifar10-train"), vectors(f"{ood}-train"))
    seconds = time.perf_counter() - start
    value = auroc(fitted.score(vectors("cifar10-test")), fitted.score(vectors(f"{ood}-test")))
    show(f"{scorer}, {ood}", f"{value:.2f} (fit {seconds:.0f} s)")
    assert value >= least


@pytest.mark.parametrize(("ood", "least"), [("svhn", 99.5), ("cifar100", 72.0)])
def test_few_shot(vectors, ood, least):
    values = []
    for draw in range(10):
        generator = torch.Generator().manual_seed(draw)
        both = vectors("cifar10-train"), vectors(f"{ood}-train")
        pick = [rows[torch.randperm(len(rows), generator=generator)[:25]] for rows in both]
        fitted = make_scorer("logistic").fit(*pick)
        values.append(auroc(fitted.score(vectors("cifar10-test")), fitted.score(vectors(f"{ood}-test"))))
    show(f"few-shot logistic, {ood}", f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f} over 10 draws")
    assert statistics.mean(values) >= least


@pytest.mark.parametrize("scorer", ["average", "logistic"])
def test_the_saved_file_is_small(tmp_path, resnet56, read, scorer):
    data, held = read("cifar10-train", 500), read("cifar10-test", 2000)
    Detector(resnet56.model, scorer=scorer).fit(data, held_out=held).save(tmp_path / "x.nmd")
    size = (tmp_path / "x.nmd").stat().st_size
    show(f"saved {scorer} detector", f"{size / 1000:.0f} kB")
    assert size < 200_000


def test_recording_costs_little(resnet56, read):
    detector, x = Detector(resnet56.model, scorer="average"), read("cifar10-test", 32)
    detector.calibrate(read("cifar10-test", 100))
    recorder, batch = Recorder(resnet56.model, select_layers(resnet56.model)), to_batch(x)
    calls = {"plain": lambda: resnet56.model(x), "recording": lambda: recorder(batch), "detector": lambda: detector(x)}
    times = {name: [] for name in calls}
    torch.set_num_threads(os.cpu_count() or 1)  # as a user would run it; the other tests use one thread
    with torch.no_grad():
        for _ in range(60):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    torch.set_num_threads(1)
    middle = {name: statistics.median(values[5:]) for name, values in times.items()}
    ratios = {name: value / middle["plain"] for name, value in middle.items()}
    show(
        "recording / plain, and the whole detector / plain, batch 32",
        f"{ratios['recording']:.3f}, {ratios['detector']:.3f}",
    )
    assert ratios["recording"] <= 1.10


_MEMORY = """
import sys, torch
from neuralmean import Reference
from neuralmean.models import allocator as memory
from neuralmean.bench import models
from neuralmean.data.batch import to_batch
torch.set_num_threads(1)
model = models.build("resnet20").eval()
def batches(n):
    for start in range(0, n, 100):
        yield torch.rand(100, 3, 32, 32)
Reference.from_data(model, None, batches(int(sys.argv[1])))
print(memory.peak())
"""


def test_a_reference_holds_memory_flat():
    peaks = [
        int(subprocess.run([sys.executable, "-c", _MEMORY, str(n)], capture_output=True, text=True, check=True).stdout)
        for n in (1000, 50_000)
    ]
    show("peak memory of a reference from 1,000 / 50,000 images", f"{peaks[0] // 10**6} / {peaks[1] // 10**6} MB")
    assert peaks[1] <= 1.10 * peaks[0]


def test_eight_threads_give_the_serial_answers(resnet56, read):
    detector = Detector(resnet56.model, scorer="average").calibrate(read("cifar10-test", 100))
    parts = read("svhn-test", 64).split(8)
    serial, results = [detector(part) for part in parts], {}

    def work(index):
        results[index] = detector(parts[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, (output, decision) in enumerate(serial):
        assert torch.equal(results[index][0], output)
        assert torch.equal(results[index][1].score, decision.score)
    show("8 threads on one model", "exactly the serial answers")
