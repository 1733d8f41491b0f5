"""`train`: a model's name and images in, a file of weights out.

Joins the parts: recipe, task, loop, evaluation, file. The file says what the model is, which normalisation it wants, how
it was trained and how good it is, with the same keys as the weights that others made.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from neuralmean.bench.data import ImageSet, dataset, names
from neuralmean.bench.models import TrainedModel, accuracy, architecture, build, load_weights, outputs
from neuralmean.bench.models.trained import SIZE, Triple
from neuralmean.bench.train.checkpoint import remove_checkpoint, save_tensors
from neuralmean.bench.train.loop import Precision, Progress, Setting, run
from neuralmean.bench.train.moco import MoCo, neighbour_accuracy
from neuralmean.bench.train.recipes import Recipe, default_recipe
from neuralmean.bench.train.supervised import Supervised
from neuralmean.errors import InputError


def train(
    name: str,
    id_set: ImageSet,
    *,
    out: Path | str,
    test_set: ImageSet | None = None,
    epochs: int | None = None,
    recipe: Recipe | None = None,
    num_classes: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    precision: Precision = "float32",
    resume: bool = True,
    overwrite: bool = False,
    checkpoint_seconds: float = 60.0,
    progress: Callable[[Progress], None] | None = None,
) -> TrainedModel:
    """Train a model and write its weights; a run that was interrupted goes on when called again with the same arguments.

    Args:
        name: One of `models.names()`.
        id_set: Images to train on, with labels unless the model is `moco-resnet34`.
        out: The safetensors file to write. Beside it lies `<out>.checkpoint` until training is done.
        test_set: Images to measure the accuracy on; without it the file says none.
        epochs: Passes over the images, in place of the recipe's.
        recipe: How to train; `default_recipe(name)` if not given.
        num_classes: Number of classes; read off the labels if not given.
        seed: Of weights, order, augmentation and dropout: the same seed gives the same weights on the same machine.
        device: Where to train; a GPU if there is one.
        precision: `"bfloat16"` is faster, on GPUs only.
        resume: Whether to go on from a checkpoint that is there, or to start anew.
        overwrite: Whether `out` may be there already.
        checkpoint_seconds: How often the state is kept on disk; at most this much work is lost.
        progress: Called every few steps.

    Returns:
        The trained model, as read back from `out`.
    """
    out = Path(out)
    head = architecture(name).head
    _check(name, id_set, out, needs_labels=head is not None, overwrite=overwrite)
    recipe = recipe or default_recipe(name, dataset=id_set.name)
    recipe = recipe if epochs is None else replace(recipe, epochs=epochs)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if precision == "bfloat16" and where.type == "cpu":
        # Its backward pass ends in an illegal instruction on CPUs that announce AMX and do not grant it.
        raise InputError(
            "Expected `precision` to be 'float32' on a CPU, but got 'bfloat16'. Train on a GPU, or leave it out."
        )
    classes = _count_classes(id_set, num_classes) if head is not None else 0
    identity = {
        "name": name,
        "images": id_set.digest,
        "num_classes": classes,
        "recipe": asdict(recipe),
        "seed": seed,
        "precision": precision,
    }
    setting = Setting(
        checkpoint=checkpoint_of(out),
        identity=identity,
        seed=seed,
        device=where,
        precision=precision,
        resume=resume,
        checkpoint_seconds=checkpoint_seconds,
        progress=progress,
    )
    mean, std = colour_moments(id_set)
    task = _task(name, recipe, mean, std, classes, seed, where)
    images = torch.from_numpy(id_set.images).permute(0, 3, 1, 2).contiguous().to(where)
    labels = None if id_set.labels is None else torch.from_numpy(id_set.labels).to(where)
    seconds = run(task, images, labels, recipe, setting)
    model = task.result.eval().cpu()
    measured = _measure(TrainedModel(model, name, classes, mean, std, SIZE), id_set, test_set)
    metadata = _metadata(name, id_set, mean, std, recipe, seed, precision, seconds) | measured
    save_tensors(out, model.state_dict(), metadata)
    remove_checkpoint(setting.checkpoint)
    return load_weights(out)


def checkpoint_of(out: Path | str) -> Path:
    """Return where the checkpoint of a run that writes `out` lies."""
    return Path(out).with_name(f"{Path(out).name}.checkpoint")


def colour_moments(images: ImageSet) -> tuple[Triple, Triple]:
    """Mean and standard deviation per colour of images scaled to [0, 1], to four digits."""
    flat = images.images.reshape(-1, 3)
    # Counts of the 256 values give exact moments at a fraction of the memory.
    counts = [np.bincount(flat[:, colour], minlength=256) for colour in range(3)]
    values = np.arange(256) / 255
    mean = [float((count * values).sum() / len(flat)) for count in counts]
    spread = [
        float(np.sqrt((count * (values - centre) ** 2).sum() / len(flat)))
        for count, centre in zip(counts, mean, strict=True)
    ]
    if min(spread) == 0:
        raise InputError("Expected images whose colours vary, but got one colour throughout. Check the data set.")
    rounded = [round(value, 4) for value in (*mean, *(max(value, 1e-4) for value in spread))]
    return (rounded[0], rounded[1], rounded[2]), (rounded[3], rounded[4], rounded[5])


def _check(name: str, id_set: ImageSet, out: Path, *, needs_labels: bool, overwrite: bool) -> None:
    if needs_labels and id_set.labels is None:
        raise InputError(
            f"Expected {id_set.name!r} to have labels to train {name!r} on, but it has none. "
            "Pass a labelled set, or train 'moco-resnet34', which needs none."
        )
    if out.suffix != ".safetensors":
        raise InputError(f"Expected `out` to end in .safetensors, but got {str(out)!r}.")
    if not out.parent.is_dir():
        raise InputError(f"Expected the folder {str(out.parent)!r} to be there, but it is not. Make it first.")
    if out.exists() and not overwrite:
        raise InputError(f"Expected no file at {str(out)!r}, but there is one. Pass `overwrite=True` to replace it.")


def _count_classes(id_set: ImageSet, num_classes: int | None) -> int:
    if id_set.labels is None:
        raise InputError(f"Expected {id_set.name!r} to have labels, but it has none.")
    seen = int(id_set.labels.max()) + 1
    classes = max(2, seen) if num_classes is None else num_classes
    if int(id_set.labels.min()) < 0 or seen > classes:
        raise InputError(
            f"Expected labels from 0 to {classes - 1}, but got {int(id_set.labels.min())} to {seen - 1}. "
            "Pass `num_classes`, or check the labels."
        )
    return classes


def _task(
    name: str, recipe: Recipe, mean: Triple, std: Triple, classes: int, seed: int, device: torch.device
) -> Supervised | MoCo:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(name, num_classes=classes or 2)
    # mypy knows no `memory_format` of Module.to
    model = model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if classes:
        return Supervised(model, recipe=recipe, mean=mean, std=std, num_classes=classes)
    return MoCo(model, features=model.width, recipe=recipe, mean=mean, std=std, seed=seed)


def _measure(trained: TrainedModel, id_set: ImageSet, test_set: ImageSet | None) -> dict[str, str]:
    """Return the accuracy on the test set, for the file: a share, as other files have it."""
    if test_set is None or test_set.labels is None:
        return {}
    if trained.num_classes:
        return {"accuracy": f"{accuracy(trained, test_set.images, test_set.labels) / 100:.4f}"}
    if id_set.labels is None:
        return {}
    features, test_features = (outputs(trained, images.images) for images in (id_set, test_set))
    labels, test_labels = (torch.from_numpy(images.labels) for images in (id_set, test_set))
    found = neighbour_accuracy(features, labels, test_features, test_labels)
    return {"neighbour_accuracy": f"{found / 100:.4f}"}


def _metadata(
    name: str, id_set: ImageSet, mean: Triple, std: Triple, recipe: Recipe, seed: int, precision: str, seconds: float
) -> dict[str, str]:
    return {
        "architecture": name,
        "dataset": dataset(id_set.name).title if id_set.name in names() else id_set.name,
        "mean": ",".join(map(str, mean)),
        "std": ",".join(map(str, std)),
        "source": "trained by neuralmean",
        "recipe": recipe.to_json(),
        "images": json.dumps({"count": len(id_set), "split": id_set.split, "digest": id_set.digest}),
        "seed": str(seed),
        "precision": precision,
        "seconds": f"{seconds:.0f}",
        "versions": json.dumps({"torch": torch.__version__, "python": platform.python_version()}),
    }
