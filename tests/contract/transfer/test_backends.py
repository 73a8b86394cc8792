"""What every backend promises, between two processes and between two network namespaces."""

import asyncio
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbus_testkit.timing import eventually, scaled
from kvbus_testkit.transfer import PeerError, TransferPeer
from kvbus_testkit.transfer_peer import pattern
from kvbus_transfer import (
    GrantRefused,
    PeerLost,
    PeerUnreachable,
    Refusal,
    TransferAgent,
    TransferError,
    TransferLimits,
)
from kvbus_transfer.backends.shm import ShmBackend
from tests.contract.transfer.conftest import LIMITS, Place, peer_of

MIB = 1 << 20


def kind_for(backend: str) -> str:
    return "arena" if backend == "shm" else "host"


@pytest.fixture
def region(owner: TransferPeer, backend: str) -> int:
    return owner.register(kind_for(backend), 6 * MIB, 1)


DATA = pattern(6 * MIB, 1)


async def test_scattered_blocks_arrive_where_they_are_wanted(
    owner: TransferPeer, reader: TransferAgent, region: int, backend: str
) -> None:
    segments = [(5 * MIB, 1000), (0, MIB), (3 * MIB + 7, 64), (5 * MIB, 1000)]
    grant, lease = owner.grant(region, segments, peer="reader")
    memory = bytearray(4 * MIB)
    view = memoryview(memory)
    targets = [view[0:1000], view[5000 : 5000 + MIB], view[2000:2064], view[3000:4000]]
    assert await reader.read(grant, [0, 1, 2, 3], targets, checksum=True) == backend
    for (offset, length), target in zip(segments, targets, strict=True):
        assert target == DATA[offset : offset + length]
    assert memory[1000:2000] == bytes(1000), "beside the targets nothing changes"
    assert await reader.read(grant, [2], [targets[0][:64]]) == backend
    assert targets[0][:64] == DATA[3 * MIB + 7 : 3 * MIB + 71]
    owner.ask("release", lease=lease)


async def test_a_read_of_more_than_may_be_under_way_is_done_in_pieces(
    owner: TransferPeer, reader: TransferAgent, region: int
) -> None:
    segments = [(i * MIB, MIB) for i in range(6)] * 4
    grant, _ = owner.grant(region, segments, peer="reader")
    target = bytearray(24 * MIB)
    views = [memoryview(target)[i * MIB : (i + 1) * MIB] for i in range(24)]
    await reader.read(grant, range(24), views)
    assert target == DATA * 4
    await reader.finish(grant)


async def test_many_reads_at_once_keep_apart(owner: TransferPeer, reader: TransferAgent, region: int) -> None:
    grant, _ = owner.grant(region, [(i * 100_000, 100_000) for i in range(60)], peer="reader")
    targets = [[bytearray(100_000) for _ in range(6)] for _ in range(10)]
    await asyncio.gather(*(reader.read(grant, range(i * 6, i * 6 + 6), targets[i]) for i in range(10)))
    assert b"".join(bytes(each) for row in targets for each in row) == DATA[:6_000_000]
    await reader.finish(grant)


async def test_nothing_is_asked_for_and_nothing_comes(owner: TransferPeer, reader: TransferAgent, region: int) -> None:
    grant, _ = owner.grant(region, [(0, 8)], peer="reader")
    await reader.read(grant, [], [])
    await reader.finish(grant)


@pytest.mark.parametrize("byte", [1, 40, -20, -1])
async def test_a_grant_that_was_changed_is_refused(
    owner: TransferPeer, reader: TransferAgent, region: int, byte: int
) -> None:
    grant, lease = owner.grant(region, [(0, 64)], peer="reader")
    forged = bytearray(grant)
    forged[byte] ^= 1
    target = bytearray(64)
    with pytest.raises((GrantRefused, PeerUnreachable)):
        await reader.read(bytes(forged), [0], [target], deadline_s=scaled(10))
    assert target == bytes(64)
    owner.ask("release", lease=lease)


async def test_a_grant_for_another_peer_is_refused(owner: TransferPeer, reader: TransferAgent, region: int) -> None:
    grant, lease = owner.grant(region, [(0, 64)], peer="somebody-else")
    with pytest.raises(GrantRefused) as refused:
        await reader.read(grant, [0], [bytearray(64)])
    assert refused.value.reason is Refusal.WRONG_PEER
    owner.ask("release", lease=lease)


async def test_what_the_grant_does_not_name_cannot_be_read(
    owner: TransferPeer, reader: TransferAgent, region: int
) -> None:
    grant, lease = owner.grant(region, [(0, 64)], peer="reader")
    for index in (1, -1):
        with pytest.raises(GrantRefused) as refused:
            await reader.read(grant, [index], [bytearray(64)])
        assert refused.value.reason is Refusal.OUT_OF_RANGE
    owner.ask("release", lease=lease)
    for segment in ([6 * MIB - 1, 2], [-1, 4], [0, 0]):
        with pytest.raises(PeerError):
            owner.ask("grant", region=region, segments=[segment], lease_s=5.0)


async def test_after_the_end_of_a_lease_nothing_counts_as_read(
    owner: TransferPeer, reader: TransferAgent, region: int
) -> None:
    grant, lease = owner.grant(region, [(0, MIB)], peer="reader")
    await reader.read(grant, [0], [bytearray(MIB)])
    assert owner.ask("release", lease=lease) == {"released": True}
    assert owner.ask("release", lease=lease) == {"released": False}
    with pytest.raises(GrantRefused) as refused:
        await reader.read(grant, [0], [bytearray(MIB)])
    assert refused.value.reason is Refusal.RELEASED


async def test_a_lease_expires_by_itself(owner: TransferPeer, reader: TransferAgent, region: int) -> None:
    grant, lease = owner.grant(region, [(0, MIB)], 0.05, peer="reader")
    await eventually(lambda: owner.ask("state")["leases"] == 0)
    assert [lease, "expired"] in owner.ask("state")["ended"]
    with pytest.raises(GrantRefused) as refused:
        await reader.read(grant, [0], [bytearray(MIB)])
    assert refused.value.reason is Refusal.EXPIRED


async def test_a_region_that_is_gone_is_stale(owner: TransferPeer, reader: TransferAgent, backend: str) -> None:
    region = owner.register(kind_for(backend), MIB, 2)
    grant, _ = owner.grant(region, [(0, MIB)], peer="reader")
    await reader.read(grant, [0], [bytearray(MIB)])
    owner.ask("deregister", region=region)
    with pytest.raises(GrantRefused):
        await reader.read(grant, [0], [bytearray(MIB)])


async def test_memory_that_is_used_again_at_once_never_passes_for_blocks(
    owner: TransferPeer, reader: TransferAgent, backend: str
) -> None:
    """The lease ends and the memory is overwritten while it is read, at any moment: whole blocks or an error."""
    moments = random.Random(3)
    for _ in range(6):
        region = owner.register(kind_for(backend), 4 * MIB, 4)
        grant, lease = owner.grant(region, [(i * MIB, MIB) for i in range(4)], peer="reader")
        targets = [bytearray(MIB) for _ in range(4)]
        reading = asyncio.create_task(reader.read(grant, range(4), targets))
        await asyncio.sleep(moments.random() * 0.004)
        await asyncio.to_thread(owner.ask, "release", lease=lease, scramble=region)
        try:
            await reading
        except TransferError:
            pass
        else:
            assert b"".join(map(bytes, targets)) == pattern(4 * MIB, 4)
        owner.ask("deregister", region=region)


async def test_a_cancelled_read_leaves_its_targets_alone(
    owner: TransferPeer, reader: TransferAgent, region: int
) -> None:
    grant, _ = owner.grant(region, [(0, 4 * MIB)], peer="reader")
    moments = random.Random(5)
    for _ in range(6):
        target = bytearray(4 * MIB)
        reading = asyncio.create_task(reader.read(grant, [0], [target]))
        await asyncio.sleep(moments.random() * 0.003)
        reading.cancel()
        await asyncio.wait([reading])
        target[:] = bytes(4 * MIB)
        again = bytearray(4 * MIB)
        await reader.read(grant, [0], [again])
        assert again == DATA[: 4 * MIB]
        assert target == bytes(4 * MIB)
    await reader.finish(grant)


async def test_writing_is_done_by_the_owner_of_the_memory(
    owner: TransferPeer, reader: TransferAgent, backend: str
) -> None:
    region = owner.register(kind_for(backend), MIB, 6)
    grant, lease = owner.grant(region, [(0, 1000), (5000, 3000)], peer="reader", access="write")
    source = reader.register(bytearray(pattern(8000, 7)))
    await reader.write(grant, [1, 0], source, [(1000, 3000), (0, 1000)], checksum=True)
    assert owner.bytes(region, 0, 1000) == pattern(8000, 7)[:1000]
    assert owner.bytes(region, 5000, 3000) == pattern(8000, 7)[1000:4000]
    assert owner.bytes(region, 1000, 4000) == pattern(MIB, 6)[1000:5000]
    with pytest.raises(GrantRefused) as refused:
        await reader.read(grant, [0], [bytearray(1000)])
    assert refused.value.reason is Refusal.WRONG_ACCESS
    owner.ask("release", lease=lease)
    with pytest.raises(GrantRefused):
        await reader.write(grant, [0], source, [(0, 1000)])
    readable, lease = owner.grant(region, [(0, 1000)], peer="reader")
    with pytest.raises(GrantRefused) as refused:
        await reader.write(readable, [0], source, [(0, 1000)])
    assert refused.value.reason is Refusal.WRONG_ACCESS
    owner.ask("release", lease=lease)
    reader.deregister(source)


async def test_a_notification_says_who_sent_it(owner: TransferPeer, reader: TransferAgent, backend: str) -> None:
    await reader.notify(owner.info(), f"by {backend}".encode())
    assert ["reader", f"by {backend}"] in owner.ask("state")["notified"]


async def test_another_layout_is_refused_before_anything_moves(
    owner: TransferPeer, reader: TransferAgent, backend: str
) -> None:
    region = owner.register(kind_for(backend), 4096, 8, layout="a")
    grant, lease = owner.grant(region, [(0, 4096)], peer="reader")
    with pytest.raises(GrantRefused) as refused:
        await reader.read(grant, [0], [bytearray(4096)], layout="b")
    assert refused.value.reason is Refusal.WRONG_LAYOUT
    await reader.read(grant, [0], [bytearray(4096)], layout="a")
    owner.ask("release", lease=lease)


async def test_an_owner_that_dies_is_an_error_and_its_successor_does_not_honour_old_grants(
    place: Place, backend: str, reader: TransferAgent
) -> None:
    with peer_of(place, backend, "mortal") as peer:
        region = peer.register(kind_for(backend), 4 * MIB, 9)
        grant, _ = peer.grant(region, [(0, 4 * MIB)], peer="reader")
        reading = [asyncio.create_task(reader.read(grant, [0], [bytearray(4 * MIB)])) for _ in range(4)]
        await asyncio.sleep(0)
        peer.kill()
        for each in await asyncio.gather(*reading, return_exceptions=True):
            assert isinstance(each, str | TransferError)
        # What was mapped stays whole when its owner dies; a new reader finds nobody.
        async with TransferAgent("late", secret=b"of the cluster", backends=[backend]) as late:
            with pytest.raises((PeerLost, PeerUnreachable)):
                await late.read(grant, [0], [bytearray(4 * MIB)], deadline_s=scaled(20))
    assert reader.reader.bytes_under_way() == 0
    await eventually(lambda: not reader.reader.knows("mortal"), what="that all of the dead owner is forgotten")
    if isinstance(shm := reader.backends.get("shm"), ShmBackend):
        assert shm.mapped_bytes() == 0, "its memory is free"


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_list_of_blocks_arrives(
    shared_owner: TransferPeer, place: Place, backend: str, data: st.DataObject
) -> None:
    """Sizes around those where a piece, a batch or a page ends, in any order, some cancelled in the middle."""
    size = 3 * MIB
    lengths = st.one_of(
        st.integers(1, 300), st.sampled_from([4095, 4096, 4097, 65_535, 65_536, 65_537, MIB - 1, MIB + 1])
    )
    segments = data.draw(
        st.lists(lengths.flatmap(lambda n: st.tuples(st.integers(0, size - n), st.just(n))), min_size=1, max_size=12)
    )
    indices = data.draw(st.lists(st.integers(0, len(segments) - 1), max_size=12))
    cancel_s = data.draw(st.none() | st.floats(0, 0.003))

    async def example() -> None:
        limits = TransferLimits(
            **LIMITS
        )  # as the owner has them: it refuses a batch that is larger than what it may have under way
        async with TransferAgent(
            "reader", secret=b"of the cluster", backends=[backend], limits=limits, host=place.here
        ) as agent:
            region = shared_owner.register(kind_for(backend), size, 11)
            grant, _ = shared_owner.grant(region, segments, peer="reader")
            targets = [bytearray(segments[index][1]) for index in indices]
            reading = asyncio.create_task(agent.read(grant, indices, targets, backend=backend))
            if cancel_s is not None:
                await asyncio.sleep(cancel_s)
                reading.cancel()
            await asyncio.wait([reading])
            if not reading.cancelled():
                reading.result()
                whole = pattern(size, 11)
                for index, target in zip(indices, targets, strict=True):
                    offset, length = segments[index]
                    assert target == whole[offset : offset + length]
            await agent.finish(grant)
            shared_owner.ask("deregister", region=region)

    asyncio.run(example())
    assert shared_owner.ask("state")["leases"] == 0
