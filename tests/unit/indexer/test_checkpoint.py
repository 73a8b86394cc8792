from collections.abc import Iterator

import pytest

from kvbus_blocks.plain_index import PlainIndex
from kvbus_indexer.core import checkpoint
from kvbus_indexer.core.catalog import Catalog
from kvbus_indexer.core.checkpoint import SLICE_BLOCKS, Pause
from kvbus_indexer.core.digest import combined, feed_digests
from kvbus_indexer.core.instance import Phase
from kvbus_indexer.core.limits import Limits
from kvbus_testkit.index_events import MODEL, a_kvbm, a_worker, batch, load_report, stored
from kvbus_testkit.instances import block_keys
from kvbus_wire.checkpoint import VERSION, CheckpointFeed, CheckpointHeader, framed, read_checkpoint
from kvbus_wire.kv_events import KvEvents, Removed
from kvbus_wire.message import DecodeFailed
from kvbus_wire.packing import short_keys


def a_catalog(*messages: KvEvents, limits: Limits | None = None) -> Catalog:
    """Of a worker and a kvbm; the messages are the stream, from number 1 on."""
    catalog = Catalog(limits or Limits(), PlainIndex)
    catalog.joined(a_worker(), 0.0)
    catalog.joined(a_kvbm(), 0.0)
    deliver(catalog, *messages)
    return catalog


def deliver(catalog: Catalog, *messages: KvEvents) -> None:
    for message in messages:
        seq = catalog.repairs.position + 1
        catalog.delivered(seq, 0.0)
        catalog.apply(message, 0.0, seq)


def saving(catalog: Catalog) -> Iterator[bytes | Pause]:
    return checkpoint.save(catalog, stream="s", indexer_id="i", saved_ms=0)


def save(catalog: Catalog) -> bytes:
    return b"".join(part for part in saving(catalog) if not isinstance(part, Pause))


def restore(catalog: Catalog, data: bytes) -> None:
    header, feeds = read_checkpoint(data)
    catalog.begin_restore(header.stream_seq)
    for feed in feeds:
        for _ in checkpoint.restore(catalog, feed, 0.0):
            pass


def digest(catalog: Catalog) -> str:
    catalog.check_integrity()
    return combined(feed_digests(catalog))


def depths(catalog: Catalog, *numbers: int) -> dict[str, int]:
    return {m.instance_id: m.depth for m in catalog.match(MODEL, short_keys(block_keys(*numbers)), 0.0)}


def long_chains(count: int) -> KvEvents:
    """Each takes a slice to handle."""
    return batch(*(stored(*range(n * SLICE_BLOCKS + 1, (n + 1) * SLICE_BLOCKS + 1)) for n in range(count)), seq=1)


EVENTS = (
    batch(stored(1, 2, 3), stored(20, 30, parent=1), stored(9, parent=8), seq=1),
    batch(stored(1, 2), seq=1, worker="k1", tier="g2"),
    batch(stored(5), seq=1, worker="k1", tier="g3", model="other"),
    batch(Removed(block_keys(2)), seq=4),
)


def test_a_restored_catalog_is_the_saved_one_with_orphans_branches_tiers_and_models() -> None:
    before, after = a_catalog(*EVENTS), a_catalog()
    restore(after, save(before))
    assert digest(after) == digest(before)
    assert depths(after, 1, 2, 3) == {"w1": 1, "k1": 2}
    for catalog in (before, after):
        catalog.stream_caught_up(0.0)
        deliver(catalog, batch(stored(2, parent=1), seq=5))
    assert depths(after, 1, 2, 3) == {"w1": 3, "k1": 2}
    assert digest(after) == digest(before)
    assert not after.repairs.due(0.0), "nobody has to be asked"


def test_events_that_apply_while_it_is_saved_and_are_read_again_behind_it_change_nothing() -> None:
    before = a_catalog(*EVENTS[:2])
    parts = saving(before)
    data = [next(parts)]
    deliver(before, *EVENTS[2:])
    data += [part for part in parts if not isinstance(part, Pause)]
    after = a_catalog()
    restore(after, b"".join(part for part in data if not isinstance(part, Pause)))
    assert after.repairs.position == 2
    deliver(after, *EVENTS[2:])
    assert digest(after) == digest(before)
    assert after.repairs.in_phase(Phase.LIVE) == 2


def test_an_instance_that_is_gone_or_has_restarted_is_not_brought_back() -> None:
    data = save(a_catalog(*EVENTS))
    after = Catalog(Limits(), PlainIndex)
    after.joined(a_worker(incarnation=2), 0.0)
    restore(after, data)
    after.check_integrity()
    assert after.content.entries == 0
    after.stream_caught_up(0.0)
    assert [order.reason for order in after.repairs.due(0.0)] == ["unseen"]


def test_an_instance_that_leaves_while_it_is_restored_leaves_nothing() -> None:
    data = save(a_catalog(long_chains(2)))
    after = a_catalog()
    header, feeds = read_checkpoint(data)
    after.begin_restore(header.stream_seq)
    parts = checkpoint.restore(after, next(feeds), 0.0)
    next(parts)
    assert after.content.entries
    after.left("w1")
    after.joined(a_worker(), 0.0)
    assert all(isinstance(part, Pause) for part in parts)
    assert after.content.entries == 0
    after.check_integrity()


def test_what_is_not_known_to_be_right_or_whole_is_not_saved() -> None:
    limits = Limits(max_entries=3)
    full = a_catalog(batch(stored(1, 2), seq=1), batch(stored(3, 4, 5), seq=1, worker="k1", tier="g2"), limits=limits)
    full.stream_caught_up(0.0)
    assert full.partial_instances == 1
    gap = a_catalog(batch(stored(1), seq=1), batch(stored(2), seq=9))
    for catalog, saved in ((full, {"w1"}), (gap, set())):
        _, feeds = read_checkpoint(save(catalog))
        assert {feed.instance_id for feed in feeds} == saved


def test_an_instance_that_turns_out_to_lack_events_while_it_is_saved_is_left_out_as_a_whole() -> None:
    """Half of its feeds would keep it from being asked for the others after a restart."""
    catalog = a_catalog(
        batch(*long_chains(1).events, seq=1, worker="k1", tier="g2"), batch(stored(1), seq=1, worker="k1", tier="g3")
    )
    parts = saving(catalog)
    data = [next(parts), next(parts)]
    assert isinstance(data[1], Pause), "the first feed is being saved"
    deliver(catalog, batch(stored(2), seq=9, worker="k1", tier="g3"))
    _, feeds = read_checkpoint(b"".join(part for part in [*data, *parts] if not isinstance(part, Pause)))
    assert list(feeds) == []


def test_a_stream_that_has_lost_what_lies_behind_makes_the_restored_content_worthless() -> None:
    data = save(a_catalog(*EVENTS))
    after = a_catalog()
    restore(after, data)
    after.delivered(6, 0.0)
    after.apply(batch(stored(7), seq=6), 0.0, 6)
    assert after.content.entries == 0
    after.stream_caught_up(0.0)
    assert {(order.instance_id, order.reason) for order in after.repairs.due(0.0)} == {("w1", "gap"), ("k1", "unseen")}


def test_a_stream_that_was_replaced_before_it_was_read_does_so_too() -> None:
    after = a_catalog()
    restore(after, save(a_catalog(*EVENTS)))
    after.stream_replaced(0.0)
    assert after.content.entries == 0
    after.delivered(1, 0.0)
    after.apply(batch(stored(7), seq=1), 0.0, 1)
    assert depths(after, 7) == {"w1": 1}


def test_restored_content_that_lags_behind_the_worker_is_repaired() -> None:
    after = a_catalog()
    restore(after, save(a_catalog(*EVENTS)))
    after.stream_caught_up(0.0)
    after.load_report(load_report(7), 0.0)
    (order,) = after.repairs.due(1.0)
    assert (order.reason, order.replay and order.replay.after) == ("lag", 4)


def test_nothing_is_restored_into_a_catalog_that_answers_already() -> None:
    after = a_catalog()
    after.stream_caught_up(0.0)
    restore(after, save(a_catalog(*EVENTS)))
    assert after.content.entries == 0


def test_between_two_pauses_only_so_many_blocks_are_handled() -> None:
    catalog, after = a_catalog(long_chains(3)), a_catalog()
    assert len([part for part in saving(catalog) if isinstance(part, Pause)]) == 9
    header, feeds = read_checkpoint(save(catalog))
    after.begin_restore(header.stream_seq)
    assert len(list(checkpoint.restore(after, next(feeds), 0.0))) == 3


def test_a_long_chain_is_one_chain() -> None:
    catalog = a_catalog(batch(stored(*range(1, 1001)), stored(2000, 2001, parent=500), seq=1))
    _, feeds = read_checkpoint(save(catalog))
    assert sorted(len(feed.lengths) // 4 for feed in feeds) == [2]


HEADER = CheckpointHeader(version=VERSION, stream="s", stream_seq=1, indexer_id="i", saved_ms=0)
FEED = CheckpointFeed(
    instance_id="w1",
    incarnation=1,
    model=MODEL,
    tier="g1",
    kv_seq=1,
    keys=bytes(8),
    lengths=b"\1\0\0\0",
    parents=bytes(8),
)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        framed(HEADER)[:-1],
        framed(FEED),
        framed(CheckpointHeader(version=VERSION + 1, stream="s", stream_seq=1, indexer_id="i", saved_ms=0)),
        framed(HEADER) + framed(HEADER),
        framed(HEADER) + framed(FEED)[:-1],
        framed(HEADER) + framed(FEED) + b"\x01",
    ],
)
def test_what_is_no_checkpoint_of_this_version_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeFailed):
        restore(a_catalog(), data)


@pytest.mark.parametrize(
    ("keys", "lengths", "parents"),
    [
        (bytes(8), b"\2\0\0\0", bytes(8)),
        (bytes(7), b"\1\0\0\0", bytes(8)),
        (bytes(8), b"\1\0\0\0", bytes(16)),
        (bytes(8), b"\0\0\0\0\1\0\0\0", bytes(16)),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(keys: bytes, lengths: bytes, parents: bytes) -> None:
    feed = CheckpointFeed(
        instance_id="w1", incarnation=1, model=MODEL, tier="g1", kv_seq=1, keys=keys, lengths=lengths, parents=parents
    )
    with pytest.raises(DecodeFailed):
        restore(a_catalog(), framed(HEADER) + framed(feed))


def test_a_digest_tells_content_apart_and_not_the_order_in_which_it_came() -> None:
    one = a_catalog(batch(stored(1, 2), stored(7), seq=1))
    other = a_catalog(batch(stored(7), stored(9), stored(1), stored(2, parent=1), Removed(block_keys(9)), seq=1))
    third = a_catalog(batch(stored(1, 2), stored(8), seq=1))
    empty = a_catalog(batch(Removed(block_keys(1)), seq=1))
    assert digest(one) == digest(other)
    assert len({digest(one), digest(third), digest(empty)}) == 3
    assert digest(empty) == digest(a_catalog())
    (feed,) = feed_digests(one)
    assert (feed.entries, feed.key_sum, feed.kv_seq) == (3, 10, 2)
