"""`train`: a model's name and images in, a file of weights out.

Combines recipe, task, loop, evaluation and file. The metadata of the file has the architecture, the normalisation, the
training and the accuracy, under the same keys as published weights.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from neuralmean.bench.data import ImageSet, dataset, names
from neuralmean.bench.models import TrainedModel, accuracy, architecture, build, load_weights, outputs
from neuralmean.bench.models.trained import SIZE, Triple
from neuralmean.bench.train.checkpoint import held_run, remove_checkpoint, save_tensors
from neuralmean.bench.train.loop import Precision, Progress, Setting, run, trial_step
from neuralmean.bench.train.moco import MoCo, linear_accuracy
from neuralmean.bench.train.plan import measure, plan, usable_sizes
from neuralmean.bench.train.precision import WORTH_IT, bfloat16_gain
from neuralmean.bench.train.recipes import Recipe, default_recipe, full_recipe
from neuralmean.bench.train.supervised import Supervised
from neuralmean.errors import InputError
from neuralmean.models.fingerprint import fingerprint


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
    precision: Precision | Literal["auto"] = "float32",
    compiled: bool = False,
    budget: float | None = None,
    init: Path | str | None = None,
    resume: bool = True,
    overwrite: bool = False,
    checkpoint_seconds: float = 60.0,
    progress: Callable[[Progress], None] | None = None,
) -> TrainedModel:
    """Train a model and write its weights; an interrupted run resumes when called again with the same arguments.

    Args:
        name: One of `models.names()`.
        id_set: Images to train on, with labels unless the model is `moco-resnet34`.
        out: The safetensors file to write. `<out>.checkpoint` exists next to it until training is finished.
        test_set: Images to measure the accuracy on; without them, the file states none.
        epochs: Passes over the images, instead of the recipe's.
        recipe: How to train; None takes `default_recipe(name)`.
        num_classes: Number of classes; None takes it from the labels.
        seed: Seed of weights, order, augmentation and dropout: the same seed gives the same weights on the same machine.
        device: Where to train; None takes a GPU if there is one.
        precision: `"bfloat16"` is faster on processors that support it; `"auto"` uses it if it works and is faster, as
            tested in a separate process.
        compiled: Whether to compile the model first, which takes a minute per image size. Steps of ResNet-34 and ViT
            then take about 0.6 of the time; VGG-19 and ConvNet-4 gain nothing.
        budget: Seconds that training may take; image sizes and epochs are chosen to fit, by timing a few steps.
        init: Weights of the same architecture to start from, with their normalisation.
        resume: Whether to resume from an existing checkpoint.
        overwrite: Whether `out` may exist already.
        checkpoint_seconds: Seconds between checkpoints, and so the most work that an interruption can lose.
        progress: Called every few steps.

    Returns:
        The trained model, as read back from `out`.
    """
    out = Path(out)
    head = architecture(name).head
    _check(name, id_set, out, needs_labels=head is not None, overwrite=overwrite)
    if budget is not None and (epochs is not None or recipe is not None):
        raise InputError("Expected either a `budget` or `epochs` and `recipe`, but got both. Leave one of them out.")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    classes = _count_classes(id_set, num_classes) if head is not None else 0
    start = None if init is None else _starting_point(name, init, classes)
    mean, std = colour_moments(id_set) if start is None else (start.mean, start.std)
    images = torch.from_numpy(id_set.images).permute(0, 3, 1, 2).contiguous().to(where)
    labels = None if id_set.labels is None else torch.from_numpy(id_set.labels).to(where)

    def make_task(recipe: Recipe) -> Supervised | MoCo:
        task = _task(name, recipe, mean, std, classes, seed, where, start)
        if compiled:
            task.compile()
        return task

    # The plan of the first start is kept: the machine may be faster or slower now.
    begun = held_run(checkpoint_of(out)) if resume else {}
    precision = _choose_precision(precision, where, begun)
    if budget is not None:
        recipe = _recall(begun, budget) or _fit_budget(
            full_recipe(name, dataset=id_set.name), make_task, images, labels, where, precision, budget,
            usable_sizes(name), started=start is not None,
        )  # fmt: skip
    recipe = recipe or default_recipe(name, dataset=id_set.name)
    recipe = recipe if epochs is None else replace(recipe, epochs=epochs)
    identity = {
        "name": name,
        "images": id_set.digest,
        "num_classes": classes,
        "recipe": asdict(recipe),
        "seed": seed,
        "precision": precision,
        "compiled": compiled,
        "budget": budget,
        "init": None if start is None else fingerprint(start.model),
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
    task = make_task(recipe)
    seconds = run(task, images, labels, recipe, setting)
    model = task.result.cpu()
    measured = _measure(TrainedModel(model, name, classes, mean, std, SIZE), id_set, test_set)
    metadata = _metadata(name, id_set, mean, std, recipe, seed, precision, seconds) | measured
    if start is not None:
        metadata["init"] = json.dumps({"weights": Path(init or "").name, "digest": identity["init"]})
    save_tensors(out, model.state_dict(), metadata)
    remove_checkpoint(setting.checkpoint)
    return load_weights(out)


def checkpoint_of(out: Path | str) -> Path:
    """Return the path of the checkpoint of a run that writes `out`."""
    return Path(out).with_name(f"{Path(out).name}.checkpoint")


def colour_moments(images: ImageSet) -> tuple[Triple, Triple]:
    """Mean and standard deviation per colour of images scaled to [0, 1], to four digits."""
    flat = images.images.reshape(-1, 3)
    # Counting the 256 values gives exact moments in a fraction of the memory.
    counts = [np.bincount(flat[:, colour], minlength=256) for colour in range(3)]
    values = np.arange(256) / 255
    mean = [float((count * values).sum() / len(flat)) for count in counts]
    spread = [
        float(np.sqrt((count * (values - centre) ** 2).sum() / len(flat)))
        for count, centre in zip(counts, mean, strict=True)
    ]
    if min(spread) == 0:
        raise InputError("Expected images whose colours vary, but got a single colour. Check the data set.")
    rounded = [round(value, 4) for value in (*mean, *(max(value, 1e-4) for value in spread))]
    return (rounded[0], rounded[1], rounded[2]), (rounded[3], rounded[4], rounded[5])


def _starting_point(name: str, path: Path | str, classes: int) -> TrainedModel:
    start = load_weights(path)
    if (start.name, start.num_classes) != (name, classes):
        raise InputError(
            f"Expected `init` to hold {name!r} with {classes} classes, but {Path(path).name} holds {start.name!r} with "
            f"{start.num_classes}. Pass weights of the model that is trained."
        )
    return start


def _choose_precision(asked: Precision | Literal["auto"], device: torch.device, begun: Mapping[str, Any]) -> Precision:
    """Choose float32 or bfloat16; a resumed run keeps its choice."""
    if asked == "auto" and begun.get("precision") == "float32":
        return "float32"
    if asked == "float32" or device.type != "cpu":
        return "bfloat16" if asked == "bfloat16" else "float32"
    gain = bfloat16_gain()
    if asked == "auto" and "precision" not in begun:
        return "bfloat16" if gain is not None and gain > WORTH_IT else "float32"
    if gain is None:
        raise InputError(
            "Expected a CPU that computes in bfloat16, but a trial step of it failed on this one. Train in 'float32'; "
            "remove a checkpoint that was begun in bfloat16."
        )
    return "bfloat16"


def _recall(begun: Mapping[str, Any], budget: float) -> Recipe | None:
    """Return the recipe planned for this budget when the run was first started."""
    return Recipe.from_mapping(begun["recipe"]) if begun.get("budget") == budget else None


def _fit_budget(
    recipe: Recipe,
    make_task: Callable[[Recipe], Supervised | MoCo],
    images: Tensor,
    labels: Tensor | None,
    device: torch.device,
    precision: Precision,
    budget: float,
    sizes: tuple[int, ...],
    *,
    started: bool,
) -> Recipe:
    """Time a few steps at each size on a temporary network, and plan with these times."""
    task = make_task(recipe)
    step = trial_step(task, images, labels, recipe, device=device, precision=precision)
    per_epoch = max(1, len(images) // recipe.batch_size)
    took = measure(step, sizes[-1:] if started else sizes)
    return plan(recipe, {size: seconds * per_epoch for size, seconds in took.items()}, budget, started=started)


def _check(name: str, id_set: ImageSet, out: Path, *, needs_labels: bool, overwrite: bool) -> None:
    if needs_labels and id_set.labels is None:
        raise InputError(
            f"Expected {id_set.name!r} to have labels to train {name!r} on, but it has none. "
            "Pass a labelled set, or train 'moco-resnet34', which needs none."
        )
    if out.suffix != ".safetensors":
        raise InputError(f"Expected `out` to end in .safetensors, but got {str(out)!r}.")
    if not out.parent.is_dir():
        raise InputError(f"Expected the folder {str(out.parent)!r} to exist, but it does not. Create it first.")
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
    name: str,
    recipe: Recipe,
    mean: Triple,
    std: Triple,
    classes: int,
    seed: int,
    device: torch.device,
    start: TrainedModel | None,
) -> Supervised | MoCo:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(name, num_classes=classes or 2)
    if start is not None:
        model.load_state_dict(start.model.state_dict())
    # mypy does not know the `memory_format` of Module.to
    model = model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if classes:
        return Supervised(model, recipe=recipe, mean=mean, std=std, num_classes=classes)
    return MoCo(model, features=model.width, recipe=recipe, mean=mean, std=std, seed=seed)


def _measure(trained: TrainedModel, id_set: ImageSet, test_set: ImageSet | None) -> dict[str, str]:
    """Return the accuracy on the test set as a fraction, for the metadata of the file."""
    if test_set is None or test_set.labels is None:
        return {}
    if trained.num_classes:
        return {"accuracy": f"{accuracy(trained, test_set.images, test_set.labels) / 100:.4f}"}
    if id_set.labels is None:
        return {}
    features, test_features = (outputs(trained, images.images) for images in (id_set, test_set))
    labels, test_labels = (torch.from_numpy(images.labels) for images in (id_set, test_set))
    found = linear_accuracy(features, labels, test_features, test_labels)
    return {"linear_accuracy": f"{found / 100:.4f}"}


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
