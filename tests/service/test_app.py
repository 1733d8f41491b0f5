"""The routes, over ASGI: right answers, and a sentence for everything that is wrong."""

import asyncio
import gzip
import io
import json
import logging
import re
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from neuralmean import Detector
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.detector.decision import Decision
from neuralmean.errors import InputError, MissingExtraError
from neuralmean.monitor.monitor import Monitor
from neuralmean.service import Settings, bodies, create_app
from neuralmean.service import service as service_module
from neuralmean.service.batching import Batcher, Job
from neuralmean.service.bodies import NamedBytes, decode_images, decode_small
from neuralmean.service.live import Live
from neuralmean.service.passes import run_pass
from neuralmean.service.refusal import Refusal
from tests.service.conftest import PREPROCESSING, ask, png, running

TOKEN = "correct-horse-battery"


@pytest.fixture
def app(detector):
    return create_app(detector, PREPROCESSING, name="toy")


def _body(x, **changes):
    tensor = {"name": "input", "shape": list(x.shape), "datatype": "FP32", "data": x.flatten().tolist()}
    return {"inputs": [{**tensor, **changes}]}


def _outputs(response):
    assert response.status_code == 200, response.text
    return {output["name"]: output for output in response.json()["outputs"]}


def test_health_and_metadata(app):
    async def go():
        async with running(app) as client:
            for path in (
                "/v2/health/live",
                "/v2/health/ready",
                "/v2/models/toy/ready",
                "/v2/models/toy/versions/1/ready",
            ):
                assert (await client.get(path)).status_code == 200, path
            assert (await client.get("/v2")).json()["extensions"] == ["binary_tensor_data"]
            metadata = (await client.get("/v2/models/toy")).json()
            assert metadata["inputs"][0]["shape"] == [-1, 3, 8, 8]
            assert metadata["outputs"][0] == {"name": "output", "datatype": "FP32", "shape": [-1, 3]}

    asyncio.run(go())


def test_without_its_worker_the_server_is_not_ready(app):
    import httpx

    async def go():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            response = await client.get("/v2/health/ready")
            assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
            assert (await client.get("/v2/health/live")).status_code == 200

    asyncio.run(go())


def test_infer_gives_the_numbers_of_the_library(app, detector, images, strange):
    x = torch.cat([images[:3], strange[:2]])
    output, decision = detector(x)
    outputs = _outputs(ask(app, "POST", "/v2/models/toy/infer", json=_body(x) | {"id": "5"}))
    assert outputs["output"]["shape"] == [5, 3]
    np.testing.assert_array_equal(np.float32(outputs["output"]["data"]), output.detach().flatten().numpy())
    np.testing.assert_array_equal(np.float32(outputs["score"]["data"]), decision.score.numpy())
    np.testing.assert_array_equal(outputs["p_value"]["data"], decision.p_value.numpy())
    assert outputs["is_ood"]["data"] == decision.is_ood.tolist() == [False, False, False, True, True]


def test_binary_infer_gives_the_same_bytes(app, detector, images):
    data = images[:2].numpy().tobytes()
    request = _body(images[:2], parameters={"binary_data_size": len(data)})
    del request["inputs"][0]["data"]
    request["parameters"] = {"binary_data_output": True}
    header = json.dumps(request).encode()
    lengths = {"Inference-Header-Content-Length": str(len(header))}
    response = ask(app, "POST", "/v2/models/toy/versions/1/infer", content=header + data, headers=lengths)
    length = int(response.headers["Inference-Header-Content-Length"])
    output, decision = detector(images[:2])
    parts = (output.detach(), decision.score, decision.p_value, decision.is_ood)
    assert response.content[length:] == b"".join(part.numpy().tobytes() for part in parts)
    assert response.headers["content-type"] == "application/octet-stream"


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_packed_bodies_are_unpacked(app, images, encoding, pack):
    body = pack(json.dumps(_body(images[:1])).encode())
    response = ask(app, "POST", "/v2/models/toy/infer", content=body, headers={"Content-Encoding": encoding})
    assert response.status_code == 200


def test_images_are_scored_as_the_library_scores_them(app, detector):
    files = [png(seed) for seed in range(3)]
    decision = detector.predict(PREPROCESSING.apply_array(np.stack([pixels for _, pixels in files])))
    form = [("file", (f"{i}.png", data, "image/png")) for i, (data, _) in enumerate(files)]
    answer = ask(app, "POST", "/score", files=form).json()
    assert [result["path"] for result in answer["results"]] == ["0.png", "1.png", "2.png"]
    assert [result["score"] for result in answer["results"]] == decision.score.tolist()
    assert [result["p_value"] for result in answer["results"]] == decision.p_value.tolist()
    assert answer["threshold"] == detector.threshold
    single = ask(app, "POST", "/score", content=files[0][0], headers={"Content-Type": "image/png"}).json()
    assert single["results"][0]["path"] == "body"
    assert single["results"][0]["score"] == pytest.approx(decision.score[0].item(), rel=1e-5)


def test_an_explanation_comes_when_asked_for_and_adds_up(app, detector):
    data, _ = png(3)
    (result,) = ask(app, "POST", "/score?explain=true", content=data).json()["results"]
    assert [layer["layer"] for layer in result["layers"]] == list(detector.layers)
    assert sum(layer["contribution"] for layer in result["layers"]) == pytest.approx(result["score"], rel=1e-5)
    assert result["sentence"].endswith("at least as unusual.")
    assert result["exact"] is True


def test_images_of_any_size_go_through_a_model_that_takes_them(detector):
    app = create_app(detector, Preprocessing(None, (0.0,) * 3, (1.0,) * 3), name="toy")
    form = [("file", ("a", png(0, 8)[0])), ("file", ("b", png(1, 12)[0]))]
    results = ask(app, "POST", "/score?explain=1", files=form).json()["results"]
    assert [result["path"] for result in results] == ["a", "b"]
    assert all(result["layers"] for result in results)


def test_requests_at_the_same_time_share_passes_and_get_their_own_answers(app, detector, images):
    expected = detector.predict(images[:40]).score

    async def go():
        async with running(app) as client:
            posts = [client.post("/v2/models/toy/infer", json=_body(images[i : i + 1])) for i in range(40)]
            responses = await asyncio.gather(*posts)
            passes = app.state.service.batcher.n_passes
        scores = [_outputs(response)["score"]["data"][0] for response in responses]
        assert scores == pytest.approx(expected.tolist(), rel=1e-5)
        assert passes < 40

    asyncio.run(go())


BAD_IMAGES = {
    "empty": (b"", 400, "the body is empty"),
    "text": (b"hello", 400, "Expected 'body' to be an image, but it is not a PNG"),
    "truncated": (png()[0][:60], 400, "Expected 'body' to be an image, but the file is damaged or cut short"),
    "too_many_pixels": (png(0, 200)[0], 413, "it has 200 x 200 pixels, more than the limit of 10,000"),
}


@pytest.mark.parametrize("case", BAD_IMAGES)
def test_bad_images_are_refused_with_a_sentence(detector, case):
    data, status, sentence = BAD_IMAGES[case]
    app = create_app(detector, PREPROCESSING, settings=Settings(max_pixels=10_000))
    response = ask(app, "POST", "/score", content=data)
    assert response.status_code == status
    assert sentence in response.json()["error"]


BAD_FORMS = {
    "no_boundary": ("multipart/form-data", b"x", 400, "Expected a form"),
    "cut": (
        "multipart/form-data; boundary=a",
        b'--a\r\nContent-Disposition: form-data; name="f"; file',
        400,
        "no file in it",
    ),
    "garbage": ("multipart/form-data; boundary=a", b"\x00\xff--b", 400, "Expected a form"),
    "no_file": (
        "multipart/form-data; boundary=a",
        b'--a\r\nContent-Disposition: form-data; name="f"\r\n\r\nx\r\n--a--\r\n',
        400,
        "there is no file in it",
    ),
    "no_name": ("multipart/form-data; boundary=a", b"--a\r\nX: y\r\n\r\nx\r\n--a--\r\n", 400, "Expected a form"),
}


@pytest.mark.parametrize("case", BAD_FORMS)
def test_bad_forms_are_refused_with_a_sentence(app, case):
    kind, body, status, sentence = BAD_FORMS[case]
    response = ask(app, "POST", "/score", content=body, headers={"Content-Type": kind})
    assert response.status_code == status
    assert sentence in response.json()["error"]


def test_too_many_files_are_refused(detector):
    app = create_app(detector, PREPROCESSING, settings=Settings(max_batch=2))
    response = ask(app, "POST", "/score", files=[("file", (str(i), png()[0])) for i in range(3)])
    assert response.status_code == 413
    assert "Expected a form with at most 2 image files, but: Too many files" in response.json()["error"]


def test_bodies_that_are_too_large_are_refused_however_they_come(detector, images):
    app = create_app(detector, PREPROCESSING, name="toy", settings=Settings(max_body_bytes=1000))

    async def chunks():
        for _ in range(3):
            yield b"x" * 500

    url = "/v2/models/toy/infer"
    bomb = gzip.compress(b" " * 5000)
    for options in (
        {"content": b"x" * 1001},
        {"content": chunks()},
        {"content": bomb, "headers": {"Content-Encoding": "gzip"}},
    ):
        response = ask(app, "POST", url, **options)
        assert response.status_code == 413
        assert response.json() == {"error": "Expected a body of at most 1000 bytes, but it is larger."}


@pytest.mark.parametrize(
    ("encoding", "body", "status", "sentence"),
    [
        ("br", b"x", 415, "Expected a body that is plain, gzip or deflate, but got 'br'"),
        ("gzip", b"x" * 30, 400, "packed with gzip, but it cannot be unpacked"),
        ("gzip", gzip.compress(b"{}", mtime=0)[:-3], 400, "packed with gzip, but it is cut short or longer"),
        ("deflate", zlib.compress(b"{}") + b"x", 400, "packed with deflate, but it is cut short or longer"),
    ],
)
def test_bodies_that_cannot_be_unpacked_are_refused(app, encoding, body, status, sentence):
    response = ask(app, "POST", "/v2/models/toy/infer", content=body, headers={"Content-Encoding": encoding})
    assert response.status_code == status
    assert sentence in response.json()["error"]


def test_a_body_that_does_not_arrive_is_given_up(detector):
    app = create_app(detector, PREPROCESSING, settings=Settings(timeout_s=0.02))

    async def never():
        yield b"x"
        await asyncio.Event().wait()

    response = ask(app, "POST", "/score", content=never())
    assert response.status_code == 408
    assert response.json()["error"] == "Expected the whole body within 0.02 seconds, but it did not come."


def test_more_bytes_than_may_be_held_are_refused_and_let_go(detector):
    app = create_app(detector, PREPROCESSING, settings=Settings(max_bytes_in_flight=100))

    async def go():
        async with running(app) as client:
            response = await client.post("/score", content=b"x" * 101)
            assert response.status_code == 503
            assert response.headers["Retry-After"]
            assert "holds too many requests" in response.json()["error"]
            assert (await client.post("/score", content=b"x" * 90)).status_code == 400
            assert app.state.service.reader.n_bytes == 0

    asyncio.run(go())


def test_infer_refuses_with_the_sentence_of_the_protocol(app, images):
    response = ask(app, "POST", "/v2/models/toy/infer", json=_body(images[:1], datatype="UINT8"))
    assert response.status_code == 400
    assert response.json()["error"].startswith("Expected `datatype` to be FP32")


def test_an_input_that_the_model_cannot_take_is_the_clients_fault(detector, images):
    app = create_app(detector, None, name="toy")
    wrong = ask(app, "POST", "/v2/models/toy/infer", json=_body(torch.rand(1, 5, 8, 8)))
    assert wrong.status_code == 400
    assert "Expected `x` to be an input that TinyNet accepts, but got shape (1, 5, 8, 8)" in wrong.json()["error"]
    huge = ask(app, "POST", "/v2/models/toy/infer", json=_body(torch.full((1, 3, 8, 8), 3e38)))
    assert huge.status_code == 400
    assert "Expected finite activations" in huge.json()["error"]
    assert ask(app, "POST", "/score", content=png()[0]).status_code == 415
    assert _outputs(ask(app, "POST", "/v2/models/toy/infer", json=_body(images[:1])))["score"]["shape"] == [1]


def test_unknown_addresses_names_and_methods_are_told_so(app):
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "/v2/models/other", 404),
        ("GET", "/v2/models/toy/versions/2", 404),
        ("POST", "/v2/models/other/infer", 404),
        ("DELETE", "/score", 405),
        ("GET", "/live?since=x", 400),
        ("POST", "/score?explain=perhaps", 400),
        ("GET", "/live/flagged/x", 400),
        ("GET", "/live/flagged/77", 404),
    ):
        response = ask(app, method, path)
        assert response.status_code == status, path
        assert response.json()["error"].endswith(".")


def test_a_failure_of_the_server_is_a_sentence_and_one_line_in_the_log(app, detector, images, caplog):
    async def go():
        async with running(app) as client:
            with torch.no_grad():
                detector.model.fc.weight.add_(1)
            return await client.post("/v2/models/toy/infer", json=_body(images[:1]))

    response = asyncio.run(go())
    assert response.status_code == 500
    assert response.json() == {"error": "The server failed on this request. Its log says more."}
    assert "ModelMismatchError" in caplog.text
    assert "Traceback" not in caplog.text


def test_with_a_token_only_the_page_and_health_are_open(detector, caplog):
    app = create_app(detector, PREPROCESSING, name="toy", settings=Settings(token=TOKEN))
    caplog.set_level(logging.DEBUG)

    async def go():
        async with running(app) as client:
            for path in (
                "/",
                "/docs",
                "/openapi.json",
                "/page/app.js",
                "/page/style.css",
                "/v2/health/live",
                "/v2/health/ready",
            ):
                assert (await client.get(path)).status_code == 200, path
            right = {"Authorization": f"Bearer {TOKEN}"}
            for path in ("/v2", "/v2/models/toy", "/metrics", "/live", "/live/setup", "/nothing"):
                for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
                    refused = await client.get(path, headers=headers)
                    assert refused.status_code == 401, path
                    assert refused.headers["WWW-Authenticate"] == "Bearer"
                    assert "Authorization: Bearer TOKEN" in refused.json()["error"]
                assert (await client.get(path, headers=right)).status_code in (200, 404)
            assert (await client.post("/score", content=png()[0])).status_code == 401
            assert (await client.post("/score", content=png()[0], headers=right)).status_code == 200

    asyncio.run(go())
    assert TOKEN not in caplog.text


def test_metrics_tell_what_happened(app, images, strange):
    from prometheus_client.parser import text_string_to_metric_families

    async def go():
        async with running(app) as client:
            await client.post("/v2/models/toy/infer", json=_body(torch.cat([images[:5], strange[:5]])))
            await client.post("/score", content=b"no image")
            while app.state.service.live.monitor.status().n_seen < 10:
                await asyncio.sleep(0)
            return (await client.get("/metrics")).text

    found = {}
    for family in text_string_to_metric_families(asyncio.run(go())):
        for sample in family.samples:
            found[(sample.name, *sorted(sample.labels.values()))] = sample.value
    assert found[("nmd_inputs_total",)] == 10
    assert sum(value for key, value in found.items() if key[0] == "nmd_ood_total") == 5
    assert found[("nmd_window_ood_rate",)] == 0.5
    assert found[("nmd_p_value_count",)] == found[("nmd_p_value_bucket", "+Inf")] == 10
    assert found[("nmd_drift",)] in (0, 1)
    assert found[("nmd_http_requests_total", "200", "infer")] == 1
    assert found[("nmd_http_requests_total", "/score", "400")] == 1
    assert {key[1] for key in found if key[0] == "nmd_layer_shift"} == {"bn1", "bn2"}
    assert found[("nmd_passes_total",)] == 1


async def _settled(app, n):
    while app.state.service.live.snapshot(0)["number"] < n:
        await asyncio.sleep(0)


def test_the_live_view_shows_the_latest_and_keeps_only_so_many(detector, images, strange):
    app = create_app(detector, PREPROCESSING, name="toy", settings=Settings(n_flagged=2))

    async def go():
        async with running(app) as client:
            await client.post("/v2/models/toy/infer", json=_body(torch.cat([images[:2], strange[:5]])))
            await _settled(app, 7)
            live = (await client.get("/live")).json()
            assert live["number"] == live["monitor"]["n_seen"] == 7
            assert [item["number"] for item in live["items"]] == [1, 2, 3, 4, 5, 6, 7]
            assert [item["is_ood"] for item in live["items"]] == [False] * 2 + [True] * 5
            assert [item["number"] for item in live["flagged"]] == [7, 6]
            assert [item["number"] for item in (await client.get("/live?since=5")).json()["items"]] == [6, 7]
            picture = await client.get("/live/flagged/7")
            assert picture.headers["content-type"] == "image/png"
            assert (await client.get("/live/flagged/5")).status_code == 404
            setup = (await client.get("/live/setup")).json()
            assert (setup["name"], setup["images"], setup["thumbnails"]) == ("toy", True, True)
            for _ in range(7):
                await client.post("/v2/models/toy/infer", json=_body(images[:64]))
            await _settled(app, 455)
            assert len((await client.get("/live")).json()["items"]) == 400

    asyncio.run(go())


def test_a_thumbnail_is_what_the_model_saw(detector):
    import io

    from PIL import Image

    preprocessing = Preprocessing((8, 8), (0.4, 0.5, 0.6), (0.1, 0.2, 0.3))
    app = create_app(detector, preprocessing, name="toy")
    data, pixels = png(5)

    async def go():
        async with running(app) as client:
            answer = (await client.post("/score", content=data)).json()
            assert answer["results"][0]["is_ood"]
            await _settled(app, 1)
            return (await client.get("/live/flagged/1")).content

    shown = np.asarray(Image.open(io.BytesIO(asyncio.run(go()))))
    np.testing.assert_array_equal(shown, pixels)


def test_without_thumbnails_no_picture_is_kept(detector, strange):
    app = create_app(detector, PREPROCESSING, name="toy", settings=Settings(thumbnails=False))

    async def go():
        async with running(app) as client:
            await client.post("/v2/models/toy/infer", json=_body(strange[:3]))
            await _settled(app, 3)
            assert (await client.get("/live")).json()["flagged"] == []
            assert (await client.get("/live/flagged/1")).status_code == 404

    asyncio.run(go())


def test_the_alarm_can_be_reset_but_not_by_another_site(app, strange):
    async def go():
        async with running(app) as client:
            for _ in range(4):
                await client.post("/v2/models/toy/infer", json=_body(strange[:20]))
            await _settled(app, 80)
            assert (await client.get("/live")).json()["monitor"]["drift"]
            refused = await client.post("/live/reset", headers={"Sec-Fetch-Site": "cross-site"})
            assert refused.status_code == 403
            assert "comes from a page of another site" in refused.json()["error"]
            assert (await client.post("/live/reset")).json() == {"drift": False}
            assert not (await client.get("/live")).json()["monitor"]["drift"]

    asyncio.run(go())


def test_the_monitors_state_survives_a_restart(detector, images, tmp_path):
    settings = Settings(state=tmp_path / "monitor", window=64)
    for total in (5, 10):
        app = create_app(detector, PREPROCESSING, name="toy", settings=settings)
        assert ask(app, "POST", "/v2/models/toy/infer", json=_body(images[:5])).status_code == 200
        assert Monitor.load(tmp_path / "monitor", detector).status().n_seen == total


def test_a_state_that_cannot_be_written_is_logged(detector, images, tmp_path, caplog):
    app = create_app(detector, PREPROCESSING, name="toy", settings=Settings(state=tmp_path / "no" / "monitor"))
    assert ask(app, "POST", "/v2/models/toy/infer", json=_body(images[:5])).status_code == 200
    assert "The monitor's state was not saved: Expected to write" in caplog.text


def test_the_page_may_ask_nobody_else(app):
    response = ask(app, "GET", "/")
    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    for path in ("/", "/docs", "/openapi.json", "/page/app.js", "/page/docs.js", "/page/style.css"):
        text = ask(app, "GET", path).text.replace("http://www.w3.org/2000/svg", "")
        assert "http" not in text.replace("https://", "http://").replace("http-equiv", "") or "http://" not in text, (
            path
        )


def test_the_description_names_every_route(app):
    paths = ask(app, "GET", "/openapi.json").json()["paths"]
    assert {"/score", "/metrics", "/live", "/v2/models/{name}/infer", "/v2/health/ready"} <= set(paths)
    assert "multipart/form-data" in paths["/score"]["post"]["requestBody"]["content"]


def test_a_name_with_a_slash_is_refused(detector):
    with pytest.raises(InputError, match="Expected `name` to be a name without slashes, but got 'a/b'"):
        create_app(detector, None, name="a/b")


def test_a_missing_extra_is_named(detector, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    message = r"Serving needs the 'prometheus_client' package. Install it with `pip install neuralmean\[serve\]`"
    with pytest.raises(MissingExtraError, match=message):
        create_app(detector, None)


def test_a_model_whose_output_is_no_tensor_is_served_without_it(images):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm2d(3)

        def forward(self, x):
            self.bn(x)
            return "done"

    model = Odd().train()
    model(images)
    app = create_app(Detector(model, scorer="average").calibrate(images[:50]), None, name="odd")
    outputs = _outputs(ask(app, "POST", "/v2/models/odd/infer", json=_body(images[:2])))
    assert list(outputs) == ["score", "p_value", "is_ood"]


def test_a_client_that_leaves_is_not_answered_and_nothing_is_logged(app, images, caplog):
    sent = []

    async def receive_then_leave():
        if not sent:
            sent.append(1)
            return {"type": "http.request", "body": b"{", "more_body": True}
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v2/models/toy/infer", "raw_path": b"/v2/models/toy/infer", "query_string": b"", "root_path": "",
        "headers": [(b"host", b"127.0.0.1")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip

    async def go():
        async with app.router.lifespan_context(app):
            await app(scope, receive_then_leave, send)

    asyncio.run(go())
    assert sent[1]["status"] == 499
    assert "Traceback" not in caplog.text


def test_only_small_images_are_decoded_without_a_thread():
    small, large = (NamedBytes("a.png", png(size=size)[0]) for size in (8, 200))
    limits = {"max_pixels": 1000, "max_bytes": 10**6}
    (image,) = decode_small([small], PREPROCESSING, **limits)
    np.testing.assert_array_equal(image, decode_images([small], PREPROCESSING, **limits)[0])
    assert decode_small([large], PREPROCESSING, **limits | {"max_pixels": 10**6}) is None  # too many bytes
    assert decode_small([small, small], PREPROCESSING, **limits) is None
    plain = io.BytesIO()
    Image.new("RGB", (200, 200)).save(plain, "PNG")
    assert len(plain.getvalue()) < 1000
    pixels = limits | {"max_pixels": 10**6}
    assert decode_small([NamedBytes("b.png", plain.getvalue())], PREPROCESSING, **pixels) is None  # too many
    with pytest.raises(Refusal, match=r"Expected 'c.png' to be an image"):
        decode_small([NamedBytes("c.png", b"none")], PREPROCESSING, **limits)


def test_images_that_unpack_to_too_much_are_refused_before_all_are_unpacked(monkeypatch):
    seen = []
    real = bodies.decode_image
    monkeypatch.setattr(bodies, "decode_image", lambda *args, **kwargs: seen.append(1) or real(*args, **kwargs))
    files = [NamedBytes(f"{i}.png", png(seed=i)[0]) for i in range(5)]  # 192 bytes each
    with pytest.raises(
        Refusal, match=r"Expected images of at most 400 bytes together once unpacked. Send fewer"
    ) as refused:
        decode_images(files, PREPROCESSING, max_pixels=1000, max_bytes=400)
    assert refused.value.status == 413
    assert len(seen) == 3
    (batch,) = decode_images(files, PREPROCESSING, max_pixels=1000, max_bytes=960)
    assert batch.shape == (5, 8, 8, 3)


def test_a_packed_body_counts_as_what_it_is_unpacked(detector):
    app = create_app(detector, PREPROCESSING, settings=Settings(max_bytes_in_flight=50_000))
    packed = gzip.compress(b" " * 60_000)
    assert len(packed) < 1000
    answer = ask(app, "POST", "/score", content=packed, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 503
    assert app.state.service.reader.n_bytes == 0


def test_a_model_that_cannot_take_zeros_is_served_all_the_same(detector, monkeypatch):
    run = service_module.run_pass

    def no_zeros(detector, x, *args, **kwargs):
        if not x.any():
            raise InputError("Expected finite activations")
        return run(detector, x, *args, **kwargs)

    monkeypatch.setattr(service_module, "run_pass", no_zeros)
    assert ask(create_app(detector, PREPROCESSING), "POST", "/score", content=png()[0]).status_code == 200


def test_a_reset_alone_is_saved(detector, tmp_path, images):
    live = create_app(detector, PREPROCESSING, settings=Settings(state=tmp_path / "state.nmm")).state.service.live
    live.monitor.update(detector.predict(images[:5]))
    live.save()
    first = (tmp_path / "state.nmm").read_bytes()
    live.save()
    assert (tmp_path / "state.nmm").read_bytes() == first
    live.monitor.reset()
    live.save()
    assert Monitor.load(tmp_path / "state.nmm", detector).status().n_since_reset == 0


def test_what_is_not_to_be_watched_is_answered_and_not_watched(detector):
    app = create_app(detector, PREPROCESSING)
    picture = png()[0]

    async def go():
        async with running(app) as client:
            plain = await client.post("/score", content=picture)
            apart = await asyncio.gather(*(client.post("/score?watch=false", content=picture) for _ in range(5)))
            wrong = await client.post("/score?watch=maybe", content=picture)
            return plain, apart, wrong

    plain, apart, wrong = asyncio.run(go())
    assert wrong.status_code == 400
    for answer in apart:  # which share passes
        assert answer.json()["results"][0]["score"] == pytest.approx(plain.json()["results"][0]["score"], rel=1e-5)
    assert app.state.service.live.monitor.status().n_seen == 1


def test_of_a_shared_pass_only_the_watched_rows_are_watched(detector, images):
    seen = []

    def run(inputs, explain, *, alone):
        return run_pass(detector, inputs)

    batcher = Batcher([run], max_batch=8, max_wait_ms=1, queue=8, after=lambda *args: seen.append(args))
    jobs = [Job(images[:2]), Job(images[2:5], watched=False), Job(images[5:6])]
    batcher._n_running = 6
    batcher._run_batch(run, jobs, alone=False)
    batcher.close()
    ((inputs, shared),) = seen
    assert torch.equal(inputs, images[[0, 1, 5]])
    assert len(shared.decision) == len(shared.vectors) == 3


def _unexplained(detector, images):
    """A pass with scores that no layer explains."""
    usual = run_pass(detector, images)
    decision = Decision(usual.decision.score + 100, detector.calibration)
    vectors = detector.profile.moments.mean.float().repeat(len(images), 1)
    return replace(usual, decision=decision, vectors=vectors)


def test_layers_are_named_in_the_log_as_soon_as_it_is_certain(detector, images, caplog):
    live = Live(Monitor(detector, every=1), None, n_flagged=0, state=None)
    shared = _unexplained(detector, images[:8])
    for _ in range(2):
        live.take(images[:8], shared)
    moved = replace(shared, vectors=shared.vectors + 5 * detector.profile.moments.std.float())
    for _ in range(4):
        live.take(images[:8], moved)
    alarm, named = (record.getMessage() for record in caplog.records)
    assert alarm.endswith("Layers that moved: none for certain yet.")
    assert re.fullmatch(r"Layers that moved, by the last \d+ inputs: bn\d, bn\d\.", named)


def test_layers_are_named_after_a_restart_too(detector, images, caplog, tmp_path):
    monitor = Monitor(detector, every=1)
    first = Live(monitor, None, n_flagged=0, state=tmp_path / "state")
    first.take(images[:8], _unexplained(detector, images[:8]))
    first.save()
    again = Live(Monitor.load(tmp_path / "state", detector), None, n_flagged=0, state=None)
    shared = _unexplained(detector, images[:40])
    again.take(images[:40], replace(shared, vectors=shared.vectors + 5 * detector.profile.moments.std.float()))
    alarm, named = (record.getMessage() for record in caplog.records)
    assert alarm.startswith("Drift alarm at input")
    assert named.startswith("Layers that moved, by the last")


def test_it_is_not_asked_for_ever_which_layers_moved(detector, images, caplog, monkeypatch):
    monitor, asked = Monitor(detector, window=64, every=1), []
    live = Live(monitor, None, n_flagged=0, state=None)
    status = monitor.status
    monkeypatch.setattr(monitor, "status", lambda: asked.append(monitor.drift) or status())
    shared = _unexplained(detector, images[:8])
    for _ in range(30):
        live.take(images[:8], shared)
    assert monitor.drift
    assert 5 <= len(asked) <= 10
    assert caplog.text.count("Layers that moved") == 1


def test_an_alarm_and_its_reset_are_logged(detector, images, caplog):
    live = create_app(detector, PREPROCESSING).state.service.live
    caplog.set_level(logging.WARNING, "neuralmean.service")
    live.take(images[:40], run_pass(detector, images[:40]))
    assert caplog.text == ""
    strange = images[:40] + 3
    for _ in range(3):
        live.take(strange, run_pass(detector, strange))
    assert caplog.text.count("Drift alarm at input") == 1
    assert "expected: 5.0 %. Layers that moved:" in caplog.text
    assert live.snapshot(0)["monitor"]["drift_time"] > 1e9
    assert caplog.text.count("Layers that moved") == 1  # all were named at once
    live.reset()
    assert "The drift alarm was reset." in caplog.text
    assert live.snapshot(0)["monitor"]["drift_time"] is None


def test_an_alarm_says_what_the_stream_no_longer_looks_like(detector, images, caplog):
    live = Live(Monitor(detector, every=1), None, n_flagged=0, state=None)

    def alarm(batch):
        caplog.clear()
        for part in batch.split(20):
            live.take(part, run_pass(detector, part))
        return next(text for record in caplog.records if (text := record.getMessage()).startswith("Drift alarm"))

    assert "the inputs no longer look like the data that the detector was calibrated on." in alarm(images[:150] + 3)
    live.accept()
    assert re.search(r"the inputs no longer look like the \d+ accepted items\.", alarm(images[:60] - 3))
    live.revert()
    frozen = alarm(torch.cat([images[100:101]] * 20))
    assert "The same input comes again and again" in frozen
    assert "no longer look like" not in frozen


def test_a_detector_that_needs_labels_is_not_served(detector, images):
    detector.calibrate(images[:200], groups=[row % 2 for row in range(200)])
    with pytest.raises(InputError, match="Expected a detector without groups for the service, which takes no labels"):
        create_app(detector, PREPROCESSING)
