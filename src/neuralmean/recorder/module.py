"""A model that says itself what it recorded: for compilers and exporters, which cannot follow a recorder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import count
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from neuralmean.data import Batch
from neuralmean.layers import Layer
from neuralmean.recorder.behind import read_behind
from neuralmean.recorder.plan import Plan
from neuralmean.recorder.sink import Sink
from neuralmean.recording import Exits
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
        left: Names of layers that are read before them all the same.
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
        left: Collection[str] = (),
        exits: Exits | None = None,
    ) -> None:
        super().__init__()
        self.model = shared_copy(core)
        self.model.eval()  # which need not return the model
        self._layers = tuple(layers)
        found = read_behind(core, layers, left=left) if behind and not variance else None
        self._is_behind = found is not None
        if found is not None:
            device = device_of(core.modules())
            self.register_buffer("factor", found.factor.to(device), persistent=False)
            self.register_buffer("offset", found.offset.to(device), persistent=False)
        plan = Plan(self.model, layers if found is None else found.layers)
        plan.modules()
        self._sink = Sink(plan, None, variance=variance, head=head, exits=exits)
        self._sink.attach()

    def forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], mask: Tensor | None
    ) -> tuple[Any, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Run the copy and return its output, means, variances, feature and logits, as a `Recording` has them."""
        sink = self._sink
        sink.clear()
        is_tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]  # it must not look at shapes
        sink.mask, sink.size = mask, None if is_tracing else Batch(args, kwargs).first.shape[0]
        output = self.model(*args, **kwargs)
        mean, variance = sink.statistics()
        feature, logits = sink.feature, sink.logits
        sink.clear()
        return output, self.undo(mean), variance, feature, logits

    def compiled(self) -> Callable[..., Any]:
        """Return what `torch.compile` makes of `forward`.

        It gives up on code that it compiled often, over all modules that share it: each compilation has code of its own.
        """
        own = type(self).forward
        code = own.__code__.replace(co_name=f"forward_{next(_numbers)}")
        return torch.compile(MethodType(FunctionType(code, own.__globals__), self), options=_options())

    def undo(self, means: Tensor, depth: int | None = None) -> Tensor:
        """Return the means of the watched layers, or of the first `depth`, given what was recorded, side by side."""
        if not self._is_behind:
            return means
        if depth is None:
            return means * self.factor + self.offset
        width = sum(layer.channels for layer in self._layers[:depth])
        return means * self.factor[:width] + self.offset[:width]


def _options() -> dict[str, Any]:
    """Return what the compiler is asked for, as far as this torch has it: cheaper means, and fewer questions per call."""
    options: dict[str, Any] = {}
    with suppress(ImportError):  # an early torch; means are taken one by one
        from neuralmean.recorder.arranging import Arrange  # loads the compiler, which few need

        options["post_grad_custom_pre_pass"] = Arrange()
    if hasattr(torch.compiler, "skip_guard_on_inbuilt_nn_modules_unsafe"):
        options["guard_filter_fn"] = _is_worth_asking
    return options


def _is_worth_asking(guards: Sequence[Any]) -> list[bool]:
    """Say which of the compiler's questions to ask before each call: thousands, some of which take longer than the means.

    Nobody but the copy itself has the copy's layers, and torch's own do not change themselves in evaluation mode, so that it
    need not be asked whether they did. Their tensors are the model's and may have been moved or converted.
    """
    kept = torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe(guards)  # type: ignore[no-untyped-call]
    return [keep or guard.guard_type == "TENSOR_MATCH" for keep, guard in zip(kept, guards, strict=True)]
