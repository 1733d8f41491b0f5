"""Starts what `compose.yaml` starts, where Docker does not run: the service, Prometheus and, if it is installed, Grafana.

    python deploy/local.py model.nmd
    python deploy/local.py model.nmd --walk cifar10-test.npz svhn-test.npz

With `--walk`, it sends usual images and then strange ones, waits until Prometheus fires the drift alert, prints how long each
step took, and ends; the exit code is 1 if no alert fires. Needs `nmd` in this environment and `prometheus` on the path.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
GRAFANA_HOMES = ("/usr/share/grafana", "/opt/grafana", "/opt/homebrew/share/grafana")


def free_port() -> int:
    """Return a port on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def prometheus_config(target: str, token_file: Path, rules: Path, interval: str) -> str:
    """Return the configuration of `prometheus/prometheus.yml` with addresses of this machine; JSON is also YAML."""
    scrape = {
        "job_name": "nmd",
        "authorization": {"credentials_file": str(token_file)},
        "static_configs": [{"targets": [target]}],
    }
    times = {"scrape_interval": interval, "evaluation_interval": interval}
    return json.dumps({"global": times, "rule_files": [str(rules)], "scrape_configs": [scrape]}, indent=1)


@contextmanager
def running(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program until the block ends, then end it with SIGTERM."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **environment})
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(
    check: Callable[[], Any], what: str, seconds: float, process: subprocess.Popen[bytes] | None = None
) -> Any:
    """Return what `check` returns once that is true; raise `SystemExit` when it takes too long or the process has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process is not None and process.poll() is not None:
            raise SystemExit(f"{what}: the process ended with code {process.returncode}.")
        try:
            if found := check():
                return found
        except OSError:
            pass  # it does not listen yet
        time.sleep(0.05)
    raise SystemExit(f"{what}: nothing after {seconds:g} seconds.")


def get(url: str, token: str | None = None) -> Any:
    """Return the JSON at an address."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        return json.load(answer)


def firing(prometheus: str, name: str) -> dict[str, Any] | None:
    """Return an alert that Prometheus fires; None if it does not."""
    alerts = get(f"{prometheus}/api/v1/alerts")["data"]["alerts"]
    return next((one for one in alerts if one["labels"]["alertname"] == name and one["state"] == "firing"), None)


def scraped(prometheus: str) -> bool:
    """Tell whether Prometheus reaches the service."""
    found = get(f"{prometheus}/api/v1/query?query=up")["data"]["result"]
    return bool(found) and all(one["value"][1] == "1" for one in found)


class Parts:
    """The parts, and where they listen.

    Args:
        folder: Where logs, data and the token are kept.
        interval: How often Prometheus reads the metrics and evaluates the rules.
    """

    def __init__(self, folder: Path, interval: str = "1s") -> None:
        self.folder = folder
        self.interval = interval
        self.token = secrets.token_hex(16)
        self.token_file = folder / "token"
        self.token_file.write_text(self.token)
        self.token_file.chmod(0o600)
        self.service = f"http://127.0.0.1:{free_port()}"
        self.prometheus = f"http://127.0.0.1:{free_port()}"
        self.grafana: str | None = None

    @contextmanager
    def started(self, model: Path, options: list[str]) -> Iterator[None]:
        """Start everything, wait until it answers, and end it with the block."""
        with ExitStack() as stack:
            port = self.service.rpartition(":")[2]
            serve = [
                sys.executable,
                "-m",
                "neuralmean",
                "serve",
                str(model),
                "--port",
                port,
                "--allow-host",
                "localhost",
            ]
            serve += ["--token-file", str(self.token_file), "--state", str(self.folder / "monitor.state"), *options]
            service = stack.enter_context(running(serve, self.folder / "nmd.log"))
            prometheus = stack.enter_context(running(self._prometheus(), self.folder / "prometheus.log"))
            self._start_grafana(stack)
            wait_for(lambda: get(f"{self.service}/v2/health/ready")["ready"], "The service", 120, service)
            wait_for(lambda: scraped(self.prometheus), "Prometheus", 60, prometheus)
            yield

    def _prometheus(self) -> list[str]:
        program = shutil.which("prometheus")
        if program is None:
            raise SystemExit("Expected `prometheus` on the path. On Debian: apt-get install prometheus.")
        config = self.folder / "prometheus.yml"
        target, rules = self.service.removeprefix("http://"), HERE / "prometheus" / "rules.yml"
        config.write_text(prometheus_config(target, self.token_file, rules, self.interval))
        listen = self.prometheus.removeprefix("http://")
        data = self.folder / "prometheus"
        return [
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={data}",
            f"--web.listen-address={listen}",
        ]

    def _start_grafana(self, stack: ExitStack) -> None:
        program = shutil.which("grafana-server") or shutil.which("grafana")
        home = next((path for path in GRAFANA_HOMES if Path(path).is_dir()), None)
        if program is None or home is None:
            return
        provisioning = self.folder / "provisioning"
        shutil.copytree(HERE / "grafana" / "provisioning", provisioning)
        for file, old, new in (
            ("datasources/prometheus.yml", "http://prometheus:9090", self.prometheus),
            ("dashboards/nmd.yml", "/var/lib/grafana/dashboards", str(HERE / "grafana" / "dashboards")),
        ):
            path = provisioning / file
            path.write_text(path.read_text().replace(old, new))
        self.grafana = f"http://127.0.0.1:{free_port()}"
        settings = {
            "GF_PATHS_PROVISIONING": str(provisioning),
            "GF_PATHS_DATA": str(self.folder / "grafana"),
            "GF_SERVER_HTTP_ADDR": "127.0.0.1",
            "GF_SERVER_HTTP_PORT": self.grafana.rpartition(":")[2],
            "GF_AUTH_ANONYMOUS_ENABLED": "true",
        }
        command = [program, *(["server"] if program.endswith("grafana") else []), "--homepath", home]
        stack.enter_context(running(command, self.folder / "grafana.log", **settings))


def send(parts: Parts, images: Any, batch: int = 16) -> list[bool]:
    """Post uint8 images (N, H, W, C) to the service as PNG files, and return which were flagged."""
    from PIL import Image

    flagged: list[bool] = []
    for start in range(0, len(images), batch):
        boundary, body = secrets.token_hex(16), io.BytesIO()
        for number, image in enumerate(images[start : start + batch]):
            head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{start + number}.png"\r\n'
            body.write(f"{head}Content-Type: image/png\r\n\r\n".encode())
            Image.fromarray(image).save(body, "PNG")
            body.write(b"\r\n")
        body.write(f"--{boundary}--\r\n".encode())
        headers = {
            "Authorization": f"Bearer {parts.token}",
            "Content-Type": f"multipart/form-data; boundary={boundary}",
        }
        request = urllib.request.Request(f"{parts.service}/score", body.getvalue(), headers, method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            flagged += [row["is_ood"] for row in json.load(answer)["results"]]
    return flagged


def walk(parts: Parts, usual: Any, strange: Any) -> dict[str, float]:
    """Send usual images and then strange ones until the drift alert fires, and return what was seen.

    Args:
        parts: What runs.
        usual: In-distribution images, uint8 (N, H, W, C); no alert may fire.
        strange: Other images.
    """
    begin = time.monotonic()
    early = send(parts, usual)
    usual_s = time.monotonic() - begin
    time.sleep(3)  # for Prometheus to read the metrics at least twice
    if firing(parts.prometheus, "NmdDrift") is not None:
        raise SystemExit("The drift alert fired on usual images.")
    begin, n_sent, late = time.monotonic(), 0, []
    while n_sent < len(strange) and firing(parts.prometheus, "NmdDrift") is None:
        late += send(parts, strange[n_sent : n_sent + 16])
        n_sent += 16
    wait_for(lambda: firing(parts.prometheus, "NmdDrift"), "The drift alert", 60)
    alert_s = time.monotonic() - begin
    drift = get(f"{parts.service}/live?since=0", parts.token)["monitor"]
    return {
        "usual_images": float(len(early)),
        "usual_flagged": sum(early) / len(early),
        "usual_seconds": usual_s,
        "strange_images_sent": float(len(late)),
        "strange_flagged": sum(late) / max(1, len(late)),
        "strange_images_until_alarm": float(drift["drift_at"] - len(early)),
        "seconds_from_first_strange_image_to_alert": alert_s,
    }


def main() -> None:
    """Start the parts, and walk or wait."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", type=Path, help="a saved detector")
    parser.add_argument("--walk", nargs=2, type=Path, metavar=("USUAL", "STRANGE"), help=".npz files with `images`")
    parser.add_argument("--usual", type=int, default=1000, help="usual images to send")
    parser.add_argument("--model", dest="spec", help="the model, where the saved file does not name it")
    parser.add_argument("--weights", type=Path, help="the model's weights, where the saved file does not name them")
    arguments = parser.parse_args()
    options = [] if arguments.weights is None else ["--weights", str(arguments.weights)]
    options += [] if arguments.spec is None else ["--model", arguments.spec]
    with tempfile.TemporaryDirectory(prefix="nmd-local-") as folder:
        parts, begin = Parts(Path(folder)), time.monotonic()
        with parts.started(arguments.model, options):
            print(f"started in {time.monotonic() - begin:.1f} s")
            print(f"service {parts.service}  prometheus {parts.prometheus}  grafana {parts.grafana or 'not installed'}")
            if arguments.walk is None:
                print(f"token {parts.token}   (Ctrl+C ends all parts)")
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
                try:
                    signal.pause()
                except KeyboardInterrupt:
                    return
            import numpy as np

            usual, strange = (np.load(path)["images"] for path in arguments.walk)
            for name, value in walk(parts, usual[: arguments.usual], strange).items():
                print(f"{name}: {value:.4g}")
            print(f"from the start to the alert: {time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    main()
