"""Tests in a separate process whether bfloat16 is worthwhile on this machine's CPU.

Some machines announce bfloat16 but crash with an illegal instruction in the backward pass, which would end the training
run. Others emulate it, slower than float32.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import torch

WORTH_IT = 1.2  # times as fast as float32; below, it is not worth the loss of precision
_SECONDS = 120.0
# Best of three steps of a few convolutions like those of ResNet-34: float32, then bfloat16.
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
    """Return the speed-up of a training step in bfloat16 over float32 on this CPU; None if it does not work.

    Args:
        probe: The test program; it prints the seconds of a step in float32, then in bfloat16.
    """
    command = [sys.executable, "-c", probe, str(torch.get_num_threads())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:  # negative: killed by a signal, such as SIGILL
        return None
    try:
        full, reduced = (float(line) for line in done.stdout.split())
    except ValueError:
        return None
    return full / reduced if reduced > 0 else None
