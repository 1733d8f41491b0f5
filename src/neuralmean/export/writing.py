"""Writes a fitted detector as one graph that runs without neuralmean: ONNX, and torch's own `.pt2`.

The graph holds the model, the discrepancy, the scorer and the threshold; its outputs are the model's own, `score`,
`p_value` and `is_ood`. The batch is dynamic. The header of the saved file goes along as metadata.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from neuralmean import __version__
from neuralmean.data.batch import Batch, to_batch
from neuralmean.detector.early_exit import full_of
from neuralmean.detector.saving import to_artefact
from neuralmean.errors import InputError, MissingExtraError
from neuralmean.export.arranging import arrange
from neuralmean.export.detector_graph import DetectorGraph, input_names
from neuralmean.files.artefact import FORMAT_VERSION
from neuralmean.files.atomic import write_atomically
from neuralmean.models.execution import Modules, device_of, eval_mode, translate_input_errors
from neuralmean.models.layers import unwrap
from neuralmean.scorers import VectorScorer

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from neuralmean.detector.detector import Detector

METADATA_KEY = "neuralmean"
VERDICTS = ("score", "p_value", "is_ood")


def to_onnx(
    detector: Detector, path: str | Path, *, example_input: Any = None, input_shape: Sequence[int] | None = None
) -> tuple[str, ...]:
    """Write the detector and its model as one ONNX graph, and return the names of the graph's outputs.

    Args:
        detector: A fitted detector.
        path: Where to; the file is written whole or not at all.
        example_input: An input of the model as in `detector(x)`; only its shapes and types matter.
        input_shape: Shape of one input without the batch, `(3, 32, 32)`, in place of an example.

    Raises:
        MissingExtraError: The packages that write ONNX are not installed.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401 - torch.onnx needs it
    except ImportError:
        raise MissingExtraError(
            "Exporting to ONNX needs the packages onnx and onnxscript. Install them with `pip install neuralmean[onnx]`."
        ) from None
    program, inputs, outputs = _trace(detector, example_input, input_shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.onnx warns of its own deprecations
        exported = torch.onnx.export(program, (), dynamo=True, input_names=inputs, output_names=outputs, verbose=False)
    if exported is None:
        raise InputError("Expected torch.onnx to return a graph, but it returned none. Use torch 2.5 or newer.")
    proto = exported.model_proto
    _name_batch(proto)
    arrange(proto)
    onnx.helper.set_model_props(proto, {METADATA_KEY: json.dumps(_header(detector), sort_keys=True)})
    with write_atomically(path) as file:
        file.write(proto.SerializeToString())
    return tuple(outputs)


def _name_batch(proto: Any) -> None:
    """Call the batch by its name, and not by that of a symbol of torch's."""
    values = (*proto.graph.input, *proto.graph.output, *proto.graph.value_info)
    dims = [dim for value in values for dim in value.type.tensor_type.shape.dim]
    symbols = {
        dim.dim_param for value in proto.graph.input for dim in value.type.tensor_type.shape.dim if dim.dim_param
    }
    for dim in dims:
        if dim.dim_param and dim.dim_param in symbols:
            dim.dim_param = "batch"


def to_pt2(
    detector: Detector, path: str | Path, *, example_input: Any = None, input_shape: Sequence[int] | None = None
) -> tuple[str, ...]:
    """Write the detector and its model for `torch.export.load`, and return the names of the outputs.

    Arguments are those of `to_onnx`. The loaded program's `module()` returns `(output, score, p_value, is_ood)`; the
    saved file's header is the extra file `neuralmean`.
    """
    program, _, outputs = _trace(detector, example_input, input_shape)
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={METADATA_KEY: json.dumps(_header(detector), sort_keys=True)})
    with write_atomically(path) as file:
        file.write(buffer.getvalue())
    return tuple(outputs)


def _trace(
    detector: Detector, example_input: Any, input_shape: Sequence[int] | None
) -> tuple[ExportedProgram, list[str], list[str]]:
    """Return the traced graph, the names of its inputs and of its outputs."""
    detector.check_weights()
    if (device := device_of(detector.model.modules())).type != "cpu":
        raise InputError(f"Expected a model on the CPU to export, but got one on {device}. Move it: `model.cpu()`.")
    batch = _example(example_input, input_shape)
    names = input_names(detector.model, batch)
    graph = DetectorGraph(detector, names, len(batch.args)).eval()
    values = (*batch.args, *batch.kwargs.values())
    size, rows = len(batch), torch.export.Dim("batch")
    shapes = tuple({0: rows} if value.dim() and len(value) == size else {} for value in values)
    with torch.no_grad(), eval_mode(Modules(graph)), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export warns of its own deprecations
        given = "input_shape" if example_input is None else "example_input"
        with translate_input_errors(unwrap(detector.model), batch, given):
            output = graph(*values)[0]
        program = _export(graph, values, shapes)
    return program, list(names), [*_output_names(output), *VERDICTS]


def _export(graph: DetectorGraph, values: tuple[Tensor, ...], shapes: tuple[Any, ...]) -> ExportedProgram:
    """Trace the graph; the strict way follows `len(x)` in a model, which the other takes for a constant."""
    reason = ""
    for strict in (False, True):
        try:
            return torch.export.export(graph, values, dynamic_shapes={"inputs": shapes}, strict=strict)
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
    raise InputError(
        f"Expected a model and scorer that torch.export can trace with a dynamic batch, but it cannot ({reason}). "
        "Look for Python numbers made of tensors: use `x.shape[0]`, and no branch on values."
    )


def _example(example_input: Any, input_shape: Sequence[int] | None) -> Batch:
    if (example_input is None) == (input_shape is None):
        raise InputError("Expected either `example_input` or `input_shape` to be given. Pass one of the two.")
    batch = to_batch(torch.zeros(2, *input_shape) if input_shape is not None else example_input)
    batch = batch.to(torch.device("cpu"))
    size = len(batch)

    def grow(value: Tensor) -> Tensor:
        # A single example would have its batch size built into the graph.
        return torch.cat([value, value]) if size == 1 and value.dim() > 0 and len(value) == 1 else value

    return batch.each(grow)


def _output_names(output: Any) -> list[str]:
    """Name the model's own outputs: `output`, or one name per tensor where there are several."""
    if isinstance(output, Tensor):
        return ["output"]
    leaves = [leaf for leaf in pytree.tree_flatten(output)[0] if leaf is not None]  # of which the graph knows nothing
    if isinstance(output, Mapping):
        there = [key for key, value in output.items() if value is not None]
        if len(leaves) == len(there):
            return [f"output_{key}" if key in VERDICTS else str(key) for key in there]
    return [f"output_{index}" for index in range(len(leaves))]


def _header(detector: Detector) -> dict[str, Any]:
    if isinstance(full_of(detector.scorer), VectorScorer):
        header = to_artefact(detector).header
    else:  # a scorer of the user's own is in the graph but has no saved form
        header = {"threshold": detector.threshold, "versions": {"neuralmean": __version__, "torch": torch.__version__}}
    return {**header, "format_version": FORMAT_VERSION}
