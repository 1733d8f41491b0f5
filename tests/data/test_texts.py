import json

import pytest
import torch

from neuralmean.data.texts import TextBatches
from neuralmean.errors import InputError


def _tokenize(texts):
    longest = max(map(len, texts))
    rows = [[ord(letter) for letter in text] + [0] * (longest - len(text)) for text in texts]
    numbers = torch.tensor(rows)
    return {"input_ids": numbers, "attention_mask": (numbers != 0).long()}


def test_each_line_of_a_text_file_is_a_text_and_blank_ones_are_not(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("one\n\n  two  \r\nGr\u00fc\u00dfe".encode())
    batches = TextBatches([str(path)], _tokenize, batch_size=2)
    names = [batch.names for batch in batches]
    assert names == [[f"{path}:1", f"{path}:3"], [f"{path}:4"]]
    assert [text for _, text in batches.texts()] == ["one", "two", "Gr\u00fc\u00dfe"]
    assert batches.n_texts == 3
    assert len(batches) == 2


def test_the_field_text_of_each_line_of_json_is_a_text_and_other_lines_are_noted(tmp_path):
    path, notes = tmp_path / "a.jsonl", []
    lines = [json.dumps({"text": "a\nb"}), "{", json.dumps({"text": 3}), json.dumps({"text": "last", "id": 7})]
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n" + b"[" * 100_000)
    batches = TextBatches([str(path)], _tokenize, on_unreadable=lambda *note: notes.append(note))
    assert [text for _, text in batches.texts()] == ["a\nb", "last"]
    assert [(name.rpartition(":")[2], reason) for name, reason in notes] == [
        ("2", "it is not JSON"),
        ("3", "it has no field 'text' with a text"),
        ("5", "it is not UTF-8"),
        ("6", "it is not JSON"),
    ]


def test_a_line_can_be_named_and_names_can_be_left_out(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\nthree\n")
    assert [text for _, text in TextBatches([f"{path}:2"], _tokenize).texts()] == ["two"]
    batches = TextBatches([str(path)], _tokenize, skip=lambda name: name.endswith(":1"))
    assert [text for _, text in batches.texts()] == ["two", "three"]
    assert batches.n_left_out == 1


def test_what_is_no_file_of_texts_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"Expected a \.txt or \.jsonl file"):
        TextBatches([str(tmp_path / "missing.txt")], _tokenize)
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(InputError, match=r"Expected a \.txt or \.jsonl file"):
        TextBatches([str(tmp_path / "a.csv")], _tokenize)


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 1_000_001)
    with pytest.raises(InputError, match="line 1 has more than 1,000,000 bytes"):
        list(TextBatches([str(tmp_path / "a.txt")], _tokenize))
