"""The paper as a program: data, models, protocols, baselines, experiments."""
