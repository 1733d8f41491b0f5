import errno
import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from neuralmean.errors import ArtefactError, InputError
from neuralmean.files.atomic import check_target, locked, remove_leftovers, write_atomically


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_where_nothing_can_be_written_is_known_beforehand(tmp_path):
    check_target(tmp_path / "new.bin")
    assert _names(tmp_path) == []
    (tmp_path / "old.bin").write_bytes(b"old")
    check_target(tmp_path / "old.bin")
    with pytest.raises(ArtefactError, match="it is a folder"):
        check_target(tmp_path)
    with pytest.raises(ArtefactError, match="there is no folder .*no'. Create it first"):
        check_target(tmp_path / "no" / "new.bin")


def test_a_folder_that_may_not_be_written_is_known_beforehand(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(os, "access", lambda *args: asked.append(args))
    with pytest.raises(ArtefactError, match=r"the folder '.*' may not be written to"):
        check_target(tmp_path / "new.bin")
    (tmp_path / "old.bin").write_bytes(b"old")
    with pytest.raises(ArtefactError, match="may not be written to"):
        check_target(tmp_path / "old.bin")
    assert asked == [(tmp_path, os.W_OK)] * 2


def test_the_file_appears_whole_and_only_at_the_end(tmp_path):
    path = tmp_path / "out.bin"
    with write_atomically(path) as handle:
        handle.write(b"half")
        handle.flush()
        assert not path.exists()
        handle.write(b" and half")
    assert path.read_bytes() == b"half and half"
    assert _names(tmp_path) == ["out.bin"]


def test_text_is_utf8_and_its_line_ends_are_left_alone(tmp_path):
    path = tmp_path / "out.csv"
    with write_atomically(path, "w") as handle:
        handle.write("größe\r\n1\n")
    assert path.read_bytes() == "größe\r\n1\n".encode()


def test_the_old_file_stays_when_the_block_raises(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")
    with pytest.raises(KeyError, match="mine"), write_atomically(path, "w") as handle:  # noqa: PT012
        handle.write("new")
        raise KeyError("mine")
    assert path.read_text() == "old"
    assert _names(tmp_path) == ["out.txt"]


def test_an_os_error_of_the_block_about_another_file_comes_through_as_it_is(tmp_path):
    with pytest.raises(FileNotFoundError, match="elsewhere"), write_atomically(tmp_path / "out.txt"):
        (tmp_path / "elsewhere").read_bytes()
    assert _names(tmp_path) == []


def test_the_old_file_is_replaced(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("a longer old text")
    with write_atomically(str(path), "w") as handle:
        handle.write("new")
    assert path.read_text() == "new"


def test_a_missing_folder_is_named(tmp_path):
    path = tmp_path / "nowhere" / "out.txt"
    message = f"Expected to write {str(path)!r}, but there is no folder {str(path.parent)!r}. Create it first."
    with pytest.raises(ArtefactError, match=re.escape(message)), write_atomically(path):
        pass


def test_a_folder_is_no_place_for_a_file(tmp_path):
    with pytest.raises(ArtefactError, match="it is a folder"), write_atomically(tmp_path):
        pass


def test_a_path_that_no_file_can_have_is_one_clear_error(tmp_path):
    for check in (check_target, write_atomically):
        with (
            pytest.raises(ArtefactError, match="Expected the path of a file to write, but got"),
            check("a\0b") or tmp_path,
        ):
            pass


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtefactError, match="is not a folder"), write_atomically(tmp_path / "file" / "out.txt"):
        pass


def test_a_mode_that_is_neither_bytes_nor_text_is_refused(tmp_path):
    with pytest.raises(InputError, match=re.escape("Expected `mode` to be 'wb' or 'w', but got 'a'.")):
        write_atomically(tmp_path / "out.txt", "a")


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.EACCES, "may not be written to"), (errno.EROFS, "read-only disk"), (errno.EIO, "the system reported")],
    ids=["no_permission", "read_only", "other"],
)
def test_a_folder_that_refuses_new_files_is_one_clear_error(tmp_path, monkeypatch, code, words):
    path = tmp_path / "out.txt"
    path.write_text("old")

    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ArtefactError, match=words), write_atomically(path):
        pass
    assert path.read_text() == "old"


def test_a_name_that_cannot_be_replaced_is_one_clear_error(tmp_path, monkeypatch):
    def refuse(self, target):
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(ArtefactError, match="may not be written to"), write_atomically(tmp_path / "out.txt"):
        pass
    assert _names(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on file sizes")
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path):
    import resource

    path = tmp_path / "out.bin"
    path.write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(ArtefactError, match="the disk is full"), write_atomically(path) as handle:
            handle.write(bytes(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert _names(tmp_path) == ["out.bin"]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_permissions_of_an_old_file_are_kept_and_the_umask_rules_a_new_one(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("")
    old.chmod(0o640)
    umask = os.umask(0o022)
    try:
        for path in (old, new):
            with write_atomically(path) as handle:
                handle.write(b"x")
    finally:
        os.umask(umask)
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    assert stat.S_IMODE(new.stat().st_mode) == 0o644


@pytest.mark.skipif(sys.platform == "win32", reason="symbolic links need rights there")
def test_a_link_stays_a_link_and_its_file_is_replaced(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    with write_atomically(tmp_path / "link", "w") as handle:
        handle.write("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


@pytest.mark.skipif(sys.platform == "win32", reason="no /dev")
def test_a_device_is_written_to_and_not_replaced():
    code = (
        "from neuralmean.files.atomic import write_atomically\n"
        "with write_atomically('/dev/stdout', 'w') as handle: handle.write('hello')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "hello"


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_killed_process_leaves_no_part_of_the_file(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")
    code = (
        "import os, signal, sys\n"
        "from neuralmean.files.atomic import write_atomically\n"
        "with write_atomically(sys.argv[1], 'w') as handle:\n"
        "    handle.write('half'); handle.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -9
    assert path.read_text() == "old"


def test_a_lock_is_held_by_one_at_a_time_and_free_after_an_error(tmp_path):
    path = tmp_path / "lock"
    with locked(path) as first, locked(path, wait=False) as second:
        assert (first, second) == (True, False)
    with pytest.raises(KeyError), locked(path):
        raise KeyError
    with locked(path, wait=False) as held:
        assert held


def test_a_lock_of_a_process_that_was_killed_is_free(tmp_path):
    path = tmp_path / "lock"
    code = f"""
from neuralmean.files.atomic import locked
with locked({str(path)!r}):
    print("held", flush=True)
    input()
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    with locked(path, wait=False) as held:
        assert not held
    child.kill()
    child.communicate()
    with locked(path, wait=False) as held:
        assert held


def test_a_lock_in_a_folder_that_is_not_there_is_one_clear_error(tmp_path):
    with pytest.raises(ArtefactError, match="there is no folder"), locked(tmp_path / "none" / "lock"):
        pass


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path):
    mine = [tmp_path / f".out.{token}.nmd-tmp" for token in ("0123456789ab", "ffffffffffff")]
    others = [
        tmp_path / name for name in ("out", ".out.json.0123456789ab.nmd-tmp", ".in.0123456789ab.nmd-tmp", ".out.x")
    ]
    for path in (*mine, *others):
        path.write_bytes(b"part")
    remove_leftovers(tmp_path / "out")
    assert _names(tmp_path) == sorted(path.name for path in others)


def test_the_unfinished_file_is_hidden_and_named_after_its_target(tmp_path):
    for name in ("out.bin", "\u2603" * 80):  # 240 bytes of snowmen: there is no room for all of them and more
        with write_atomically(tmp_path / name):
            (unfinished,) = _names(tmp_path)
            assert unfinished.startswith(f".{name[:50]}.")
        (tmp_path / name).unlink()


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes with names there")
@pytest.mark.parametrize(("mode", "content"), [("wb", b"\xff\r\n"), ("w", "gr\u00f6\u00dfe\r\n")])
def test_a_pipe_gets_what_is_written(tmp_path, mode, content):
    os.mkfifo(tmp_path / "pipe")
    check_target(tmp_path / "pipe")
    got = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    with write_atomically(tmp_path / "pipe", mode) as handle:
        handle.write(content)
    reader.join(10)
    assert got == [content if mode == "wb" else content.encode()]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.skipif(sys.platform == "win32", reason="no /dev")
def test_a_device_that_cannot_be_opened_is_one_clear_error(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ArtefactError, match="Expected to write '/dev/null', but"), write_atomically("/dev/null"):
        pass
