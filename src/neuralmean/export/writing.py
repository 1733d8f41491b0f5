"""Writes a fitted detector as one graph that runs without neuralmean: ONNX, and torch's own `.pt2`.

The graph holds the model, the discrepancy, the scorer and the threshold; its outputs are the model's own, `score`,
`p_value` and `is_ood`. The batch size is dynamic. The header of the saved file is stored as metadata. Every file is run
and compared with the library before it is kept.
"""

from __future__ import annotations

import io
import json
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from neuralmean.export.checking import check_graph
from neuralmean.export.detector_graph import KIND_NAMES, DetectorGraph, input_names
from neuralmean.files.artefact import FORMAT_VERSION
from neuralmean.files.atomic import check_target, write_atomically
from neuralmean.models.execution import Modules, device_of, eval_mode, translate_input_errors
from neuralmean.models.layers import unwrap
from neuralmean.models.repeats import check_repeats
from neuralmean.recording.graph.capture import capture
from neuralmean.recording.graph.compiled import compile_packages
from neuralmean.scorers import VectorScorer

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from neuralmean.detector.detector import Detector

METADATA_KEY = "neuralmean"
VERDICTS = ("score", "p_value", "is_ood")
RATE = "alarm_rate"  # optional input of an ONNX graph: the largest p-value that is flagged


@dataclass(frozen=True)
class _Captured:
    """A detector as an exported program, with the names of its inputs and outputs."""

    program: ExportedProgram
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    example: Batch
    header: str


def to_onnx(
    detector: Detector,
    path: str | Path,
    *,
    example_input: Any = None,
    input_shape: Sequence[int] | None = None,
    check: Any = None,
) -> tuple[str, ...]:
    """Write the detector and its model as one ONNX graph, and return the names of the graph's outputs.

    The graph is run in onnxruntime with default settings and compared with the library. If a score differs by more than
    0.001 (by a ten-thousandth for scores beyond 10), or a decision differs, an error is raised and no file is written.
    The optional input `alarm_rate`, a float64 number, overrides the false-alarm rate of the fit.

    Args:
        detector: A fitted detector.
        path: The file, which is written atomically.
        example_input: An input of the model as in `detector(x)`; only its shapes and types matter.
        input_shape: Shape of one input without the batch, such as `(3, 32, 32)`, instead of an example.
        check: Inputs to compare on, as for `score`; None takes noise and natural-looking images. None of them is stored.

    Raises:
        MissingExtraError: The packages to write and run ONNX are not installed.
        InputError: The detector is not a fixed graph, or the graph's results differ from the library's.
    """
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 - torch.onnx needs it
    except ImportError:
        raise MissingExtraError(
            "Exporting to ONNX needs the packages onnx, onnxscript and onnxruntime. Install them with "
            "`pip install neuralmean[onnx]`."
        ) from None
    check_target(path)
    found = _capture(detector, example_input, input_shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.onnx warns about its own deprecations
        options: dict[str, Any] = {"input_names": list(found.inputs), "output_names": list(found.outputs)}
        exported: Any = torch.onnx.export(found.program, (), dynamo=True, verbose=False, **options)
    proto = exported.model_proto
    _name_batch(proto)
    proto.graph.input.append(onnx.helper.make_tensor_value_info(RATE, onnx.TensorProto.DOUBLE, []))
    onnx.helper.set_model_props(proto, {METADATA_KEY: found.header})
    content = proto.SerializeToString()
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3  # it warns that the rate is not a constant
    session = onnxruntime.InferenceSession(content, settings)

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        feed = {name: value.contiguous().numpy() for name, value in zip(found.inputs, inputs, strict=True)}
        return [torch.from_numpy(value) for value in session.run(None, feed)]

    check_graph(detector, run, found.outputs, found.example, check, "onnxruntime")
    with write_atomically(path) as file:
        file.write(content)
    return found.outputs


def _name_batch(proto: Any) -> None:
    """Name the batch dimension, instead of torch's symbol."""
    parts = [list(proto.graph.input), [*proto.graph.output, *proto.graph.value_info]]
    inputs, others = ([dim for value in part for dim in value.type.tensor_type.shape.dim] for part in parts)
    symbols = {dim.dim_param for dim in inputs} - {""}
    for dim in (*inputs, *others):
        if dim.dim_param in symbols:
            dim.dim_param = "batch"


def to_pt2(
    detector: Detector,
    path: str | Path,
    *,
    example_input: Any = None,
    input_shape: Sequence[int] | None = None,
    check: Any = None,
    portable: bool = False,
) -> tuple[str, ...]:
    """Write the detector and its model as compiled code, and return the names of the outputs.

    `torch._inductor.aoti_load_package(path)`, or C++ without Python, runs the file: it returns the model's output, score,
    p-value and decision. The file contains machine code for this operating system and processor family, and the header
    of the saved file in its metadata under `neuralmean`. It is checked as by `to_onnx`.

    Args:
        detector: A fitted detector.
        path: The file, which is written atomically.
        example_input: As for `to_onnx`.
        input_shape: As for `to_onnx`.
        check: As for `to_onnx`.
        portable: Write the exported program instead, which `torch.export.load(path).module()` runs on any machine
            without a compiler; the header is its extra file `neuralmean`.

    Raises:
        InputError: The detector is not a fixed graph, there is no C++ compiler, or the graph's results differ from the
            library's.
    """
    check_target(path)
    found = _capture(detector, example_input, input_shape)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tensors that share memory
        if portable:
            buffer = io.BytesIO()
            torch.export.save(found.program, buffer, extra_files={METADATA_KEY: found.header})
            content, where = buffer.getvalue(), "torch.export"
            graph: Any = torch.export.load(io.BytesIO(content)).module()
        else:
            (package,) = compile_packages([found.program], Path(folder), {METADATA_KEY: found.header})
            content, where = package.read_bytes(), "AOTInductor"
            graph = torch._inductor.aoti_load_package(str(package))

        def run(inputs: Sequence[Tensor]) -> list[Tensor]:
            with torch.no_grad():
                returned = pytree.tree_flatten(graph(*(value.contiguous() for value in inputs)))[0]
            return [value for value in returned if value is not None]

        check_graph(detector, run, found.outputs, found.example, check, where)
    with write_atomically(path) as file:
        file.write(content)
    return found.outputs


def _capture(detector: Detector, example_input: Any, input_shape: Sequence[int] | None) -> _Captured:
    detector.check_weights()
    if (device := device_of(detector.model.modules())).type != "cpu":
        raise InputError(f"Expected a model on the CPU to export, but got one on {device}. Move it: `model.cpu()`.")
    batch = _example(example_input, input_shape)
    names = input_names(detector.model, batch)
    graph = DetectorGraph(detector, names, len(batch.args)).eval()
    values, core = (*batch.args, *batch.kwargs.values()), unwrap(detector.model)
    with eval_mode(Modules(graph)), eval_mode(Modules(core)):
        given = "input_shape" if example_input is None else "example_input"
        with torch.no_grad(), translate_input_errors(core, batch, given):
            output = graph(*values)[0]
        try:
            check_repeats(core, lambda: core(*batch.each(Tensor.clone).args, **batch.each(Tensor.clone).kwargs))
            program = capture(graph, values, any_size=True)
        except InputError as error:
            raise InputError(
                f"Expected {type(core).__name__} and its scorer to be a fixed graph for batches of any size, but "
                f"{str(error).rstrip('.')}. Look for Python numbers computed from tensors: use `x.shape[0]`, "
                "and no branch on values."
            ) from error
    header = json.dumps(_header(detector), sort_keys=True)
    kinds = () if detector.learnt.kinds is None else KIND_NAMES
    return _Captured(program, names, (*_output_names(output), *VERDICTS, *kinds), batch, header)


def _example(example_input: Any, input_shape: Sequence[int] | None) -> Batch:
    if (example_input is None) == (input_shape is None):
        raise InputError("Expected either `example_input` or `input_shape` to be given. Pass one of the two.")
    batch = to_batch(torch.zeros(2, *input_shape) if input_shape is not None else example_input)
    batch = batch.to(torch.device("cpu"))
    if len(batch) > 1:
        return batch
    # With a single example, the batch size would become a constant of the graph.
    return batch.each(lambda value: torch.cat([value, value]) if value.dim() and len(value) == 1 else value)


def _output_names(output: Any) -> list[str]:
    """Name the model's own outputs: `output`, or one name per tensor if there are several."""
    if isinstance(output, Tensor):
        return ["output"]
    leaves = [leaf for leaf in pytree.tree_flatten(output)[0] if leaf is not None]  # which the graph does not have
    if isinstance(output, Mapping):
        there = [key for key, value in output.items() if value is not None]
        if len(leaves) == len(there):
            return [f"output_{key}" if key in (*VERDICTS, *KIND_NAMES) else str(key) for key in there]
    return [f"output_{index}" for index in range(len(leaves))]


def _header(detector: Detector) -> dict[str, Any]:
    if isinstance(full_of(detector.scorer), VectorScorer):
        header = to_artefact(detector).header
    else:  # a user's scorer is in the graph but has no saved form
        header = {"threshold": detector.threshold, "versions": {"neuralmean": __version__, "torch": torch.__version__}}
    return {**header, "format_version": FORMAT_VERSION}
