"""The detector: from a model and examples to decisions, explanations and a saved file."""
