"""Graphs: the recorded forward pass as one exported, compiled program."""
