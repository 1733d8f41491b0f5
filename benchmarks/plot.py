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
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.set_xscale("log")
    axes.axvline(1, color="#888", linewidth=1, linestyle="--", zorder=1)
    costs = [cost for _, cost, _ in points]
    drawn: list[tuple[float, float]] = []
    for name, cost, auroc in sorted(points, key=lambda point: -point[2]):
        ours = name.startswith("neuralmean")
        axes.scatter(cost, auroc, s=60 if ours else 35, color="#c0392b" if ours else "#34495e", zorder=3)
        near = sum(abs(cost / other - 1) < 0.2 and abs(auroc - height) < 1.6 for other, height in drawn)
        left = near % 2 == 1 or cost > 0.7 * max(costs)  # labels of neighbours on either side
        # A label that would run into the next point goes above its own.
        above = any(1.2 < other / cost < 1.6 and abs(auroc - height) < 0.5 for _, other, height in points)
        drawn.append((cost, auroc))
        axes.annotate(
            name,
            (cost, auroc),
            xytext=(-4, 10) if above else (-7 if left else 7, 0),
            textcoords="offset points",
            fontsize=8,
            ha="right" if left and not above else "left",
            va="center",
        )
    axes.margins(y=0.08)
    axes.set_xlim(min(costs) * 0.93, max(costs) * 1.1)
    axes.xaxis.set_major_locator(FixedLocator([0.5, 0.7, 1, 1.5, 2, 3, 5, 10]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(f"cost of an answer, over a plain forward pass (batch {batch}, log scale)")
    axes.set_ylabel("AUROC, mean of the OOD sets (%)")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True
