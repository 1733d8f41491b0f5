"""Forward hooks that exist during one pass. No other file registers hooks.

Hooks change the user's model, so they are registered on entry to a `with` block and always removed on exit. Only public
torch API is used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

# torch numbers hooks without a lock, and hooks with the same number replace each other.
_registration = threading.Lock()


class Hook(NamedTuple):
    """A function to call when a layer runs.

    It is called with the module, its positional arguments, its keyword arguments and, after the layer, its output. If
    another thread runs the layer while the hook is being registered, the keyword arguments may be missing.
    """

    module: nn.Module
    function: Callable[..., None]
    reads_input: bool


class Hooks:
    """Hooks on several layers, registered and removed together.

    Args:
        hooks: The hooks to register on entry.
    """

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self._hooks = hooks
        self._handles: list[RemovableHandle] = []

    def register(self) -> None:
        """Register all hooks, after existing hooks of their layers."""
        add = self._handles.append
        with _registration:
            for module, function, reads_input in self._hooks:
                if reads_input:
                    add(module.register_forward_pre_hook(function, with_kwargs=True))
                else:
                    add(module.register_forward_hook(function, with_kwargs=True))

    def remove(self) -> None:
        """Remove every hook that was registered."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Self:
        try:
            self.register()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
