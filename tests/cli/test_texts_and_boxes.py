"""`nmd fit`, `score` and `explain` on files of texts, and `nmd score --boxes`."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from PIL import Image

from neuralmean.data.preprocessing import Preprocessing
from tests.cli.conftest import FIT


@pytest.fixture
def encoder(tmp_path, monkeypatch):
    """A folder with a small encoder and a tokenizer of letters, and files of texts."""
    transformers = pytest.importorskip("transformers", reason="the extra `huggingface` is not installed")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "encoder"
    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(90))]
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=40,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    drawn = random.Random(0)
    for name, count in (("id", 150), ("held", 150)):
        lines = [" ".join(drawn.choice(words[5:60]) for _ in range(drawn.randint(8, 16))) for _ in range(count)]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    strange = [json.dumps({"text": " ".join(["w80"] * 12)}), json.dumps({"text": lines[0]}), "{"]
    (tmp_path / "new.jsonl").write_text("\n".join(strange))
    return folder


@pytest.mark.filterwarnings("ignore")  # transformers warns of its own affairs
def test_texts_are_fitted_scored_and_explained(nmd, encoder):
    code, _, err = nmd("fit", "hf:encoder", "--id", "id.txt", "--held-out", "held.txt", "--out", "m.nmd")
    assert code == 0, err
    code, out, err = nmd("score", "m.nmd", "new.jsonl", "--format", "json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, [row["path"] for row in rows]) == (0, ["new.jsonl:1", "new.jsonl:2"])
    assert [row["is_ood"] for row in rows] == [True, False]
    assert "Cannot read new.jsonl:3: it is not JSON" in err
    code, out, _ = nmd("explain", "m.nmd", "new.jsonl:2", "--format", "json")
    answer = json.loads(out)
    words = [word for word, _ in answer["tokens"]]
    assert (code, answer["path"], answer["score"]) == (0, "new.jsonl:2", pytest.approx(rows[1]["score"], rel=1e-5))
    assert (words[0], words[-1], len(words)) == ("[CLS]", "[SEP]", len(answer["tokens"]))
    code, out, _ = nmd("explain", "m.nmd", "new.jsonl")
    assert code == 0
    assert "new.jsonl:1" in out
    assert "w80" in out


def test_texts_need_a_model_that_takes_them(nmd, world):
    (world / "a.txt").write_text("one\ntwo\n")
    assert nmd("fit", "toynet:Net", *FIT, "--id", "train", "--held-out", "val", "--out", "m.nmd")[0] == 0
    code, _, err = nmd("score", "m.nmd", "a.txt")
    assert code == 1
    assert "Expected a detector of a model that takes texts, fitted with `hf:DIR`" in err


def _fit_regions(nmd):
    code, _, err = nmd("fit", "toynet:Net", *FIT, "--id", "train", "--held-out", "val", "--regions", "--out", "m.nmd")
    assert code == 0, err


def test_boxes_get_a_row_each(nmd, world):
    _fit_regions(nmd)
    pixels = np.array(Image.open(world / "val" / "0000.png"))
    pixels[2:8, 3:9] = (255, 0, 0)
    Image.fromarray(pixels).save(world / "odd.png")
    (world / "boxes.jsonl").write_text(
        json.dumps({"path": "odd.png", "boxes": [[3, 2, 9, 8], [50, 50, 60, 60]]}) + "\n"
    )
    code, out, err = nmd("score", "m.nmd", "odd.png", "val", "--boxes", "boxes.jsonl", "--format", "json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0, err
    assert len(rows) == 1
    assert rows[0]["path"] == "odd.png"
    assert [rows[0][name] for name in ("x0", "y0", "x1", "y1", "is_ood")] == [3, 2, 9, 8, True]
    assert "box 50, 50, 60, 60 lies outside" in err
    (world / "boxes.csv").write_text("path,x0,y0,x1,y1\nodd.png,3,2,9,8\n")
    code, out, _ = nmd(
        "score", "m.nmd", "odd.png", "--boxes", "boxes.csv", "--format", "csv", "--out", "out.csv", "--fail-on-ood"
    )
    assert code == 3
    lines = (world / "out.csv").read_text().splitlines()
    assert lines[0] == "path,x0,y0,x1,y1,score,p_value,is_ood"
    assert lines[1].startswith("odd.png,3.0,2.0,9.0,8.0,")


@pytest.mark.parametrize(
    "content", ["{", '{"path": "a"}', '{"path": "a", "boxes": [[1, 2, 3]]}', '{"path": 1, "boxes": []}', ""]
)
def test_a_file_without_boxes_is_refused(nmd, world, content):
    _fit_regions(nmd)
    (world / "boxes.jsonl").write_text(content)
    code, _, err = nmd("score", "m.nmd", "val", "--boxes", "boxes.jsonl")
    assert code == 1
    assert "Expected each line of 'boxes.jsonl'" in err or "but it is empty" in err


@pytest.mark.parametrize("crop", ["center", "squash", "border"])
@pytest.mark.parametrize("fraction", [0.875, 1.0, 1.25])
@pytest.mark.parametrize("shape", [(60, 40), (40, 60), (33, 77)])
def test_boxes_go_where_the_pixels_go(crop, fraction, shape):
    how = Preprocessing((32, 32), (0.0,) * 3, (0.5,) * 3, crop=crop, crop_fraction=fraction)
    height, width = shape
    box = [width // 2 - 6, height // 2 - 5, width // 2 + 6, height // 2 + 7]
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[box[1] : box[3], box[0] : box[2]] = 255
    bright = how.pixels(Image.fromarray(pixels))[:, :, 0] > 127
    rows, columns = np.flatnonzero(bright.any(axis=1)), np.flatnonzero(bright.any(axis=0))
    placed = how.place_boxes(torch.tensor([box], dtype=torch.float64), shape)[0].clamp(0, 32).tolist()
    for found, expected in zip((columns[0], rows[0], columns[-1] + 1, rows[-1] + 1), placed, strict=True):
        assert abs(found - expected) <= 1
