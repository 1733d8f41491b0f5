"""Models of Hugging Face from a local folder: the model, and its tokenizer if there is one.

Nothing is downloaded, no code of the folder is run and no pickle is read: the classes are those of the installed
transformers, and the weights are safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from neuralmean.data.preprocessing import import_quietly
from neuralmean.errors import InputError
from neuralmean.models.weights import is_on_a_network

MAX_TOKENS = 512  # longer texts are truncated; the model's own limit may be lower
_MAX_CONFIG = 10_000_000  # bytes
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_CLASSES = {  # by the ending of the architecture's name
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForImageClassification": "AutoModelForImageClassification",
    "ForMaskedLM": "AutoModel",
    "ForCausalLM": "AutoModel",
    "Model": "AutoModel",
}


class Tokenizer:
    """Converts texts to the keyword inputs of a model, padded to the longest and truncated to the model's limit.

    Args:
        folder: The folder of the model.
        most: Maximum number of tokens of the model; None if unknown.
    """

    def __init__(self, folder: Path, most: int | None = None) -> None:
        transformers = import_quietly("transformers", "transformers")
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **_LOCAL)
        except Exception as error:
            raise InputError(f"Expected a tokenizer in {str(folder)!r}, but it cannot be read: {error}") from error
        own = getattr(self._tokenizer, "model_max_length", MAX_TOKENS)
        self.most = min(int(own), most or MAX_TOKENS, MAX_TOKENS)

    def __call__(self, texts: list[str]) -> Mapping[str, Tensor]:
        """Return the inputs of some texts, (N, T) each."""
        padding = self._tokenizer.pad_token is not None
        found: Mapping[str, Tensor] = self._tokenizer(
            texts, padding=padding, truncation=True, max_length=self.most, return_tensors="pt"
        )
        return found

    def words(self, text: str) -> list[str]:
        """Return the tokens of a text as strings, as many as the model's input has."""
        numbers = self._tokenizer(text, truncation=True, max_length=self.most)["input_ids"]
        return list(self._tokenizer.convert_ids_to_tokens(numbers))


def load_folder(folder: str, *, trusted: bool = True) -> tuple[nn.Module, Tokenizer | None, bool]:
    """Return the model of a folder, its tokenizer if it takes texts, and whether it has classes.

    Args:
        folder: The folder.
        trusted: Whether the user named it, rather than a file.

    Raises:
        InputError: The folder has no model that can be read without running its code, or a file names another machine.
    """
    if not trusted and is_on_a_network(folder):
        raise InputError(
            f"Expected the file to name a folder of this machine, but it names {folder!r}. If you trust it, pass it as "
            "--model hf:DIR."
        )
    place = Path(folder)
    config = _config(place)
    names = config.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else "Model"
    kind = next((own for ending, own in _CLASSES.items() if architecture.endswith(ending)), None)
    if kind is None:
        raise InputError(f"Expected an encoder or a classifier in {folder!r}, but its config names a {architecture}.")
    transformers = import_quietly("transformers", "transformers")
    try:
        model = getattr(transformers, kind).from_pretrained(place, use_safetensors=True, **_LOCAL)
    except Exception as error:
        raise InputError(f"Expected a model with safetensors weights in {folder!r}, but got: {error}") from error
    takes_texts = hasattr(model, "get_input_embeddings") and isinstance(model.get_input_embeddings(), nn.Embedding)
    tokenizer = Tokenizer(place, _most_tokens(config)) if takes_texts else None
    return model, tokenizer, kind != "AutoModel"


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        if path.stat().st_size > _MAX_CONFIG:
            raise InputError(f"Expected {str(path)!r} to be the config of a model, but it is far too large.")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"Expected `hf:` and the folder of a model with a config.json, but {str(path)!r} cannot be read ({error}). "
            "Download the model first, and name its folder."
        ) from error
    if not isinstance(found, dict):
        raise InputError(
            f"Expected {str(path)!r} to hold the config of a model, but it holds a {type(found).__name__}."
        )
    return found


def _most_tokens(config: Mapping[str, Any]) -> int | None:
    most = config.get("max_position_embeddings")
    return most if isinstance(most, int) and not isinstance(most, bool) and most > 0 else None
