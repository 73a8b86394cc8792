"""kvbm when processes die, memory is full, writers are late and the bus goes away."""

import asyncio
import resource
import sys
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.event_log import EventLog
from kvbus_testkit.kvbm import STREAM_BYTES, by_hand, content, key
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.pausing import pause, resume
from kvbus_testkit.processes import ServiceProcess
from kvbus_testkit.timing import eventually
from kvbus_wire.errors import ErrorCode
from kvbus_wire.kv_events import KvEvents, Stored, decode_events
from kvbus_wire.packing import unpack_keys


def kvbm_process(nats_url: str, namespace: str, arena_dir: Path, instance_id: str, *more: str) -> ServiceProcess:
    arguments = {
        "--nats": nats_url,
        "--namespace": namespace,
        "--instance-id": instance_id,
        "--host-id": "host-1",
        "--arena-dir": str(arena_dir),
        "--g2-bytes": str(64 * 1024),
        "--lease-ttl-s": "2",
        "--kv-stream-max-bytes": str(STREAM_BYTES),
    }
    return ServiceProcess("kvbus_kvbm", [*(word for pair in arguments.items() for word in pair), *more])


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:  # noqa: S310
        text: str = response.read().decode()
        return text


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_the_next_kvbm_of_the_host_removes_the_memory_of_a_killed_one_and_of_no_other(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        dead = stack.enter_context(kvbm_process(nats_server.url, namespace, tmp_path, "kvbm-dead"))
        alive = stack.enter_context(kvbm_process(nats_server.url, namespace, tmp_path, "kvbm-alive"))
        dead.wait_ready()
        alive.wait_ready()
        async with by_hand(nats_server.url, namespace, "worker-a", "kvbm-alive") as worker:
            kept = Path((await worker.attach()).path).name
            worker.kvbm_id = "kvbm-dead"
            left = Path((await worker.attach()).path).name
            await worker.offload(["a"])
            pinned = await worker.pin(["a"])
            dead.kill()
            assert files(tmp_path) == sorted([kept, left])
            heir = stack.enter_context(kvbm_process(nats_server.url, namespace, tmp_path, "kvbm-heir"))
            heir.wait_ready()
            assert files(tmp_path) == [kept]
            assert bytes(worker.slot(pinned.slots[0].index)) == content("a"), "a mapping outlives the file"
            heir.terminate()
            alive.terminate()
            assert (heir.wait(), alive.wait()) == (0, 0)
            assert files(tmp_path) == []


async def test_a_writer_that_is_later_than_lease_and_quarantine_costs_a_miss_and_never_wrong_data(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    limits = ("--lease-s", "0.5", "--quarantine-s", "0", "--pool-share", "1", "--g2-bytes", "8192")
    with kvbm_process(nats_server.url, namespace, tmp_path, "kvbm-1", *limits) as kvbm:
        kvbm.wait_ready()
        async with (
            by_hand(nats_server.url, namespace, "worker-late", "kvbm-1") as late,
            by_hand(nats_server.url, namespace, "worker-b", "kvbm-1") as other,
        ):
            attached = await late.attach()
            await other.attach()
            mine = [f"late-{i}" for i in range(attached.slots)]
            stale = await late.reserve(mine)
            # Every slot is reserved until the lease has expired.

            async def store() -> bool:
                try:
                    return await other.offload(["a", "b"]) == 2
                except RequestFailed as failure:
                    if failure.code is not ErrorCode.GONE:  # a slow machine may lose the lease
                        raise
                    return False

            stored: Callable[[], Any] = store
            await eventually(stored, what="slots of the expired lease")
            assert await other.onboard(["a", "b"]) == [content("a"), content("b")]
            late.write(mine, stale)
            assert await other.onboard(["a", "b"]) == []
            await eventually(stored, what="the spoilt blocks were dropped and can be stored again")
            assert await other.onboard(["a", "b"]) == [content("a"), content("b")]


WRITES_AND_HANGS = """
import asyncio, sys
from kvbus_testkit.kvbm import by_hand

async def main(nats_url, namespace):
    async with by_hand(nats_url, namespace, "worker-doomed", "kvbm-1") as worker:
        await worker.attach()
        reserved = await worker.reserve(["a", "b", "c"])
        worker.slot(reserved.slots[0].index)[:100] = b"x" * 100
        await worker.offload(["d"], parent="c")
        print("writing", flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_what_a_worker_was_writing_when_it_was_killed_is_never_seen_and_its_slots_come_back(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    with kvbm_process(nats_server.url, namespace, tmp_path, "kvbm-1", "--quarantine-s", "1") as kvbm:
        url = kvbm.wait_ready()
        doomed = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", WRITES_AND_HANGS, nats_server.url, namespace), stdout=asyncio.subprocess.PIPE
        )
        assert doomed.stdout is not None
        while await asyncio.wait_for(doomed.stdout.readline(), 30) != b"writing\n":
            pass
        doomed.kill()
        await doomed.wait()
        async with by_hand(nats_server.url, namespace, "worker-b", "kvbm-1") as worker:
            attached = await worker.attach()
            assert await worker.onboard(["a", "b", "c", "d"]) == []
            free = f'kvbus_kvbm_slots{{model="tiny",pool="{attached.pool_id}",state="free"}} {attached.slots}.0'
            await eventually(lambda: free in page(url + "/metrics"), what="all slots free again")
            assert await worker.offload(["a", "b", "c", "d"]) == 4
            assert await worker.onboard(["a", "b", "c", "d"]) == [content(name) for name in "abcd"]


async def test_a_kvbm_that_was_stopped_for_a_while_ends_the_leases_that_ran_out(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    with kvbm_process(nats_server.url, namespace, tmp_path, "kvbm-1", "--lease-s", "0.2") as kvbm:
        kvbm.wait_ready()
        async with by_hand(nats_server.url, namespace, "worker-a", "kvbm-1") as worker:
            await worker.attach()
            reserved = await worker.reserve(["a"])
            pause(kvbm.pid)
            # Time goes on for a stopped process; the lease was not renewed meanwhile.
            ends_s = asyncio.get_running_loop().time() + 0.2
            await eventually(lambda: asyncio.get_running_loop().time() > ends_s)
            resume(kvbm.pid)
            with pytest.raises(RequestFailed) as caught:
                await worker.commit(reserved.lease_id, [1])
            assert caught.value.code is ErrorCode.GONE
            assert await worker.onboard(["a"]) == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
async def test_a_memory_file_system_without_room_is_a_refusal_and_kvbm_lives_on(
    nats_server: NatsServer, namespace: str
) -> None:
    folder = Path("/dev/shm")
    with kvbm_process(nats_server.url, namespace, folder, "kvbm-1", "--g2-bytes", str(1 << 45)) as kvbm:
        kvbm.wait_ready()
        async with by_hand(nats_server.url, namespace, "worker-a", "kvbm-1") as worker:
            for _ in range(2):
                with pytest.raises(RequestFailed) as caught:
                    await worker.attach()
                assert caught.value.code is ErrorCode.OVERLOADED
                assert "g2_bytes" in caught.value.reply.message
        assert kvbm.returncode is None
    assert not [name for name in files(folder) if namespace in name]


async def test_blocks_and_events_survive_a_restart_of_the_bus(namespace: str, tmp_path: Path) -> None:
    with NatsServer() as server, kvbm_process(server.url, namespace, tmp_path, "kvbm-1") as kvbm:
        kvbm.wait_ready()
        async with by_hand(server.url, namespace, "worker-a", "kvbm-1") as worker:
            await worker.attach()
            await worker.offload(["a"])
            server.restart(wipe=True)
            assert await worker.onboard(["a"]) == [content("a")]
            assert await worker.offload(["b"], parent="a") == 1
            (chunk,) = await worker.snapshot()
            assert chunk.kv_seq == 2
            assert chunk.chains[0].keys == key("a") + key("b")
            seen: list[KvEvents] = []
            log = await EventLog.open(worker.service.bus)
            await log.follow(
                worker.service.bus.subjects.kv_events("*", "*"),
                lambda _subject, data, headers, _seq: seen.append(decode_events(data, headers["Content-Type"])),
            )
            await eventually(lambda: seen and seen[-1].last_seq == 2)
            last = seen[-1].events[-1]
            assert isinstance(last, Stored)
            assert unpack_keys(last.keys)[-1] == key("b")
        assert kvbm.returncode is None


async def test_it_is_small_and_imports_no_array_library(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    with kvbm_process(nats_server.url, namespace, tmp_path, "kvbm-1") as kvbm:
        kvbm.wait_ready()
        assert resident_bytes(kvbm.pid) < 150 << 20
        mapped = Path(f"/proc/{kvbm.pid}/maps").read_text()  # noqa: ASYNC240
        assert "torch" not in mapped
        assert "numpy" not in mapped
