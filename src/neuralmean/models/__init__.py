"""Models: which layers are watched, how a model is built and run, and whether its weights changed."""
