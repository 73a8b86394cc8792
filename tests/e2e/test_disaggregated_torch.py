"""A real transformer's prompt is computed in one process and decoded in another, over the backends that are made for networks."""

import urllib.request
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.asker import asking
from kvbus_testkit.kvbm import STREAM_BYTES
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.pairs import BLOCK, prompt
from kvbus_testkit.processes import ServiceProcess
from kvbus_worker.models import tiny

pytest.importorskip("torch")

BACKENDS = [name for name, module in (("nixl", "nixl"), ("ucx", "ucxx")) if find_spec(module)]


async def test_the_answer_is_the_same_when_the_blocks_come_from_another_process(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    model = tiny.write(tmp_path / "tiny", arch="qwen3")
    common = CommonSettings(nats=nats_server.url, namespace=namespace, health_port=-1, kv_stream_max_bytes=STREAM_BYTES)
    with ExitStack() as stack:

        def start(name: str, role: str, backend: str) -> ServiceProcess:
            flags = {
                "nats": nats_server.url,
                "namespace": namespace,
                "kv-stream-max-bytes": str(STREAM_BYTES),
                "instance-id": name,
                "engine": "torch",
                "model": str(model),
                "served-model-name": "tiny",
                "kv-blocks": "128",
                "threads": "1",
                "max-batched-tokens": "64",
                "role": role,
                "transfer-backends": backend,
            }
            words = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
            process = ServiceProcess("kvbus_worker", [*words, "--no-kvbm"], env={"UCX_NET_DEVICES": "lo"})
            return stack.enter_context(process)

        workers = [start("alone", "both", "tcp")]
        for backend in BACKENDS:
            workers += [start(f"p-{backend}", "prefill", backend), start(f"d-{backend}", "decode", backend)]
        health = {
            worker.command[worker.command.index("--instance-id") + 1]: worker.wait_ready(timeout_s=90)
            for worker in workers
        }
        async with asking(common, "tiny") as asker:
            tokens = prompt(20)
            turn = [*tokens, *prompt(6, seed=3)]
            expected = [await asker.ask("alone", each) for each in (tokens, turn)]
            for backend in BACKENDS:
                first = await asker.ask(f"d-{backend}", tokens, prefill=f"p-{backend}")
                assert (first.tokens, first.prefill_worker) == (expected[0].tokens, f"p-{backend}")
                second = await asker.ask(f"d-{backend}", turn, prefill=f"p-{backend}")
                assert second.tokens == expected[1].tokens
                assert second.cached >= 20 * BLOCK
                assert second.prefill_worker == f"p-{backend}"
                with urllib.request.urlopen(health[f"d-{backend}"] + "/metrics") as page:  # noqa: ASYNC210, S310
                    assert f'kvbus_worker_transfer_bytes_total{{backend="{backend}"}}' in page.read().decode()
