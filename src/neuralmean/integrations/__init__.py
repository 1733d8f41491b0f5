"""Integrations with the tools around PyTorch, each an optional extra."""
