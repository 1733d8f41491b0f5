"""The user's cache folder, whose content is trusted because nobody else may write to it."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from neuralmean.errors import InputError


def cache_folder(name: str) -> Path:
    """Return a private folder in the user's cache, created if missing.

    Raises:
        InputError: Others may write to it.
    """
    if sys.platform == "win32":
        root = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches"
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "neuralmean" / name
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise InputError(f"the cache folder {str(folder)!r} cannot be created ({error.strerror})") from error
    if hasattr(os, "getuid"):
        found = folder.lstat()
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if not is_own or stat.S_IMODE(found.st_mode) & 0o077:
            raise InputError(f"{str(folder)!r} must be a folder of your own that nobody else may use (mode 0700)")
    return folder
