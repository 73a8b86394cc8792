"""Memory that takes long to reserve: longer than the worker waits for it."""

import threading
from pathlib import Path

import pytest

from kvbus_kvbm.adapters.arenas import Arenas
from kvbus_kvbm.app import start
from kvbus_kvbm.core.pools import Plan
from kvbus_kvbm.settings import KvbmSettings
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.service import host
from kvbus_testkit.kvbm import BLOCK_BYTES, STREAM_BYTES, by_hand
from kvbus_testkit.nats import NatsServer
from kvbus_wire.kvbm import AttachedPool, AttachPool


def files(folder: Path) -> list[str]:
    return [str(path) for path in folder.iterdir()]


async def test_a_worker_that_gave_up_waiting_finds_the_pool_when_it_asks_again(
    nats_server: NatsServer, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    create = Arenas._create

    def slow_create(self: Arenas, plan: Plan) -> str:
        may_go_on.wait(30)
        return create(self, plan)

    monkeypatch.setattr(Arenas, "_create", slow_create)
    settings = KvbmSettings(
        nats=nats_server.url,
        namespace=namespace,
        instance_id="kvbm-1",
        health_port=-1,
        arena_dir=str(tmp_path),
        g2_bytes=64 * 1024,
        kv_stream_max_bytes=STREAM_BYTES,
    )
    async with host("kvbm", settings, start), by_hand(nats_server.url, namespace, "worker-a", "kvbm-1") as worker:
        bus = worker.service.bus
        request = AttachPool(
            instance_id="worker-a", incarnation=1, model="tiny", kv_layout="layout", block_bytes=BLOCK_BYTES
        )
        with pytest.raises(RequestFailed, match="deadline"):
            await bus.request(bus.subjects.kvbm("kvbm-1"), request, AttachedPool, timeout_s=0.2)
        may_go_on.set()
        attached: AttachedPool = await bus.request(bus.subjects.kvbm("kvbm-1"), request, AttachedPool, timeout_s=20)
        assert files(tmp_path) == [attached.path]
