"""`python -m neuralmean`: the command `nmd`, where scripts are not on the path."""

from __future__ import annotations

from neuralmean.cli import main

if __name__ == "__main__":
    main()
