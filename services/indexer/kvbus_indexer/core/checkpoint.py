"""The catalog's content as bytes and back, a slice at a time, so that questions are answered meanwhile.

Each feed is copied at one moment, with the number of its last event, but different feeds at different moments. With the events
behind ``stream_seq``, the place in the stream at which the copying began, that is right: what a copy has already is a duplicate.
"""

import sys
from array import array
from collections.abc import Iterator
from typing import NamedTuple

from kvbus_blocks.index import Held
from kvbus_indexer.core.catalog import Catalog
from kvbus_indexer.core.instance import FeedKey, Instance, Phase
from kvbus_wire.checkpoint import VERSION, CheckpointFeed, CheckpointHeader, framed
from kvbus_wire.message import DecodeFailed

SLICE_BLOCKS = 2048
"""Blocks handled between two pauses: one or two milliseconds."""


class Pause(NamedTuple):
    """Nothing to hand on yet; a good moment to do something else."""


PAUSE = Pause()


def save(catalog: Catalog, *, stream: str, indexer_id: str, saved_ms: int) -> Iterator[bytes | Pause]:
    """The parts of a checkpoint. Instances that are being repaired or are incomplete are left out: they are asked again after
    a restart."""
    header = CheckpointHeader(
        version=VERSION,
        stream=stream,
        stream_seq=catalog.repairs.position,
        indexer_id=indexer_id,
        saved_ms=saved_ms,
    )
    yield framed(header)
    for instance in catalog.all_instances():
        feeds = []
        for feed in list(instance.applied):
            if not _is_whole(catalog, instance):
                break
            kv_seq = instance.applied.get(feed)
            if kv_seq is None:
                continue
            chains: _Chains | None = None
            for chains in _chains(catalog.held(instance, feed)):
                if chains is None:
                    yield PAUSE
            assert chains is not None  # noqa: S101 (the last one is not a pause)
            feeds.append(_saved(instance, feed, kv_seq, chains))
        if _is_whole(catalog, instance):
            # All feeds or none: who has one is not asked for the others after a restart.
            yield from feeds


def _is_whole(catalog: Catalog, instance: Instance) -> bool:
    is_known = catalog.instance(instance.instance_id) is instance
    return is_known and instance.phase is Phase.LIVE and not instance.partial


def _saved(instance: Instance, feed: FeedKey, kv_seq: int, chains: "_Chains") -> bytes:
    return framed(
        CheckpointFeed(
            instance_id=instance.instance_id,
            incarnation=instance.incarnation,
            model=feed.model,
            tier=feed.tier,
            kv_seq=kv_seq,
            keys=_packed(chains.keys),
            lengths=_packed(chains.lengths),
            parents=_packed(chains.parents),
        )
    )


def restore(catalog: Catalog, feed: CheckpointFeed, now: float) -> Iterator[Pause]:
    """Enter what still holds: the content of the incarnations that the directory knows. Raise DecodeFailed."""
    key = FeedKey(feed.model, feed.tier)
    keys, lengths, parents = _unpacked("Q", feed.keys), _unpacked("I", feed.lengths), _unpacked("Q", feed.parents)
    if len(lengths) != len(parents) or sum(lengths) != len(keys) or 0 in lengths:
        raise DecodeFailed("a checkpoint whose parts do not fit together")
    if not catalog.restore(feed.instance_id, feed.incarnation, key, feed.kv_seq):
        return
    start = since_pause = 0
    for length, parent in zip(lengths, parents, strict=True):
        chain = keys[start : start + length]
        catalog.restore_chain(feed.instance_id, key, None if parent == chain[0] else parent, chain, now)
        start += length
        since_pause += length
        if since_pause >= SLICE_BLOCKS:
            since_pause = 0
            yield PAUSE


class _Chains(NamedTuple):
    keys: "array[int]"
    lengths: "array[int]"
    parents: "array[int]"


def _chains(held: Held) -> Iterator[_Chains | None]:
    """Blocks one after the other, as long as each has a child: half the size, and stored many times faster. None is a pause."""
    child_of: dict[int, int] = {}
    heads: list[tuple[int, int]] = []
    owned: set[int] = set()
    for first in range(0, len(held.keys), SLICE_BLOCKS):
        owned.update(held.keys[first : first + SLICE_BLOCKS])
        yield None
    for number, (key, parent) in enumerate(zip(held.keys, held.parents, strict=True)):
        if parent == key or parent not in owned or parent in child_of:
            heads.append((key, parent))
        else:
            child_of[parent] = key
        if not (number + 1) % SLICE_BLOCKS:
            yield None
    keys, lengths, parents = array("Q"), array("I"), array("Q")
    for head, parent in heads:
        begin = len(keys)
        block: int | None = head
        while block is not None:
            keys.append(block)
            block = child_of.get(block)
            if not len(keys) % SLICE_BLOCKS:
                yield None
        lengths.append(len(keys) - begin)
        parents.append(parent)
    yield _Chains(keys, lengths, parents)


def _packed(values: "array[int]") -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _unpacked(kind: str, data: bytes) -> "array[int]":
    values = array(kind)
    if len(data) % values.itemsize:
        raise DecodeFailed("a checkpoint with half a number")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
