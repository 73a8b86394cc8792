"""Moving KV blocks between processes of one host: the shared-memory arena and the checksum of a block. No bus, no asyncio."""

from kvbus_transfer.arena import (
    Arena,
    ArenaClosed,
    ArenaError,
    ArenaExists,
    ArenaMismatch,
    ArenaNoRoom,
    ArenaUnavailable,
    checksum,
    copy_and_checksum,
    remove_stale,
)

__all__ = [
    "Arena",
    "ArenaClosed",
    "ArenaError",
    "ArenaExists",
    "ArenaMismatch",
    "ArenaNoRoom",
    "ArenaUnavailable",
    "checksum",
    "copy_and_checksum",
    "remove_stale",
]
