"""What a real transformer says does not depend on where its prompt was computed, nor on how the blocks came."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvbus_testkit.nats import NatsServer
from kvbus_testkit.pairs import BLOCK, Pair, prompt, workers_for
from kvbus_worker.app import start
from kvbus_worker.models import tiny
from kvbus_worker.settings import WorkerSettings

pytest.importorskip("torch")

BACKENDS = ["shm", "tcp", "nixl", "ucx"]
TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("model") / "tiny", arch="qwen3")


@pytest.fixture
async def torches(nats_server: NatsServer, namespace: str, model: Path) -> AsyncIterator[Pair]:
    fields = {"engine": "torch", "model": str(model), "kv_blocks": 128, "threads": 1, "max_batched_tokens": 48}
    async with workers_for(nats_server, namespace, "tiny", WorkerSettings, start, **fields) as pair:
        await pair.join("alone")
        yield pair


async def _pair(torches: Pair, backend: str) -> None:
    """Both have this backend, or the test is skipped. tcp stays as the last resort; the metric says which one was used."""
    for name, role in (("p", "prefill"), ("d", "decode")):
        app = await torches.join(name, role, transfer_backends=backend, prefill_chunk_blocks=4)
        if backend not in app.record.transfers:
            pytest.skip(f"{backend} cannot load here")


@pytest.mark.parametrize("backend", BACKENDS)
async def test_the_answer_is_the_same_over_each_backend(
    torches: Pair, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    await _pair(torches, backend)
    ask, tokens = torches.asker.ask, prompt(20)
    alone = await ask("alone", tokens, TOKENS)
    apart = await ask("d", tokens, TOKENS, prefill="p")
    assert apart.tokens == alone.tokens
    assert (apart.prefill_worker, apart.cached) == ("p", 0)
    size = torches.app("d").record.block_bytes
    assert torches.metric("d", "transfer_bytes", backend=backend) == 20 * size

    # The next turn reuses what is there, and fetches what is new.
    turn = [*tokens, *alone.tokens, *prompt(8, seed=3)]
    again = await ask("alone", turn, TOKENS)
    apart = await ask("d", turn, TOKENS, prefill="p")
    assert apart.tokens == again.tokens
    assert (apart.prefill_worker, apart.cached >= 20 * BLOCK) == ("p", True)

    # A request that has migrated: the last tokens of its prompt are output of another worker.
    moved = await ask("d", [*prompt(20, seed=7)], TOKENS, prefill="p")
    half = moved.tokens[: TOKENS // 2]
    rest = await torches.asker.send("alone", [*prompt(20, seed=7), *half], TOKENS, prefill="p", resumed=len(half))
    assert (await asyncio.wait_for(rest.ended, 60)).reason == "length"
    assert rest.tokens == moved.tokens[TOKENS // 2 :]
    assert rest.prefill_worker == "p"
    await torches.nothing_is_left()


async def test_the_answer_is_the_same_with_mixed_roles_at_the_same_time(torches: Pair) -> None:
    """Each computes prompts for another one, for itself, or has nobody to ask."""
    await torches.join("a", "both")
    await torches.join("b", "both")
    prompts = [prompt(12, more=seed, seed=seed) for seed in range(1, 9)]
    expected = await asyncio.gather(*(torches.asker.ask("alone", each, TOKENS) for each in prompts))
    ways = [("a", "b"), ("b", "a"), ("a", "alone"), ("b", ""), ("alone", "a"), ("a", "b"), ("b", "b"), ("a", "nobody")]
    answers = await asyncio.gather(
        *(
            torches.asker.ask(decode, each, TOKENS, prefill=prefill)
            for (decode, prefill), each in zip(ways, prompts, strict=True)
        )
    )
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    await torches.nothing_is_left()


async def test_blocks_that_leave_the_prefill_worker_are_computed_where_they_are_needed(torches: Pair) -> None:
    """The prefill worker has room for one prompt only."""
    await torches.join("p", "prefill", kv_blocks=24, prefill_chunk_blocks=1)
    await torches.join("d", "decode")
    prompts = [prompt(20, seed=seed) for seed in range(4)]
    expected = [await torches.asker.ask("alone", each, TOKENS) for each in prompts]
    answers = await asyncio.gather(*(torches.asker.ask("d", each, TOKENS, prefill="p") for each in prompts))
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    await torches.nothing_is_left()
