"""Cost against AUROC, as in the paper's first figure."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any


def draw(rows: list[dict[str, Any]], path: Path, *, batch: int) -> bool:
    """Draw one point for each method that has both figures; return whether there was anything to draw."""
    points = [
        (row["method"], row[f"batch {batch}"]["ratio"], mean(row["auroc"].values())) for row in rows if row.get("auroc")
    ]
    if not points:
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, cost, auroc in points:
        ours = name.startswith("neuralmean")
        axes.scatter(cost, auroc, s=60 if ours else 35, color="#c0392b" if ours else "#34495e", zorder=3)
        axes.annotate(name, (cost, auroc), xytext=(5, 4), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel(f"cost of an answer, over a plain forward pass (batch {batch}, log scale)")
    axes.set_ylabel("AUROC, mean of the OOD sets (%)")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True
