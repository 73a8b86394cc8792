"""`kvbus kv` against a real kvbm with a disk and a cluster store."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvbus_kvbm.app import KvbmApp, start
from kvbus_kvbm.settings import KvbmSettings
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.service import host
from kvbus_testkit.kvbm import STREAM_BYTES, ByHand, by_hand, content, key
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.timing import eventually
from kvbus_testkit.up import run_kvbus
from kvbus_wire.kv_tools import (
    DescribedTiers,
    DescribeTiers,
    EvictBlocks,
    InspectBlocks,
    ListBlocks,
    ListedBlocks,
    VerifiedBlocks,
    VerifyBlocks,
    WarmBlocks,
    WarmedBlocks,
)
from kvbus_wire.kvbm import BlockDirective, DropBlocks, DroppedBlocks, RetainBlocks, Retained
from kvbus_wire.packing import pack_keys, unpack_keys
from kvbus_wire.worker import Done

NAMES = [f"x{i}" for i in range(12)]
KEYS = pack_keys(map(key, NAMES))


class Scene:
    """A kvbm with 12 blocks of a chain in each of its tiers, and a worker."""

    def __init__(self, url: str, namespace: str, worker: ByHand, app: KvbmApp, folder: Path) -> None:
        self._url = url
        self._namespace = namespace
        self.worker = worker
        self.app = app
        self.folder = folder

    async def ask(self, question: Any, reply: type[Any]) -> Any:
        bus = self.worker.service.bus
        return await bus.request(bus.subjects.control("k1"), question, reply, timeout_s=10)

    async def kvbus(self, *arguments: str, status: int = 0) -> Any:
        """What the command prints as JSON."""
        told = await self.run(*arguments, "--json")
        assert told.returncode == status, told.stdout + told.stderr
        return json.loads(told.stdout)

    async def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        place = ("--nats", self._url, "--namespace", self._namespace)
        return await asyncio.to_thread(run_kvbus, "kv", *arguments, *place)

    async def blocks_in(self, tier: str) -> int:
        told: DescribedTiers = await self.ask(DescribeTiers(), DescribedTiers)
        return sum(held.blocks for state in told.tiers if state.tier == tier for held in state.holdings)


@pytest.fixture
async def scene(nats_server: NatsServer, namespace: str, tmp_path: Path) -> AsyncIterator[Scene]:
    settings = KvbmSettings(
        nats=nats_server.url,
        namespace=namespace,
        instance_id="k1",
        host_id="host-1",
        health_port=-1,
        arena_dir=str(tmp_path),
        g2_bytes=32 * 1024,
        pool_share=1.0,
        tier_batch_share=0.5,
        tier_gather_s=0.0,
        kv_stream_max_bytes=STREAM_BYTES,
        g3_dir=str(tmp_path / "disk"),
        g3_bytes=8 << 20,
        g3_segment_bytes=1 << 20,
        g3_keep_free_bytes=0,
        g4_url=f"file://{tmp_path}/store",
        g4_bytes=1 << 20,
        tool_blocks=5,
        tool_verify_bytes=4000,
    )
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(host("kvbm", settings, start))
        worker = await stack.enter_async_context(by_hand(nats_server.url, namespace, "worker-a", "k1"))
        await worker.attach()
        await worker.offload(NAMES)
        assert isinstance(running.app, KvbmApp)
        it = Scene(nats_server.url, namespace, worker, running.app, tmp_path)
        for tier in ("g3", "g4"):

            async def is_there(tier: str = tier) -> Any:
                return await it.blocks_in(tier) == len(NAMES)

            await eventually(is_there, what=f"all blocks in {tier}")
        yield it


def flip_a_byte(folder: Path, content: bytes) -> None:
    """In the one file that has this content, in the middle of it."""
    for file in filter(Path.is_file, folder.rglob("*")):
        data = bytearray(file.read_bytes())
        at = data.find(content)
        if at >= 0:
            with file.open("r+b") as opened:
                opened.seek(at + len(content) // 2)
                opened.write(bytes([data[at + len(content) // 2] ^ 1]))
            return
    raise AssertionError("no file has it")


async def test_ls_shows_all_tiers_and_inspect_how_long_a_chain_is_kept(scene: Scene) -> None:
    lease = BlockDirective(start=0, end=3, kind="pinned", ttl_s=300.0, tenant="t")
    await scene.worker.ask(
        RetainBlocks(pool_id=scene.worker.pool_id, instance_id="worker-a", keys=KEYS, directives=(lease,)), Retained
    )
    (told,) = (await scene.kvbus("ls"))["kvbms"]
    assert {tier["tier"]: tier["blocks"] for tier in told["tiers"]} == {"g2": 12, "g3": 12, "g4": 12}
    assert all(tier["available"] and tier["used_bytes"] > 0 for tier in told["tiers"])
    table = (await scene.run("ls")).stdout
    assert all(tier in table for tier in ("g2", "g3", "g4", "tiny"))
    assert told["g4_store"] == f"file://{scene.folder}/store"

    async def pins() -> Any:
        state: DescribedTiers = await scene.ask(DescribeTiers(), DescribedTiers)
        return [tier.holdings[0].pinned for tier in state.tiers] == [3, 3, 3]

    await eventually(pins, what="the lease in all tiers")
    listed: ListedBlocks = await scene.ask(
        InspectBlocks(model="tiny", keys=pack_keys(map(key, NAMES[:5]))), ListedBlocks
    )
    assert [block.tier for block in listed.blocks] == ["g2"] * 5 + ["g3"] * 5 + ["g4"] * 5
    for block in listed.blocks:
        assert unpack_keys(KEYS)[block.depth] == block.key
        assert (block.kind, block.tenant) == (("pinned", "t") if block.depth < 3 else ("normal", ""))
        assert (block.ttl_s is not None and 0 < block.ttl_s <= 300) == (block.depth < 3)
    asked = ",".join(key(name).hex() for name in NAMES[:4])
    told = await scene.kvbus("inspect", "--model", "tiny", "--keys", asked)
    assert [(line["tier"], line["leading"], line["kinds"]) for line in told["standing"]] == [
        (tier, 4, {"normal": 1, "pinned": 3}) for tier in ("g2", "g3", "g4")
    ]


async def test_lists_come_in_pages_of_any_size_up_to_the_limit(scene: Scene) -> None:
    for limit in (1, 4, 5, 100):
        seen: list[bytes] = []
        after = b""
        while True:
            page: ListedBlocks = await scene.ask(
                ListBlocks(model="tiny", tier="g3", after=after, limit=limit), ListedBlocks
            )
            assert len(page.blocks) <= min(limit, 5)
            seen += [block.key for block in page.blocks]
            after = page.after
            if not after:
                break
        assert seen == sorted(unpack_keys(KEYS))
    told = await scene.kvbus("ls", "--model", "tiny", "--tier", "g4", "--limit", "7")
    assert len(told["blocks"]) == 7
    for bad in (
        ListBlocks(model="tiny", tier="g9"),
        ListBlocks(model="tiny", tier="g3", limit=0),
        InspectBlocks(model="tiny", keys=KEYS),
        InspectBlocks(model="tiny", keys=b"short"),
        EvictBlocks(model="tiny", tier="g2", keys=b""),
    ):
        with pytest.raises(RequestFailed):
            await scene.ask(bad, Done)
    assert (await scene.ask(ListBlocks(model="unheard", tier="g2"), ListedBlocks)).blocks == ()


async def test_a_list_of_which_nobody_asks_for_the_rest_is_forgotten(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbus_kvbm.handlers.kv._LISTING_S", 0.02)
    await scene.ask(ListBlocks(model="tiny", tier="g3", limit=1), ListedBlocks)
    await eventually(lambda: scene.app._control._tools._listing is None, what="no list kept")


async def test_verify_scrubs_every_tier_in_pieces_and_drops_what_does_not_hold(scene: Scene) -> None:
    told = await scene.kvbus("verify")
    assert [(line["tier"], line["checked"], line["bad"]) for line in told["scrubbed"]] == [
        (tier, 12, []) for tier in ("g2", "g3", "g4")
    ]
    piece: VerifiedBlocks = await scene.ask(VerifyBlocks(model="tiny", tier="g2", limit=100), VerifiedBlocks)
    assert piece.checked == 4  # 4000 bytes
    slots = (await scene.worker.pin(NAMES)).slots
    scene.worker.slot(slots[11].index)[5] ^= 1
    flip_a_byte(scene.folder / "disk", content("x10"))
    flip_a_byte(scene.folder / "store", content("x9"))
    told = await scene.kvbus("verify", status=3)
    bad = {line["tier"]: line["bad"] for line in told["scrubbed"]}
    assert bad == {tier: [key(name).hex()] for tier, name in (("g2", "x11"), ("g3", "x10"), ("g4", "x9"))}
    told = await scene.kvbus("verify", "--tier", "g4")
    assert [(line["tier"], line["bad"]) for line in told["scrubbed"]] == [("g4", [])]


async def test_a_pool_that_is_reclaimed_while_it_is_scrubbed_or_dropped_is_an_answer_all_the_same(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    attaching = scene.app._blocks._attaching

    async def reclaimed(work: Any) -> Any:
        for pool in scene.app.pools:
            await attaching._give_up(pool.pool_id)
        return work()

    monkeypatch.setattr("kvbus_kvbm.handlers.kv.in_thread", reclaimed)
    piece: VerifiedBlocks = await scene.ask(VerifyBlocks(model="tiny", tier="g2", limit=3), VerifiedBlocks)
    assert (piece.checked, piece.bad) == (3, b"")
    await scene.worker.attach()

    async def stop(pool_id: str, keys: Any) -> None:
        await attaching._give_up(pool_id)

    monkeypatch.setattr(scene.app.loads, "stop", stop)
    dropped: DroppedBlocks = await scene.ask(DropBlocks(model="tiny", keys=KEYS), DroppedBlocks)
    assert dropped.blocks["g2"] == 0


async def test_evict_frees_one_tier_only_and_warm_brings_it_back(scene: Scene) -> None:
    asked = ",".join(key(name).hex() for name in NAMES)
    last: DroppedBlocks = await scene.ask(EvictBlocks(model="tiny", tier="g2", keys=key("x5")), DroppedBlocks)
    assert last.blocks == {"g2": 0}  # it has others below it
    told = await scene.kvbus("evict", "--model", "tiny", "--keys", asked)
    assert told["freed"] == [{"kvbm": "k1", "tier": "g2", "blocks": 12}]
    assert [await scene.blocks_in(tier) for tier in ("g2", "g3", "g4")] == [0, 12, 12]
    told = await scene.kvbus("warm", "--model", "tiny", "--keys", asked)
    assert told["kvbms"] == [{"kvbm": "k1", "present": 12, "coming": 0}]
    assert await scene.blocks_in("g2") == 12
    for tier in ("g2", "g3", "g4"):
        told = await scene.kvbus("evict", "--model", "tiny", "--tier", tier, "--all")
        assert told["freed"][0]["blocks"] == 12, tier
        assert await scene.blocks_in(tier) == 0
    gone: WarmedBlocks = await scene.ask(WarmBlocks(model="tiny", keys=KEYS, wait_s=10.0), WarmedBlocks)
    assert gone == WarmedBlocks(present=0)
    none: WarmedBlocks = await scene.ask(WarmBlocks(model="unheard", keys=KEYS, wait_s=1e300), WarmedBlocks)
    assert none == WarmedBlocks(present=0)


async def test_what_cannot_be_asked_is_told(scene: Scene) -> None:
    for arguments, status, text in (
        (("inspect", "--model", "tiny"), 2, "give one of"),
        (("inspect", "--model", "tiny", "--keys", "12"), 2, "32 hexadecimal digits"),
        (("evict", "--all"), 2, "give --model"),
        (("ls", "--kvbm", "k9"), 1, "no kvbm 'k9'"),
    ):
        result = await scene.run(*arguments)
        assert result.returncode == status
        assert text in result.stderr
