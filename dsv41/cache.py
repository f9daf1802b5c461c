"""Where caches lie."""

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """The folder for caches when none is given.

    Returns:
        ``$DSV41_CACHE`` if set, else ``$XDG_CACHE_HOME/dsv41``, else ``~/.cache/dsv41``. It need not exist.

    Raises:
        RuntimeError: The folder is meant to lie in a home directory that cannot be found.
    """
    if own := os.environ.get("DSV41_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "dsv41"
    return Path.home() / ".cache" / "dsv41"
