"""From a saved file to a process that ends well, and real clients against real sockets."""

import http.client
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from neuralmean.errors import InputError, NeuralMeanError
from neuralmean.recording.graph.compiled import _run, abandoned
from neuralmean.service import create_app, serve
from neuralmean.service.launch import _listen, _server, address, load_served, run_server, wait_for_threads
from neuralmean.service.service import _thread_ids
from tests.service.conftest import PREPROCESSING, png

SPEC = "tests.conftest:make_trained"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def saved(detector, tmp_path):
    path = tmp_path / "toy.nmd"
    detector.save(path, info={"model": SPEC, "weights": None, "preprocessing": PREPROCESSING.to_json()})
    return path


def test_a_saved_file_says_all_that_is_needed(saved, detector, images):
    served = load_served(saved, trust_local_code=True)
    assert (served.name, served.preprocessing) == ("toy", PREPROCESSING)
    torch.testing.assert_close(served.detector.score(images[:3]), detector.score(images[:3]))
    assert load_served(saved, name="other", model=SPEC).name == "other"


def test_a_device_that_is_not_there_is_an_error(saved):
    with pytest.raises(
        InputError, match="Expected a device of this machine, such as 'cpu' or 'cuda:0', but got 'abacus'"
    ):
        load_served(saved, device="abacus", model=SPEC)
    assert load_served(saved, device="cpu", model=SPEC).name == "toy"


def test_a_file_that_does_not_name_its_model_needs_one(detector, tmp_path):
    detector.save(tmp_path / "bare.nmd")
    with pytest.raises(
        InputError, match=r"Expected .* to say which model it belongs to, but it does not. Pass the model"
    ):
        load_served(tmp_path / "bare.nmd")
    assert load_served(tmp_path / "bare.nmd", model=SPEC).preprocessing is None


def test_wrong_options_are_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(InputError, match=r"Expected only the options"):
        serve(tmp_path / "missing.nmd", colour="red")


def test_a_port_that_is_taken_is_told(detector):
    taken = _listen("127.0.0.1", 0)
    taken.listen()
    try:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"Expected to listen on '127.0.0.1' port {port}, but .* in use"):
            run_server(create_app(detector, None), host="127.0.0.1", port=port)
        assert address(taken) == f"http://127.0.0.1:{port}"
    finally:
        taken.close()


def test_a_server_that_does_not_start_is_an_error_of_ours(detector, monkeypatch):
    app = create_app(detector, None)
    monkeypatch.setattr(app.state.service, "_warm_up", lambda n_threads: 1 / 0)
    with pytest.raises(NeuralMeanError, match="Expected the server to start, but it did not"):
        run_server(app, host="127.0.0.1", port=0)


def test_an_open_server_without_a_token_is_warned_about(detector, monkeypatch, caplog):
    monkeypatch.setattr(
        "neuralmean.service.launch._server",
        lambda *_: type("S", (), {"run": lambda _, sockets: sockets[0].close()})(),
    )
    caplog.set_level(logging.INFO, "neuralmean.service")
    run_server(create_app(detector, None), host="0.0.0.0", port=0)
    assert "Anyone who can reach 0.0.0.0 can use this server" in caplog.text


@contextmanager
def serving(app):
    """The port of a server that runs in a thread."""
    import uvicorn

    listening = _listen("127.0.0.1", 0)
    server = _server(uvicorn.Config(app, log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        _wait_until_ready(listening.getsockname()[1])
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)


def _wait_until_ready(port):
    for _ in range(3000):
        try:
            if _get(port, "/v2/health/ready") == 200:
                return
        except OSError:
            pass
        threading.Event().wait(0.01)
    raise AssertionError("the server did not come up")


def _get(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("binary", [False, True], ids=["json", "binary"])
def test_tritonclient_gets_the_numbers_of_the_library(detector, images, strange, binary):
    triton = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
    x = torch.cat([images[:3], strange[:2]]).numpy()
    output, decision = detector(x)
    with serving(create_app(detector, PREPROCESSING, name="toy")) as port:
        client = triton.InferenceServerClient(f"127.0.0.1:{port}")
        try:
            assert client.is_server_live()
            assert client.is_server_ready()
            assert client.is_model_ready("toy")
            assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
            assert client.get_model_metadata("toy", "1")["inputs"][0]["shape"] == [-1, 3, 8, 8]
            tensor = triton.InferInput("input", list(x.shape), "FP32")
            tensor.set_data_from_numpy(x, binary_data=binary)
            names = ("output", "score", "p_value", "is_ood")
            wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in names]
            for outputs in (wanted, None):
                result = client.infer("toy", [tensor], outputs=outputs, request_id="9")
                assert result.get_response()["id"] == "9"
                np.testing.assert_array_equal(result.as_numpy("output"), output.detach().numpy())
                np.testing.assert_array_equal(result.as_numpy("score"), decision.score.numpy())
                np.testing.assert_array_equal(result.as_numpy("p_value"), decision.p_value.numpy())
                np.testing.assert_array_equal(result.as_numpy("is_ood"), decision.is_ood.numpy())
            packed = client.infer("toy", [tensor], request_compression_algorithm="gzip")
            np.testing.assert_array_equal(packed.as_numpy("score"), decision.score.numpy())
            wrong = triton.InferInput("input", [1, 1, 8, 8], "FP32")
            wrong.set_data_from_numpy(x[:1, :1], binary_data=binary)
            from tritonclient.utils import InferenceServerException

            with pytest.raises(InferenceServerException, match=r"Expected `shape` to be \[-1, 3, 8, 8\]"):
                client.infer("toy", [wrong])
        finally:
            client.close()


def test_sigterm_under_load_answers_what_was_accepted_and_exits_with_0(saved):
    script = (
        "import sys, time, torch\n"
        "torch.set_num_threads(1)\n"
        "import neuralmean.service.workers as workers\n"
        "run = workers.run_pass\n"
        "def slow(*args):\n"
        "    time.sleep(0.3)\n"
        "    return run(*args)\n"
        "workers.run_pass = slow\n"
        "from neuralmean.service import serve\n"
        "serve(sys.argv[1], port=0, max_batch=2, trust_local_code=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(saved)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        line = process.stderr.readline()
        assert "Serving toy on http://127.0.0.1:" in line, line + process.stderr.read()
        port = int(line.rsplit(":", 1)[1])
        _wait_until_ready(port)
        answers = []

        def post():
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("POST", "/score", png()[0])
            answers.append(connection.getresponse().status)
            connection.close()

        clients = [threading.Thread(target=post) for _ in range(7)]
        for client in clients:
            client.start()
        # All seven are accepted once the metrics count them as waiting or running; /metrics itself waits for nobody.
        _wait_for_queue(port)
        process.send_signal(signal.SIGTERM)
        for client in clients:
            client.join(30)
        assert answers == [200] * 7
        assert process.wait(30) == 0
        rest = process.stderr.read()
        assert "Traceback" not in rest
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


FREEZING = {
    # As torch does: in and out of C++, which does not bear that Python ends the thread there.
    "in_torch": "def step(*args, **kwargs):\n    print('step', file=sys.stderr, flush=True)\n"
    "    while True:\n        torch.ones(3).relu()\n"
    "import neuralmean.recording.graph.frozen as frozen\nfrozen.capture = step\n",
    "in_the_compiler": "import neuralmean.recording.graph.compiled as compiled\n"
    "compiled._CHILD = 'import time; time.sleep(100)'\n"
    "run = compiled.subprocess.Popen\n"
    "def start(*args, **kwargs):\n    print('step', file=sys.stderr, flush=True)\n    return run(*args, **kwargs)\n"
    "compiled.subprocess.Popen = start\n",
}


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGTERM")
@pytest.mark.parametrize("where", FREEZING)
def test_sigterm_while_the_model_is_compiled_ends_the_server_at_once(where, saved, tmp_path):
    script = "import sys, torch\n" + FREEZING[where] + "from neuralmean.cli import main\nmain()\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    command = ["serve", str(saved), "--port", "0", "--trust-local-code", "--state", str(tmp_path / "state")]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *command], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        while line := process.stderr.readline():
            if line == "step\n":
                break
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=30)[1]
        assert (process.returncode, "Traceback" in rest, "terminate" in rest) == (0, False, False)
        if where == "in_the_compiler":
            assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_compilation_that_nobody_wants_ends_with_all_its_processes(tmp_path):
    event, begin = threading.Event(), time.monotonic()
    threading.Timer(0.5, event.set).start()
    token = abandoned.set(event)
    try:
        with pytest.raises(InputError, match="its compilation was abandoned"):
            _run(["sh", "-c", f"sleep 20; touch {tmp_path}/late & sleep 20"], dict(os.environ))
    finally:
        abandoned.reset(token)
    assert time.monotonic() - begin < 15
    assert not any(tmp_path.iterdir())


def _wait_for_queue(port):
    """Wait until the worker has begun a pass and five inputs wait behind it: seven are in."""
    for _ in range(1000):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        done = float(lines["nmd_pass_inputs_total"])
        if done + float(lines["nmd_queue_inputs"]) + (2 if done else 1) >= 7:
            return
        threading.Event().wait(0.005)
    raise AssertionError("the requests did not arrive")


def test_the_end_does_not_wait_for_threads_of_others():
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, name="tqdm", daemon=True)
    thread.start()
    assert thread.native_id not in _thread_ids()
    go_on.set()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows a process's threads")
def test_the_end_waits_for_threads_to_have_ended_for_the_system():
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    begin = time.monotonic()
    wait_for_threads({thread.native_id}, seconds=0.1)
    assert time.monotonic() - begin >= 0.1
    threading.Timer(0.1, go_on.set).start()
    wait_for_threads({thread.native_id}, seconds=30)
    assert not Path(f"/proc/self/task/{thread.native_id}").exists()
    thread.join()
