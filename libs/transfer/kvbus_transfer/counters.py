"""What an agent has done: plain numbers, for metrics of whoever owns it."""

from collections import Counter


class TransferCounters:
    """``read_bytes``, ``reads``: done, by backend. ``served_bytes``: sent by this agent itself (one-sided reads are not seen).
    ``refused``: grants of this agent, by reason. ``failed``: reads of this agent, by error code. ``fallbacks``: by the backend
    that failed. ``leases_ended``: by how."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()
        self.read_bytes: Counter[str] = Counter()
        self.served_bytes: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.leases_ended: Counter[str] = Counter()
        self.unknown_peers = 0
        self.turned_away = 0
        self.checksums = 0
