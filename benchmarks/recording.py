"""What recording costs: a forward pass with the channel means of every watched layer, over a plain one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import subjects
from benchmarks.timing import in_a_row, interleave
from neuralmean.data.batch import Batch
from neuralmean.errors import InputError
from neuralmean.models.fingerprint import fingerprint
from neuralmean.models.layers import Layer, select_layers
from neuralmean.recording import Recorder
from neuralmean.recording.graph.frozen import FrozenObserver, freeze
from neuralmean.recording.observer import Observer

MODES = ("eager", "channels-last", "compile")  # the last two with channels last


def run(
    *, names: tuple[str, ...], batches: tuple[int, ...], modes: tuple[str, ...], seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield one row for each model, batch and mode: ratios of naive hooks, of the recorder and of its graph."""
    for name in names:
        for mode in modes:
            if mode not in MODES:
                continue
            for batch in batches:
                row = _measure(name, batch, mode, seconds)
                print(_line(row), flush=True)
                yield row


def _measure(name: str, size: int, mode: str, seconds: float) -> dict[str, Any]:
    model, x = subjects.build(name), subjects.images(size)
    if mode != "eager":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = x.contiguous(memory_format=torch.channels_last)
    layers = select_layers(model)
    runner: Any = torch.compile(model) if mode == "compile" else model
    recorder = Recorder(runner, layers)
    candidates: dict[str, Callable[[], object]] = {
        "plain": lambda: runner(x),
        "recorder": lambda: recorder(Batch((x,))).mean,
    }
    if mode != "compile":
        candidates["naive"] = lambda: _naive(model, layers, x)
    with suppress(InputError):  # a model that is no fixed graph
        observer = Observer(model, layers, variance=False, head=None)
        frozen = FrozenObserver(observer, freeze(observer, Batch((x,)), fingerprint(model)))
        candidates["frozen"] = lambda: frozen.observe(Batch((x,)))[1].means
    with torch.no_grad():
        timings = interleave(candidates, baseline="plain", seconds=seconds, calls=in_a_row(size))
    row: dict[str, Any] = {"model": name, "mode": mode, "batch": size, "layers": len(layers)}
    row["columns"] = sum(layer.channels for layer in layers)
    return row | {key: timing.to_dict() for key, timing in timings.items()}


def _naive(model: nn.Module, layers: tuple[Layer, ...], x: Tensor) -> Tensor:
    """Hooks that call `mean`, registered for one pass: what anybody would write."""
    found: list[Tensor] = []
    handles = []
    for layer in layers:
        module = model.get_submodule(layer.name)
        dims = 1 if layer.channels_last else (2, 3)
        if layer.reads_input:

            def before(_module: nn.Module, args: Any, dims: Any = dims) -> None:
                found.append(args[0].mean(dims))

            handles.append(module.register_forward_pre_hook(before))
        else:

            def after(_module: nn.Module, _args: Any, output: Any, dims: Any = dims) -> None:
                found.append(output.mean(dims))

            handles.append(module.register_forward_hook(after))
    model(x)
    for handle in handles:
        handle.remove()
    return torch.cat(found, dim=1)


def _line(row: dict[str, Any]) -> str:
    others = "".join(f"{key} {row[key]['ratio']:.3f}, " for key in ("naive", "frozen") if key in row)
    plain, ours = row["plain"], row["recorder"]
    spread = f"{ours['ratio_low']:.3f}-{ours['ratio_high']:.3f}"
    return (
        f"{row['model']:12s} {row['mode']:14s} batch {row['batch']:3d}: plain {plain['seconds'] * 1e3:8.2f} ms, "
        f"{others}recorder {ours['ratio']:.3f} ({spread})"
    )
