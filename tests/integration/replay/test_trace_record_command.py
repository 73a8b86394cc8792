"""`kvbus trace record` listens to a real bus, and what it writes can be replayed."""

import asyncio
from pathlib import Path

import pytest

from kvbus_replay.trace.reading import read_trace
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.instances import BLOCK_SIZE, FakeInstance, block_keys, fake_worker
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.timing import scaled
from kvbus_testkit.up import run_kvbus
from kvbus_wire.router import Decision, Progress

MODEL = "org/model.v1"


def settings(server: NatsServer, namespace: str) -> CommonSettings:
    return CommonSettings(nats=server.url, namespace=namespace, health_port=-1, instance_id="worker-0")


async def session(worker: FakeInstance, number: int) -> None:
    """Two calls, the second of which begins with the first and its output."""
    first = 100 * number
    bus, subjects = worker.service.bus, worker.service.bus.subjects
    for turn, blocks in enumerate((2, 4)):
        request_id = f"{number}-{turn}"
        decision = Decision(
            router_id="router",
            request_id=request_id,
            model=MODEL,
            worker_id=worker.instance_id,
            incarnation=worker.service.incarnation,
            prompt_tokens=blocks * BLOCK_SIZE + 1,
            uncached_tokens=1,
            expected_output=1,
            keys=block_keys(*range(first, first + blocks)),
        )
        await bus.publish(subjects.decisions(MODEL), decision)
        if turn == 0:
            await worker.store(*range(first, first + 3))
        progress = Progress(request_id=request_id, model=MODEL, phase="finished", output_tokens=BLOCK_SIZE)
        await bus.publish(subjects.progress(MODEL), progress)
        await asyncio.sleep(0)


async def test_live_traffic_becomes_a_trace_of_sessions(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    path = tmp_path / "live.jsonl"
    arguments = ("trace", "record", str(path), "--nats", nats_server.url, "--namespace", namespace)
    async with asyncio.timeout(scaled(60)), fake_worker(settings(nats_server, namespace), MODEL) as worker:
        recording = asyncio.create_task(
            asyncio.to_thread(run_kvbus, *arguments, "--calls", "4", "--settle-s", "0.2", timeout_s=60)
        )
        number = 0
        # Nobody says when the recorder has begun to listen.
        while not recording.done():
            number += 1
            await session(worker, number)
            await asyncio.wait([recording], timeout=0.1)
        result = await recording
    assert result.returncode == 0, result.stderr
    assert f"recording {MODEL} to {path}, until 4 calls have ended or Ctrl-C" in result.stderr
    trace = read_trace(path)
    assert f"{len(trace.calls)} calls" in result.stdout
    assert trace.block_size == BLOCK_SIZE
    assert MODEL.encode() not in path.read_bytes()
    later = [call for call in trace.calls if call.after]
    assert later
    by_id = {call.call_id: call for call in trace.calls}
    for call in later:
        before = by_id[call.after[0]]
        assert call.session_id == before.session_id
        assert len(before.chain) == 3
        assert call.chain.hashes()[:3] == before.chain.hashes()


async def test_a_recording_needs_a_model(nats_server: NatsServer, namespace: str, tmp_path: Path) -> None:
    arguments = ("trace", "record", str(tmp_path / "t"), "--nats", nats_server.url, "--namespace", namespace)
    result = await asyncio.to_thread(run_kvbus, *arguments)
    assert result.returncode == 1
    assert "there is no worker" in result.stderr


@pytest.mark.parametrize(("arguments", "status"), [((), 2), (("--help",), 0)])
def test_the_file_comes_first(arguments: tuple[str, ...], status: int) -> None:
    assert run_kvbus("trace", "record", *arguments).returncode == status
