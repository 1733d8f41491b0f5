"""`hf:DIR`: models of Hugging Face from a folder, without a download, without code of the folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from neuralmean.errors import InputError
from neuralmean.models.spec import is_untrained, resolve

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of its own affairs
transformers = pytest.importorskip("transformers", reason="the extra `huggingface` is not installed")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "dog", "sees", "the", "."]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small encoder with random weights and a tokenizer of ten words."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=12,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizerFast(vocab=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_gives_a_model_and_its_tokenizer(folder: Path) -> None:
    resolved = resolve(f"hf:{folder}")
    assert resolved.tokenizer is not None
    assert not resolved.model.training
    assert not resolved.has_classes
    assert not is_untrained(resolved)
    inputs = resolved.tokenizer(["the cat sees the dog.", "dog"])
    assert inputs["attention_mask"].sum(dim=1).tolist()[0] > inputs["attention_mask"].sum(dim=1).tolist()[1]
    long = resolved.tokenizer(["cat " * 100])
    assert long["input_ids"].shape == (1, 12)
    assert len(resolved.tokenizer.words("cat " * 100)) == 12
    assert resolved.model(**inputs).last_hidden_state.shape[0] == 2


def test_a_saved_file_may_name_a_folder_too(folder: Path) -> None:
    assert type(resolve(f"hf:{folder}", trusted=False).model).__name__ == "BertModel"


def test_a_folder_with_code_of_its_own_is_not_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoModel": "mine.Mine", "AutoConfig": "mine.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    with pytest.raises(InputError, match="Expected a model with safetensors weights"):
        resolve(f"hf:{folder}", trusted=False)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("[1]", "it holds a list"),
        ("{", "cannot be read"),
        ('{"architectures": ["DiffusionPipeline"]}', "Expected an encoder or a classifier"),
    ],
)
def test_a_folder_without_a_model_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=message):
        resolve(f"hf:{tmp_path}")


def test_weights_beside_those_of_the_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Leave the weights out"):
        resolve(f"hf:{folder}", weights=tmp_path / "w.safetensors")
