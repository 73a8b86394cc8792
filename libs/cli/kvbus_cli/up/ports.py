"""Free ports for services that this command starts."""

import random
import socket
from collections.abc import Callable

# Below the range from which the kernel takes ports of outgoing connections (32768 and up by default): a port that is free now
# is not taken by chance before the service binds it.
FIRST, LAST = 20000, 32000


def is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError):  # taken, not ours, or no port at all
            return False
    return True


def free_port_picker(rng: random.Random) -> Callable[[], int]:
    """Each call gives another port of 127.0.0.1 that nobody listens on. Raise RuntimeError when none is left."""
    ports = iter(rng.sample(range(FIRST, LAST), LAST - FIRST))

    def pick() -> int:
        for port in ports:
            if is_free("127.0.0.1", port):
                return port
        raise RuntimeError(f"no free port between {FIRST} and {LAST}")

    return pick
