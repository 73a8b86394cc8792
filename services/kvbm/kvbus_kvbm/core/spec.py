"""What blocks have in common that can share memory."""

import msgspec

# Slots begin on a cache line: two workers never write the same line.
_ALIGN_BYTES = 64


class PoolSpec(msgspec.Struct, frozen=True):
    """What blocks must have in common to share a pool."""

    model: str
    kv_layout: str
    block_bytes: int
    block_size: int

    @property
    def slot_bytes(self) -> int:
        return -(-self.block_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
