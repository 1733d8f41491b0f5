from __future__ import annotations

import json
import os
import random
import re
import struct

import pytest
import torch

from neuralmean import Detector
from neuralmean.errors import ArtefactError, InputError
from neuralmean.files.artefact import FORMAT_VERSION, Artefact
from tests.conftest import make_trained

MODEL = make_trained()


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "x.nmd"
    images = torch.rand(100, 3, 8, 8)
    Detector(MODEL, scorer="average").calibrate(images).save(path)
    return path


def rewrite(path, change):
    """Write the file again with a changed header or tensors and a digest that fits: what an attacker would do."""
    artefact = Artefact.read(path)
    header = {key: value for key, value in artefact.header.items() if key not in ("digest", "format_version")}
    tensors = dict(artefact.tensors)
    change(header, tensors)
    Artefact(header, tensors).write(path)


def test_a_file_is_written_and_read_back(tmp_path):
    artefact = Artefact({"a": [1, "b"]}, {"t": torch.arange(3.0), "empty": torch.zeros(0), "wide": torch.zeros(0, 5)})
    artefact.write(tmp_path / "a.nmd")
    again = Artefact.read(tmp_path / "a.nmd")
    assert again.header["a"] == [1, "b"]
    assert again.header["format_version"] == FORMAT_VERSION
    assert torch.equal(again.tensors["t"], torch.arange(3.0))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ArtefactError, match=r"Expected to read a saved detector from .*none\.nmd', but No such file"):
        Detector.load(tmp_path / "none.nmd", MODEL)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ArtefactError, match="but it is a folder"):
        Artefact.read(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"abc", b"PK\x03\x04" + bytes(100), b"\xff" * 64, struct.pack("<Q", 10) + b"{}"], ids=range(5)
)
def test_something_else_is_not_one_of_ours(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(
        ArtefactError, match=r"to be a file that `Detector\.save` wrote, but it is not one, or it is truncated"
    ):
        Artefact.read(tmp_path / "x")


def test_a_truncated_file_is_noticed_at_every_length(saved):
    content = saved.read_bytes()
    for length in range(0, len(content), 97):
        saved.write_bytes(content[:length])
        with pytest.raises(ArtefactError):
            Artefact.read(saved)


def test_a_single_changed_byte_is_noticed(saved):
    content, generator = saved.read_bytes(), random.Random(0)
    for _ in range(300):
        position = generator.randrange(len(content))
        damaged = bytearray(content)
        damaged[position] ^= 1 << generator.randrange(8)
        saved.write_bytes(bytes(damaged))
        with pytest.raises(ArtefactError):
            Artefact.read(saved)


def test_a_newer_file_asks_for_an_upgrade(saved):
    header = {**Artefact.read(saved).header, "format_version": FORMAT_VERSION + 1}
    metadata = json.dumps({"__metadata__": {"neuralmean": json.dumps(header)}}).encode()
    saved.write_bytes(struct.pack("<Q", len(metadata)) + metadata)
    with pytest.raises(
        ArtefactError, match=f"format version {FORMAT_VERSION} or older, but it has {FORMAT_VERSION + 1}. Upgrade"
    ):
        Artefact.read(saved)


@pytest.mark.parametrize("version", [None, "1", True, 0], ids=repr)
def test_a_file_must_say_its_version(saved, version):
    metadata = json.dumps({"__metadata__": {"neuralmean": json.dumps({"format_version": version})}}).encode()
    saved.write_bytes(struct.pack("<Q", len(metadata)) + metadata)
    with pytest.raises(ArtefactError, match="Expected .* to state its format version"):
        Artefact.read(saved)


def test_a_deeply_nested_header_is_refused(saved):
    metadata = b'{"__metadata__":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    saved.write_bytes(struct.pack("<Q", len(metadata)) + metadata)
    with pytest.raises(ArtefactError, match="it is not one"):
        Artefact.read(saved)


HOSTILE = {
    "no layers": lambda h, t: h.pop("layers"),
    "layers of another kind": lambda h, t: h.update(layers=5),
    "an unknown scorer": lambda h, t: h["scorer"].update(name="os.system"),
    "options it does not have": lambda h, t: h["scorer"].update(options={"x": 1}),
    "an unknown statistic": lambda h, t: h.update(statistic="median"),
    "a rate out of range": lambda h, t: h["calibration"].update(false_alarm_rate=7),
    "an unknown source": lambda h, t: h["calibration"].update(source="trust me"),
    "unsorted scores": lambda h, t: t.update({"calibration.scores": t["calibration.scores"].flip(0)}),
    "scores of another shape": lambda h, t: t.update({"calibration.scores": torch.zeros(3, 3)}),
    "too few scores": lambda h, t: t.update({"calibration.scores": torch.zeros(3)}),
    "no scores": lambda h, t: t.pop("calibration.scores"),
    "a reference of another width": lambda h, t: t.update({"reference.mean": torch.zeros(3).double()}),
    "a reference of NaN": lambda h, t: t.update({"reference.mean": torch.full((10,), float("nan")).double()}),
    "a profile of another width": lambda h, t: t.update({"profile.mean": torch.zeros(3).double()}),
    "a profile of nobody": lambda h, t: h["moments"].update(profile=0),
    "a profile with squares below zero": lambda h, t: t.update({"profile.m2": torch.full((10,), -1.0).double()}),
    "a profile of other layers": lambda h, t: t.update({"profile.squares": torch.ones(3).double()}),
    "a profile with shares below zero": lambda h, t: t.update({"profile.squares": -torch.ones(2).double()}),
    "a profile with shares above one": lambda h, t: t.update({"profile.largest": 2 * torch.ones(2).double()}),
    "a profile of True": lambda h, t: h["moments"].update(profile=True),
    "moments that are no mapping": lambda h, t: h.update(moments=["profile"]),
    "a head that is not there": lambda h, t: h.update(head="nowhere"),
    "a reference of a negative number of examples": lambda h, t: h.update(
        reference={"source": "data", "count": -(10**400)}
    ),
    "info that is no mapping": lambda h, t: h.update(info=[1]),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_file_that_makes_no_sense_is_one_clear_error(saved, change):
    rewrite(saved, change)
    with pytest.raises(ArtefactError, match=r"Expected '.*x\.nmd' to describe a detector, but its content is invalid"):
        Detector.load(saved, MODEL)


def test_an_absurdly_large_file_is_refused_without_reading_it_all(tmp_path, monkeypatch):
    monkeypatch.setattr("neuralmean.files.artefact.MAX_BYTES", 1000)
    (tmp_path / "x").write_bytes(bytes(2000))
    with pytest.raises(ArtefactError, match="to be at most 0 MiB, but it is larger"):
        Artefact.read(tmp_path / "x")


def test_saving_replaces_the_old_file_or_leaves_it(saved, monkeypatch):
    before = saved.read_bytes()

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ArtefactError, match="but the disk is full"):
        Detector(MODEL, scorer="average").calibrate(torch.rand(50, 3, 8, 8)).save(saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["x.nmd"]


def test_numbers_as_keys_are_read_back_as_text(tmp_path):
    names = {number: f"class {number}" for number in range(12)}  # 2 comes before 10, and "10" before "2"
    Detector(MODEL, scorer="average").calibrate(torch.rand(100, 3, 8, 8)).save(
        tmp_path / "x.nmd", info={"names": names}
    )
    loaded = Detector.load(tmp_path / "x.nmd", MODEL)
    assert loaded.info["names"] == {str(number): name for number, name in names.items()}


def test_what_is_no_json_is_refused_and_forgotten(tmp_path):
    detector = Detector(MODEL, scorer="average").calibrate(torch.rand(100, 3, 8, 8))
    with pytest.raises(InputError, match=r"Expected `info` to hold nothing but JSON values, but it does not \(.*Path"):
        detector.save(tmp_path / "x.nmd", info={"where": tmp_path})
    assert detector.info == {}
    detector.save(tmp_path / "x.nmd")


@pytest.mark.parametrize("limit", ["MAX_BYTES", "MAX_HEADER_BYTES"])
def test_what_could_not_be_read_is_not_written(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(f"neuralmean.files.artefact.{limit}", 2**10)
    with pytest.raises(InputError, match=r"Expected at most .* MiB to save"):
        Artefact({"long": "x" * 2000}, {}).write(tmp_path / "x.nmd")
    assert not (tmp_path / "x.nmd").exists()


def test_a_file_that_becomes_shorter_while_it_is_read_is_told(saved, monkeypatch):
    real = os.fstat

    class Status:
        def __init__(self, status):
            self.st_mode, self.st_size = status.st_mode, status.st_size + 4

    text = json.dumps(
        {
            "__metadata__": {"neuralmean": json.dumps({"format_version": 1})},
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        }
    ).encode()
    saved.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    monkeypatch.setattr(os, "fstat", lambda descriptor: Status(real(descriptor)))
    with pytest.raises(ArtefactError, match="not to change while it is read, but it became shorter. Try again"):
        Artefact.read(saved)


def _file(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


_OURS = b'"__metadata__":{"neuralmean":"{\\"format_version\\":%d}"}'


@pytest.mark.parametrize(
    "content",
    [b"x", _file(b"{" + _OURS % 0 + b"}"), _file(b"{" + _OURS % 99 + b"}"), _file(b"{" + _OURS % 1 + b',"a":1}')],
    ids=["nothing", "no_version", "newer", "no_tensors"],
)
def test_every_error_names_the_file(tmp_path, content):
    path = tmp_path / "named.nmd"
    path.write_bytes(content)
    with pytest.raises(ArtefactError, match=re.escape(repr(str(path)))):
        Artefact.read(path)


@pytest.mark.parametrize("shape", [[1] * 8, [0, 3], []], ids=str)
def test_shapes_of_up_to_eight_sides_are_read_back(tmp_path, shape):
    Artefact({}, {"a": torch.zeros(shape)}).write(tmp_path / "x.nmd")
    assert Artefact.read(tmp_path / "x.nmd").tensors["a"].shape == torch.Size(shape)


def test_a_shape_of_nine_sides_is_refused(tmp_path):
    Artefact({}, {"a": torch.zeros([1] * 9)}).write(tmp_path / "x.nmd")
    with pytest.raises(ArtefactError, match="to hold tensors, but they cannot be read"):
        Artefact.read(tmp_path / "x.nmd")


@pytest.mark.parametrize("part", [b"[]", b"{}", b'"a":1'], ids=bytes.decode)
def test_each_kind_of_part_counts(tmp_path, monkeypatch, part):
    whole = b"[%s]" % b",".join([part] * 50) if b":" not in part else b"{%s}" % b",".join([part] * 50)
    (tmp_path / "x.nmd").write_bytes(_file(b"{" + _OURS % 1 + b',"x":' + whole + b"}"))
    monkeypatch.setattr("neuralmean.files.artefact.MAX_PARTS", 30)
    with pytest.raises(ArtefactError, match="it is not one, or it is truncated"):
        Artefact.read(tmp_path / "x.nmd")


@pytest.mark.parametrize(
    ("shape", "data"), [([3], bytes(8)), ([2], bytes(9)), ([2], bytes(7))], ids=["another_shape", "longer", "shorter"]
)
def test_tensors_fill_the_file_exactly(tmp_path, shape, data):
    entry = b',"a":{"dtype":"F32","shape":%s,"data_offsets":[0,8]}}' % json.dumps(shape).encode()
    (tmp_path / "x.nmd").write_bytes(_file(b"{" + _OURS % 1 + entry, data))
    with pytest.raises(ArtefactError, match="to hold tensors, but they cannot be read"):
        Artefact.read(tmp_path / "x.nmd")


@pytest.mark.parametrize("less", [0, 1])
@pytest.mark.parametrize("bound", ["MAX_BYTES", "MAX_HEADER_BYTES", "MAX_PARTS"])
def test_what_is_exactly_as_large_as_allowed_is_written_and_read(tmp_path, monkeypatch, bound, less):
    path = tmp_path / "x.nmd"
    Artefact({"a": [1, {"b": 2}]}, {"c": torch.zeros(20)}).write(path)
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    parts = sum(content[8 : 8 + length].count(mark) for mark in (b"[", b"{", b":"))
    allowed = {"MAX_BYTES": len(content), "MAX_HEADER_BYTES": length, "MAX_PARTS": parts}[bound] - less
    monkeypatch.setattr(f"neuralmean.files.artefact.{bound}", allowed)
    for use in (
        lambda: Artefact.read(path),
        lambda: Artefact({"a": [1, {"b": 2}]}, {"c": torch.zeros(20)}).write(path),
    ):
        if less:
            with pytest.raises((ArtefactError, InputError), match="Expected "):
                use()
        else:
            use()


def test_only_the_header_is_searched_for_parts(tmp_path):
    brackets = torch.full((30_000,), 0x5B5B5B5B, dtype=torch.int32)  # "[[[[" each
    Artefact({}, {"a": brackets}).write(tmp_path / "x.nmd")
    assert torch.equal(Artefact.read(tmp_path / "x.nmd").tensors["a"], brackets)
