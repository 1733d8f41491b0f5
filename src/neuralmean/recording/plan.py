"""State shared by the passes of a recorder: the watched modules and cached facts about them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from neuralmean.errors import LayerNotFoundError
from neuralmean.models.execution import Modules
from neuralmean.models.layers import Layer
from neuralmean.stats.channels import positions

_DIMS = tuple([positions(n, channels_last) for n in range(65)] for channels_last in (False, True))  # torch allows 64
_MOST = 64  # number of input shapes whose counts are cached


class Plan:
    """State shared by the passes of one recorder.

    Args:
        core: The model.
        layers: The layers to watch.
    """

    def __init__(self, core: nn.Module, layers: Sequence[Layer]) -> None:
        self.core, self.layers = core, tuple(layers)
        # Dimensions to sum over, indexed by the number of dimensions of the activation.
        self.dims = [_DIMS[layer.channels_last] for layer in self.layers]
        self.reads_input = [layer.reads_input for layer in self.layers]
        self.watched: list[nn.Module] = []  # the modules of the layers, set by `modules`
        self.repeated: frozenset[int] = frozenset()  # indices of layers that ran more than once in some pass
        self.counts: dict[tuple[Any, ...], Tensor] = {}  # see `count`
        self._modules: Modules | None = None

    def modules(self) -> Modules:
        """Every module of the model, looked up again only if one was added, replaced or removed."""
        if self._modules is None or not self._modules.are_all():
            self.watched = [self.module(layer.name) for layer in self.layers]
            self._modules = Modules(self.core)
        return self._modules

    def module(self, name: str) -> nn.Module:
        """Return the layer called `name`."""
        try:
            return self.core.get_submodule(name)
        except AttributeError:
            raise LayerNotFoundError(
                f"Expected {type(self.core).__name__} to have the layer {name!r}, but it does not. "
                "Make a new Detector for the model."
            ) from None

    def count(self, key: tuple[Any, ...], shapes: Sequence[torch.Size], device: torch.device) -> Tensor:
        """Return the number of positions of each channel of the first layers, (D',), given their shapes; cached in `counts`."""
        n = [math.prod(shape[dim] for dim in dims[len(shape)]) for shape, dims in zip(shapes, self.dims, strict=False)]
        widths = torch.tensor([layer.channels for layer in self.layers[: len(n)]])
        if len(self.counts) >= _MOST:
            self.counts.clear()
        counts = self.counts[key] = torch.tensor(n, dtype=torch.float32).repeat_interleave(widths).to(device)
        return counts
