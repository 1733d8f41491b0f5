"""Compares the results of a written graph with those of the library, before the file is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from neuralmean.data.batch import Batch, to_batches
from neuralmean.data.probes import are_close, odd_inputs
from neuralmean.detector.decision import Decision
from neuralmean.errors import InputError
from neuralmean.export.detector_graph import KIND_NAMES

if TYPE_CHECKING:
    from neuralmean.detector.detector import Detector

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]

SCORE_TOLERANCE = 1e-3  # largest difference of scores; relative to 10 for larger scores
BORDERLINE = 1e-4  # distance from the threshold within which decisions may differ
_OUTPUT_TOLERANCE = 1e-4
_KIND_TOLERANCE = 1e-3  # of p-values of kinds, in addition to two held-out scores
_SIZES = (1, 2, 8)


def check_graph(detector: Detector, run: Run, names: Sequence[str], example: Batch, data: Any, where: str) -> None:
    """Run a written graph on images and compare it with the library.

    Args:
        detector: The exported detector.
        run: Runs the graph on its inputs.
        names: Names of the graph's outputs: those of the model, then score, p-value and decision, then the kind if it
            is learnt.
        example: An example of the inputs.
        data: The inputs to compare on; None takes noise, natural-looking images and odd inputs.
        where: Name of the runtime, for error messages.

    Raises:
        InputError: An output differs; the message names it.
    """
    batches: Iterable[Batch] = _made(example) if data is None else to_batches(data, name="check", batch_size=32)
    for batch in batches:
        try:
            seen = next(iter(detector.observe_each([batch.each(Tensor.clone)])))
        except InputError:  # not finite, for which the library raises
            if data is not None:
                raise
            continue
        leaves = [leaf for leaf in pytree.tree_flatten(seen.output)[0] if isinstance(leaf, Tensor)]
        decision = Decision(seen.score, detector.calibrated())
        expected = [*leaves, decision.score, decision.p_value, decision.is_ood]
        found = run([*batch.args, *batch.kwargs.values()])
        name = _differing(names, expected, found[: len(expected)], detector.threshold)
        p_values = seen.kind_p_values()
        if name is None and p_values is not None:
            name = _differing_kind(p_values, found[len(expected) :], len(detector.calibrated().scores))
        if name is not None:
            raise InputError(
                f"Expected the graph in {where} to agree with the library, but {name} for {len(batch)} "
                f"{'test inputs' if data is None else 'inputs of `check`'} of shape {tuple(batch.first.shape[1:])}. No file was "
                "written. Compare on inputs of your own with `check`, or run the model with the library."
            )


def _differing(
    names: Sequence[str], expected: Sequence[Tensor], found: Sequence[Tensor], threshold: float
) -> str | None:
    """Describe the output that differs; None if all agree."""
    *outputs, score, p_value, is_ood = (value.detach() for value in expected)
    *others, other_score, other_p, other_is_ood = found
    if len(outputs) != len(others):
        return f"it returns {len(others)} outputs of the model, not {len(outputs)},"
    for name, one, other in zip(names, outputs, others, strict=False):
        if not are_close(one, other, tolerance=_OUTPUT_TOLERANCE):
            return f"`{name}` differs"
    if other_score.shape != score.shape:
        return f"`score` has the shape {tuple(other_score.shape)}, not {tuple(score.shape)},"
    off = (score.double() - other_score.double()).abs()
    allowed = SCORE_TOLERANCE * (score.double().abs() / 10).clamp_min(1)
    if not bool((off <= allowed).all()):
        row = int((off - allowed).nan_to_num(nan=torch.inf).argmax())
        return f"`score` differs ({other_score[row].item():.6g} instead of {score[row].item():.6g})"
    clear = (score.double() - threshold).abs() > BORDERLINE * max(1.0, abs(threshold))
    if bool((other_is_ood[clear] != is_ood[clear]).any()):
        return "`is_ood` differs"
    # Allows for one held-out score between the two scores.
    same = off == 0
    return None if torch.allclose(other_p[same], p_value[same], rtol=0, atol=1e-9) else "`p_value` differs"


def _differing_kind(p_values: Tensor, found: Sequence[Tensor], n_held_out: int) -> str | None:
    """Describe the p-value of the kind that differs by more than two held-out scores; None if all agree."""
    if len(found) != len(KIND_NAMES):
        return f"it returns {len(found)} outputs of the kind, not {len(KIND_NAMES)},"
    allowed = _KIND_TOLERANCE + 2.5 / (n_held_out + 1)
    for name, one, other in zip(KIND_NAMES, p_values.unbind(dim=1), found, strict=False):
        if not torch.allclose(other.double(), one, rtol=0, atol=allowed):
            return f"`{name}` differs"
    return None


def _made(example: Batch) -> Iterator[Batch]:
    """Yield the example in batches of several sizes or, if it is the only input, probes of its shape."""
    if len(example.args) == 1 and not example.kwargs:
        yield from (Batch((inputs,)) for inputs in odd_inputs(example.first))
        return
    count = len(example)
    for size in _SIZES:
        rows = torch.arange(size) % count
        yield example.each(lambda value: value[rows] if value.dim() and len(value) == count else value)  # noqa: B023
