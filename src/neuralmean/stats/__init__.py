"""Statistics: the mathematics of the paper, free of models."""
