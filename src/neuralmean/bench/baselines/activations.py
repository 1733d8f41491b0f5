"""The activations of a model's stages, with gradients, for methods that need more than means.

The library's recorder reduces activations inside its hooks and drops gradients; here both are kept, for the benchmark
only. Hooks live inside a context manager, which removes them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from neuralmean.errors import InputError, LayerNotFiredError
from neuralmean.models.layers import unwrap

Place = tuple[str, int]  # a module's dotted name, and the index of its call within a pass
OUTPUT: Place = ("", 0)  # the model's own output
AT_LEAST = 4  # stages of a model whose activations all have one resolution


class Stop(Exception):  # noqa: N818  # not an error: ends a pass of which the rest is not needed
    """Raised inside a forward pass once every requested activation has been captured."""


@contextmanager
def capturing(
    model: nn.Module, places: Sequence[Place], *, stop: bool = False
) -> Generator[Callable[[Tensor], list[Tensor]]]:
    """Yield a function that runs the model on a batch and returns the activations at `places`, in order.

    Args:
        model: The model; gradients are recorded if the caller has enabled them.
        places: The places, as returned by `stages`.
        stop: Whether to stop a pass once every activation has been captured.
    """
    wanted = {place: number for number, place in enumerate(places)}
    core = unwrap(model)
    calls: dict[str, int] = {}
    found: dict[int, Tensor] = {}

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: object) -> None:
            place = name, calls.get(name, 0)
            calls[name] = place[1] + 1
            if place in wanted and isinstance(output, Tensor):
                found[wanted[place]] = output
                if stop and len(found) == len(wanted):
                    raise Stop

        return hook

    def run(batch: Tensor) -> list[Tensor]:
        calls.clear()
        found.clear()
        with suppress(Stop):
            model(batch)
        if len(found) < len(wanted):
            missing = next(place[0] for place, number in wanted.items() if number not in found)
            raise LayerNotFiredError(f"Expected {missing!r} to take part in the pass, but it did not.")
        kept = [found[number] for number in range(len(wanted))]
        found.clear()
        return kept

    handles = []
    try:
        for name in {name for name, _ in places}:
            handles.append(core.get_submodule(name).register_forward_hook(hook_of(name)))
        yield run
    finally:
        for handle in handles:
            handle.remove()


def stages(model: nn.Module, example: Tensor) -> list[Place]:
    """Return the places where a model's stages end: its first layer, and the last output at each resolution.

    These are nearly the places of Lee et al. 2018, the stem and the end of each group of blocks. Their code reads a
    ResNet's stem after batch norm and ReLU, where this reads the convolution's output, and a DenseNet's blocks after
    the transition, where this reads before it. A model with a single resolution (a transformer) gives four evenly
    spaced layers.

    Args:
        model: The model.
        example: A batch that it accepts.
    """
    outputs = [(place, shape) for place, shape in _outputs(model, example) if len(shape) > 2]
    if not outputs:
        raise InputError(
            f"Expected {type(unwrap(model)).__name__} to have layers with positions (images or tokens), but none of its "
            "outermost layers has any. Use a method that needs only logits or features."
        )
    ends = [
        number
        for number, (_, shape) in enumerate(outputs)
        if number + 1 == len(outputs) or outputs[number + 1][1][2:] != shape[2:]
    ]
    chosen = sorted({0, *ends})
    if len(chosen) < AT_LEAST:
        step = (len(outputs) - 1) / (AT_LEAST - 1)
        chosen = sorted({*chosen, *(round(number * step) for number in range(AT_LEAST))})
    return [outputs[number][0] for number in chosen]


def convolutions(model: nn.Module, example: Tensor) -> list[Place]:
    """Return every convolution of a model, in the order of the pass.

    Args:
        model: The model.
        example: A batch that it accepts.
    """
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    names = [name for name, module in unwrap(model).named_modules() if isinstance(module, kinds)]
    return [place for place, _ in _shapes(model, names, example)]


def pooled(activation: Tensor) -> Tensor:
    """Mean over positions, shape (N, C), of images (N, C, H, W) or tokens (N, T, C)."""
    return activation.mean(dim=1) if activation.ndim == 3 else activation.flatten(2).mean(dim=2)


def _outputs(model: nn.Module, example: Tensor) -> list[tuple[Place, tuple[int, ...]]]:
    """Places and output shapes of the outermost layers, containers expanded, in the order of the pass."""
    return _shapes(model, _outermost(unwrap(model), ""), example)


def _outermost(module: nn.Module, prefix: str) -> list[str]:
    names = []
    for name, child in module.named_children():
        inside = isinstance(child, (nn.Sequential, nn.ModuleList)) and len(child) > 0
        names += _outermost(child, f"{prefix}{name}.") if inside else [f"{prefix}{name}"]
    return names


def _shapes(model: nn.Module, names: Sequence[str], example: Tensor) -> list[tuple[Place, tuple[int, ...]]]:
    core, order, calls = unwrap(model), [], dict.fromkeys(names, 0)

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: Any) -> None:
            if isinstance(output, Tensor):
                order.append(((name, calls[name]), tuple(output.shape)))
            calls[name] += 1

        return hook

    handles = []
    try:
        for name in names:
            handles.append(core.get_submodule(name).register_forward_hook(hook_of(name)))
        with torch.no_grad():
            model(example)
    finally:
        for handle in handles:
            handle.remove()
    return order
