"""Two agents in one process: what does not depend on the backend."""

import asyncio
import secrets
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvbus_testkit.timing import eventually, scaled
from kvbus_transfer import (
    AgentInfo,
    Arena,
    BackendFailed,
    ChecksumMismatch,
    FileSegment,
    GrantRefused,
    LeaseEnd,
    LimitReached,
    PeerUnreachable,
    Refusal,
    Tls,
    TransferAgent,
    TransferLimits,
    TransferTimeout,
)
from kvbus_transfer.backends.base import ReadJob
from kvbus_transfer.messages import Fetch, Hello
from kvbus_transfer.peers import Peer
from kvbus_transfer.stream import Stream

MIB = 1 << 20
EVERYWHERE = "0.0.0.0"  # noqa: S104


@pytest.fixture
async def owner() -> AsyncIterator[TransferAgent]:
    async with TransferAgent("owner", backends=["shm"]) as agent:
        yield agent


@pytest.fixture
async def reader() -> AsyncIterator[TransferAgent]:
    async with TransferAgent("reader", backends=["shm"]) as agent:
        yield agent
        assert agent.reader.bytes_under_way() == 0


@pytest.fixture
def arena(tmp_path: Path) -> Any:
    path = Path(f"/dev/shm/kvbus-test-{secrets.token_hex(6)}.arena")
    with Arena.create(path, MIB, 4) as made:
        made.memory()[:] = secrets.token_bytes(4 * MIB)
        yield made
        made.remove()


async def test_shared_memory_is_taken_where_it_can_be_and_tcp_elsewhere(
    owner: TransferAgent, reader: TransferAgent, arena: Arena, tmp_path: Path
) -> None:
    path = tmp_path / "g3.segment"
    path.write_bytes(b"x" * 100 + b"block" * 1000)
    for memory, expected, data in (
        (arena, "shm", bytes(arena.view(0)[7:1007])),
        (bytearray(b"host" * 1000), "tcp", (b"host" * 1000)[7:1007]),
        (b"read only" * 500, "tcp", (b"read only" * 500)[7:1007]),
        (FileSegment(path, 100, 5000), "tcp", (b"block" * 1000)[7:1007]),
    ):
        region = owner.register(memory)
        granted = owner.grant(region, [(7, 1000)], 10.0, peer="reader")
        target = bytearray(1000)
        assert await reader.read(granted.sealed, [0], [target], checksum=True) == expected
        assert target == data
        owner.deregister(region)
        assert owner.leases() == 0


async def test_what_is_missing_is_named_and_tcp_is_always_there() -> None:
    async with TransferAgent("a", backends=[]) as agent:
        assert list(agent.backends) == ["tcp"]
    with pytest.raises(ValueError, match="no backend"):
        await TransferAgent("a", backends=["carrier-pigeon"]).start()


async def test_an_address_that_means_all_is_none_to_tell_others() -> None:
    with pytest.raises(ValueError, match="advertise_host"):
        await TransferAgent("a", backends=[], host=EVERYWHERE).start()
    async with TransferAgent("a", backends=[], host=EVERYWHERE, advertise_host="127.0.0.1") as agent:
        assert AgentInfo.decode(agent.info.encode()) == agent.info
        await agent.notify(agent.info, b"to itself")


async def test_a_lease_that_grows_with_each_chunk_has_one_end(owner: TransferAgent, reader: TransferAgent) -> None:
    region = owner.register(bytearray(b"abcdefgh"))
    first = owner.grant(region, [(0, 4)], 10.0, peer="reader")
    second = owner.grant(region, [(4, 4)], 10.0, peer="reader", lease_id=first.lease_id)
    assert second.lease_id == first.lease_id
    assert owner.leases() == 1
    target = bytearray(4)
    await reader.read(second.sealed, [0], [target])
    assert target == b"efgh"
    await reader.finish(second.sealed)
    assert owner.leases() == 0
    assert owner.counters.leases_ended == {LeaseEnd.FINISHED: 1}
    with pytest.raises(GrantRefused):
        await reader.read(first.sealed, [0], [target])
    with pytest.raises(GrantRefused):
        owner.grant(region, [(0, 4)], 10.0, peer="reader", lease_id=first.lease_id)


async def test_a_name_without_the_secret_is_worth_nothing() -> None:
    async with TransferAgent("owner", secret=b"right", backends=[]) as owner:
        granted = owner.grant(owner.register(bytearray(8)), [(0, 8)], 10.0, peer="reader")
        async with TransferAgent("reader", secret=b"wrong", backends=[]) as reader:
            with pytest.raises(PeerUnreachable):
                await reader.read(granted.sealed, [0], [bytearray(8)])
        assert owner.counters.unknown_peers >= 1
        async with TransferAgent("reader", secret=b"right", backends=[]) as reader:
            await reader.read(granted.sealed, [0], [bytearray(8)])


async def test_a_block_that_arrives_changed_is_an_error(
    owner: TransferAgent, reader: TransferAgent, arena: Arena
) -> None:
    region = owner.register(arena)
    granted = owner.grant(region, [(0, 1000), (MIB, 2 * MIB)], 10.0)
    shm = reader.backends["shm"]

    class Flipping:
        name = "shm"

        def can_reach(self, info: bytes, *, same_host: bool) -> bool:
            return True

        def forget(self, peer: Peer) -> None:
            shm.forget(peer)

        async def fetch(self, job: ReadJob) -> None:
            await shm.fetch(job)
            job.targets[1][5] ^= 1

    reader.backends["shm"] = Flipping()  # type: ignore[assignment]
    targets = [bytearray(1000), bytearray(2 * MIB)]
    assert await reader.read(granted.sealed, [0, 1], targets) == "shm"
    with pytest.raises(ChecksumMismatch):
        await reader.read(granted.sealed, [0, 1], targets, checksum=True)
    reader.backends["shm"] = shm


async def test_a_backend_that_fails_rests_and_is_tried_again(arena: Arena) -> None:
    now = 0.0
    async with (
        TransferAgent("owner", backends=["shm"]) as owner,
        TransferAgent(
            "reader", backends=["shm"], clock=lambda: now, limits=TransferLimits(backend_rest_s=10.0)
        ) as reader,
    ):
        shm, broken = reader.backends["shm"], True

        class Failing:
            name = "shm"
            tried = 0

            def can_reach(self, info: bytes, *, same_host: bool) -> bool:
                return True

            def forget(self, peer: Peer) -> None:
                shm.forget(peer)

            async def fetch(self, job: ReadJob) -> None:
                self.tried += 1
                if broken:
                    raise BackendFailed("no")
                await shm.fetch(job)

        failing = Failing()
        reader.backends["shm"] = failing  # type: ignore[assignment]
        granted = owner.grant(owner.register(arena), [(0, 100)], 10.0)
        for _ in range(3):
            assert await reader.read(granted.sealed, [0], [bytearray(100)]) == "tcp"
        assert failing.tried == 1
        assert reader.counters.fallbacks == {"shm": 1}
        now = 10.5
        assert await reader.read(granted.sealed, [0], [bytearray(100)]) == "tcp"
        broken, now = False, 21.0
        assert await reader.read(granted.sealed, [0], [bytearray(100)]) == "shm"
        with pytest.raises(BackendFailed):
            await reader.read(granted.sealed, [0], [bytearray(100)], backend="ucx")
        reader.backends["shm"] = shm


async def test_bytes_under_way_are_bounded_per_peer(owner: TransferAgent) -> None:
    limits = TransferLimits(peer_bytes=3 * MIB, batch_bytes=2 * MIB)
    async with TransferAgent("reader", backends=[], limits=limits) as reader:
        region = owner.register(bytearray(secrets.token_bytes(4 * MIB)))
        granted = owner.grant(region, [(i * MIB, MIB) for i in range(4)] + [(0, 3 * MIB), (0, 4 * MIB)], 30.0)
        targets = [[bytearray(MIB) for _ in range(4)] for _ in range(8)]
        await asyncio.gather(*(reader.read(granted.sealed, range(4), targets[i]) for i in range(8)))
        assert all(b"".join(map(bytes, row)) == region.view(0, 4 * MIB) for row in targets)
        (peer,) = reader.reader._peers.values()
        assert peer.budget.highest_bytes <= 3 * MIB
        assert peer.budget.waits > 0
        await reader.read(granted.sealed, [4], [bytearray(3 * MIB)])
        with pytest.raises(LimitReached) as reached:
            await reader.read(granted.sealed, [5], [bytearray(4 * MIB)])
        assert reached.value.own, "it is this side's limit and says nothing about the peer"


async def test_the_owner_bounds_what_it_sends_to_one_peer(reader: TransferAgent) -> None:
    limits = TransferLimits(peer_bytes=2 * MIB, batch_bytes=2 * MIB)
    async with TransferAgent("owner", backends=[], limits=limits) as owner:
        region = owner.register(bytearray(4 * MIB))
        granted = owner.grant(region, [(0, 2 * MIB), (0, 3 * MIB)], 30.0)
        await asyncio.gather(*(reader.read(granted.sealed, [0], [bytearray(2 * MIB)]) for _ in range(4)))
        assert owner._server is not None
        assert owner._server.budget("reader").highest_bytes == 2 * MIB
        with pytest.raises(LimitReached) as reached:
            await reader.read(granted.sealed, [1], [bytearray(3 * MIB)])
        assert not reached.value.own


async def test_grants_and_leases_have_limits() -> None:
    limits = TransferLimits(leases=2, grant_blocks=3, lease_s=5.0)
    async with TransferAgent("owner", backends=["shm"], limits=limits) as owner:
        region = owner.register(bytearray(8))
        first = owner.grant(region, [(0, 1)] * 3, 5.0)
        with pytest.raises(LimitReached):
            owner.grant(region, [(0, 1)] * 4, 5.0)
        with pytest.raises(ValueError, match="lease"):
            owner.grant(region, [(0, 1)], 5.1)
        owner.grant(region, [(0, 1)], 5.0)
        with pytest.raises(LimitReached):
            owner.grant(region, [(0, 1)], 5.0)
        assert owner.release(first.lease_id)
        owner.grant(region, [(0, 1)], 5.0)


async def test_a_peer_that_never_reads_costs_the_owner_no_more_than_the_deadline() -> None:
    async with TransferAgent("owner", backends=[], limits=TransferLimits(deadline_s=0.2)) as owner:
        region = owner.register(bytearray(64 * MIB))
        granted = owner.grant(region, [(0, 64 * MIB)], 30.0)
        async with TransferAgent("reader", backends=[]) as reader:
            peer = reader.reader._peer(owner.info)
            async with peer.connection() as stream:
                await stream.say(Fetch(grant=granted.sealed, indices=[0], deadline_s=60.0))
                assert owner._server is not None
                server = owner._server
                await eventually(lambda: server.budget("reader").used_bytes == 64 * MIB)
                await eventually(lambda: server.budget("reader").used_bytes == 0)
                stream.close()


async def test_a_reader_that_goes_away_in_the_middle_frees_what_was_held_for_it() -> None:
    async with TransferAgent("owner", backends=[]) as owner:
        granted = owner.grant(owner.register(bytearray(64 * MIB)), [(0, 64 * MIB)], 30.0)
        async with TransferAgent("reader", backends=[]) as reader:
            reading = asyncio.create_task(reader.read(granted.sealed, [0], [bytearray(64 * MIB)]))
            assert owner._server is not None
            server = owner._server
            await eventually(lambda: server.budget("reader").used_bytes > 0 or reading.done())
            reading.cancel()
            await asyncio.wait([reading])
            await eventually(lambda: server.budget("reader").used_bytes == 0)


async def test_the_deadline_is_kept_when_the_owner_hangs(reader: TransferAgent) -> None:
    gone = asyncio.Event()

    async def silent(stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await stream.read()
        writer.close()
        await writer.wait_closed()
        gone.set()

    listener = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    info = AgentInfo(agent_id="hung", incarnation=1, host_id="elsewhere", host="127.0.0.1", port=port)
    with pytest.raises(TransferTimeout):
        await reader.notify(info, b"", deadline_s=0.05)
    await asyncio.wait_for(gone.wait(), scaled(10))
    listener.close()


async def test_strangers_that_talk_nonsense_are_cut_off(owner: TransferAgent) -> None:
    loop = asyncio.get_running_loop()
    nonsense: Sequence[bytes] = (b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", b"\x03\x00\x00\x00abc", b"")
    for words in nonsense:
        _, stream = await loop.create_connection(lambda: Stream(lambda _: None), owner.info.host, owner.info.port)
        await stream.receive()
        await stream.send(words)
        if not words:
            await stream.say(Hello(agent_id="x", incarnation=1, nonce=b"", proof=b""))
            await stream.receive()
        await asyncio.wait_for(asyncio.shield(stream.closed), scaled(10))


async def test_more_connections_than_allowed_are_turned_away() -> None:
    async with TransferAgent("owner", backends=[], limits=TransferLimits(inbound=1)) as owner:
        granted = owner.grant(owner.register(bytearray(8)), [(0, 8)], 30.0)
        async with TransferAgent("first", backends=[]) as first, TransferAgent("second", backends=[]) as second:
            await first.read(granted.sealed, [0], [bytearray(8)])
            with pytest.raises(PeerUnreachable):
                await second.read(granted.sealed, [0], [bytearray(8)])
            assert owner.counters.turned_away >= 1


async def test_a_write_that_loses_its_lease_stops(owner: TransferAgent, reader: TransferAgent) -> None:
    """`quiet` returns when nothing writes any more; then the memory may be used."""
    region = owner.register(bytearray(32 * MIB))
    source = reader.register(bytearray(b"\1" * 32 * MIB))
    granted = owner.grant(region, [(0, 32 * MIB)], 30.0, access="write")
    writing = asyncio.create_task(reader.write(granted.sealed, [0], source, [(0, 32 * MIB)]))
    await eventually(lambda: owner._storing)
    owner.release(granted.lease_id)
    await owner.quiet(granted.lease_id)
    region.view(0, 32 * MIB)[:] = bytes(32 * MIB)
    with pytest.raises(GrantRefused) as refused:
        await writing
    assert refused.value.reason is Refusal.RELEASED
    assert region.view(0, 32 * MIB) == bytes(32 * MIB)
    assert reader.leases() == 0


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += [
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(folder / "key.pem"),
        "-out",
        str(folder / "cert.pem"),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl")
    return folder


async def test_with_tls_nobody_without_it_gets_in(certificate: Path) -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    client = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    tls = Tls(server, client)
    async with (
        TransferAgent("owner", backends=[], tls=tls) as owner,
        TransferAgent("reader", backends=[], tls=tls) as reader,
        TransferAgent("plain", backends=[]) as plain,
    ):
        data = secrets.token_bytes(3 * MIB)
        granted = owner.grant(owner.register(data), [(0, 3 * MIB)], 30.0)
        target = bytearray(3 * MIB)
        await reader.read(granted.sealed, [0], [target])
        assert target == data
        with pytest.raises(PeerUnreachable):
            await plain.read(granted.sealed, [0], [target])


async def test_nothing_is_left_in_shared_memory(arena: Arena) -> None:
    def files() -> set[str]:
        return {path.name for path in Path("/dev/shm").glob("kvbus-transfer-*")}

    before = files()
    agent = TransferAgent("owner", backends=["shm"])
    await agent.start()
    agent.grant(agent.register(arena), [(0, 8)], 30.0)
    assert len(files() - before) == 1
    await agent.stop()
    await agent.stop()
    assert files() - before == set()


async def test_without_the_libraries_an_agent_works_by_what_is_there(owner: TransferAgent) -> None:
    gone = dict.fromkeys(("nixl_cu12._api", "nixl_cu13._api", "nixl._api", "ucxx._lib.libucxx"))
    with mock.patch.dict(sys.modules, gone):
        async with TransferAgent("reader") as reader:
            assert list(reader.backends) == ["shm", "tcp"]
            assert "kvbus[nixl]" in reader.unavailable["nixl"]
            assert "kvbus[ucx]" in reader.unavailable["ucx"]
            granted = owner.grant(owner.register(bytearray(8)), [(0, 8)], 30.0)
            assert await reader.read(granted.sealed, [0], [bytearray(8)]) == "tcp"


async def test_what_is_kept_of_many_grants_is_bounded(
    owner: TransferAgent, reader: TransferAgent, arena: Arena
) -> None:
    region = owner.register(arena)
    for at in range(20):
        granted = owner.grant(region, [(at, 8)], 10.0)
        target = bytearray(8)
        for _ in range(2):
            await reader.read(granted.sealed, [0], [target])
        assert target == arena.memory()[at : at + 8]
        owner.release(granted.lease_id)
    (peer,) = reader.reader._peers.values()
    assert len(peer._digests) == 8
