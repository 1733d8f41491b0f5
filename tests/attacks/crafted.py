"""Files as an attacker would write them: well-formed, with a digest that fits, and content that means harm."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable

import torch

from neuralmean.files.artefact import Artefact

Change = Callable[[dict, dict], None]


def recrafted(artefact: Artefact, change: Change) -> Artefact:
    """Return the artefact after a change, to be written with a digest that fits."""
    header = {
        key: copy.deepcopy(value) for key, value in artefact.header.items() if key not in ("digest", "format_version")
    }
    tensors = dict(artefact.tensors)
    change(header, tensors)
    return Artefact(header, tensors)


def raw_file(entries: dict, data: bytes, header: object = None) -> bytes:
    """Return the bytes of a safetensors file with these entries, whatever they claim."""
    described = {"__metadata__": {"neuralmean": json.dumps(header or {"format_version": 1})}, **entries}
    text = json.dumps(described).encode()
    return struct.pack("<Q", len(text)) + text + data


def put(*path: object, value: object) -> Change:
    """Return a change that sets one value deep in the header."""

    def change(header: dict, tensors: dict) -> None:
        place = header
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


def fill(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Return a change that replaces one tensor."""

    def change(header: dict, tensors: dict) -> None:
        tensors[name] = make(tensors[name])

    return change


MONITOR_STATES: dict[str, Change] = {
    "moment_counts_above_a_block": put("blocks", "counts", 0, value=33),  # an endless loop once
    "open_block_that_is_full": put("blocks", "counts", -2, value=32),
    "open_block_that_is_huge": put("blocks", "counts", -2, value=10**12),
    "negative_count": put("blocks", "counts", 0, value=-32),
    "count_that_is_a_float": put("blocks", "counts", 0, value=32.0),
    "count_that_is_true": put("blocks", "counts", -1, value=True),
    "learnt_beyond_the_window": put("blocks", "counts", -1, value=2**40),
    "no_counts": put("blocks", "counts", value=[]),
    "counts_that_are_text": put("blocks", "counts", value="32"),
    "huge_capacity": put("items", "ranks", "capacity", value=2**40),
    "small_capacity": put("blocks", "ranks", "capacity", value=3),
    "no_ranks": put("items", "ranks", value=[]),
    "random_state_of_another_kind": put("items", "ranks", "random", value={"bit_generator": "MT19937", "state": {}}),
    "random_state_too_large": put("items", "ranks", "random", "state", "state", value=2**400),
    "window_of_a_terabyte": put("window", value=2**40),
    "window_that_is_odd": put("window", value=33),
    "rate_above_one": put("false_alarm_rate", value=7),
    "rate_that_is_text": put("false_alarm_rate", value="0.01"),
    "seed_below_zero": put("seed", value=-1),
    "seed_that_is_text": put("seed", value="a"),
    "more_flagged_than_seen": put("counters", "n_ood", value=10**9),
    "two_counters": put("n", value=[1, 2]),
    "counts_that_do_not_add_up": put("counters", "n_seen", value=10**6),
    "too_few_bins": put("counters", "p_value_counts", value=[1]),
    "sum_that_is_infinite": put("counters", "p_value_sum", value=float("inf")),
    "sum_that_is_nan": put("counters", "p_value_sum", value=float("nan")),
    "alarm_of_no_test": put("alarm", "test", value="<script>"),
    "alarm_in_the_future": put("alarm", "item", value=10**9),
    "alarm_without_a_test": put("alarm", value={"item": 3}),
    "alarm_of_no_kind": put("alarm", "kind", value="<script>"),
    "examples_that_are_text": put("alarm", "examples", value=["a"]),
    "spacing_of_nothing": put("spacing", 0, value=0),
    "following_the_future": put("following", value=10**9),
    "last_score_that_is_text": put("repeats", "last_score", value="a"),
    "bins_below_zero": fill("items.bins", lambda held: held - 1),
    "bins_of_another_shape": fill("items.bins", lambda held: held[:1]),
    "last_vector_of_another_width": fill("repeats.last_vector", lambda held: held[:1]),
    "kind_that_is_unknown": fill("recent", lambda held: held + torch.tensor([0, 0, 0, 0, 0, 0, 77])),
    "evidence_that_is_infinite": put("items", "evidence", 0, "log_bets", value=[1e400] * 14),
    "evidence_of_nobody": put("blocks", "evidence", "n", value=10**12),
    "evidence_below_zero": put("items", "evidence", 0, "n", value=-5),
    "no_evidence": put("items", "evidence", value=[]),
    "window_with_other_numbers": fill("recent", lambda held: held + 7),
    "bin_that_is_not_there": fill("recent", lambda held: held + torch.tensor([0, 0, 1000, 0, 0, 0, 0])),
    "window_with_nan": fill("recent", lambda held: held * float("nan")),
    "window_that_is_too_long": fill("recent", lambda held: held.repeat(100, 1)),
    "window_of_another_shape": fill("recent", lambda held: held.flatten()[:3]),
    "moments_with_infinity": fill("blocks.mean", lambda held: held + float("inf")),
    "moments_of_another_width": fill("blocks.m2", lambda held: held[:, :1]),
    "deviations_below_zero": fill("blocks.m2", lambda held: held - 1e9),
    "moments_of_integers": fill("blocks.mean", lambda held: held.long()),
    "ranks_out_of_order": fill("items.scores", lambda held: held.flip(0)),
    "ranks_with_nan": fill("items.scores", lambda held: held * float("nan")),
    "ties_above_one": fill("items.ties", lambda held: held + 1),
    "counts_below_zero": fill("items.counts", lambda held: held - 1),
    "counts_that_are_floats": fill("items.counts", lambda held: held.double()),
}

_F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
RAW_FILES: dict[str, bytes] = {
    "overlapping_tensors": raw_file({"a": _F32, "b": _F32}, bytes(8)),
    "gap_between_tensors": raw_file({"a": _F32, "b": {**_F32, "data_offsets": [16, 24]}}, bytes(24)),
    "offsets_beyond_the_end": raw_file({"a": {**_F32, "shape": [2**40], "data_offsets": [0, 2**42]}}, bytes(8)),
    "offsets_that_run_backwards": raw_file({"a": {**_F32, "data_offsets": [8, 0]}}, bytes(8)),
    "bytes_after_the_last_tensor": raw_file({"a": _F32}, bytes(4096)),
    "shape_of_another_size": raw_file({"a": {**_F32, "shape": [3]}}, bytes(8)),
    "shape_below_zero": raw_file({"a": {**_F32, "shape": [-2, -1]}}, bytes(8)),
    "shape_that_multiplies_to_zero": raw_file({"a": {**_F32, "shape": [0, 2**62], "data_offsets": [0, 0]}}, b""),
    "shape_of_many_dimensions": raw_file({"a": {**_F32, "shape": [1] * 5000 + [2]}}, bytes(8)),
    "shape_that_is_true": raw_file({"a": {**_F32, "shape": [True, 2]}}, bytes(8)),
    "type_that_is_unknown": raw_file({"a": {**_F32, "dtype": "PICKLE"}}, bytes(8)),
    "type_that_is_a_list": raw_file({"a": {**_F32, "dtype": []}}, bytes(8)),
    "entry_that_is_a_number": raw_file({"a": 1}, bytes(8)),
    "no_offsets": raw_file({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "header_that_is_a_list": struct.pack("<Q", 2) + b"[]",
    "header_of_many_brackets": struct.pack("<Q", 10**6) + b"[" * 10**6,
    "header_longer_than_the_file": struct.pack("<Q", 2**63) + b"{}",
    "our_header_is_a_list": raw_file({}, b"", [1]),
    "version_that_is_true": raw_file({}, b"", {"format_version": True}),
    "version_of_a_million_digits": raw_file({}, b"", {"format_version": "9" * 10**6}),
}
