"""What only the one-sided reads of UCX can get wrong: memory that is gone, owners that die in a copy, slow networks."""

import asyncio
import importlib.util
import os
import random
import secrets
from collections.abc import Iterator

import pytest

from kvbus_testkit.timing import eventually
from kvbus_testkit.transfer import TransferPeer
from kvbus_testkit.transfer_peer import pattern
from kvbus_transfer import GrantRefused, TransferAgent, TransferError
from kvbus_transfer.backends import ucx_channel
from kvbus_transfer.backends.ucx import UcxBackend
from kvbus_transfer.backends.ucx_channel import Channel, ChannelFailed
from kvbus_transfer.backends.ucx_direct import DirectOwner, DirectReader
from kvbus_transfer.backends.ucx_library import load
from kvbus_transfer.copying import address_of
from tests.contract.transfer.conftest import LIBRARIES, Place, peer_of

MIB = 1 << 20
pytestmark = pytest.mark.skipif(importlib.util.find_spec(LIBRARIES["ucx"]) is None, reason="ucxx is not installed")


@pytest.fixture
def backend() -> str:
    return "ucx"


def one_sided(agent: TransferAgent) -> DirectReader:
    backend = agent.backends["ucx"]
    assert isinstance(backend, UcxBackend)
    assert backend._reader is not None
    return backend._reader


async def test_the_owner_has_no_part_in_a_read(place: Place, backend: str, reader: TransferAgent) -> None:
    with peer_of(place, backend) as owner:
        region = owner.register("host", 3 * MIB, 1)
        grant, lease = owner.grant(region, [(0, 3 * MIB), (5, 16)], peer="reader")
        large, small = bytearray(3 * MIB), bytearray(16)
        await reader.read(grant, [0, 1], [large, small])
        assert large == pattern(3 * MIB, 1)
        assert small == pattern(3 * MIB, 1)[5:21]
        assert owner.ask("state")["served_bytes"] == {}
        owner.ask("release", lease=lease)
    await eventually(lambda: not one_sided(reader)._idle, what="that nothing of an owner that has gone is kept")


@pytest.mark.parametrize("place", ["process"], indirect=True)
async def test_memory_that_is_unmapped_while_it_is_read_is_an_error_and_not_the_end_of_the_process(
    place: Place, backend: str, reader: TransferAgent
) -> None:
    moments = random.Random(7)
    whole = pattern(64 * MIB, 2)
    with peer_of(place, backend) as owner:
        for _ in range(4):
            region = owner.register("host", 64 * MIB, 2)  # so large that it goes back to the kernel when it is freed
            grant, _ = owner.grant(region, [(0, 4 * MIB), (60 * MIB, 4 * MIB)], peer="reader")
            await reader.read(grant, [1], [bytearray(4 * MIB)])
            targets = [bytearray(4 * MIB) for _ in range(2)]
            reading = asyncio.create_task(reader.read(grant, [0, 1], targets))
            await asyncio.sleep(moments.random() * 0.002)
            await asyncio.to_thread(owner.ask, "deregister", region=region)
            try:
                await reading
            except GrantRefused:
                pass
            else:
                assert targets == [whole[: 4 * MIB], whole[60 * MIB :]]
            with pytest.raises(GrantRefused):
                await reader.read(grant, [0], targets[:1])
        assert owner.ask("state")["leases"] == 0


async def test_an_owner_that_is_killed_in_the_middle_of_a_copy_is_an_error(place: Place, backend: str) -> None:
    whole = pattern(16 * MIB, 3)
    for delay_s in (0.0, 0.002):
        async with TransferAgent("reader", secret=b"of the cluster", backends=[backend], host=place.here) as agent:
            with peer_of(place, backend) as owner:
                region = owner.register("host", 16 * MIB, 3)
                grant, _ = owner.grant(region, [(at * MIB, 4 * MIB) for at in range(12)], peer="reader")
                targets = [bytearray(4 * MIB) for _ in range(12)]
                await agent.read(grant, range(12), targets)
                assert all(target == whole[at * MIB : (at + 4) * MIB] for at, target in enumerate(targets))
                readings = [asyncio.create_task(agent.read(grant, range(12), targets)) for _ in range(2)]
                await asyncio.sleep(delay_s)
                owner.kill()
                for each in await asyncio.gather(*readings, return_exceptions=True):
                    assert isinstance(each, str | TransferError)
            assert agent.reader.bytes_under_way() == 0


async def test_an_owner_that_cannot_be_read_one_sided_sends_messages(
    place: Place, backend: str, reader: TransferAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucx_channel, "_EMULATED", {*ucx_channel._EMULATED, "cma"})
    with peer_of(place, backend) as owner:
        region = owner.register("host", MIB, 4)
        grant, lease = owner.grant(region, [(0, MIB)], peer="reader")
        for _ in range(2):
            target = bytearray(MIB)
            assert await reader.read(grant, [0], [target]) == "ucx"
            assert target == pattern(MIB, 4)
        assert owner.ask("state")["served_bytes"] == {"ucx": 2 * MIB}
        assert len(one_sided(reader)._unreachable) == 1
        owner.ask("release", lease=lease)


@pytest.fixture
def slow_owner(place: Place, backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[TransferPeer]:
    """Reads of it are under way for a while and need the owner, as those by RDMA are and do while they connect."""
    monkeypatch.setattr(ucx_channel, "_EMULATED", {"self"})
    monkeypatch.setenv("UCX_TLS", "sysv,self")
    with peer_of(place, backend, "slow") as peer:
        yield peer


@pytest.mark.parametrize("place", ["process"], indirect=True)
async def test_reads_that_do_not_end_at_once_are_waited_for_and_end_when_they_are_cancelled(
    slow_owner: TransferPeer, place: Place, reader: TransferAgent
) -> None:
    region = slow_owner.register("host", 4 * MIB, 5)
    grant, _ = slow_owner.grant(region, [(0, 4 * MIB), (7, 1000)], peer="reader")
    for delay_s in (None, 0.0, 0.001, 0.004, None):
        target, small = bytearray(4 * MIB), bytearray(1000)
        reading = asyncio.create_task(reader.read(grant, [0, 1], [target, small]))
        if delay_s is not None:
            await asyncio.sleep(delay_s)
            reading.cancel()
        await asyncio.wait([reading])
        if not reading.cancelled():
            assert reading.result() == "ucx"
            assert target == pattern(4 * MIB, 5)
            assert small == pattern(4 * MIB, 5)[7:1007]
        target[:] = bytes(4 * MIB)
        await reader.read(grant, [1], [small])
        assert target == bytes(4 * MIB)
    assert slow_owner.ask("state")["served_bytes"] == {}
    readings = [asyncio.create_task(reader.read(grant, [0], [bytearray(4 * MIB)])) for _ in range(3)]
    await asyncio.sleep(0.002)
    slow_owner.kill()
    for each in await asyncio.gather(*readings, return_exceptions=True):
        assert isinstance(each, str | TransferError)
    assert reader.reader.bytes_under_way() == 0


async def test_memory_that_is_registered_anew_and_larger_at_the_same_place_is_read() -> None:
    memory = memoryview(bytearray(secrets.token_bytes(2 * MIB)))
    async with (
        TransferAgent("owner", backends=["ucx"]) as owner,
        TransferAgent("reader", backends=["ucx"]) as reader,
    ):
        for size in (MIB, 2 * MIB, MIB // 2, 2 * MIB):
            region = owner.register(memory[:size])
            granted = owner.grant(region, [(0, size)], 10.0)
            target = bytearray(size)
            assert await reader.read(granted.sealed, [0], [target], backend="ucx") == "ucx"
            assert target == memory[:size]
            owner.deregister(region)
            with pytest.raises(GrantRefused):
                await reader.read(granted.sealed, [0], [target], backend="ucx")
        assert owner.counters.served_bytes == {}


async def test_a_channel_that_failed_says_so_from_then_on() -> None:
    ucx = await asyncio.to_thread(load)
    table = memoryview(bytearray(b"12345678"))
    owner = await asyncio.to_thread(DirectOwner, ucx, table)
    channel = await asyncio.to_thread(Channel, ucx, owner._address)
    try:
        channel.post_entry(address_of(table), owner._table_key)
        assert not channel.progress()
        assert channel.entry() == b"12345678"
        assert channel.is_good
        with pytest.raises(ChannelFailed):
            channel.post_entry(4096, owner._table_key)  # no process has memory there
        assert not channel.is_good
        with pytest.raises(ChannelFailed):
            channel.post_entry(address_of(table), owner._table_key)
    finally:
        channel.close()
        channel.close()
        await owner.stop()
        await owner.stop()


async def test_channels_leave_no_file_descriptors_behind(place: Place, backend: str) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    with peer_of(place, backend) as owner:
        region = owner.register("host", MIB, 6)
        grant, lease = owner.grant(region, [(0, MIB)], peer="reader")
        counts = []
        for _ in range(4):
            async with TransferAgent("reader", secret=b"of the cluster", backends=[backend], host=place.here) as agent:
                await asyncio.gather(*(agent.read(grant, [0], [bytearray(MIB)]) for _ in range(6)))
            counts.append(descriptors())
        owner.ask("release", lease=lease)
    assert counts[-1] <= counts[1]
