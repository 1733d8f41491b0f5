"""Worker processes come and go with the iterator."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import neuralmean
from neuralmean.data.images import ImageBatches, Unreadable
from neuralmean.data.images import batches as batches_module
from neuralmean.data.images import pool as pool_module
from tests.data.images.conftest import SMALL, collect, noise, posix, save


class TestProcesses:
    def _children(self):
        me = os.getpid()
        found = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = entry.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == me:
                found.append(int(entry.parent.name))
        return found

    def test_few_images_start_no_process(self, tmp_path, monkeypatch):
        for i in range(5):
            save(tmp_path / f"{i}.png")
        monkeypatch.setattr(subprocess, "Popen", None)
        assert len(collect(ImageBatches(tmp_path, SMALL, workers=2))[0]) == 5

    def test_rows_that_keep_their_size_start_no_process(self, tmp_path, monkeypatch):
        np.savez(tmp_path / "a.npz", images=noise(size=(300, 8, 8)))
        monkeypatch.setattr(subprocess, "Popen", None)
        assert len(collect(ImageBatches(tmp_path / "a.npz", SMALL, workers=2))[0]) == 300

    @pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
    @pytest.mark.parametrize("how", ["to the end", "stopped early", "error in the loop"])
    def test_no_process_is_left(self, many, how):
        before = set(self._children())
        iterator = iter(ImageBatches(many, SMALL, batch_size=10, workers=2))
        next(iterator)
        assert len(set(self._children()) - before) == 2
        if how == "to the end":
            list(iterator)
        elif how == "stopped early":
            iterator.close()
        else:
            with pytest.raises(RuntimeError, match="mine"):
                iterator.throw(RuntimeError("mine"))
        assert set(self._children()) == before

    @pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
    def test_workers_end_when_the_main_process_is_killed(self, many, tmp_path):
        code = (
            "import sys, os, signal, pathlib; from neuralmean.data.images import ImageBatches; "
            "from neuralmean.data.preprocessing import Preprocessing; import neuralmean.data.images.pool as pool; "
            "batches = iter(ImageBatches(sys.argv[1], Preprocessing((8, 8), (0,) * 3, (1,) * 3), workers=1, batch_size=8)); "
            "next(batches); children = pathlib.Path(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read_text(); "
            "pathlib.Path(sys.argv[2]).write_text(children); os.kill(os.getpid(), signal.SIGKILL)"
        )
        done = subprocess.run([sys.executable, "-c", code, str(many), str(tmp_path / "pids")], check=False)
        assert done.returncode == -signal.SIGKILL
        pids = (tmp_path / "pids").read_text().split()
        assert len(pids) == 1
        program = Path(f"/proc/{pids[0]}/exe")  # also gone when the process ended and nobody has reaped it
        for _ in range(200):
            if not program.exists():
                break
            subprocess.run([sys.executable, "-S", "-c", ""], check=True)  # a moment passes
        assert not program.exists()

    @posix
    @pytest.mark.parametrize("workers", [1, 2])
    def test_a_decoder_that_crashes_costs_the_file_that_killed_it(self, many, tmp_path, monkeypatch, workers):
        # A worker whose decoder kills its own process on two of the files.
        boot = pool_module._BOOT.replace(
            "from neuralmean.data.images.worker import main; main()",
            "import os, neuralmean.data.images.worker as worker; read = worker.open_image; "
            "worker.open_image = lambda name, n: os.kill(os.getpid(), 9) if name[-7:] in ('070.png', '149.png') "
            "else read(name, n); worker.main()",
        )
        monkeypatch.setattr(pool_module, "_BOOT", boot)
        batches = ImageBatches(many, SMALL, batch_size=50, workers=workers)
        names, rows = collect(batches)
        assert len(names) == len(rows) == 148
        assert batches.unreadable == [
            Unreadable(str(many / "070.png"), "the decoder crashed on it"),
            Unreadable(str(many / "149.png"), "the decoder crashed on it"),
        ]
        expected = [path for path in sorted(many.iterdir()) if path.name not in ("070.png", "149.png")]
        assert names == [str(path) for path in expected]
        assert torch.equal(torch.stack(rows), torch.stack([SMALL(Image.open(path)) for path in expected]))

    @pytest.mark.parametrize("how", ["dies at once", "cannot be started"])
    def test_where_no_process_can_run_the_work_is_done_here(self, many, monkeypatch, how):
        if how == "dies at once":
            monkeypatch.setattr(pool_module, "_BOOT", "import sys; sys.exit(1)")
        else:
            monkeypatch.setattr(sys, "executable", "/nowhere/python")
        batches = ImageBatches(many, SMALL, workers=2)
        assert len(collect(batches)[0]) == 150
        assert batches.n_unreadable == 0

    def test_only_a_few_tasks_are_under_way_at_a_time(self, many, monkeypatch):
        monkeypatch.setattr(batches_module, "_FILES_PER_TASK", 5)
        asked = []
        iterator = iter(ImageBatches(many, SMALL, batch_size=5, workers=2, skip=lambda name: asked.append(name)))
        next(iterator)
        assert len(asked) <= 5 * (2 * 2 + 1)
        iterator.close()

    def test_workers_do_not_import_torch_nor_the_callers_script(self, tmp_path, many):
        script = tmp_path / "script.py"
        # No `if __name__ == "__main__"`: with multiprocessing this would start itself again.
        script.write_text(
            "import sys\n"
            "print('started')\n"
            "from neuralmean.data.images import ImageBatches\n"
            "from neuralmean.data.preprocessing import Preprocessing\n"
            "batches = ImageBatches(sys.argv[1], Preprocessing((8, 8), (0,) * 3, (1,) * 3), workers=2)\n"
            "print(sum(len(names) for _, names in batches))\n"
        )
        (many / "numpy.py").write_text("raise RuntimeError('a module of the working folder was imported')")
        done = subprocess.run(
            [sys.executable, str(script), str(many)], capture_output=True, text=True, check=False, cwd=many
        )
        assert (done.stdout, done.stderr) == ("started\n150\n", "")

    def test_the_package_imports_no_torch(self):
        code = (
            "import sys, types; package = types.ModuleType('neuralmean'); package.__path__ = [sys.argv[1]]; "
            "sys.modules['neuralmean'] = package; import neuralmean.data.images; sys.exit('torch' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code, *neuralmean.__path__], check=False).returncode == 0

    def test_file_names_that_are_no_text_are_read(self, many, tmp_path):
        odd = many / os.fsdecode(b"z\xff\n.png")
        try:
            odd.write_bytes((many / "000.png").read_bytes())
        except OSError:
            pytest.skip("the file system takes only text as names")
        names, _ = collect(ImageBatches(many, SMALL, workers=1))
        assert names[-1] == str(odd)
