"""Recorded passes without Python: the model and its reductions as one TorchScript graph, where that can be trusted.

A pass of a deep network with one image spends a third of its time in Python, and several passes at a time get in each other's
way there, as one thread at a time may run Python. A graph has neither trouble. A model is only run as a graph if tracing it
raised no doubt (nothing depends on the values of a tensor, or on how many inputs there are) and if the graph gives the model's
numbers on other inputs.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.jit import TracerWarning  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode

from neuralmean.channels import main_tensor
from neuralmean.data import Batch
from neuralmean.errors import InputError
from neuralmean.layers import unwrap
from neuralmean.looking import Looks, run_with_exits
from neuralmean.norms import arrange_norms, norms_left
from neuralmean.observer import Observer, Rows
from neuralmean.packing import can_pack, inputs_of_convolutions, pack
from neuralmean.recorder import RecordingModule
from neuralmean.recording import Exits
from neuralmean.running import device_of, is_compiled

Graph = Callable[[Tensor], tuple[Tensor, ...]]

_SIZES = (
    2,
    5,
    1,
)  # of the batches to compare with; the head is looked for in the first, and some models cannot take one input
_N_TRACED = 3  # inputs to trace a model with
_ODD_COUNT = 17  # of which no size of an image, or number of channels or tokens, is likely to be a multiple
_SEVERAL = 8  # inputs: what a graph for more than one is arranged for
_ASK_FOR_SHAPES = {Tensor.shape.__get__, Tensor.size}  # type: ignore[attr-defined]
_warnings_lock = threading.Lock()
_RELATIVE, _ABSOLUTE = 1e-4, 1e-5


class TracedObserver(Observer):
    """An observer that runs a graph where the inputs have the shape it was made for, and the model elsewhere.

    The model runs, too, once one of its layers was added, replaced or removed, or it was moved away from the CPU.

    Args:
        observer: The observer of the model; its head has been looked for already.
        graph: What `trace` made.
        shape: Of one input.
        depths: How many of the first layers each exit in the graph looks at.
    """

    def __init__(self, observer: Observer, graph: Graph, shape: torch.Size, depths: Sequence[int] = ()) -> None:
        self.layers, self.recorder, self._head_is_open = observer.layers, observer.recorder, False
        self.shape = shape
        self._graph, self._depths, self._modules = graph, tuple(depths), self.recorder.modules

    def around(self, observer: Observer) -> TracedObserver:
        """Return the same for another observer of the same model, or of one that shares its tensors."""
        return TracedObserver(observer, self._graph, self.shape, self._depths)

    def observe(self, batch: Batch, *, name: str = "x", exits: Exits | None = None) -> tuple[Any, Rows]:
        """Return the main tensor of the model's output for a batch and the rows of it; see `Observer.observe`."""
        x = batch.first
        modules = self.recorder.modules
        fits = x.dtype is torch.float32 and x.shape[1:] == self.shape and x.device.type == "cpu"
        fits = fits and modules is self._modules and device_of(modules).type == "cpu"
        fits = fits and (exits is None or tuple(exits.depths) == self._depths)
        fits = fits and not torch.is_autocast_enabled("cpu")
        if not fits or len(batch.args) != 1 or batch.kwargs or x.requires_grad:
            return super().observe(batch, name=name, exits=exits)
        with torch.no_grad():
            if exits is None:
                output, rows = _read(self._graph(x))
            else:
                output, rows = run_with_exits(exits, lambda: _read(self._graph(x)), lambda means: (None, Rows(means)))
        self._check_finite(rows.means, name)
        return output, rows


def trace(observer: Observer, example: Tensor, *, fold: bool = False, depths: Sequence[int] = ()) -> TracedObserver:
    """Return an observer that runs the model as a graph.

    Args:
        observer: The observer of the model.
        example: Inputs, shape (N, ...); only the shape of one counts.
        fold: Whether the last digits may differ from the model's, for the sake of speed: batch norms are folded into the
            convolutions before them, and see `packing`.
        depths: Where the graph may be left: how many of the first layers each exit looks at.

    Raises:
        InputError: The model cannot be a graph, or not safely.
    """
    core = unwrap(observer.recorder.model)
    wanted = f"Expected {type(core).__name__} to be a fixed graph of its input"
    if is_compiled(observer.recorder.model):
        raise InputError(f"{wanted}, but it is compiled already.")
    if device_of(core.modules()).type != "cpu" or example.dtype is not torch.float32:
        raise InputError(
            f"{wanted}, in float32 on the CPU, but got {example.dtype} for a model on {device_of(core.modules())}."
        )
    try:
        with torch.no_grad():
            # First, as that finds the head, and layers that run more than once.
            expected = list(_answers(observer, example))
            if min(observer.recorder.repeated, default=len(observer.layers)) < max(depths, default=0):
                raise InputError("a layer before an exit runs more than once")
            script, n_traced = _make_script(_Graph(observer, fold=fold, depths=depths), example)
            left = norms_left(_freeze(script, fold=True).graph, _Graph.PREFIX) if fold else frozenset()
            if left:  # these are read in front of them, where `norms` can do more
                script, n_traced = _make_script(_Graph(observer, fold=fold, depths=depths, left=left), example)

            def attempt(graph: Graph) -> TracedObserver:
                traced = TracedObserver(observer, graph, example.shape[1:], depths)
                for x, found in expected:
                    _compare(found, traced.observe(Batch((x.clone(),))))
                return traced

            # The last ones are for models that write to their activations, or count on how these lie in memory.
            for arrange, in_place in ((True, True), (False, True), (False, False)) if fold and can_pack() else ():
                with suppress(Exception):
                    return attempt(_PackedGraphs(script, n_traced, in_place=in_place, arrange=arrange))
            return attempt(_freeze(script, fold=fold))
    except Exception as error:  # whatever a model or torch has against it
        reason = (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0][:200].rstrip(".")
        raise InputError(f"{wanted}, but it is not: {reason}. It runs as it is without a graph.") from error


def _noise(count: int, example: Tensor) -> Tensor:
    return torch.randn(count, *example.shape[1:], generator=torch.Generator().manual_seed(count))


def _answers(observer: Observer, example: Tensor) -> Iterator[tuple[Tensor, tuple[Any, Rows]]]:
    """Yield inputs and what the model says of them."""
    for count in _SIZES:
        x = _noise(count, example)
        try:
            yield x, observer.observe(Batch((x.clone(),)))  # a model may write to its input
        except Exception:  # some models squeeze too much away
            if count > 1:
                raise


def _make_script(module: _Graph, example: Tensor) -> tuple[Any, int]:
    """Return a module, traced, and with how many inputs.

    Raises:
        InputError: What the module does depends on values, or on the number of inputs.
    """
    doubts: list[str] = []
    for count, shapes in ((_N_TRACED, nullcontext()), (_ODD_COUNT, _KnownShapes())):
        with warnings.catch_warnings(record=True) as caught, shapes:
            warnings.simplefilter("always")
            script = torch.jit.trace(module, (_noise(count, example),), check_trace=False)  # type: ignore[no-untyped-call]
        found = [str(warning.message) for warning in caught if issubclass(warning.category, TracerWarning)]
        if not found:
            return script, count
        doubts += found
    raise InputError(doubts[0])


class _KnownShapes(TorchFunctionMode):
    """Has a model that is traced with `_ODD_COUNT` inputs see shapes as they are, where these do not count the inputs.

    To a tracer the size of an image is something to be computed, and a model that asks whether it is the right one raises a
    doubt. But a graph is only for inputs of one size.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, or answer in its place."""
        if func not in _ASK_FOR_SHAPES:
            return func(*args, **(kwargs or {}))
        tracing = torch._C._get_tracing_state()
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
        try:
            known = args[0].shape
        finally:
            torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]
        traced = args[0].shape
        shape = [one if size % _ODD_COUNT == 0 else size for one, size in zip(traced, known, strict=True)]
        dim = (kwargs or {}).get("dim", args[1] if len(args) > 1 and func is Tensor.size else None)
        return torch.Size(shape) if dim is None else shape[dim]


def _freeze(script: Any, *, fold: bool) -> Any:
    with _warnings_lock, warnings.catch_warnings():  # not for two threads: the filters are the process's
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.freeze(script, optimize_numerics=fold)


class _PackedGraphs:
    """Graphs of a module that was traced with `n_traced` inputs, each made when it is first needed.

    How weights should lie depends on whether there is one input or several, and on the number of threads. The wrong way may take
    longer than the model itself.
    """

    def __init__(self, script: Any, n_traced: int, *, in_place: bool, arrange: bool) -> None:
        self._script, self._n_traced, self._in_place, self._arrange = script, n_traced, in_place, arrange
        self._shapes = inputs_of_convolutions(script.inlined_graph)
        self._made: dict[tuple[bool, int], Any] = {}
        self._lock = threading.Lock()

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        key = len(x) == 1, torch.get_num_threads()
        graph = self._made.get(key)
        if graph is None:
            with self._lock:
                graph = self._made[key] = self._made.get(key) or self._make(1 if len(x) == 1 else _SEVERAL)
        return cast(tuple[Tensor, ...], graph(x))

    def _make(self, size: int) -> Any:
        graph = _freeze(self._script, fold=True)
        if self._arrange:
            arrange_norms(graph.graph)
        shapes = [shape and [shape[0] * size // self._n_traced, *shape[1:]] for shape in self._shapes]
        pack(graph.graph, shapes, in_place=self._in_place)
        return graph


class _Graph(nn.Module):
    """The model with its reductions as a function of one tensor to a fixed number of tensors."""

    PREFIX = "__module._module.model."  # of the names of the model's layers in a graph

    def __init__(self, observer: Observer, *, fold: bool, depths: Sequence[int], left: Collection[str] = ()) -> None:
        super().__init__()
        recorder = observer.recorder
        self._looks = Looks(depths) if depths else None
        self._module = RecordingModule(
            unwrap(recorder.model),
            recorder.layers,
            variance=recorder.variance,
            head=recorder.head,
            behind=fold,
            left=left,
            exits=self._looks,
        )
        if self._looks is not None:
            self._looks.undo = self._module.undo
        self.eval()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return output, means, variances, logits, feature and what the exits left; what is not recorded is empty."""
        if self._looks is not None:
            self._looks.made.clear()
        output, means, *optional = self._module((x,), {}, None)
        main = main_tensor(output)
        if main is None:
            raise InputError("its output holds no tensor")
        if main.is_contiguous():
            main = main.contiguous()  # in the graph, too, whose activations may lie in another order
        variances, feature, logits = (x.new_zeros(0) if tensor is None else tensor for tensor in optional)
        looks = () if self._looks is None else self._looks.made
        return (main, means, variances, logits, feature, *looks)


def _read(parts: tuple[Tensor, ...]) -> tuple[Any, Rows]:
    output, means, *optional = parts[:5]
    return output, Rows(means, *(None if tensor.dim() == 1 else tensor for tensor in optional))


def _compare(expected: tuple[Any, Rows], found: tuple[Any, Rows]) -> None:
    pairs = [(main_tensor(expected[0]), found[0])]
    pairs += [
        (getattr(expected[1], name), getattr(found[1], name)) for name in ("means", "variances", "output", "feature")
    ]
    for one, other in pairs:
        if one is None and other is None:
            continue
        if one is None or other is None or not torch.allclose(one, other, rtol=_RELATIVE, atol=_ABSOLUTE):
            raise InputError("the graph does not give the model's numbers")
