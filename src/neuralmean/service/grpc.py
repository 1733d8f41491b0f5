"""The Open Inference Protocol over gRPC, in the event loop and with the batching of the HTTP service.

The messages are built from a table when the server starts, in a descriptor pool of their own: generated code would register
`inference.*` in the pool of the process, where Triton's client, with the same names, could not be imported any more.
Needs `pip install neuralmean[grpc]`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from neuralmean.errors import InputError, MissingExtraError
from neuralmean.service.batching import Answer, Batcher, ClientGoneError, Job
from neuralmean.service.bodies import BodyReader
from neuralmean.service.protocol import (
    OUTPUTS,
    VERSION,
    InputSpec,
    RawTensor,
    datatype_of,
    little_endian,
    model_metadata,
    read_raw,
    server_metadata,
)
from neuralmean.service.refusal import Refusal
from neuralmean.service.settings import Settings, is_authorised

log = logging.getLogger("neuralmean.service")

SERVICE = "inference.GRPCInferenceService"
OPEN_CALLS = frozenset({"ServerLive", "ServerReady"})
"""Calls that need no token: load balancers have none."""

# Name, type, number: the messages and fields of the protocol's published .proto that this server reads or writes.
# Fields that are left out are skipped by the parser, as protobuf skips every field that it does not know.
_MESSAGES: dict[str, str] = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "live bool 1",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "ready bool 1",
    "ModelReadyRequest": "name string 1, version string 2",
    "ModelReadyResponse": "ready bool 1",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "name string 1, version string 2, extensions string* 3",
    "ModelMetadataRequest": "name string 1, version string 2",
    "TensorMetadata": "name string 1, datatype string 2, shape int64* 3",
    "ModelMetadataResponse": (
        "name string 1, versions string* 2, platform string 3, inputs TensorMetadata* 4, outputs TensorMetadata* 5"
    ),
    "InferTensorContents": "fp32_contents float* 6, fp64_contents double* 7",
    "InferInputTensor": "name string 1, datatype string 2, shape int64* 3, contents InferTensorContents 5",
    "InferRequestedOutputTensor": "name string 1",
    "InferOutputTensor": "name string 1, datatype string 2, shape int64* 3",
    "ModelInferRequest": (
        "model_name string 1, model_version string 2, id string 3, inputs InferInputTensor* 5, "
        "outputs InferRequestedOutputTensor* 6, raw_input_contents bytes* 7"
    ),
    "ModelInferResponse": (
        "model_name string 1, model_version string 2, id string 3, outputs InferOutputTensor* 5, raw_output_contents bytes* 6"
    ),
}
_CALLS = ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer")
_CODES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    413: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}


class Served(Protocol):
    """The parts of the HTTP service that this server shares."""

    name: str
    spec: InputSpec
    settings: Settings
    output_shape: tuple[int, ...] | None
    batcher: Batcher | None
    reader: BodyReader


def make_messages() -> dict[str, Any]:
    """Return the protocol's message classes by name."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="open_inference.proto", package="inference", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for entry in filter(None, fields.split(", ")):
            field, kind, number = entry.split()
            label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            kind = kind.rstrip("*")
            if kind in _MESSAGES:
                options = {"type": kinds.TYPE_MESSAGE, "type_name": f".inference.{kind}"}
            else:
                options = {"type": getattr(kinds, f"TYPE_{kind.upper()}")}
            message.field.add(name=field, number=int(number), label=label, **options)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"inference.{name}")) for name in _MESSAGES
    }


class GrpcServer:
    """Answers the protocol's gRPC calls; lives in the event loop of the HTTP service.

    Args:
        service: The HTTP service, whose batcher, limits and names are shared.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
    """

    def __init__(self, service: Served, host: str, port: int) -> None:
        self._service = service
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._messages: dict[str, Any] = {}
        self._server: Any = None
        self.port = port

    async def start(self) -> None:
        """Listen; calls are answered from now on."""
        try:
            import grpc

            self._messages = make_messages()
        except ImportError as error:
            raise MissingExtraError(
                "Serving gRPC needs the 'grpcio' and 'protobuf' packages. Install them with `pip install neuralmean[grpc]`."
            ) from error
        settings = self._service.settings
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", settings.max_body_bytes),
                # Without this, a second server could listen on the same port and take half of the calls.
                ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=settings.bounds.connections,
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, self._handlers(grpc)),))
        try:
            self.port = self._server.add_insecure_port(self._address)
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            raise InputError(f"Expected to listen on {self._address} for gRPC, but it is taken. Choose another port.")
        await self._server.start()
        log.info("Serving gRPC on port %d", self.port)

    async def stop(self) -> None:
        """Refuse new calls and wait for accepted ones."""
        if self._server is not None:
            await self._server.stop(grace=self._service.settings.timeout_s)

    def _handlers(self, grpc: Any) -> dict[str, Any]:
        methods = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._infer,
        }
        return {
            call: grpc.unary_unary_rpc_method_handler(
                self._guarded(grpc, call, methods[call]),
                request_deserializer=self._messages[f"{call}Request"].FromString,
                response_serializer=self._messages[f"{call}Response"].SerializeToString,
            )
            for call in _CALLS
        }

    def _guarded(self, grpc: Any, call: str, method: Callable[[Any], Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Return a call that checks the token first and turns exceptions into status codes."""

        async def answer(request: Any, context: Any) -> Any:
            code, sentence = "INTERNAL", "The server failed on this request. Its log says more."
            try:
                self._check_token(call, tuple(context.invocation_metadata() or ()))
                with self._service.reader.holding() as hold:
                    self._service.reader.add(hold, request.ByteSize())
                    return await method(request)
            except Refusal as refusal:
                code, sentence = _CODES.get(refusal.status, "INTERNAL"), refusal.sentence
            except InputError as error:
                code, sentence = "INVALID_ARGUMENT", str(error)
            except (ClientGoneError, asyncio.CancelledError):
                raise
            except Exception as error:  # noqa: BLE001 - the caller gets an answer, the log the reason
                log.error("A gRPC call failed: %s: %s", type(error).__name__, error)
            return await context.abort(grpc.StatusCode[code], sentence)  # raises

        return answer

    def _check_token(self, call: str, metadata: Sequence[tuple[str, Any]]) -> None:
        token = self._service.settings.token
        if token is None or call in OPEN_CALLS:
            return
        sent = [str(value).encode() for name, value in metadata if name == "authorization"]
        if len(sent) != 1 or not is_authorised(sent[0], token):
            raise Refusal(401, "Expected `authorization: Bearer TOKEN` as metadata, once, but it is missing or wrong.")

    def _check_name(self, name: str, version: str) -> None:
        if name != self._service.name or version not in ("", VERSION):
            raise Refusal(404, f"Expected the model {self._service.name!r} (version {VERSION}), but got {name[:80]!r}.")

    async def _server_live(self, _: Any) -> Any:
        return self._messages["ServerLiveResponse"](live=True)

    async def _server_ready(self, _: Any) -> Any:
        return self._messages["ServerReadyResponse"](ready=self._service.batcher is not None)

    async def _model_ready(self, request: Any) -> Any:
        self._check_name(request.name, request.version)
        return self._messages["ModelReadyResponse"](ready=self._service.batcher is not None)

    async def _server_metadata(self, _: Any) -> Any:
        known = server_metadata()
        return self._messages["ServerMetadataResponse"](name=known["name"], version=known["version"])

    async def _model_metadata(self, request: Any) -> Any:
        self._check_name(request.name, request.version)
        known = model_metadata(self._service.name, self._service.spec, self._service.output_shape)
        return self._messages["ModelMetadataResponse"](**known)

    async def _infer(self, request: Any) -> Any:
        self._check_name(request.model_name, request.model_version)
        batcher = self._service.batcher
        if batcher is None:
            raise Refusal(503, "The server is not ready. Try again later.")
        inputs = read_raw(_raw_tensor(request), self._service.spec)
        wanted = _wanted([output.name for output in request.outputs])
        (answer,) = await batcher.submit([Job(torch.from_numpy(inputs))], timeout=self._service.settings.timeout_s)
        return self._response(request, answer, wanted)

    def _response(self, request: Any, answer: Answer, wanted: tuple[str, ...]) -> Any:
        response = self._messages["ModelInferResponse"](
            model_name=self._service.name, model_version=VERSION, id=request.id
        )
        arrays: dict[str, NDArray[Any]] = answer.arrays()
        for name in wanted:
            if name in arrays:  # a model whose output is no tensor has none
                array = arrays[name]
                response.outputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
                response.raw_output_contents.append(little_endian(array))
        return response


def _raw_tensor(request: Any) -> RawTensor:
    """Return the one tensor of a request as the shared reader takes it."""
    if len(request.inputs) != 1:
        raise Refusal(400, f"Expected `inputs` to hold one tensor, but got {len(request.inputs)}.")
    tensor, raw = request.inputs[0], request.raw_input_contents
    data: bytes | NDArray[Any]
    if len(raw) > 1:
        raise Refusal(400, f"Expected one tensor in `raw_input_contents`, but got {len(raw)}.")
    if len(raw) == 1:
        data = raw[0]
    elif tensor.datatype == "FP64":
        data = np.array(tensor.contents.fp64_contents, np.float64)
    else:
        data = np.array(tensor.contents.fp32_contents, np.float32)
    return RawTensor(tensor.name, tensor.datatype, list(tensor.shape), data)


def _wanted(names: list[str]) -> tuple[str, ...]:
    if not names:
        return OUTPUTS
    for name in names:
        if name not in OUTPUTS:
            raise Refusal(400, f"Expected the outputs to be among {list(OUTPUTS)}, but got {name[:40]!r}.")
    if len(set(names)) < len(names):
        raise Refusal(400, "Expected every output to be requested once, but one is listed twice.")
    return tuple(names)
