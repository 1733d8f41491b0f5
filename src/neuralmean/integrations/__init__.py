"""Integrations with the tools around PyTorch, each an optional extra.

Importing this package imports none of them. Each module imports its own tool at the top, since a callback must derive from
the tool's own class; without the tool, that import is an error that names the extra.
"""
