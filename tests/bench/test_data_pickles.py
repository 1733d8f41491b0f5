"""CIFAR's python batches: read as they are, and never run."""

import io
import os
import pickle
import pickletools

import numpy as np
import pytest

from neuralmean.bench.data.pickles import read_batch
from neuralmean.errors import ArtefactError

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 3072), np.uint8)
LABELS = [6, 9, 9, 4]


def _write(path, content, protocol=2):
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


def _python2_batch():
    """A batch as Python 2 wrote it: byte strings and numpy's old module name, opcode by opcode."""
    out = io.BytesIO()

    def text(value):
        raw = value if isinstance(value, bytes) else value.encode()
        out.write(b"T" + len(raw).to_bytes(4, "little") + raw)  # BINSTRING

    out.write(b"\x80\x02}(")
    text("data")
    out.write(b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t")
    text("b")
    out.write(b"tR(K\x01(K\x04M\x00\x0ctcnumpy\ndtype\n(")
    text("u1")
    out.write(b"K\x00K\x01tR(K\x03")
    text("|")
    out.write(b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89")
    text(PIXELS.tobytes())
    out.write(b"tb")
    text("labels")
    out.write(b"(" + b"".join(b"K" + bytes([label]) for label in LABELS) + b"l")
    out.write(b"u.")
    return out.getvalue()


def test_images_and_labels_come_back(tmp_path):
    path = _write(
        tmp_path / "data_batch_1", {"data": PIXELS, "labels": LABELS, "batch_label": "x", "filenames": ["a"] * 4}
    )
    images, labels = read_batch(path)
    assert images.shape == (4, 32, 32, 3)
    assert labels.tolist() == LABELS
    # The file has all of red, then green, then blue, each row by row.
    assert images[1, 2, 3].tolist() == [PIXELS[1, 67], PIXELS[1, 1024 + 67], PIXELS[1, 2048 + 67]]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL))
def test_every_protocol_with_byte_keys(tmp_path, protocol):
    path = _write(tmp_path / "batch", {b"data": PIXELS, b"fine_labels": LABELS}, protocol)
    images, labels = read_batch(path)
    assert np.array_equal(images.transpose(0, 3, 1, 2).reshape(4, 3072), PIXELS)
    assert labels.tolist() == LABELS


def test_what_python_2_wrote_is_read(tmp_path):
    raw = _python2_batch()
    assert ("GLOBAL", "numpy.core.multiarray _reconstruct") in {
        (op.name, arg) for op, arg, _ in pickletools.genops(raw)
    }
    path = tmp_path / "data_batch_1"
    path.write_bytes(raw)
    images, labels = read_batch(path)
    assert np.array_equal(images.transpose(0, 3, 1, 2).reshape(4, 3072), PIXELS)
    assert labels.tolist() == LABELS


class _Call:
    """Pickles to a call of `function(*args)`."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


@pytest.mark.parametrize(
    ("function", "named"),
    [(os.system, "posix.system|nt.system"), (eval, r"builtins.eval|__builtin__.eval"), (np.load, "numpy.load")],
    ids=["system", "eval", "numpy.load"],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_hostile_pickle_is_refused_and_not_run(tmp_path, monkeypatch, function, named, protocol):
    monkeypatch.chdir(tmp_path)
    command = "open('ran', 'w')" if function is eval else "echo ran > ran"
    path = _write(tmp_path / "data_batch_1", {"data": _Call(function, command), "labels": []}, protocol)
    with pytest.raises(ArtefactError, match=f"to hold nothing but arrays, but it refers to ({named})"):
        read_batch(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "dotted", [b"cnumpy\ncore.multiarray.exec\n.", b"cbuiltins\ngetattr\n.", b"(S'x'\nios\nsystem\n."]
)
def test_other_names_are_refused(tmp_path, dotted):
    path = tmp_path / "batch"
    path.write_bytes(dotted)
    with pytest.raises(ArtefactError, match="to hold nothing but arrays, but it refers to"):
        read_batch(path)


def test_arrays_of_objects_are_refused(tmp_path):
    path = _write(tmp_path / "batch", {"data": np.array([{}, []], dtype=object), "labels": [0, 1]})
    with pytest.raises(ArtefactError, match="but it refers to an array of type 'O8'"):
        read_batch(path)


def test_references_to_elsewhere_are_refused(tmp_path):
    path = tmp_path / "batch"
    path.write_bytes(b"Pelsewhere\n.")
    with pytest.raises(ArtefactError, match="but it refers to a persistent object 'elsewhere'"):
        read_batch(path)


def test_other_encodings_are_refused(tmp_path):
    path = tmp_path / "batch"
    path.write_bytes(b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.")
    with pytest.raises(ArtefactError, match="but it refers to the encoding 'rot13'"):
        read_batch(path)


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        {"labels": LABELS},
        {"data": PIXELS},
        {"data": PIXELS, "labels": [1]},
        {"data": PIXELS[:, :100], "labels": LABELS},
        {"data": PIXELS.astype(np.int64), "labels": LABELS},
        {"data": "x", "labels": LABELS},
    ],
    ids=["list", "no_data", "no_labels", "few_labels", "few_pixels", "wide_pixels", "text"],
)
def test_another_pickle_is_no_batch(tmp_path, content):
    with pytest.raises(ArtefactError, match="Expected batch to be one of CIFAR's python batches, but it is damaged"):
        read_batch(_write(tmp_path / "batch", content))


@pytest.mark.parametrize("keep", [0, 1, 50, 5000, 12_000])
def test_a_damaged_batch_says_so(tmp_path, keep):
    path = _write(tmp_path / "batch", {"data": PIXELS, "labels": LABELS}, 4)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ArtefactError, match=r"but it is damaged .* Remove it and download the set again"):
        read_batch(path)
