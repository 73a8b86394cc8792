"""A real transformer's blocks through disk and cluster store, over the death of everything that computed them."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.asker import asking
from kvbus_testkit.kvbm import STREAM_BYTES, by_hand
from kvbus_testkit.nats import NatsServer
from kvbus_worker.models import tiny
from tests.e2e.kvbm_hosts import BLOCK, KvbmHost, until_in_tier

pytest.importorskip("torch")

PROMPT = [(i * 37 + i // 5) % 190 + 12 for i in range(11 * BLOCK + 5)]
BLOCKS = len(PROMPT) // BLOCK


async def test_a_new_worker_and_a_new_kvbm_answer_the_same_from_the_disk_of_those_that_were_killed(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    model = tiny.write(tmp_path / "tiny", arch="qwen3")
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
