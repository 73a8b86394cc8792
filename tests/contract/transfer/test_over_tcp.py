"""NIXL and UCX where the hosts share nothing but a network: UCX is left tcp alone. Owners then have to take part in every read."""

import asyncio
import gc
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbus_testkit.timing import eventually
from kvbus_testkit.transfer import TransferPeer
from kvbus_testkit.transfer_peer import pattern
from kvbus_transfer import TransferAgent, TransferError, TransferTimeout
from kvbus_transfer.backends.nixl import NixlBackend
from tests.contract.transfer.conftest import LIBRARIES, Place, peer_of

MIB = 1 << 20


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.fixture(params=["nixl", "ucx"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    pytest.importorskip(LIBRARIES[name])
    return name


@pytest.fixture
def place() -> Place:
    return Place("127.0.0.1", "127.0.0.1", (), ("lo", "lo"))


@pytest.fixture
def far_owner(place: Place, backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[TransferPeer]:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    with peer_of(place, backend) as peer:
        yield peer


async def test_blocks_arrive_and_the_owner_rests_afterwards(
    far_owner: TransferPeer, reader: TransferAgent, backend: str
) -> None:
    region = far_owner.register("host", 6 * MIB, 1)
    grant, lease = far_owner.grant(region, [(i * MIB, MIB) for i in range(6)], peer="reader")
    targets = [bytearray(MIB) for _ in range(6)]
    assert await reader.read(grant, range(6), targets, checksum=True, backend=backend) == backend
    assert b"".join(map(bytes, targets)) == pattern(6 * MIB, 1)
    far_owner.ask("release", lease=lease)

    samples: list[tuple[float, int]] = []

    def rests() -> bool:
        """It took less than a tenth of the last half second."""
        now, ticks = time.monotonic(), cpu_ticks(far_owner.process.pid)
        samples.append((now, ticks))
        before = [each for at, each in samples if at <= now - 0.5]
        return bool(before) and ticks - before[-1] <= os.sysconf("SC_CLK_TCK") // 20

    await eventually(rests, what="an owner that does nothing while nothing is asked")


async def test_cancelled_reads_and_a_dead_owner(far_owner: TransferPeer, reader: TransferAgent, backend: str) -> None:
    region = far_owner.register("host", 4 * MIB, 2)
    grant, _ = far_owner.grant(region, [(0, 4 * MIB)], peer="reader")
    for delay_s in (0.0, 0.001, 0.004):
        target = bytearray(4 * MIB)
        reading = asyncio.create_task(reader.read(grant, [0], [target], backend=backend))
        await asyncio.sleep(delay_s)
        reading.cancel()
        await asyncio.wait([reading])
        target[:] = bytes(4 * MIB)
        again = bytearray(4 * MIB)
        await reader.read(grant, [0], [again])
        assert again == pattern(4 * MIB, 2)
        assert target == bytes(4 * MIB)
    far_owner.kill()
    with pytest.raises(TransferError):
        await reader.read(grant, [0], [bytearray(4 * MIB)])
    assert reader.reader.bytes_under_way() == 0


async def test_memory_that_is_registered_anew_and_larger_at_the_same_place_is_read() -> None:
    """NIXL readers keep what they knew of a place."""
    pytest.importorskip("nixl_cu12")
    memory = memoryview(bytearray(secrets.token_bytes(2 * MIB)))
    async with (
        TransferAgent("owner", backends=["nixl"]) as owner,
        TransferAgent("reader", backends=["nixl"]) as reader,
    ):
        for size in (MIB, 2 * MIB, MIB // 2, 2 * MIB):
            region = owner.register(memory[:size])
            granted = owner.grant(region, [(0, size)], 10.0)
            target = bytearray(size)
            assert await reader.read(granted.sealed, [0], [target], backend="nixl") == "nixl"
            assert target == memory[:size]
            owner.deregister(region)
        backend = owner.backends["nixl"]
        assert isinstance(backend, NixlBackend)
        await eventually(lambda: backend._polling is None or backend._polling.done())


async def test_reads_that_fail_leave_nothing_for_the_garbage_collector(
    far_owner: TransferPeer, reader: TransferAgent, backend: str
) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    region = far_owner.register("host", 4 * MIB, 2)
    grant, _ = far_owner.grant(region, [(0, 4 * MIB)], peer="reader")
    counts = []
    gc.disable()
    try:
        for _ in range(12):
            with pytest.raises(TransferTimeout):
                await reader.read(grant, [0], [bytearray(4 * MIB)], backend=backend, deadline_s=0.002)
            counts.append(descriptors())
    finally:
        gc.enable()
    assert counts[-1] <= counts[0] + 8, counts
