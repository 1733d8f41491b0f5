"""Integrations with the tools around PyTorch, each an optional extra.

Importing this package imports none of them. Each module imports its own tool at the top, because a callback must derive from
the tool's own class; without the tool, the import is an error that names the extra.
"""
