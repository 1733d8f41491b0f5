"""Downloads from a server on this machine: sums, resume, interruptions; and archives that must not be trusted."""

import hashlib
import http.server
import io
import pickle
import re
import tarfile
import threading
from dataclasses import replace

import numpy as np
import pytest

from neuralmean.bench import data
from neuralmean.bench.data import downloads as module
from neuralmean.bench.data import registry
from neuralmean.errors import ArtefactError, InputError

CONTENT = np.random.default_rng(0).integers(0, 256, 1_000_000, np.uint8).tobytes()
MD5 = hashlib.md5(CONTENT).hexdigest()


class _Server(http.server.ThreadingHTTPServer):
    """Serves `files`; `cut` ends every answer after so many bytes; `ranges` says whether it can resume."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.cut, self.ranges, self.asked, self.shift = {}, None, True, [], 0

    def handle_error(self, request, client_address):
        """Keep quiet about clients that hang up: some tests do."""

    def url(self, name):
        return f"http://127.0.0.1:{self.server_port}/{name}"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        asked = self.headers.get("Range")
        server.asked.append(asked)
        content = server.files.get(self.path.lstrip("/"))
        if content is None:
            self.send_error(404)
            return
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and server.ranges else 0
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start + server.shift}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : None if server.cut is None else start + server.cut])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = _Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    server.files["set.bin"] = CONTENT
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


class TestFetch:
    def test_brings_the_file_and_reports_progress(self, server, tmp_path):
        seen = []
        path = data.fetch(server.url("set.bin"), tmp_path / "a", md5=MD5, progress=lambda *at: seen.append(at))
        assert path.read_bytes() == CONTENT
        assert seen[-1] == (1_000_000, 1_000_000)
        assert seen == sorted(seen)
        assert [entry.name for entry in tmp_path.iterdir()] == ["a"]

    def test_goes_on_where_an_earlier_run_stopped(self, server, tmp_path):
        (tmp_path / "a.part").write_bytes(CONTENT[:600_000])
        seen = []
        data.fetch(server.url("set.bin"), tmp_path / "a", md5=MD5, progress=lambda here, total: seen.append(here))
        assert (tmp_path / "a").read_bytes() == CONTENT
        assert server.asked == ["bytes=600000-"]
        assert seen[0] > 600_000

    def test_goes_on_when_the_connection_ends_early(self, server, tmp_path):
        server.cut = 300_000
        data.fetch(server.url("set.bin"), tmp_path / "a", md5=MD5)
        assert (tmp_path / "a").read_bytes() == CONTENT
        assert server.asked == [None, "bytes=300000-", "bytes=600000-", "bytes=900000-"]

    def test_starts_anew_where_the_server_cannot_resume(self, server, tmp_path):
        server.ranges = False
        (tmp_path / "a.part").write_bytes(b"x" * 600_000)
        data.fetch(server.url("set.bin"), tmp_path / "a", md5=MD5)
        assert (tmp_path / "a").read_bytes() == CONTENT

    def test_takes_a_part_that_was_whole_already(self, server, tmp_path):
        (tmp_path / "a.part").write_bytes(CONTENT)
        data.fetch(server.url("set.bin"), tmp_path / "a", md5=MD5)
        assert (tmp_path / "a").read_bytes() == CONTENT
        assert server.asked == ["bytes=1000000-"]

    def test_gives_up_when_nothing_more_comes_and_keeps_what_is_here(self, server, tmp_path):
        server.cut = 0
        (tmp_path / "a.part").write_bytes(CONTENT[:600_000])
        with pytest.raises(ArtefactError, match=r"but got the connection ended early. What is here is kept: try again"):
            data.fetch(server.url("set.bin"), tmp_path / "a", md5=MD5)
        assert (tmp_path / "a.part").read_bytes() == CONTENT[:600_000]
        assert not (tmp_path / "a").exists()

    def test_refuses_another_sum_and_removes_the_file(self, server, tmp_path):
        with pytest.raises(ArtefactError, match=f"to have the MD5 sum {'0' * 32}, but got {MD5}. It was removed"):
            data.fetch(server.url("set.bin"), tmp_path / "a", md5="0" * 32)
        assert list(tmp_path.iterdir()) == []

    def test_refuses_another_range_than_asked_for(self, server, tmp_path):
        server.shift = 1
        (tmp_path / "a.part").write_bytes(CONTENT[:10])
        with pytest.raises(ArtefactError, match="another range than requested: bytes 11-"):
            data.fetch(server.url("set.bin"), tmp_path / "a", md5=MD5)

    def test_names_what_the_server_said(self, server, tmp_path):
        with pytest.raises(ArtefactError, match="but got HTTPError: HTTP Error 404"):
            data.fetch(server.url("none"), tmp_path / "a", md5=MD5)

    def test_has_a_limit(self, server, tmp_path, monkeypatch):
        monkeypatch.setattr(module, "MAX_BYTES", 500_000)
        with pytest.raises(ArtefactError, match="to send at most 500,000 bytes, but it sends more"):
            data.fetch(server.url("set.bin"), tmp_path / "a", md5=MD5)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://x/y"])
    def test_takes_web_addresses_only(self, url, tmp_path):
        with pytest.raises(InputError, match="Expected an http or https address, but got '"):
            data.fetch(url, tmp_path / "a", md5=MD5)


def _tar(path, members):
    """Write an archive of (TarInfo or name, content) pairs."""
    with tarfile.open(path, "w:gz") as archive:
        for member, content in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def _special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


class TestUnpack:
    def test_files_and_folders_arrive(self, tmp_path):
        folder = _special("top/deep", tarfile.DIRTYPE)
        _tar(tmp_path / "a.tar.gz", [(folder, b""), ("top/deep/x", b"1"), ("top/y", b"22")])
        assert data.unpack(tmp_path / "a.tar.gz", tmp_path) == [tmp_path / "top"]
        assert (tmp_path / "top" / "deep" / "x").read_bytes() == b"1"
        assert (tmp_path / "top" / "y").read_bytes() == b"22"
        assert {entry.name for entry in tmp_path.iterdir()} == {"a.tar.gz", "top"}

    @pytest.mark.parametrize(
        "member",
        [
            "../evil",
            "top/../../evil",
            "/evil",
            "top\\..\\..\\evil",
            "C:/evil",
            _special("top/link", tarfile.SYMTYPE, "/etc/passwd"),
            _special("top/hard", tarfile.LNKTYPE, "../evil"),
            _special("top/pipe", tarfile.FIFOTYPE),
            _special("top/device", tarfile.CHRTYPE),
        ],
        ids=lambda member: getattr(member, "name", member),
    )
    def test_nothing_leaves_the_folder_and_nothing_is_kept(self, member, tmp_path):
        root = tmp_path / "root"
        root.mkdir()
        _tar(tmp_path / "a.tar.gz", [("top/good", b"1"), (member, b"")])
        with pytest.raises(ArtefactError, match="to hold plain files below its folder, but got '"):
            data.unpack(tmp_path / "a.tar.gz", root)
        assert list(root.iterdir()) == []
        assert {entry.name for entry in tmp_path.iterdir()} == {"a.tar.gz", "root"}

    def test_size_is_bounded(self, tmp_path):
        _tar(tmp_path / "a.tar.gz", [("top/x", bytes(600)), ("top/y", bytes(600))])
        with pytest.raises(ArtefactError, match="to unpack to at most 1,000 bytes"):
            data.unpack(tmp_path / "a.tar.gz", tmp_path, max_bytes=1000)
        assert {entry.name for entry in tmp_path.iterdir()} == {"a.tar.gz"}

    def test_number_is_bounded(self, tmp_path, monkeypatch):
        monkeypatch.setattr(module, "MAX_MEMBERS", 2)
        _tar(tmp_path / "a.tar.gz", [(f"top/{number}", b"") for number in range(3)])
        with pytest.raises(ArtefactError, match="in 2 files, but it holds more"):
            data.unpack(tmp_path / "a.tar.gz", tmp_path)

    def test_what_was_there_stays(self, tmp_path):
        (tmp_path / "top").mkdir()
        (tmp_path / "top" / "mine").write_text("mine")
        _tar(tmp_path / "a.tar.gz", [("top/x", b"1")])
        with pytest.raises(ArtefactError, match=r"Expected no 'top' in .* to unpack a.tar.gz to, but there is one"):
            data.unpack(tmp_path / "a.tar.gz", tmp_path)
        assert [entry.name for entry in (tmp_path / "top").iterdir()] == ["mine"]

    @pytest.mark.parametrize("keep", [0, 15, 200])
    def test_a_damaged_archive_says_so(self, keep, tmp_path):
        path = _tar(tmp_path / "a.tar.gz", [("top/x", CONTENT[:10_000])])
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(ArtefactError, match="to be a tar archive, but it is damaged"):
            data.unpack(path, tmp_path)
        assert {entry.name for entry in tmp_path.iterdir()} == {"a.tar.gz"}


class TestDownload:
    @pytest.fixture
    def cifar10(self, server, monkeypatch, tmp_path):
        """A small CIFAR-10 on the server, in the archive's own layout, and the folder to download it to."""
        images = np.random.default_rng(0).integers(0, 256, (2, 3072), np.uint8)
        batch = pickle.dumps({"data": images, "labels": [0, 1]}, protocol=2)
        files = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
        path = _tar(tmp_path / "made.tar.gz", [(f"cifar-10-batches-py/{file}", batch) for file in files])
        archive = path.read_bytes()
        server.files["cifar-10-python.tar.gz"] = archive
        source = registry.Source(server.url("cifar-10-python.tar.gz?dl=1"), hashlib.md5(archive).hexdigest())
        server.files["cifar-10-python.tar.gz?dl=1"] = archive
        small = replace(data.dataset("cifar10"), sources=(source,))
        monkeypatch.setitem(registry._BY_NAME, "cifar10", small)
        monkeypatch.setitem(registry._BY_ALIAS, "cifar10", small)
        return tmp_path / "data"

    def test_brings_a_set_that_can_be_loaded(self, cifar10):
        paths = data.download("cifar10", cifar10)
        assert paths == [cifar10 / "cifar-10-batches-py", cifar10 / "cifar-10-batches-py" / "test_batch"]
        assert len(data.load("cifar10", "train", cifar10)) == 10
        assert [entry.name for entry in cifar10.iterdir()] == ["cifar-10-batches-py"]

    def test_leaves_a_set_that_is_there(self, cifar10, server):
        data.download("cifar10", cifar10)
        server.asked.clear()
        data.download("cifar10", cifar10)
        assert server.asked == []

    def test_takes_an_archive_that_was_brought_by_hand(self, cifar10, server):
        cifar10.mkdir()
        (cifar10 / "cifar-10-python.tar.gz").write_bytes(server.files["cifar-10-python.tar.gz"])
        data.download("cifar10", cifar10)
        assert server.asked == []
        assert len(data.load("cifar10", "test", cifar10)) == 2

    def test_refuses_another_archive_that_was_brought_by_hand(self, cifar10):
        cifar10.mkdir()
        (cifar10 / "cifar-10-python.tar.gz").write_bytes(b"x")
        with pytest.raises(ArtefactError, match=r"to be the official file, but its MD5 sum differs. Remove it"):
            data.download("cifar10", cifar10)

    def test_says_when_the_set_is_still_not_whole(self, cifar10, server, tmp_path, monkeypatch):
        archive = _tar(tmp_path / "other.tar.gz", [("something/else", b"1")]).read_bytes()
        server.files["cifar-10-python.tar.gz?dl=1"] = archive
        source = replace(data.dataset("cifar10").sources[0], md5=hashlib.md5(archive).hexdigest())
        small = replace(data.dataset("cifar10"), sources=(source,))
        monkeypatch.setitem(registry._BY_ALIAS, "cifar10", small)
        with pytest.raises(
            ArtefactError, match="Expected 'cifar10' to be complete after the download, but got: missing"
        ):
            data.download("cifar10", cifar10)

    def test_brings_only_the_part_that_is_missing(self, server, tmp_path, monkeypatch):
        scipy_io = pytest.importorskip("scipy.io")
        sources = []
        for split in ("train", "test"):
            file = io.BytesIO()
            scipy_io.savemat(file, {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.ones((2, 1))})
            server.files[f"{split}_32x32.mat"] = file.getvalue()
            md5 = hashlib.md5(file.getvalue()).hexdigest()
            sources.append(registry.Source(server.url(f"{split}_32x32.mat"), md5, split))
        monkeypatch.setitem(registry._BY_ALIAS, "svhn", replace(data.dataset("svhn"), sources=tuple(sources)))
        np.savez(tmp_path / "svhn-train.npz", images=np.zeros((1, 32, 32, 3), np.uint8))
        assert data.download("svhn", tmp_path) == [tmp_path / "svhn-train.npz", tmp_path / "test_32x32.mat"]
        assert len(server.asked) == 1
