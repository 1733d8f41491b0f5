"""The paper's experiments as a program: data, models, protocols, baselines, experiments."""
