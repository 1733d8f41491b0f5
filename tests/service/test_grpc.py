"""The gRPC form of the protocol, with Triton's own client."""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from neuralmean.errors import InputError, MissingExtraError
from neuralmean.service import Settings, create_app
from neuralmean.service.grpc import GrpcServer, make_messages
from tests.service.conftest import PREPROCESSING, httpx

pytest.importorskip("grpc", reason="the extra `grpc` is not installed")
triton = pytest.importorskip("tritonclient.grpc.aio", reason="tritonclient is not installed")
InferenceServerException = pytest.importorskip("tritonclient.utils").InferenceServerException


@asynccontextmanager
async def serving(detector, preprocessing=PREPROCESSING, **settings):
    """A gRPC client, the application, and the server."""
    app = create_app(detector, preprocessing, name="toy", settings=Settings(**settings))
    server = GrpcServer(app.state.service, "127.0.0.1", 0)
    app.state.service.companions.append(server)
    async with app.router.lifespan_context(app):
        client = triton.InferenceServerClient(f"127.0.0.1:{server.port}")
        try:
            yield client, app, server
        finally:
            await client.close()


def make_input(images, datatype="FP32"):
    tensor = triton.InferInput("input", list(images.shape), datatype)
    kinds = {"FP16": np.float16, "FP32": np.float32, "FP64": np.float64}
    tensor.set_data_from_numpy(images.numpy().astype(kinds[datatype]))
    return [tensor]


def refusal(detector, call, **settings):
    """The error that a call raises, as status and sentence."""

    async def go():
        async with serving(detector, **settings) as (client, _, _):
            with pytest.raises(InferenceServerException) as raised:
                await call(client)
            return raised.value.status(), raised.value.message()

    return asyncio.run(go())


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "FP16"])
def test_tritons_grpc_client_gets_the_librarys_numbers(detector, images, datatype):
    async def go():
        async with serving(detector) as (client, _, _):
            return await client.infer("toy", make_input(images[:4], datatype), request_id="seven")

    result = asyncio.run(go())
    inputs = images[:4].half().float() if datatype == "FP16" else images[:4]
    output, decision = detector(inputs)
    np.testing.assert_allclose(result.as_numpy("output"), output.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result.as_numpy("score"), decision.score.numpy(), rtol=1e-5)
    assert result.as_numpy("p_value").tolist() == decision.p_value.tolist()
    assert result.as_numpy("is_ood").tolist() == decision.is_ood.tolist()
    assert result.get_response().id == "seven"


def test_health_and_metadata(detector):
    async def go():
        async with serving(detector) as (client, _, _):
            assert await client.is_server_live()
            assert await client.is_server_ready()
            assert await client.is_model_ready("toy")
            return await client.get_server_metadata(), await client.get_model_metadata("toy")

    server, model = asyncio.run(go())
    assert server.name == "neuralmean"
    assert list(model.inputs[0].shape) == [-1, 3, 8, 8]
    assert [output.name for output in model.outputs] == ["output", "score", "p_value", "is_ood"]


def test_calls_over_grpc_and_http_share_forward_passes(detector, images):
    async def go():
        async with serving(detector, max_wait_ms=200.0) as (client, app, _):
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                entry = {
                    "name": "input",
                    "datatype": "FP32",
                    "shape": [1, 3, 8, 8],
                    "data": images[0].flatten().tolist(),
                }
                for _ in range(3):
                    calls = [client.infer("toy", make_input(images[i : i + 1])) for i in range(10)]
                    posts = [http.post("/v2/models/toy/infer", json={"inputs": [entry]}) for _ in range(10)]
                    done = await asyncio.gather(*calls, *posts)
                assert all(answer.status_code == 200 for answer in done[10:])
                batcher = app.state.service.batcher
                return batcher.n_rows, batcher.n_passes, app.state.service.live.monitor

    n_rows, n_passes, monitor = asyncio.run(go())
    assert n_rows == 60
    assert n_passes < 45
    assert monitor.status().n_seen == 60  # one stream, one monitor


def test_only_the_outputs_asked_for_come_back(detector, images):
    async def go():
        async with serving(detector) as (client, _, _):
            wanted = [triton.InferRequestedOutput("is_ood")]
            return await client.infer("toy", make_input(images[:2]), outputs=wanted)

    result = asyncio.run(go())
    assert result.as_numpy("score") is None
    assert result.as_numpy("is_ood").shape == (2,)


@pytest.mark.parametrize(
    ("call", "status", "sentence"),
    [
        (lambda c: c.infer("other", make_input(torch.rand(1, 3, 8, 8))), "NOT_FOUND", "Expected the model 'toy'"),
        (lambda c: c.infer("toy", make_input(torch.rand(1, 3, 9, 8))), "INVALID_ARGUMENT", "Expected `shape` to be"),
        (lambda c: c.infer("toy", make_input(torch.rand(65, 3, 8, 8))), "RESOURCE_EXHAUSTED", "at most 64 inputs"),
        (lambda c: c.infer("toy", make_input(torch.full((1, 3, 8, 8), torch.nan))), "INVALID_ARGUMENT", "finite"),
        (lambda c: c.infer("toy", make_input(torch.rand(1, 3, 8, 8)) * 2), "INVALID_ARGUMENT", "one tensor, but got 2"),
        (
            lambda c: c.infer(
                "toy", make_input(torch.rand(1, 3, 8, 8)), outputs=[triton.InferRequestedOutput("logits")]
            ),
            "INVALID_ARGUMENT",
            "Expected the outputs to be among",
        ),
        (lambda c: c.get_model_metadata("toy", "9"), "NOT_FOUND", "version 1"),
    ],
)
def test_what_is_wrong_is_a_status_and_a_sentence(detector, call, status, sentence):
    found, message = refusal(detector, call)
    assert found == f"StatusCode.{status}"
    assert sentence in message


def test_a_message_beyond_the_limit_is_refused_before_it_is_read(detector):
    status, message = refusal(
        detector, lambda c: c.infer("toy", make_input(torch.rand(8, 3, 8, 8))), max_body_bytes=4096
    )
    assert status == "StatusCode.RESOURCE_EXHAUSTED"
    assert "larger than max" in message


def test_the_token_is_needed_but_for_health(detector, images):
    token = "a-long-secret"
    status, _ = refusal(detector, lambda c: c.infer("toy", make_input(images[:1])), token=token)
    assert status == "StatusCode.UNAUTHENTICATED"
    wrong = {"authorization": "Bearer another-one"}
    status, _ = refusal(detector, lambda c: c.infer("toy", make_input(images[:1]), headers=wrong), token=token)
    assert status == "StatusCode.UNAUTHENTICATED"

    async def go():
        async with serving(detector, token=token) as (client, _, _):
            assert await client.is_server_live()
            return await client.infer("toy", make_input(images[:1]), headers={"authorization": f"Bearer {token}"})

    assert asyncio.run(go()).as_numpy("score").shape == (1,)


def test_a_port_that_is_taken_is_one_clear_error(detector):
    async def go(port):
        app = create_app(detector, PREPROCESSING)
        app.state.service.companions.append(GrpcServer(app.state.service, "127.0.0.1", port))
        async with app.router.lifespan_context(app):
            pass

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"Expected to listen on 127.0.0.1:{port} for gRPC, but it is taken"):
            asyncio.run(go(port))


def test_a_missing_package_names_the_extra(detector, monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc", None)
    server = GrpcServer(create_app(detector, PREPROCESSING).state.service, "127.0.0.1", 0)
    with pytest.raises(MissingExtraError, match=r"pip install neuralmean\[grpc\]"):
        asyncio.run(server.start())


def test_the_messages_are_those_that_triton_publishes():
    """Each field that this server knows has the number, the type and the label of Triton's own description."""
    from tritonclient.grpc import service_pb2

    for name, message in make_messages().items():
        nested = {
            "TensorMetadata": "ModelMetadataResponse",
            "InferInputTensor": "ModelInferRequest",
            "InferRequestedOutputTensor": "ModelInferRequest",
            "InferOutputTensor": "ModelInferResponse",
        }
        published = getattr(service_pb2, nested.get(name, name)).DESCRIPTOR
        if name in nested:
            published = published.nested_types_by_name[name]
        for field in message.DESCRIPTOR.fields:
            other = published.fields_by_name[field.name]
            assert (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated)
