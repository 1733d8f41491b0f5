"""Hooks that come and go with a forward pass: the only file that puts any on a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from torch import nn
from typing_extensions import Self

_keys = count(-1, -1)  # of hooks in a module's dicts; torch's own begin at 0 and grow


class Hooks:
    """Hooks on layers, to be taken away together."""

    def __init__(self) -> None:
        self._places: list[tuple[Any, ...]] = []  # keys of the hooks, each with the dicts it is in

    def put(self, module: nn.Module, hook: Callable[..., None], *, before: bool) -> None:
        """Have a hook called with a layer's arguments and keywords, before it runs, or behind it with its output as well.

        It is the last one, so that it sees what the others made of an activation. A thread that runs the layer meanwhile may
        call a hook that is half there, and then without the keywords.
        """
        # Straight into the module's own dicts: `register_forward_hook` and its handle take ten times as long.
        hooks = module._forward_pre_hooks if before else module._forward_hooks
        by_keyword = module._forward_pre_hooks_with_kwargs if before else module._forward_hooks_with_kwargs
        key = next(_keys)
        self._places.append((key, hooks, by_keyword))  # before it is there, so that it is taken away in any case
        by_keyword[key] = True
        hooks[key] = hook

    def take_away(self) -> None:
        """Take all of them away, also those that are only half there."""
        for key, *dicts in self._places:
            for hooks in dicts:
                hooks.pop(key, None)
        self._places.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.take_away()


def first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what a layer was called with, in whatever way; None if with nothing."""
    return args[0] if args else next(iter(kwargs.values()), None)
