"""Limits of a transfer agent. Each is counted where it is met; see `TransferCounters`."""

import msgspec


class TransferLimits(msgspec.Struct, frozen=True, kw_only=True):
    """
    ``peer_bytes``: bytes under way to or from one peer, each direction for itself; what is beyond waits. A single block must fit.
    ``batch_bytes``: a read of more is done piece by piece, so that others get their turn.
    ``inline_copy_bytes``: copies by shm up to this size are done on the loop's thread (2 MiB: about 0.2 ms), and by nixl and ucx
    when no other is under way.
    ``leases``: that this agent has granted and not ended. ``lease_s``: the longest.
    ``connections``: idle ones kept per peer. ``inbound``: connections of all peers together.
    ``deadline_s``: the longest that a transfer may take, whatever is asked.
    ``backend_rest_s``: for so long a backend that failed with a peer is left out, then tried again.
    ``hello_s``: to connect and say who one is.
    """

    peer_bytes: int = 256 << 20
    batch_bytes: int = 32 << 20
    inline_copy_bytes: int = 2 << 20
    leases: int = 4096
    lease_s: float = 600.0
    grant_blocks: int = 65536
    connections: int = 4
    inbound: int = 256
    deadline_s: float = 120.0
    backend_rest_s: float = 10.0
    hello_s: float = 5.0
    notification_bytes: int = 64 << 10

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive")
        if self.batch_bytes > self.peer_bytes:
            raise ValueError("batch_bytes must not be larger than peer_bytes")
