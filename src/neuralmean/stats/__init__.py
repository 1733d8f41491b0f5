"""Statistics: the mathematics of the paper, independent of models."""
