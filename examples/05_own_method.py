# %% [markdown]
# # A method of your own
#
# A scorer is any object with `fit(inliers, outliers)` and `score(vectors)`. Here: the distance to the nearest of the training vectors, after
# a principal component analysis. It gets thresholds, p-values and evaluation for free.
#
# Download this page as a notebook: {nb-download}`05_own_method.ipynb`

# %%
import torch

from neuralmean import Detector
from neuralmean.cli.demo import load_data, train_model
from neuralmean.stats.metrics import bootstrap, evaluate

data = load_data()
model = train_model(data)


# %%
class NearestNeighbour:
    """Distance to the k-th nearest training vector in the leading principal components; higher = more OOD."""

    def __init__(self, components=16, k=5):
        self.components, self.k = components, k

    def fit(self, inliers, outliers=None):
        """Keep the training vectors, projected."""
        self.centre = inliers.mean(0)
        self.axes = torch.linalg.svd(inliers - self.centre, full_matrices=False).Vh[: self.components].T
        self.known = (inliers - self.centre) @ self.axes
        return self

    def score(self, vectors):
        """Return the distance of each vector, shape (N,)."""
        return torch.cdist((vectors - self.centre) @ self.axes, self.known).kthvalue(self.k, dim=1).values


# %% [markdown]
# ## Against the built-in ones
#
# The same data, the same splits, 95 % bootstrap intervals.

# %%
for name, scorer in {"own": NearestNeighbour(), "typicality": "typicality", "average": "average"}.items():
    detector = Detector(model, scorer=scorer).fit(data.train, held_out=data.held_out)
    known = detector.score(data.test).numpy()
    for kind, images in {"digits 8 and 9": data.near, "photo patches": data.far}.items():
        unknown = detector.score(images).numpy()
        interval = bootstrap(known, unknown, resamples=300)["auroc"]
        print(
            f"{name:<11}{kind:<16}AUROC {evaluate(known, unknown).auroc:.1f} ({interval.low:.1f} to {interval.high:.1f})"
        )

# %% [markdown]
# ## In the benchmark
#
# `nmd bench run methods --method mypackage:NearestNeighbour` puts a method next to the thirty others, on the same images and with the
# same protocols: see [the benchmark](../benchmark.md).
