"""Moving KV blocks between processes and hosts: the shared-memory arena, and the transfer agent with its backends. No bus."""

from kvbus_transfer.agent import Tls, TransferAgent
from kvbus_transfer.arena import (
    Arena,
    ArenaClosed,
    ArenaError,
    ArenaExists,
    ArenaMismatch,
    ArenaNoRoom,
    ArenaUnavailable,
    checksum,
    remove_stale,
)
from kvbus_transfer.counters import TransferCounters
from kvbus_transfer.errors import (
    BackendFailed,
    ChecksumMismatch,
    GrantRefused,
    LimitReached,
    PeerLost,
    PeerUnreachable,
    Refusal,
    TransferError,
    TransferTimeout,
)
from kvbus_transfer.grants import AgentInfo
from kvbus_transfer.host_memory import host_memory
from kvbus_transfer.layout import KvLayout, LayoutMismatch, Relayout, fingerprint, why_not
from kvbus_transfer.leases import LeaseEnd
from kvbus_transfer.limits import TransferLimits
from kvbus_transfer.ownership import Granted
from kvbus_transfer.regions import FileSegment, Region
from kvbus_transfer.verified import copy_verified

__all__ = [
    "AgentInfo",
    "Arena",
    "ArenaClosed",
    "ArenaError",
    "ArenaExists",
    "ArenaMismatch",
    "ArenaNoRoom",
    "ArenaUnavailable",
    "BackendFailed",
    "ChecksumMismatch",
    "FileSegment",
    "GrantRefused",
    "Granted",
    "KvLayout",
    "LayoutMismatch",
    "LeaseEnd",
    "LimitReached",
    "PeerLost",
    "PeerUnreachable",
    "Refusal",
    "Region",
    "Relayout",
    "Tls",
    "TransferAgent",
    "TransferCounters",
    "TransferError",
    "TransferLimits",
    "TransferTimeout",
    "checksum",
    "copy_verified",
    "fingerprint",
    "host_memory",
    "remove_stale",
    "why_not",
]
