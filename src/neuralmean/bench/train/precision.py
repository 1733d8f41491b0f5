"""Whether bfloat16 is worth it on this machine's CPU: found out in a process of its own.

Some machines announce bfloat16 and end a backward pass with an illegal instruction, which would take the training run
along. Others emulate it, slower than float32.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import torch

WORTH_IT = 1.2  # times as fast: below, the loss of digits is for nothing
_SECONDS = 120.0
# Best of three steps of a few convolutions, as they are in ResNet-34: float32, then bfloat16.
_PROBE = """
import sys, time
import torch
from torch import nn
torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(0)
layers = [nn.Conv2d(64, 64, 3, padding=1) for _ in range(4)]
model = nn.Sequential(*layers, nn.BatchNorm2d(64), nn.ReLU()).to(memory_format=torch.channels_last)
images = torch.randn(32, 64, 16, 16).contiguous(memory_format=torch.channels_last)
for reduced in (False, True):
    times = []
    for _ in range(4):
        begun = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=reduced):
            loss = model(images).float().square().mean()
        loss.backward()
        times.append(time.perf_counter() - begun)
    if not torch.isfinite(loss):
        sys.exit(1)
    print(min(times[1:]))
"""


@cache
def bfloat16_gain(probe: str = _PROBE) -> float | None:
    """How many times as fast as float32 a training step is in bfloat16 on this CPU; None where it does not work.

    Args:
        probe: The program that finds out; it prints the seconds of a step in float32, then in bfloat16.
    """
    command = [sys.executable, "-c", probe, str(torch.get_num_threads())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:  # below zero: ended by a signal, such as that of an illegal instruction
        return None
    try:
        full, reduced = (float(line) for line in done.stdout.split())
    except ValueError:
        return None
    return full / reduced if reduced > 0 else None
