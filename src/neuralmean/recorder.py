"""Channel means and variances of one forward pass: the only file that registers hooks.

Each activation is reduced inside the hook and let go. The model leaves every call as it came: no hook stays on it and
its training flags are what they were, also when the forward pass raises. Many threads may record on one model: a hook
only listens to the thread that registered it.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from neuralmean.data import Batch, check_input
from neuralmean.errors import InputError, LayerNotFiredError, LayerNotFoundError, ModelInputError
from neuralmean.layers import Layer, unwrap


_NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Recording:
    """What one forward pass showed: the model's own output, and the channels of the watched layers."""

    output: Any
    means: dict[str, Tensor]  # {layer: (N, C)}
    variances: dict[str, Tensor]  # {layer: (N, C)}, empty unless asked for
    feature: Tensor | None = None  # (N, F), the input of the head
    logits: Tensor | None = None  # (N, K), the output of the head


def channel_mean(activation: Tensor, *, channels_last: bool = False, mask: Tensor | None = None) -> Tensor:
    """Mean of each channel of each example, shape (N, C), in float32 or better.

    Args:
        activation: Shape (N, C, ...), or (N, ..., C) with `channels_last`.
        channels_last: Whether the channels are the last dimension.
        mask: Shape (N, T): tokens that count, for an activation of shape (N, T, C).

    Example:
        >>> channel_mean(torch.tensor([[[1.0, 3.0], [10.0, 20.0]]]))
        tensor([[ 2., 15.]])
    """
    if mask is not None:
        weight = mask.to(_wide(activation)).unsqueeze(-1)
        return (activation * weight).sum(1) / weight.sum(1).clamp_min(1)
    dims = _positions(activation, channels_last)
    if not dims:
        return activation.to(_wide(activation), copy=True)  # a later in-place operation must not change it
    return activation.mean(dims, dtype=_wide(activation))


def channel_mean_variance(
    activation: Tensor, *, channels_last: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and population variance of each channel of each example over its positions, each (N, C).

    Arguments are those of `channel_mean`. A channel with a single position has variance 0.
    """
    wide = activation.to(_wide(activation))
    if mask is not None:
        mean = channel_mean(activation, mask=mask)
        return mean, channel_mean((wide - mean.unsqueeze(1)).square(), mask=mask)
    dims = _positions(activation, channels_last)
    if not dims:
        return wide.clone(), torch.zeros_like(wide)
    variance, mean = torch.var_mean(wide, dims, correction=0)
    return mean, variance


def main_tensor(output: Any) -> Tensor | None:
    """Return the tensor that counts in a model's output: itself, `.logits`, or the first one of a tuple or dict."""
    if isinstance(output, Tensor):
        return output
    if isinstance(getattr(output, "logits", None), Tensor):
        return output.logits  # type: ignore[no-any-return]
    if isinstance(output, Mapping):
        logits = output.get("logits")
        output = [logits] if isinstance(logits, Tensor) else list(output.values())
    if isinstance(output, (tuple, list)):
        return next((part for part in map(main_tensor, output) if part is not None), None)
    return None


class Recorder:
    """Runs a model and brings back the channel statistics of its watched layers.

    Args:
        model: The model, wrapped (DataParallel, DDP, `torch.compile`) or not.
        layers: The layers to watch.
        variance: Whether to record variances too.
        head: Name of the layer whose input is the penultimate feature and whose output the logits, where those are wanted.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], *, variance: bool = False, head: str | None = None
    ) -> None:
        self.model = model
        self.layers = tuple(layers)
        self.variance = variance
        self.head = head
        self._core = unwrap(model)
        self.takes_tokens = any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module in self._core.modules())
        self._compiled: Callable[..., tuple[Any, _Sink]] | None = None
        self._lock = threading.Lock()

    def __call__(self, batch: Batch, *, name: str = "x") -> Recording:
        """Run the model on `batch` in evaluation mode and return its output with what was recorded.

        Gradients are recorded or not as the caller has set them; the statistics never carry any.

        Raises:
            LayerNotFiredError: A watched layer took no part in the pass.
            ModelInputError: The input has a shape or type that the model cannot take.
        """
        check_input(batch, name, tokens=self.takes_tokens)
        batch = batch.to(_device(self._core))
        try:
            output, sink = self._run_compiled(batch) if _is_compiled(self.model) else self._run(batch)
        except RuntimeError as error:
            if not _is_shape_error(error):
                raise
            shape, reason = tuple(batch.first.shape), str(error).splitlines()[0].rstrip(".")
            raise ModelInputError(
                f"Expected `{name}` to be an input that {type(self._core).__name__} accepts, but got shape {shape} of "
                f"{batch.first.dtype}: {reason}."
            ) from error
        return sink.finish(output, len(batch))

    def _run(self, batch: Batch) -> tuple[Any, _Sink]:
        # A DataParallel model runs on one device here: its replicas live in other threads, out of reach of the hooks.
        model = self._core if isinstance(self.model, nn.DataParallel) else self.model
        sink = _Sink(self.layers, self.variance, self.head, batch.mask)
        with _evaluating(self._core), sink.attached(self._core):
            return model(*batch.args, **batch.kwargs), sink

    def _run_compiled(self, batch: Batch) -> tuple[Any, _Sink]:
        """Run a compiled twin that shares every tensor with the model, so that the reductions are compiled too."""
        with self._lock:
            if self._compiled is None:
                self._compiled = _compile_twin(self._core, self.layers, self.variance, self.head)
        return self._compiled(*batch.args, mask=batch.mask, **batch.kwargs)


def find_head(model: nn.Module, batch: Batch) -> str | None:
    """Return the name of the linear layer whose output is the model's output, or None where there is no such layer."""
    core = unwrap(model)
    outputs: dict[str, Tensor] = {}
    thread = threading.get_ident()

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: object) -> None:
            if threading.get_ident() == thread and isinstance(output, Tensor):
                outputs[name] = output

        return hook

    handles: list[RemovableHandle] = []
    with _evaluating(core), torch.no_grad():
        try:
            for name, module in core.named_modules():
                if isinstance(module, nn.Linear):
                    handles.append(module.register_forward_hook(keep(name)))
            moved = batch.to(_device(core))
            result = main_tensor(core(*moved.args, **moved.kwargs))
        finally:
            for handle in handles:
                handle.remove()
    if result is None:
        return None
    # A squeeze or a view of the layer's output is still the layer's output: same memory, as many numbers.
    same = [
        name
        for name, output in outputs.items()
        if output.data_ptr() == result.data_ptr() and output.numel() == result.numel()
    ]
    return same[-1] if same else None


class _Sink:
    """Collects the reduced activations of one pass."""

    def __init__(self, layers: Sequence[Layer], variance: bool, head: str | None, mask: Tensor | None) -> None:
        self.layers, self.variance, self.head, self.mask = layers, variance, head, mask
        self.means: dict[str, Tensor] = {}
        self.variances: dict[str, Tensor] = {}
        self.calls: dict[str, int] = {}
        self.feature: Tensor | None = None
        self.logits: Tensor | None = None
        self.thread: int | None = threading.get_ident()

    @contextmanager
    def attached(self, core: nn.Module) -> Iterator[None]:
        """Listen to the layers of `core` inside the block."""
        handles: list[RemovableHandle] = []
        try:
            self.attach(core, handles)
            yield
        finally:
            for handle in handles:
                handle.remove()

    def attach(self, core: nn.Module, handles: list[RemovableHandle]) -> None:
        """Register the hooks; each handle is in `handles` as soon as its hook is on the model."""
        for layer in self.layers:
            module = _submodule(core, layer.name)
            if layer.reads_input:
                handles.append(module.register_forward_pre_hook(self._input_hook(layer), with_kwargs=True))
            else:
                handles.append(module.register_forward_hook(self._output_hook(layer)))
        if self.head is not None:
            handles.append(_submodule(core, self.head).register_forward_hook(self._head_hook, with_kwargs=True))

    def _input_hook(self, layer: Layer) -> Callable[..., None]:
        # Another thread may call a hook that is half registered or half removed, and then without the keywords.
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = _NOTHING) -> None:
            self._add(layer, args[0] if args else next(iter(kwargs.values()), None))

        return hook

    def _output_hook(self, layer: Layer) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._add(layer, main_tensor(output))

        return hook

    def _head_hook(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        if self._is_foreign():
            return
        kwargs, output = rest
        feature, logits = args[0] if args else next(iter(kwargs.values())), main_tensor(output)
        with torch.no_grad():
            last = isinstance(module, nn.Linear)
            self.feature = channel_mean(feature.detach(), channels_last=last, mask=self._mask_for(feature))
            if logits is not None:
                self.logits = channel_mean(logits.detach(), channels_last=last, mask=self._mask_for(logits))

    def _is_foreign(self) -> bool:
        return self.thread is not None and threading.get_ident() != self.thread

    def _mask_for(self, activation: Tensor) -> Tensor | None:
        fits = self.mask is not None and activation.dim() == 3 and activation.shape[:2] == self.mask.shape
        return self.mask if fits else None

    def _add(self, layer: Layer, activation: Tensor | None) -> None:
        if self._is_foreign():
            return
        if activation is None:
            raise InputError(
                f"Expected layer {layer.name!r} to have a tensor, but it has none. Leave it out of `layers`."
            )
        with torch.no_grad():
            activation = activation.detach()
            last = layer.channels_last
            mask = self._mask_for(activation) if last else None
            if self.variance:
                mean, variance = channel_mean_variance(activation, channels_last=last, mask=mask)
            else:
                mean, variance = channel_mean(activation, channels_last=last, mask=mask), None
            calls = self.calls.get(layer.name, 0)
            self.means[layer.name] = mean if calls == 0 else self.means[layer.name] + mean
            if variance is not None:
                self.variances[layer.name] = variance if calls == 0 else self.variances[layer.name] + variance
            self.calls[layer.name] = calls + 1

    def finish(self, output: Any, size: int) -> Recording:
        """Return the recording, once every layer has fired with one row for each of the `size` inputs."""
        silent = [layer.name for layer in self.layers if layer.name not in self.means]
        if silent:
            shown = ", ".join(map(repr, silent[:3])) + (f" and {len(silent) - 3} more" if len(silent) > 3 else "")
            raise LayerNotFiredError(
                f"Expected every watched layer to run in the forward pass, but {shown} did not. It may be used in "
                "training only, bypassed by a fused kernel or inside a compiled submodule; choose others with `layers`."
            )
        for layer in self.layers:
            self._check_shape(layer, size)
        means, variances = (
            {name: value / self.calls[name] if self.calls[name] > 1 else value for name, value in sums.items()}
            for sums in (self.means, self.variances)
        )
        return Recording(output, means, variances, self.feature, self.logits)

    def _check_shape(self, layer: Layer, size: int) -> None:
        rows, channels = self.means[layer.name].shape
        if channels != layer.channels:
            raise InputError(
                f"Expected {layer.channels} channels in layer {layer.name!r}, but its activation has {channels}. "
                "Its channels are not where neuralmean looks for them; leave it out of `layers`."
            )
        if rows != size:
            raise InputError(
                f"Expected one row for each of the {size} inputs in layer {layer.name!r}, but its activation has {rows}. "
                "neuralmean needs the batch as first dimension; leave the layer out of `layers`."
            )


def _compile_twin(
    core: nn.Module, layers: Sequence[Layer], variance: bool, head: str | None
) -> Callable[..., tuple[Any, _Sink]]:
    """Return a compiled function that runs `core` and fills a sink, without a hook on `core` itself."""
    tensors = {id(tensor): tensor for tensor in (*core.parameters(), *core.buffers())}
    twin = copy.deepcopy(core, memo=dict(tensors)).eval()
    sink = _Sink(layers, variance, head, None)
    sink.thread = None  # the twin is ours alone; the lock below keeps threads apart
    sink.attach(twin, [])

    def forward(mask: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sink.mask, sink.feature, sink.logits = mask, None, None
        for store in (sink.means, sink.variances, sink.calls):
            store.clear()
        output = twin(*args, **kwargs)
        return output, dict(sink.means), dict(sink.variances), dict(sink.calls), sink.feature, sink.logits

    compiled = torch.compile(forward)
    lock = threading.Lock()

    def run(*args: Any, mask: Tensor | None = None, **kwargs: Any) -> tuple[Any, _Sink]:
        result = _Sink(layers, variance, head, mask)
        with lock:
            output, *statistics = compiled(mask, args, kwargs)
        result.means, result.variances, result.calls, result.feature, result.logits = statistics
        return output, result

    return run


_eval_lock = threading.Lock()
_eval_users: weakref.WeakKeyDictionary[nn.Module, tuple[int, list[nn.Module]]] = weakref.WeakKeyDictionary()


@contextmanager
def _evaluating(core: nn.Module) -> Iterator[None]:
    """Keep `core` in evaluation mode inside the block; the last of several threads to leave puts the flags back."""
    with _eval_lock:
        users, training = _eval_users.get(core, (0, []))
        if users == 0:
            training = [module for module in core.modules() if module.training]
            for module in training:
                module.training = False
        _eval_users[core] = (users + 1, training)
    try:
        yield
    finally:
        with _eval_lock:
            users, training = _eval_users[core]
            if users == 1:
                del _eval_users[core]
                for module in training:
                    module.training = True
            else:
                _eval_users[core] = (users - 1, training)


def _submodule(core: nn.Module, name: str) -> nn.Module:
    try:
        return core.get_submodule(name)
    except AttributeError:
        raise LayerNotFoundError(
            f"Expected {type(core).__name__} to have the layer {name!r}, but it has not. Make a new Detector for the model."
        ) from None


def _wide(activation: Tensor) -> torch.dtype:
    return torch.float64 if activation.dtype == torch.float64 else torch.float32


def _positions(activation: Tensor, channels_last: bool) -> list[int]:
    """Dimensions over which a channel is averaged: all but the examples and the channels."""
    channel = activation.dim() - 1 if channels_last else 1
    return [dim for dim in range(1, activation.dim()) if dim != channel]


def _device(core: nn.Module) -> torch.device:
    tensor = next((tensor for tensors in (core.parameters(), core.buffers()) for tensor in tensors), None)
    return torch.device("cpu") if tensor is None else tensor.device


def _is_compiled(model: nn.Module) -> bool:
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


def _is_shape_error(error: RuntimeError) -> bool:
    signs = (
        "channels",
        "shapes cannot be multiplied",
        "size",
        "dimension",
        "same dtype",
        "should be the same",
        "shape",
        "4D",
        "scalar type",
    )
    return type(error) is RuntimeError and any(sign in str(error) for sign in signs)
