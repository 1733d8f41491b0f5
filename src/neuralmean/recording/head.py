"""Finds the layer that returns the logits: the linear layer, or 1 x 1 convolution, whose output is the model's output."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from neuralmean.data.batch import Batch
from neuralmean.models.execution import Modules, device_of, eval_mode, translate_input_errors, uncompiled
from neuralmean.models.layers import unwrap
from neuralmean.recording.hooks import Hook, Hooks
from neuralmean.stats.channels import main_tensor


def find_head(model: nn.Module, batch: Batch, *, name: str = "x") -> str | None:
    """Return the name of the layer whose output is the model's output, or None if there is none.

    It is a linear layer, or a convolution of pooled features whose output is flattened to (N, K); a softmax may follow.

    Raises:
        ModelInputError: The model cannot take the batch, which the caller calls `name`.
    """
    core = unwrap(uncompiled(model))  # uncompiled, as a compiler would compile the hooks too
    outputs: dict[str, Tensor] = {}
    thread = threading.get_ident()

    def keep(layer: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, *rest: Any) -> None:
            output = rest[-1]
            if threading.get_ident() != thread or not isinstance(output, Tensor):
                return
            if isinstance(module, nn.Linear) or output.shape[2:] == (1, 1):  # not all feature maps, which may be large
                outputs[layer] = output

        return hook

    hooks = [
        Hook(module, keep(layer), False)
        for layer, module in core.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d))
    ]
    # Copied, as a model may modify its input.
    moved = batch.to(device_of(core.modules())).each(Tensor.clone)
    with translate_input_errors(core, batch, name), eval_mode(Modules(core)), torch.no_grad(), Hooks(hooks):
        result = main_tensor(core(*moved.args, **moved.kwargs))
    if result is None:
        return None
    # A squeeze or a view of the layer's output still counts: same memory, same number of elements, a row for each input.
    same = [
        layer
        for layer, output in outputs.items()
        if output.data_ptr() == result.data_ptr() and output.numel() == result.numel() and len(output) == len(batch)
        if isinstance(core.get_submodule(layer), nn.Linear) or result.dim() == 2
    ]
    same = same or [layer for layer, output in outputs.items() if _is_softmax(result, output.flatten(1))]
    return same[-1] if same else None


def _is_softmax(result: Tensor, logits: Tensor) -> bool:
    """Return whether a model's output is the softmax of a layer's output, or its logarithm."""
    if result.shape != logits.shape or result.dim() != 2 or result.shape[1] < 2 or not result.is_floating_point():
        return False
    return any(torch.allclose(result, way(dim=1), atol=1e-6) for way in (logits.softmax, logits.log_softmax))
