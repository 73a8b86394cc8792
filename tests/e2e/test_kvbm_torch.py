"""A real transformer's blocks through host memory, between processes."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.asker import asking
from kvbus_testkit.kvbm import STREAM_BYTES, by_hand
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.processes import ServiceProcess
from kvbus_testkit.timing import eventually
from kvbus_wire.packing import unpack_keys
from kvbus_worker.models import tiny

pytest.importorskip("torch")

BLOCK = 16
PROMPT = [(i * 37 + i // 5) % 190 + 12 for i in range(11 * BLOCK + 5)]


class Processes:
    """The kvbm and the torch workers of one host."""

    def __init__(self, stack: ExitStack, nats_url: str, namespace: str, folder: Path, model: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._model = model
        self._common = {
            "--nats": nats_url,
            "--namespace": namespace,
            "--host-id": "host-1",
            "--lease-ttl-s": "2",
            "--kv-stream-max-bytes": str(STREAM_BYTES),
        }

    def _start(self, module: str, **flags: str) -> ServiceProcess:
        pairs = {**self._common, **{"--" + name.replace("_", "-"): value for name, value in flags.items()}}
        return self._stack.enter_context(ServiceProcess(module, [word for pair in pairs.items() for word in pair]))

    def kvbm(self) -> ServiceProcess:
        return self._start("kvbus_kvbm", instance_id="kvbm-1", arena_dir=str(self._folder), g2_bytes=str(64 << 20))

    def worker(self, instance_id: str) -> ServiceProcess:
        return self._start(
            "kvbus_worker",
            instance_id=instance_id,
            engine="torch",
            model=str(self._model),
            served_model_name="tiny",
            kv_blocks="64",
            threads="1",
        )


async def test_a_worker_answers_the_same_from_the_blocks_of_one_that_was_killed(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    model = tiny.write(tmp_path / "tiny", arch="qwen3")
    common = CommonSettings(nats=nats_server.url, namespace=namespace, health_port=-1, kv_stream_max_bytes=STREAM_BYTES)
    with ExitStack() as stack:
        processes = Processes(stack, nats_server.url, namespace, tmp_path, model)
        processes.kvbm().wait_ready()
        first = processes.worker("worker-a")
        first.wait_ready(timeout_s=60)
        async with (
            asking(common, "tiny") as asker,
            by_hand(nats_server.url, namespace, "worker-watch", "kvbm-1") as watch,
        ):
            expected = await asker.ask("worker-a", PROMPT)
            assert (expected.cached, len(expected.tokens)) == (0, 24)

            async def is_in_g2() -> bool:
                chunks = await watch.snapshot()
                keys = [key for chunk in chunks for chain in chunk.chains for key in unpack_keys(chain.keys)]
                return len(keys) >= len(PROMPT) // BLOCK

            written: Callable[[], Any] = is_in_g2
            await eventually(written, what="the prompt in host memory")
            first.kill()
            second = processes.worker("worker-b")
            second.wait_ready(timeout_s=60)
            second.wait_for_event("kvbm_attached")
            answer = await asker.ask("worker-b", PROMPT)
            assert answer.onboarded == len(PROMPT) // BLOCK * BLOCK
            assert answer.cached == answer.onboarded
            assert answer.tokens == expected.tokens
            # The next turn: the prompt, the answer and something new. What the first worker had generated is there, too.
            turn = [*PROMPT, *answer.tokens, *PROMPT[:7]]
            again = await asker.ask("worker-b", turn)
            assert again.cached >= len(PROMPT) // BLOCK * BLOCK
