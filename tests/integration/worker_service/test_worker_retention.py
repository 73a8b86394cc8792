"""What requests say of their tokens, and what others ask of a worker's blocks, over the bus."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvbus_blocks.keys import CacheDomain, chain_keys
from kvbus_runtime.errors import RequestFailed
from kvbus_testkit.asker import Asker
from kvbus_testkit.nats import NatsServer
from kvbus_wire.errors import ErrorCode
from kvbus_wire.frontend import Usage
from kvbus_wire.packing import pack_tokens
from kvbus_wire.request import Retention
from kvbus_wire.worker import NeedTokens, Prefetched
from kvbus_worker.app import WorkerApp
from tests.integration.one_host import OneHost, Worker, metric, written_through

PROMPT = [i * 7 % 250 for i in range(330)]
WHOLE_BLOCKS = 20


@pytest.fixture
async def on(nats_server: NatsServer, namespace: str, tmp_path: Path) -> AsyncIterator[OneHost]:
    async with AsyncExitStack() as stack:
        yield OneHost(stack, nats_server.url, namespace, tmp_path)


async def ask(asker: Asker, *retention: Retention, salt: str = "", tenant: str = "") -> Usage:
    answer = await asker.ask("w", PROMPT, 2, retention=retention, cache_salt=salt, tenant=tenant)
    return answer.usage


def _keys(worker: Worker, salt: str = "") -> list[bytes]:
    app = worker.app
    assert isinstance(app, WorkerApp)
    card = app.record.model
    domain = CacheDomain(model_fingerprint=card.fingerprint, block_size=16, kv_layout=card.kv_layout, salt=salt)
    return chain_keys(domain.key(), pack_tokens(PROMPT), 16)


async def test_pins_within_the_share_are_granted(on: OneHost) -> None:
    await on.worker(attached=False)
    usage = await ask(await on.asker(), Retention(end=320, kind="pinned", ttl_s=300.0), tenant="t")
    assert usage.unpinned_tokens == 0


async def test_what_is_not_pinned_for_the_tenants_share_is_told(on: OneHost) -> None:
    worker, asker = await on.worker(attached=False, g1_pin_share=0.25), await on.asker()
    usage = await ask(asker, Retention(end=320, kind="pinned", ttl_s=300.0), tenant="t")
    assert usage.unpinned_tokens == 4 * 16
    assert metric(worker, "unpinned_blocks_total") == 4
    # The same ones again, by their next use, and those of another tenant besides.
    assert (await ask(asker, Retention(end=320, kind="pinned", ttl_s=300.0), tenant="t")).unpinned_tokens == 64
    usage = await ask(asker, Retention(end=160, kind="pinned", ttl_s=300.0), salt="x", tenant="other")
    assert usage.unpinned_tokens == 0


async def test_a_pinned_prompt_outlives_others(on: OneHost) -> None:
    await on.worker(attached=False, kv_blocks=48)
    asker = await on.asker()
    await ask(asker, Retention(kind="pinned", ttl_s=300.0), tenant="t")
    for i in range(4):
        await ask(asker, salt=str(i))
    assert (await ask(asker)).cached_tokens == WHOLE_BLOCKS * 16


async def test_a_pinned_prompt_that_left_g1_outlives_others_in_g2(on: OneHost) -> None:
    await on.kvbm(g2_bytes=48 * 512, pool_share=1.0, g2_pin_share=1.0)
    worker, asker = await on.worker(kv_blocks=24, g1_pin_share=0.0), await on.asker()
    pin = Retention(kind="pinned", ttl_s=300.0)
    # G1 pins nothing, and kvbm has not seen the blocks yet.
    assert (await ask(asker, pin, tenant="t")).unpinned_tokens == WHOLE_BLOCKS * 16
    await written_through(worker, WHOLE_BLOCKS)
    for i in range(4):
        before = metric(worker, "kvbm_blocks_total", direction="offload")
        await ask(asker, salt=str(i))
        await written_through(worker, int(before) + 1)
    back = await ask(asker, pin, tenant="t")
    assert back.cached_tokens == back.onboarded_tokens == WHOLE_BLOCKS * 16
    assert back.unpinned_tokens == 0


async def test_senseless_retention_is_refused(on: OneHost) -> None:
    await on.worker(attached=False)
    asker = await on.asker()
    with pytest.raises(RequestFailed) as refused:
        await ask(asker, Retention(kind="for ever"))
    assert (refused.value.code, refused.value.reply.param) == (ErrorCode.INVALID_REQUEST, "retention")


async def test_dropped_blocks_leave_g1_and_the_index(on: OneHost) -> None:
    worker, asker = await on.worker(attached=False), await on.asker()
    await ask(asker)
    keys = _keys(worker)
    assert await asker.drop("w", keys, model="another") == {}
    assert await asker.drop("w", keys) == {"g1": WHOLE_BLOCKS}
    assert await asker.drop("w", keys) == {"g1": 0}
    assert metric(worker, "block_events_total", kind="removed") == WHOLE_BLOCKS
    assert (await ask(asker)).cached_tokens == 0


async def test_a_prefetch_brings_a_prompt_back_before_its_request(on: OneHost) -> None:
    await on.kvbm()
    worker, asker = await on.worker(kv_blocks=24), await on.asker()
    await ask(asker)
    await written_through(worker, WHOLE_BLOCKS)
    await asker.drop("w", _keys(worker))
    assert await asker.prefetch("w", PROMPT) == Prefetched("prefetch", cached_tokens=320, onboarded_tokens=320)
    assert await asker.prefetch("w", PROMPT) == Prefetched("prefetch", cached_tokens=320)
    usage = await ask(asker)
    assert (usage.cached_tokens, usage.onboarded_tokens) == (320, 0)
    assert metric(worker, "prefetches_total", outcome="brought") == 1
    assert metric(worker, "prefetches_total", outcome="present") == 1


async def test_blocks_come_back_with_what_their_request_or_prefetch_says(
    on: OneHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only when the request is admitted: they may have to go before that."""
    await on.kvbm()
    worker, asker = await on.worker(kv_blocks=24), await on.asker()
    assert isinstance(worker.app, WorkerApp)
    engine = worker.app._engine
    bring = engine.import_blocks
    came: list[str] = []

    async def spied(parent: bytes, keys: Any, tokens: Any, data: Any, said: Any = ()) -> int:
        came.extend("nothing" if one is None else one.kind for one in said)
        return await bring(parent, keys, tokens, data, said)

    monkeypatch.setattr(engine, "import_blocks", spied)
    said = (Retention(start=160, kind="ephemeral"),)
    await ask(asker)
    await written_through(worker, WHOLE_BLOCKS)
    await asker.drop("w", _keys(worker))
    assert (await asker.prefetch("w", PROMPT, retention=said)).onboarded_tokens == 320
    assert came == ["nothing"] * 10 + ["ephemeral"] * 10
    await asker.drop("w", _keys(worker))
    assert (await ask(asker, *said)).onboarded_tokens == 320
    assert came[20:] == came[:20]


async def test_a_prefetch_that_comes_too_late_says_what_is_there(on: OneHost) -> None:
    await on.kvbm()
    worker, asker = await on.worker(), await on.asker()
    await ask(asker)
    await asker.drop("w", _keys(worker)[10:])
    assert await asker.prefetch("w", PROMPT, within_s=-1.0) == Prefetched("prefetch", cached_tokens=160)


async def test_a_prefetch_of_an_unknown_prefix_needs_its_tokens(on: OneHost) -> None:
    await on.worker(attached=False)
    asker = await on.asker()
    answer = await asker.prefetch("w", PROMPT, reply=NeedTokens, prefix_key=b"x" * 16, prefix_tokens=16)
    assert answer == NeedTokens(request_id="prefetch")


async def test_without_kvbm_a_prefetch_changes_nothing(on: OneHost) -> None:
    await on.worker(attached=False)
    asker = await on.asker()
    assert await asker.prefetch("w", PROMPT) == Prefetched("prefetch", cached_tokens=0)
