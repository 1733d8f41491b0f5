"""The `nmd` command: it parses, calls the library, and prints. Results go to stdout, everything else to stderr."""

from neuralmean.cli.app import main

__all__ = ["main"]
