"""Batches of texts from files: one text per line of a `.txt` file, or the field `text` of each line of a `.jsonl` file.

Lines are read when needed, so memory does not grow with the file. Invalid lines are reported and skipped. The tokenizer
is a function from texts to the model's keyword inputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from neuralmean.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TEXT_EXTENSIONS", "TextBatch", "TextBatches", "are_texts", "line_name", "split_line"]

TEXT_EXTENSIONS = frozenset({".txt", ".jsonl"})
MAX_LINE = 1_000_000  # bytes; longer lines raise
KEPT_NOTES = 1000

Tokenize = Callable[[list[str]], "Mapping[str, Tensor]"]


class TextBatch(NamedTuple):
    """The model's inputs for some texts, and the names of the texts."""

    inputs: dict[str, Tensor]
    names: list[str]


def are_texts(paths: Sequence[str]) -> bool:
    """Whether all paths are files of texts, by their extensions.

    Example:
        >>> are_texts(["a.txt", "b.jsonl"]), are_texts(["a.txt", "photos"]), are_texts(["a.txt:3"])
        (True, False, True)
    """
    return bool(paths) and all(Path(split_line(path)[0]).suffix.lower() in TEXT_EXTENSIONS for path in paths)


def line_name(path: str, line: int) -> str:
    """Return the name of the text in a line; lines are counted from 1."""
    return f"{path}:{line}"


def split_line(name: str) -> tuple[str, int | None]:
    """Return path and line of a name; None for the name of a whole file.

    Example:
        >>> split_line("texts.txt:12"), split_line("texts.txt")
        (('texts.txt', 12), ('texts.txt', None))
    """
    path, mark, line = name.rpartition(":")
    if mark and line.isascii() and line.isdigit() and Path(path).suffix.lower() in TEXT_EXTENSIONS:
        return path, int(line)
    return name, None


class TextBatches:
    """The texts of some files, as batches for a `Detector`; can be iterated more than once.

    During and after a pass, `n_texts` is the number of texts so far, and `n_unreadable` the number of invalid lines.

    Args:
        paths: `.txt` and `.jsonl` files, or single lines of them, as `line_name` names them.
        tokenize: A function from texts to the keyword inputs of the model.
        batch_size: Texts per batch.
        on_unreadable: Called with the name of an invalid line and the reason.
        skip: Called with the name of each text; texts for which it returns True are skipped.
    """

    def __init__(
        self,
        paths: Sequence[str],
        tokenize: Tokenize,
        *,
        batch_size: int = 64,
        on_unreadable: Callable[[str, str], None] | None = None,
        skip: Callable[[str], bool] | None = None,
    ) -> None:
        if batch_size < 1:
            raise InputError(f"Expected `batch_size` to be at least 1, but got {batch_size!r}.")
        for path in map(str, paths):
            file = Path(split_line(path)[0])
            if file.suffix.lower() not in TEXT_EXTENSIONS or not file.is_file():
                raise InputError(f"Expected a .txt or .jsonl file with a text in each line, but got {path!r}.")
        self._paths, self._tokenize, self.batch_size = list(map(str, paths)), tokenize, batch_size
        self._on_unreadable, self._skip = on_unreadable, skip
        self.n_texts = self.n_unreadable = self.n_left_out = 0

    def __iter__(self) -> Iterator[TextBatch]:
        self.n_texts = self.n_unreadable = self.n_left_out = 0
        waiting: list[tuple[str, str]] = []
        for item in self.texts():
            waiting.append(item)
            if len(waiting) == self.batch_size:
                yield self._batch(waiting)
                waiting = []
        if waiting:
            yield self._batch(waiting)

    def __len__(self) -> int:
        """Upper bound on the number of batches, as blank lines count."""
        return (self.count() + self.batch_size - 1) // self.batch_size

    def count(self) -> int:
        """Number of lines to try."""
        total = 0
        for path in self._paths:
            file, line = split_line(path)
            if line is not None:
                total += 1
                continue
            with Path(file).open("rb") as stream:
                total += sum(1 for _ in stream)
        return total

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each text with the text."""
        for path in self._paths:
            file, only = split_line(path)
            is_json = Path(file).suffix.lower() == ".jsonl"
            with Path(file).open("rb") as stream:
                for number, raw in enumerate(iter(partial(stream.readline, MAX_LINE + 1), b""), start=1):
                    if len(raw) > MAX_LINE:
                        raise InputError(
                            f"Expected a text in each line of {file!r}, but line {number} has more than {MAX_LINE:,} bytes."
                        )
                    if (only is not None and number != only) or not raw.strip():
                        continue
                    name = line_name(file, number)
                    if self._skip is not None and self._skip(name):
                        self.n_left_out += 1
                        continue
                    text, reason = _read(raw, is_json)
                    if text is None:
                        self.n_unreadable += 1
                        if self._on_unreadable is not None:
                            self._on_unreadable(name, reason)
                    else:
                        yield name, text

    def _batch(self, items: list[tuple[str, str]]) -> TextBatch:
        self.n_texts += len(items)
        return TextBatch(dict(self._tokenize([text for _, text in items])), [name for name, _ in items])


def _read(raw: bytes, is_json: bool) -> tuple[str | None, str]:
    """Return the text of a line, or None and the reason."""
    try:
        line = raw.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        return None, "it is not UTF-8"
    if not is_json:
        return line, ""
    try:
        content: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None, "it is not JSON"
    text = content.get("text") if isinstance(content, dict) else None
    if not isinstance(text, str) or not text.strip():
        return None, "it has no field 'text' with a text"
    return text, ""
