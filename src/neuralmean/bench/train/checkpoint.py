"""The state of a training run in one file, written atomically and read back by the same run only.

Safetensors with a JSON header, no pickle. The optimiser's tensors are stored by parameter number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from neuralmean.errors import ArtefactError
from neuralmean.files.atomic import remove_leftovers, write_atomically

FORMAT_VERSION = "1"


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file atomically: a reader of `path` sees the old file or the new one."""
    # Copied, as safetensors rejects tensors that share memory or are not contiguous.
    plain = {
        key: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for key, value in tensors.items()
    }
    content = save(plain, dict(metadata))
    with write_atomically(path) as file:
        file.write(content)


def save_checkpoint(
    path: Path,
    state: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    run: Mapping[str, Any],
    at: Mapping[str, Any],
) -> None:
    """Write the state of a run.

    Args:
        path: The checkpoint.
        state: The tensors of the model and everything else that is learnt.
        optimizer: The optimiser, whose state is saved too.
        run: The identity of the run; only the same run may resume from the checkpoint.
        at: The progress of the run.
    """
    tensors = {f"state/{key}": value for key, value in state.items()}
    for number, values in optimizer.state_dict()["state"].items():
        tensors |= {
            f"optimizer/{number}/{key}": torch.as_tensor(value) for key, value in values.items() if value is not None
        }
    header = {"format_version": FORMAT_VERSION, "run": json.dumps(run, sort_keys=True), "at": json.dumps(at)}
    save_tensors(path, tensors, header)


def load_checkpoint(
    path: Path, optimizer: torch.optim.Optimizer, run: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint and restore the optimiser.

    Args:
        path: The checkpoint.
        optimizer: The optimiser to restore.
        run: The identity of the run.

    Returns:
        The tensors of the state, and the progress of the run.
    """
    try:
        with safe_open(path, framework="pt") as handle:
            header = dict(handle.metadata() or {})
            tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
        held, at = json.loads(header["run"]), json.loads(header["at"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ArtefactError(
            f"Expected {path.name} to be a checkpoint, but it is damaged ({error}). Remove it to start over."
        ) from error
    same = json.loads(json.dumps(run))
    if held != same or header.get("format_version") != FORMAT_VERSION:
        differing = sorted(key for key in {*held, *same} if held.get(key) != same.get(key)) or ["format_version"]
        raise ArtefactError(
            f"Expected {path.name} to be a checkpoint of this run, but it is of another one: {', '.join(differing)} "
            "differ. Resume with the same arguments, pass `resume=False` to start anew, or name another `out`."
        )
    optimizer_state: dict[int, dict[str, Tensor]] = {}
    for key in [key for key in tensors if key.startswith("optimizer/")]:
        _, number, name = key.split("/", 2)
        optimizer_state.setdefault(int(number), {})[name] = tensors.pop(key)
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": optimizer_state, "param_groups": groups})
    return {key.removeprefix("state/"): value for key, value in tensors.items()}, at


def held_run(path: Path) -> dict[str, Any]:
    """Return the identity of the run of a checkpoint; empty if there is no readable checkpoint."""
    try:
        with safe_open(path, framework="pt") as handle:
            held = json.loads((handle.metadata() or {})["run"])
    except (SafetensorError, OSError, KeyError, ValueError):
        return {}
    return held if isinstance(held, dict) else {}


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint and temporary files of a run that was killed while writing it."""
    remove_leftovers(path)
    path.unlink(missing_ok=True)
