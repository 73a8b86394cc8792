"""Where kvbus keeps its files on this machine."""

import os
from pathlib import Path


def state_root() -> Path:
    """State of running systems: logs, data of the embedded nats-server (XDG_STATE_HOME)."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kvbus"


def models_dir() -> Path:
    """Prepared models (KVBUS_CACHE_DIR, else XDG_CACHE_HOME)."""
    own = os.environ.get("KVBUS_CACHE_DIR")
    return (Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvbus") / "models"
