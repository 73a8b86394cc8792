"""The token ids behind the blocks in G1, so that only the tokens after a known prefix need to cross the bus.

Fed with the engine's block events, in order. It holds at most as many blocks as the engine. Entries lie in the order they were
stored; a block is stored only while its parent is in G1, so parents precede their children.
"""

from collections.abc import Sequence

import msgspec

from kvbus_blocks.keys import ROOT, chain_keys
from kvbus_worker.engines.base import BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored


class StoredBlock(msgspec.Struct, frozen=True):
    parent: bytes
    tokens: bytes


class Prefix(msgspec.Struct, frozen=True):
    """A chain from the root: ``tokens`` packed, ``keys`` of its blocks."""

    tokens: bytes
    keys: list[bytes]


class TokenStore:
    """``refused``: blocks that came after the capacity was reached, which an engine that counts right never causes."""

    def __init__(self, capacity: int, block_size: int) -> None:
        self._capacity = capacity
        self._block_size = block_size
        self._blocks: dict[bytes, StoredBlock] = {}
        self.refused = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def apply(self, event: BlockEvent) -> None:
        match event:
            case BlocksStored(parent, keys, tokens):
                for key, packed in zip(keys, tokens, strict=True):
                    self._store(parent, key, packed)
                    parent = key
            case BlocksRemoved(keys):
                for key in keys:
                    self._blocks.pop(key, None)
            case BlocksCleared():
                self._blocks.clear()

    def resolve(self, key: bytes, domain_key: bytes) -> Prefix | None:
        """The chain that ends with ``key``; None when a part of it is gone or it belongs to another cache domain."""
        chain: list[StoredBlock] = []
        keys: list[bytes] = []
        while key != ROOT:
            block = self._blocks.get(key)
            if block is None:
                return None
            chain.append(block)
            keys.append(key)
            key = block.parent
        if not chain:
            return None
        keys.reverse()
        # The root block's key proves the domain for the whole chain: an engine links blocks of one domain only.
        if chain_keys(domain_key, chain[-1].tokens, self._block_size)[:1] != keys[:1]:
            return None
        return Prefix(b"".join(block.tokens for block in reversed(chain)), keys)

    def chain(self, key: bytes) -> list[bytes]:
        """Keys from the root's block to ``key``; empty when a part is gone."""
        keys: list[bytes] = []
        while key != ROOT:
            block = self._blocks.get(key)
            if block is None:
                return []
            keys.append(key)
            key = block.parent
        keys.reverse()
        return keys

    def links(self) -> Sequence[tuple[bytes, bytes]]:
        """(key, parent) of all blocks, parents first: a copy that later events do not change."""
        return [(key, block.parent) for key, block in self._blocks.items()]

    def check_integrity(self) -> None:
        """Raise AssertionError when a block precedes its parent or the capacity is exceeded."""
        seen: set[bytes] = set()
        for key, block in self._blocks.items():
            if block.parent != ROOT and block.parent not in seen:
                raise AssertionError(f"block {key.hex()} does not follow its parent")
            seen.add(key)
        if len(self._blocks) > self._capacity:
            raise AssertionError("more blocks than the engine has")

    def _store(self, parent: bytes, key: bytes, tokens: bytes) -> None:
        if key in self._blocks:
            return
        if len(self._blocks) >= self._capacity:
            self.refused += 1
            return
        self._blocks[key] = StoredBlock(parent, tokens)
