"""The blocks of a long prompt through host memory, disk and cluster store, over the death of everything that computed them."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.asker import asking
from kvbus_testkit.kvbm import STREAM_BYTES, by_hand
from kvbus_testkit.nats import NatsServer
from kvbus_worker.models import tiny
from tests.e2e.kvbm_hosts import BLOCK, KvbmHost, until_in_tier

pytest.importorskip("torch")

PROMPT = [(i * 37 + i // 5) % 190 + 12 for i in range(4096 + 5)]
BLOCKS = len(PROMPT) // BLOCK


def write_model(folder: Path) -> Path:
    return tiny.write(folder / "tiny", arch="qwen3", context_length=8192)


@pytest.fixture(params=["torch", "mock"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_a_worker_answers_the_same_from_the_blocks_of_one_that_was_killed(
    nats_server: NatsServer, namespace: str, tmp_path: Path, engine: str
) -> None:
    model = write_model(tmp_path)
    common = CommonSettings(nats=nats_server.url, namespace=namespace, health_port=-1, kv_stream_max_bytes=STREAM_BYTES)
    with ExitStack() as stack:
        host = KvbmHost(stack, nats_server.url, namespace, tmp_path, model, engine=engine)
        host.kvbm().wait_ready()
        first = host.worker("worker-a")
        first.wait_ready(timeout_s=60)
        async with (
            asking(common, "tiny") as asker,
            by_hand(nats_server.url, namespace, "worker-watch", host.kvbm_id) as watch,
        ):
            turn = await asker.ask("worker-a", PROMPT)
            assert (turn.cached, len(turn.tokens)) == (0, 24)
            next_turn = [*PROMPT, *turn.tokens, *PROMPT[:7]]
            expected = await asker.ask("worker-a", next_turn)
            await until_in_tier(watch, "g2", len(next_turn) // BLOCK)
            first.kill()
            second = host.worker("worker-b")
            second.wait_ready(timeout_s=60)
            second.wait_for_event("kvbm_attached")
            answer = await asker.ask("worker-b", next_turn)
            assert answer.onboarded == answer.cached >= BLOCKS * BLOCK
            assert answer.tokens == expected.tokens
            assert (await asker.ask("worker-b", PROMPT)).tokens == turn.tokens


async def test_a_new_worker_and_a_new_kvbm_answer_the_same_from_the_disk_of_those_that_were_killed(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path)
    common = CommonSettings(nats=nats_server.url, namespace=namespace, health_port=-1, kv_stream_max_bytes=STREAM_BYTES)
    disk = {"g3_dir": str(tmp_path / "disk"), "g3_bytes": str(64 << 20), "g3_segment_bytes": str(8 << 20)}
    with ExitStack() as stack:
        host = KvbmHost(stack, nats_server.url, namespace, tmp_path, model)
        kvbm = host.kvbm(**disk)
        kvbm.wait_ready()
        worker = host.worker("worker-a")
        worker.wait_ready(timeout_s=60)
        async with (
            asking(common, "tiny") as asker,
            by_hand(nats_server.url, namespace, "worker-watch", host.kvbm_id) as watch,
        ):
            expected = await asker.ask("worker-a", PROMPT)
            assert (expected.cached, len(expected.tokens)) == (0, 24)
            await until_in_tier(watch, "g3", BLOCKS)
            worker.kill()
            kvbm.kill()
            host.kvbm(**disk).wait_ready()
            await until_in_tier(watch, "g3", BLOCKS)
            second = host.worker("worker-b")
            second.wait_ready(timeout_s=60)
            second.wait_for_event("kvbm_attached")
            assert (await asker.prefetch("worker-b", PROMPT)).onboarded_tokens == BLOCKS * BLOCK
            answer = await asker.ask("worker-b", PROMPT)
            assert answer.cached == BLOCKS * BLOCK
            assert answer.tokens == expected.tokens


async def test_another_host_answers_the_same_from_the_store_of_the_cluster(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    await over_the_store(nats_server.url, namespace, tmp_path, wraps=((), ()))


@contextmanager
def host_of_its_own(number: int) -> Iterator[tuple[list[str], str]]:
    """A network namespace that sees nothing but this one: what enters it, and our address there. Skips where there is none."""
    name = f"kv{os.getpid() % 100000}{number}"
    # Of documentation's own network: nobody routes it.
    here, there = f"192.0.2.{4 * number + 1}", f"192.0.2.{4 * number + 2}"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        try:
            ip("netns", "add", name)
            ip("link", "add", f"{name}h", "type", "veth", "peer", "name", f"{name}p", "netns", name)
            ip("addr", "add", f"{here}/30", "dev", f"{name}h")
            ip("link", "set", f"{name}h", "up")
            ip("-n", name, "addr", "add", f"{there}/30", "dev", f"{name}p")
            ip("-n", name, "link", "set", f"{name}p", "up")
            ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield ["ip", "netns", "exec", name], here
    finally:
        subprocess.run(["ip", "link", "del", f"{name}h"], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


async def test_hosts_in_network_namespaces_of_their_own_share_the_store(namespace: str, tmp_path: Path) -> None:
    with (
        host_of_its_own(1) as (first, first_address),
        host_of_its_own(2) as (second, second_address),
        NatsServer(host="0.0.0.0") as server,  # noqa: S104
    ):
        port = server.url.rpartition(":")[2]
        urls = [f"nats://{address}:{port}" for address in (first_address, second_address)]
        await over_the_store(f"nats://127.0.0.1:{port}", namespace, tmp_path, wraps=(first, second), urls=urls)


async def over_the_store(
    nats_url: str, namespace: str, folder: Path, *, wraps: Sequence[Sequence[str]], urls: Sequence[str] = ()
) -> None:
    model = write_model(folder)
    common = CommonSettings(nats=nats_url, namespace=namespace, health_port=-1, kv_stream_max_bytes=STREAM_BYTES)
    (folder / "store").mkdir()
    store = {"g4_url": f"file://{folder / 'store'}"}
    with ExitStack() as stack:
        hosts = []
        for i, wrap in enumerate(wraps):
            arenas = folder / f"arenas-{i}"
            arenas.mkdir()
            url = urls[i] if urls else nats_url
            hosts.append(KvbmHost(stack, url, namespace, arenas, model, host_id=f"host-{i}", wrap=wrap))
        kvbm = hosts[0].kvbm(**store)
        kvbm.wait_for_event("started")
        worker = hosts[0].worker("worker-a")
        worker.wait_for_event("kvbm_attached", timeout_s=60)
        async with (
            asking(common, "tiny") as asker,
            by_hand(nats_url, namespace, "worker-watch", hosts[0].kvbm_id) as watch,
        ):
            expected = await asker.ask("worker-a", PROMPT)
            assert (expected.cached, len(expected.tokens)) == (0, 24)
            await until_in_tier(watch, "g4", BLOCKS)
            worker.kill()
            kvbm.kill()
            hosts[1].kvbm(**store).wait_for_event("started")
            second = hosts[1].worker("worker-b")
            second.wait_for_event("kvbm_attached", timeout_s=60)
            assert (await asker.prefetch("worker-b", PROMPT)).onboarded_tokens == BLOCKS * BLOCK
            answer = await asker.ask("worker-b", PROMPT)
            assert answer.cached == BLOCKS * BLOCK
            assert answer.tokens == expected.tokens
