"""Writes the saved files of this version to `tests/corpus/VERSION`, for later versions to load. Run once for each release.

python scripts/corpus.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from neuralmean import Detector, __version__
from neuralmean.monitor.monitor import Monitor
from neuralmean.scorers import SCORERS
from neuralmean.service.history import History, HistoryRow

CORPUS = Path(__file__).parent.parent / "tests" / "corpus"


class Net(nn.Module):
    """Small, with everything that is watched by itself: batch norms, convolutions, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, 3)."""
        x = self.bn1(self.conv1(x)).relu()
        x = self.bn2(self.conv2(x)).relu()
        return self.fc(x.mean((2, 3)))


def detectors(model: nn.Module, x: Tensor, strange: Tensor) -> dict[str, Detector]:
    """Return detectors that differ in what their files hold."""
    made = {
        name: Detector(model, scorer=name).fit(x[:200], strange[:100], held_out=x[200:]) for name in sorted(SCORERS)
    }
    made["both"] = Detector(model, statistic="both").fit(x[:200], held_out=x[200:])
    made["layers"] = Detector(model, layers=["conv*"], scorer="average").fit(x[:200], held_out=x[200:])
    made["confidence"] = Detector(model).fit(x[:200], held_out=x[200:], confidence=0.9, false_alarm_rate=0.1)
    made["groups"] = Detector(model).fit(x[:200], held_out=x[200:], groups=["left", "right"] * 100)
    return made


def write(folder: Path) -> None:
    """Write everything to a folder that is not there yet."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, x = Net(), torch.rand(400, 3, 8, 8)
    with torch.no_grad():
        for batch in x[:200].split(20):
            model(batch)
    model.eval()
    strange = 2 + 3 * torch.rand(150, 3, 8, 8)
    inputs = torch.cat([x[200:204], strange[100:104]])
    save_file(model.state_dict(), folder / "weights.safetensors")
    save_file({"inputs": inputs}, folder / "inputs.safetensors")
    answers: dict[str, Any] = {}
    for name, detector in detectors(model, x, strange).items():
        detector.save(folder / f"{name}.nmd", info={"note": name})
        groups = ["left", "right"] * 4 if name == "groups" else None
        decision = detector.predict(inputs, groups=groups)
        answers[name] = {
            "score": decision.score.tolist(),
            "p_value": decision.p_value.tolist(),
            "is_ood": decision.is_ood.tolist(),
        }
    answers["monitor"] = _monitor(folder, model, x, strange)
    history = History(folder / "history.db")
    history.add(
        [HistoryRow(i, time.time(), float(i), 0.5, i == 3, "content" if i == 3 else None, i) for i in range(1, 6)]
    )
    history.begin_alarm({"sentence": "something", "examples": [3]})
    history.close()
    answers["history"] = {"n": 5, "n_ood": 1, "n_alarms": 1}
    (folder / "answers.json").write_text(json.dumps(answers, indent=1) + "\n")


def _monitor(folder: Path, model: nn.Module, x: Tensor, strange: Tensor) -> dict[str, Any]:
    detector = Detector.load(folder / "typicality.nmd", model)
    monitor = Monitor(detector, window=64)
    for batch in (*x[300:].split(20), *strange.split(20)):
        seen = detector.observe(batch)
        monitor.update(seen.decision, vectors=seen.vectors)
    monitor.save(folder / "monitor.nmm")
    status = monitor.status()
    return {"n_seen": status.n_seen, "drift": status.drift, "drift_at": status.drift_at}


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else CORPUS / __version__
    if where.exists():
        sys.exit(f"Expected {where} not to be there yet: what a release wrote is never changed.")
    write(where)
    print(f"Wrote {sum(path.stat().st_size for path in where.iterdir()) / 1024:.0f} KiB to {where}.")
