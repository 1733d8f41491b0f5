"""A small trainer for architectures without public weights: resumable, on CPU and GPU, writing safetensors."""

from neuralmean.bench.train.loop import Progress
from neuralmean.bench.train.recipes import Recipe, default_recipe, full_recipe
from neuralmean.bench.train.trainer import checkpoint_of, train

__all__ = ["Progress", "Recipe", "checkpoint_of", "default_recipe", "full_recipe", "train"]
