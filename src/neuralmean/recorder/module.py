"""A model that says itself what it recorded: for compilers and exporters, which cannot follow a recorder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from neuralmean.layers import Layer
from neuralmean.recorder.behind import read_behind
from neuralmean.recorder.plan import Plan
from neuralmean.recorder.sink import Sink
from neuralmean.recording import Exits, Recording
from neuralmean.running import device_of, shared_copy

_numbers = count()


class RecordingModule(nn.Module):
    """A copy of a model that shares its tensors and says what it recorded: for compilers and exporters.

    The hooks are on the copy, and stay there. One thread at a time.

    Args:
        core: The model.
        layers: The layers to watch.
        variance: Whether to record variances too.
        head: Name of the layer that gives the logits, where those are wanted.
        behind: Whether to read batch norms behind them, so that they can be folded; means come out of `undo` then.
        exits: What is asked, and must not stop the pass, once its first layers have been seen.
    """

    factor: Tensor
    offset: Tensor

    def __init__(
        self,
        core: nn.Module,
        layers: Sequence[Layer],
        *,
        variance: bool,
        head: str | None,
        behind: bool = False,
        exits: Exits | None = None,
    ) -> None:
        super().__init__()
        self.model = shared_copy(core).eval()
        self._layers = tuple(layers)
        found = read_behind(core, layers) if behind and not variance else None
        self._is_behind = found is not None
        if found is not None:
            device = device_of(core.modules())
            self.register_buffer("factor", found.factor.to(device), persistent=False)
            self.register_buffer("offset", found.offset.to(device), persistent=False)
        plan = Plan(self.model, layers if found is None else found.layers)
        plan.by_keyword = frozenset(range(len(layers)))
        self._sink = Sink(plan, None, variance=variance, head=head, exits=exits)
        self._sink.thread = None  # a compiler or exporter may run the copy in a thread of its own
        self._sink.attach()

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], mask: Tensor | None) -> Any:
        """Run the copy and return its output and what `to_recording` takes: nothing but tensors and counts."""
        sink = self._sink
        sink.clear()
        sink.mask = mask
        output = self.model(*args, **kwargs)
        found = (
            [part.get(index) for index in range(len(self._layers))] for part in (sink.parts, sink.variances, sink.calls)
        )
        recorded = (*found, sink.feature, sink.logits)
        sink.clear()
        return output, recorded

    def compiled(self) -> Callable[..., Any]:
        """Return what `torch.compile` makes of `forward`.

        It gives up on code that it compiled often, over all modules that share it: each compilation has code of its own.
        """
        own = type(self).forward
        code = own.__code__.replace(co_name=f"forward_{next(_numbers)}")
        function = MethodType(FunctionType(code, own.__globals__), self)
        try:
            from neuralmean.recorder.joined import SplitMeans  # loads the compiler, which few need
        except ImportError:  # an early torch; means are taken one by one
            return torch.compile(function)
        return torch.compile(function, options={"post_grad_custom_pre_pass": SplitMeans()})

    def undo(self, means: Tensor, depth: int | None = None) -> Tensor:
        """Return the means of the watched layers, or of the first `depth`, given what was recorded, side by side."""
        if not self._is_behind:
            return means
        if depth is None:
            return means * self.factor + self.offset
        width = sum(layer.channels for layer in self._layers[:depth])
        return means * self.factor[:width] + self.offset[:width]

    def to_recording(self, output: Any, recorded: Any, size: int) -> Recording:
        """Turn what `forward` returned into a recording."""
        sink = copy.copy(self._sink)
        sink.size = size
        sink.parts, sink.variances, sink.calls = (
            {index: value for index, value in enumerate(part) if value is not None} for part in recorded[:3]
        )
        sink.feature, sink.logits = recorded[3:]
        recording = sink.finish(output)
        return replace(recording, layers=self._layers, mean=self.undo(recording.mean))
