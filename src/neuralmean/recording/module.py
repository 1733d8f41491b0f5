"""The model and its channel reductions as one `nn.Module`: the starting point of compilers and exporters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from neuralmean.data.batch import Batch
from neuralmean.models.execution import shared_copy
from neuralmean.models.layers import Layer
from neuralmean.recording.hooks import Hooks
from neuralmean.recording.plan import Plan
from neuralmean.recording.sink import Sink

_numbers = count()


class RecordingModule(nn.Module):
    """A copy of a model that shares its tensors and returns the recorded statistics along with the output.

    The hooks stay on the copy. Not thread-safe.

    Args:
        core: The model.
        layers: The layers to watch.
        variance: Whether to record variances too.
        head: Name of the layer that gives the logits, if needed.
    """

    def __init__(self, core: nn.Module, layers: Sequence[Layer], *, variance: bool, head: str | None) -> None:
        super().__init__()
        self.model = shared_copy(core)
        self.model.eval()  # `eval` need not return the model
        plan = Plan(self.model, layers)
        plan.modules()
        self._sink = Sink(plan, None, variance=variance, head=head)
        Hooks(self._sink.hooks()).register()

    def forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], mask: Tensor | None
    ) -> tuple[Any, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Run the copy and return its output, means, variances, feature and logits, as a `Recording` has them."""
        sink = self._sink
        sink.clear()
        sink.mask, sink.size = mask, Batch(args, kwargs).first.shape[0]
        output = self.model(*args, **kwargs)
        mean, variance = sink.statistics()
        feature, logits = sink.feature, sink.logits
        sink.clear()
        return output, mean, variance, feature, logits

    def compiled(self) -> Callable[..., Any]:
        """Return `forward`, compiled by `torch.compile`.

        Dynamo limits recompilations per code object, which all instances share: each gets a code object of its own.
        """
        own = type(self).forward
        code = own.__code__.replace(co_name=f"forward_{next(_numbers)}")
        return torch.compile(MethodType(FunctionType(code, own.__globals__), self))
