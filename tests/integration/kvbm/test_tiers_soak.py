"""kvbm with a real disk and a real store under churn: nothing leaks. ``KVBUS_SOAK_ROUNDS`` makes it longer."""

import asyncio
import gc
import os
import random
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvbus_kvbm.app import KvbmApp, start
from kvbus_kvbm.settings import KvbmSettings
from kvbus_runtime.service import host
from kvbus_testkit.kvbm import STREAM_BYTES, ByHand, by_hand, content, key
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.timing import eventually, scaled
from kvbus_wire.kvbm import BlockDirective, DropBlocks, DroppedBlocks, PinBlocks, PinnedBlocks, RetainBlocks, Retained
from kvbus_wire.packing import pack_keys

ROUNDS = int(os.environ.get("KVBUS_SOAK_ROUNDS", "30"))
KVBM_ID = "kvbm-1"


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Session:
    """One worker's conversation: it grows, is read back, kept, dropped, or left behind."""

    def __init__(self, worker: ByHand, dice: random.Random, number: int) -> None:
        self.worker = worker
        self.dice = dice
        self.number = number
        self.turn = 0
        self.names: list[str] = []
        self.read = 0

    async def step(self) -> None:
        what = self.dice.choice(("grow", "grow", "read", "read", "retain", "drop", "forget", "leave a lease"))
        if what == "grow" or not self.names:
            self.turn += 1
            fresh = [f"s{self.number}-{self.turn}-{i}" for i in range(self.dice.randint(1, 4))]
            await self.worker.offload(fresh, parent=self.names[-1] if self.names else "")
            self.names += fresh
        elif what == "read":
            await self.read_back()
        elif what == "retain":
            kind = self.dice.choice(("pinned", "normal", "ephemeral"))
            directive = BlockDirective(start=0, end=len(self.names), kind=kind, ttl_s=self.dice.random(), tenant="t")
            request = RetainBlocks(
                pool_id=self.worker.pool_id,
                instance_id=self.worker.service.instance_id,
                keys=self.keys,
                directives=(directive,),
            )
            await self.worker.ask(request, Retained)
        elif what == "drop":
            subject = self.worker.service.bus.subjects.control(KVBM_ID)
            unwanted = DropBlocks(model="tiny", keys=self.keys)
            await self.worker.service.bus.request(subject, unwanted, DroppedBlocks, timeout_s=scaled(20))
            self.names = []
        elif what == "forget":
            self.names = []
        else:
            await self.worker.reserve([f"s{self.number}-{self.turn}-lost"], self.names[-1])

    @property
    def keys(self) -> bytes:
        return pack_keys(map(key, self.names))

    async def read_back(self) -> None:
        done = 0
        while done < len(self.names):
            request = PinBlocks(
                pool_id=self.worker.pool_id,
                instance_id=self.worker.service.instance_id,
                keys=pack_keys(map(key, self.names[done:])),
                wait_s=0.5,
                parent=key(self.names[done - 1]) if done else b"",
            )
            pinned: PinnedBlocks = await self.worker.ask(request, PinnedBlocks)
            for name, slot in zip(self.names[done:], pinned.slots, strict=False):
                assert bytes(self.worker.slot(slot.index)) == content(name)
            if pinned.lease_id and self.dice.random() < 0.9:
                await self.worker.release(pinned.lease_id)
            done += len(pinned.slots)
            self.read += len(pinned.slots)
            if not pinned.coming:
                return


@pytest.mark.parametrize("seed", [1])
async def test_churn_leaves_no_slot_no_lease_and_no_memory_behind(
    nats_server: NatsServer, namespace: str, tmp_path: Path, seed: int
) -> None:
    (tmp_path / "store").mkdir()
    settings = KvbmSettings(
        nats=nats_server.url,
        namespace=namespace,
        arena_dir=str(tmp_path),
        instance_id=KVBM_ID,
        host_id="host-1",
        health_port=-1,
        kv_stream_max_bytes=STREAM_BYTES,
        g2_bytes=64 * 1024,
        lease_s=0.2,
        quarantine_s=0.1,
        g3_dir=str(tmp_path / "disk"),
        g3_bytes=1 << 20,
        g3_segment_bytes=64 << 10,
        g4_url=f"file://{tmp_path / 'store'}",
        g4_bytes=256 << 10,
        tier_gather_s=0.0,
    )
    dice = random.Random(seed)
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(host("kvbm", settings, start))
        app = running.app
        assert isinstance(app, KvbmApp)
        workers = [
            await stack.enter_async_context(by_hand(nats_server.url, namespace, f"worker-{i}", KVBM_ID))
            for i in range(3)
        ]
        for worker in workers:
            await worker.attach()
        pool = next(iter(app.pools))
        sessions = [Session(workers[i % 3], random.Random(dice.random()), i) for i in range(6)]
        warm = 0
        for number in range(ROUNDS):
            await asyncio.gather(*(session.step() for session in sessions for _ in range(1)))
            pool.pool.check_integrity()
            if number == ROUNDS // 2:
                gc.collect()
                warm = rss_bytes()
        assert sum(session.read for session in sessions) > 0

        def is_quiet() -> bool:
            app._expire()
            usage = pool.pool.usage()
            tiers = all(len(edge.queue) == 0 and not edge.writing for edge in app.tiers.edges)
            idle = not usage.leases and not usage.reserved and not usage.pinned and not usage.quarantined
            return idle and tiers and not len(app.loads) and not pool.pool.moves.busy

        await eventually(is_quiet, timeout_s=30, what="an end of all moves")
        pool.pool.check_integrity()
        usage = pool.pool.usage()
        assert usage.free + usage.present == usage.slots
        assert app.loads._loads.get(pool.pool_id, {}) == {}
        gc.collect()
        assert rss_bytes() - warm < 16 << 20
