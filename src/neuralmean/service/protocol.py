"""The Open Inference Protocol (KServe and Triton, version 2): request bodies to arrays, arrays to response bodies.

JSON, and the binary tensor extension: raw little-endian tensors after a JSON header, whose length an HTTP header gives.
`read_raw` reads a tensor for HTTP and gRPC alike. No bytes are trusted; any defect is a `Refusal`. No
HTTP or gRPC framework is imported here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from neuralmean import __version__
from neuralmean.service.refusal import Refusal

HEADER_LENGTH = "Inference-Header-Content-Length"
INPUT = "input"
OUTPUTS = ("output", "score", "p_value", "is_ood")
VERSION = "1"

MOST_PARTS = 100_000
"""Maximum number of lists, objects and names in a request: a few bytes each in JSON, but hundreds in Python."""
_LENIENT_BYTES = 2**20

_FLOATS: dict[str, np.dtype[Any]] = {"FP16": np.dtype("<f2"), "FP32": np.dtype("<f4"), "FP64": np.dtype("<f8")}
_NAMES = {np.dtype(np.bool_): "BOOL", np.dtype(np.float32): "FP32", np.dtype(np.float64): "FP64"}


@dataclass(frozen=True)
class InputSpec:
    """The model's input: shape of one input, None for a side of any length, and maximum rows of a request."""

    shape: tuple[int | None, ...] | None
    max_rows: int

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether the rows of a tensor of this shape (N, ...) are inputs of the model."""
        if self.shape is None:
            return len(shape) >= 2
        pairs = zip(self.shape, shape[1:], strict=False)
        return len(shape) == len(self.shape) + 1 and all(want is None or want == got for want, got in pairs)

    @property
    def sides(self) -> list[int]:
        """The shape as the protocol writes it: -1 for any length."""
        return [-1] if self.shape is None else [-1, *(-1 if side is None else side for side in self.shape)]


@dataclass(frozen=True)
class RawTensor:
    """An unchecked tensor from a client: little-endian bytes, or numbers in one dimension."""

    name: str
    datatype: Any
    shape: Any
    data: bytes | NDArray[Any]


@dataclass(frozen=True)
class InferRequest:
    """An inference request."""

    id: str | None
    inputs: NDArray[np.float32]  # (N, ...)
    outputs: tuple[tuple[str, bool], ...]  # name, and whether as binary


def parse_infer(body: bytes, header_length: str | None, spec: InputSpec) -> InferRequest:
    """Read an inference request.

    Args:
        body: The body, unpacked.
        header_length: Value of the header `Inference-Header-Content-Length`, where there is one.
        spec: What the model takes.
    """
    end = _header_end(header_length, len(body))
    request = _json_object(body[:end])
    inputs = request.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        got = f"{len(inputs)} of them" if isinstance(inputs, list) else "none"
        raise Refusal(400, f"Expected `inputs` to be a list with one tensor, but got {got}.")
    request_id = request.get("id")
    if request_id is not None and (not isinstance(request_id, str) or len(request_id) > 256):
        raise Refusal(400, "Expected `id` to be a text of at most 256 characters, but got something else.")
    tensor = _read_tensor(inputs[0], body[end:], spec)
    return InferRequest(request_id, tensor, _wanted_outputs(request))


def _header_end(header_length: str | None, size: int) -> int:
    if header_length is None:
        return size
    if not (header_length.isascii() and header_length.isdigit()) or len(header_length) > 12:
        raise Refusal(400, f"Expected {HEADER_LENGTH} to be a whole number, but got {header_length[:40]!r}.")
    if not 0 < int(header_length) <= size:
        raise Refusal(400, f"Expected {HEADER_LENGTH} to be from 1 to the {size} bytes sent, but got {header_length}.")
    return int(header_length)


def _json_object(text: bytes) -> dict[str, Any]:
    if sum(map(text.count, (b"[", b"{", b":"))) > MOST_PARTS:
        raise Refusal(
            413,
            f"Expected at most {MOST_PARTS:,} lists, objects and names in the JSON, but got more. Send `data` as one flat list, "
            "or as binary data.",
        )
    try:
        value = orjson.loads(text)  # a tenth of the time that `json` takes for an image's numbers
    except ValueError:
        value = _lenient_json(text)
    if not isinstance(value, dict):
        raise Refusal(400, f"Expected the body to be a JSON object, but got {_kind(value)}.")
    return value


def _lenient_json(text: bytes) -> Any:
    """Read JSON with common extensions: NaN, whole numbers of any length. Slower, so only if needed."""
    if len(text) <= _LENIENT_BYTES:
        with suppress(ValueError, RecursionError):
            return json.loads(text)
    raise Refusal(400, "Expected the body to be JSON with finite numbers, but it cannot be read as such.")


def _read_tensor(entry: dict[str, Any], binary: bytes, spec: InputSpec) -> NDArray[np.float32]:
    shape = entry.get("shape")
    data = _entry_data(entry, binary)
    return read_raw(RawTensor(str(entry.get("name", INPUT)), entry.get("datatype"), shape, data), spec)


def read_raw(tensor: RawTensor, spec: InputSpec) -> NDArray[np.float32]:
    """Return a client's tensor as the model's input, shape (N, ...); any defect is a `Refusal`."""
    if tensor.name != INPUT:
        raise Refusal(400, f"Expected the input to be called {INPUT!r}, but got {tensor.name[:40]!r}.")
    dtype = _FLOATS.get(tensor.datatype) if isinstance(tensor.datatype, str) else None
    if dtype is None:
        raise Refusal(
            400,
            f"Expected `datatype` to be FP32, FP64 or FP16, prepared as for the model, but got "
            f"{str(tensor.datatype)[:40]!r}. Post image files to /score instead.",
        )
    shape = _read_shape(tensor.shape, spec)
    n, data = math.prod(shape), tensor.data
    if isinstance(data, bytes):
        if len(data) != n * dtype.itemsize:
            raise Refusal(
                400,
                f"Expected {n * dtype.itemsize} bytes of binary data for this shape and datatype, but got {len(data)}.",
            )
        data = np.frombuffer(data, dtype)
    if len(data) != n:
        raise Refusal(400, f"Expected `data` to hold {n} numbers for this shape, but got {len(data)}.")
    with np.errstate(over="ignore"):  # what overflows becomes infinite and is refused below
        values = data.astype(np.float32).reshape(shape)
    if not np.isfinite(values).all():
        raise Refusal(400, "Expected finite numbers in `data`, but got NaN or Inf, or numbers too large for FP32.")
    return values


def _read_shape(shape: Any, spec: InputSpec) -> tuple[int, ...]:
    wanted = f"Expected `shape` to be {spec.sides}"
    if not isinstance(shape, list) or not 1 <= len(shape) <= 8 or not all(_is_size(side) for side in shape):
        raise Refusal(400, f"{wanted}, but got {_kind(shape)} that is no list of 1 to 8 positive whole numbers.")
    if not spec.fits(shape):
        raise Refusal(400, f"{wanted} with -1 for the number of inputs, but got {shape}.")
    if shape[0] > spec.max_rows:
        raise Refusal(413, f"Expected at most {spec.max_rows} inputs in one request, but got {shape[0]}. Send fewer.")
    return tuple(shape)


def _entry_data(entry: dict[str, Any], binary: bytes) -> bytes | NDArray[Any]:
    parameters = entry.get("parameters")
    size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
    if size is None:
        if binary:
            raise Refusal(400, "Expected `binary_data_size` among the input's parameters, as bytes follow the JSON.")
        return _json_values(entry.get("data"))
    if size != len(binary) or isinstance(size, bool):
        raise Refusal(
            400, f"Expected {str(size)[:40]} bytes of binary data, as the request says, but it brings {len(binary)}."
        )
    return binary


def _json_values(data: Any) -> NDArray[Any]:
    if not isinstance(data, list):
        raise Refusal(400, f"Expected `data` to be a list of numbers, but got {_kind(data)}.")
    # Checked before numpy sees it: numpy would make an array of gigabytes of a few long strings.
    while data and isinstance(data[0], list):
        if any(not isinstance(part, list) or len(part) != len(data[0]) for part in data):
            raise Refusal(400, "Expected `data` to be a flat or evenly nested list of numbers, but it is ragged.")
        data = list(chain.from_iterable(data))
    if not set(map(type, data)) <= {int, float}:
        raise Refusal(400, "Expected `data` to hold nothing but numbers, but it holds something else.")
    values = np.array(data)
    if values.dtype.kind not in "iuf":
        raise Refusal(400, "Expected `data` to hold nothing but numbers of at most 64 bits, but one is larger.")
    return values


def _wanted_outputs(request: dict[str, Any]) -> tuple[tuple[str, bool], ...]:
    parameters = request.get("parameters")
    default = isinstance(parameters, dict) and parameters.get("binary_data_output") is True
    outputs = request.get("outputs")
    if outputs is None or outputs == []:
        return tuple((name, default) for name in OUTPUTS)
    if not isinstance(outputs, list) or not all(isinstance(output, dict) for output in outputs):
        raise Refusal(400, f"Expected `outputs` to be a list of objects, but got {_kind(outputs)}.")
    wanted = []
    for output in outputs:
        if output.get("name") not in OUTPUTS:
            raise Refusal(
                400, f"Expected the outputs to be among {list(OUTPUTS)}, but got {str(output.get('name'))[:40]!r}."
            )
        own = output.get("parameters")
        binary = own.get("binary_data", default) if isinstance(own, dict) else default
        wanted.append((output["name"], binary is True))
    if len({name for name, _ in wanted}) < len(wanted):
        raise Refusal(400, "Expected every output to be requested once, but one is listed twice.")
    return tuple(wanted)


def encode_infer(request: InferRequest, arrays: dict[str, NDArray[Any]], model: str) -> tuple[bytes, int | None]:
    """Return the body of an inference response, and the length of its JSON header where binary data follows."""
    outputs: list[dict[str, Any]] = []
    binary: list[bytes] = []
    for name, as_binary in request.outputs:
        if name not in arrays:
            continue  # a model whose output is no tensor
        array = arrays[name]
        entry: dict[str, Any] = {"name": name, "datatype": datatype_of(array), "shape": list(array.shape)}
        if as_binary:
            data = little_endian(array)
            entry["parameters"] = {"binary_data_size": len(data)}
            binary.append(data)
        else:
            entry["data"] = _json_numbers(array)
        outputs.append(entry)
    answer: dict[str, Any] = {"model_name": model, "model_version": VERSION, "outputs": outputs}
    if request.id is not None:
        answer["id"] = request.id
    header = json.dumps(answer).encode()
    return header + b"".join(binary), len(header) if binary else None


def datatype_of(array: NDArray[Any]) -> str:
    """Return the protocol's name of an array's type."""
    return _NAMES[array.dtype]


def little_endian(array: NDArray[Any]) -> bytes:
    """Return the bytes of an array as the protocol writes them."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()


def model_metadata(model: str, spec: InputSpec, output_shape: Sequence[int] | None) -> dict[str, Any]:
    """Return what `/v2/models/NAME` says; `output_shape` is that of one row of the model's output, where known."""
    outputs = [
        {"name": "score", "datatype": "FP32", "shape": [-1]},
        {"name": "p_value", "datatype": "FP64", "shape": [-1]},
        {"name": "is_ood", "datatype": "BOOL", "shape": [-1]},
    ]
    if output_shape is not None:
        outputs.insert(0, {"name": "output", "datatype": "FP32", "shape": [-1, *output_shape]})
    return {
        "name": model,
        "versions": [VERSION],
        "platform": "pytorch_neuralmean",
        "inputs": [{"name": INPUT, "datatype": "FP32", "shape": spec.sides}],
        "outputs": outputs,
    }


def server_metadata() -> dict[str, Any]:
    """Return what `/v2` says."""
    return {"name": "neuralmean", "version": __version__, "extensions": ["binary_tensor_data"]}


def _json_numbers(array: NDArray[Any]) -> list[Any]:
    flat = array.reshape(-1)
    values: list[Any] = flat.tolist()
    if flat.dtype.kind == "f" and not np.isfinite(flat).all():
        return [value if math.isfinite(value) else None for value in values]  # JSON has no infinity
    return values


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "nothing")
