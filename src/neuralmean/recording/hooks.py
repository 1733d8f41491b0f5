"""Forward hooks that come and go with one pass: the only file that registers any.

Hooks are global state of the user's model, so they are registered inside a `with` block and removed when it ends,
whatever happens in between. Only public torch API is used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

# torch numbers its hooks without a lock, and two hooks with one number replace each other.
_registration = threading.Lock()


class Hook(NamedTuple):
    """A function to call when a layer runs.

    It is called with the module and its positional arguments, then its keyword arguments and, after the layer, its output.
    Another thread that runs the layer while the hook is being registered may leave the keyword arguments out.
    """

    module: nn.Module
    function: Callable[..., None]
    reads_input: bool


class Hooks:
    """Hooks on layers that are removed together.

    Args:
        hooks: What to register when the block is entered.
    """

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self._hooks = hooks
        self._handles: list[RemovableHandle] = []

    def register(self) -> None:
        """Register all hooks, each after those that its layer already has."""
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
