"""One worker computes prompts for another, with mock engines on a real bus and real transfers."""

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbus_runtime.errors import RequestFailed
from kvbus_testkit.pairs import BLOCK, Pair, prompt
from kvbus_testkit.timing import eventually, scaled
from kvbus_transfer.hosts import shm_folder
from kvbus_wire.errors import ErrorCode
from kvbus_wire.transfer import EndPrefill, NextBlocks, PrefillStarted, StartPrefill
from kvbus_wire.worker import Done, SetRole

pytestmark = pytest.mark.usefixtures("no_blocking")


async def test_a_prompt_is_computed_elsewhere_and_counts_as_computed(mocks: Pair) -> None:
    answer = await mocks.asker.ask("d", prompt(40), prefill="p")
    assert answer.prefill_worker == "p"
    assert (answer.cached, answer.onboarded) == (0, 0)
    ended = await answer.ended
    assert ended.usage.cached_tokens == 0
    assert mocks.metric("d", "transfer_blocks", direction="in") == 40
    assert mocks.metric("p", "transfer_blocks", direction="out") == 40
    assert mocks.metric("d", "remote_prefill_pulls", outcome="done") == 1
    await mocks.nothing_is_left()


async def test_what_is_cached_there_or_here_counts_as_cached(mocks: Pair) -> None:
    tokens = prompt(40)
    await mocks.asker.ask("p", tokens[: 20 * BLOCK + 3])
    there = await mocks.asker.ask("d", tokens, prefill="p")
    assert (there.cached, there.onboarded) == (20 * BLOCK, 20 * BLOCK)
    longer = [*tokens, *prompt(20, seed=5)]
    here = await mocks.asker.ask("d", longer, prefill="p")
    assert here.cached == 40 * BLOCK
    assert here.prefill_worker == "p"
    await mocks.nothing_is_left()


async def test_a_fan_out_moves_the_prefix_once(mocks: Pair) -> None:
    await mocks.join("slow", "prefill", mock_speedup=1.0, mock_step_base_s=0.05)
    tokens = prompt(40)
    prefillers = ["slow", "slow", "", ""]
    answers = await asyncio.gather(*(mocks.asker.ask("d", tokens, prefill=prefill) for prefill in prefillers))
    assert len({tuple(answer.tokens) for answer in answers}) == 1
    assert mocks.metric("d", "transfer_blocks", direction="in") == 40
    assert mocks.metric("d", "remote_prefill_shared") == 3
    await mocks.nothing_is_left()


async def test_a_prompt_that_goes_on_differently_waits_for_what_is_common_and_fetches_the_rest(mocks: Pair) -> None:
    tokens = prompt(40)
    other = tokens[: 30 * BLOCK] + prompt(10, seed=9)
    answers = await asyncio.gather(*(mocks.asker.ask("d", each, prefill="p") for each in (tokens, other)))
    assert [answer.prefill_worker for answer in answers] == ["p", "p"]
    assert mocks.metric("d", "transfer_blocks", direction="in") == 50
    await mocks.nothing_is_left()


async def test_a_prefill_worker_that_is_not_there_costs_a_recompute(mocks: Pair) -> None:
    answer = await mocks.asker.ask("d", prompt(20), prefill="nobody")
    assert (answer.prefill_worker, answer.cached) == ("", 0)
    assert mocks.metric("d", "remote_prefill_pulls", outcome="unavailable") == 1
    await mocks.nothing_is_left()


async def test_the_role_can_change_and_is_seen_by_all(mocks: Pair) -> None:
    bus = mocks.asker.service.bus
    await bus.request(bus.subjects.control("p"), SetRole(role="decode"), Done, timeout_s=scaled(5))
    directory = mocks.asker.service.directory

    def role() -> str:
        record = directory.get("p")
        return record.worker.role if record is not None and record.worker is not None else ""

    await eventually(lambda: role() == "decode", what="the new role")
    answer = await mocks.asker.ask("d", prompt(20), prefill="p")
    assert answer.prefill_worker == ""
    await bus.request(bus.subjects.control("p"), SetRole(role="both"), Done, timeout_s=scaled(5))
    assert (await mocks.asker.ask("d", prompt(20, seed=1), prefill="p")).prefill_worker == "p"
    with pytest.raises(RequestFailed) as refused:
        await bus.request(bus.subjects.control("p"), SetRole(role="cook"), Done, timeout_s=scaled(5))
    assert refused.value.code is ErrorCode.INVALID_REQUEST


async def test_blocks_move_while_later_ones_are_computed(mocks: Pair) -> None:
    await mocks.join("slow", "prefill", mock_speedup=1.0, mock_step_base_s=0.05)
    answer = await mocks.asker.send("d", prompt(40), prefill="slow")
    await eventually(lambda: mocks.metric("d", "transfer_blocks", direction="in") >= 4, what="the first chunk")
    assert mocks.metric("slow", "remote_prefills_open") == 1
    assert mocks.metric("d", "transfer_blocks", direction="in") < 40
    assert (await asyncio.wait_for(answer.ended, scaled(30))).reason == "length"
    await mocks.nothing_is_left()


async def test_a_cancelled_request_ends_the_prefill_at_once(mocks: Pair) -> None:
    await mocks.join("slow", "prefill", mock_speedup=1.0, mock_step_base_s=0.5)
    answer = await mocks.asker.send("d", prompt(40), prefill="slow")
    await eventually(lambda: mocks.metric("slow", "remote_prefills_open") == 1, what="the prefill")
    await mocks.asker.cancel("d", answer)
    assert (await asyncio.wait_for(answer.ended, scaled(30))).reason == "cancelled"
    await mocks.nothing_is_left()


async def test_a_deadline_that_passes_meanwhile_ends_the_prefill(mocks: Pair) -> None:
    await mocks.join("slow", "prefill", mock_speedup=1.0, mock_step_base_s=0.5)
    answer = await mocks.asker.send("d", prompt(40), prefill="slow", within_s=scaled(0.6))
    ended = await asyncio.wait_for(answer.ended, scaled(30))
    assert ended.error is not None
    assert ended.error.code is ErrorCode.DEADLINE_EXCEEDED
    await mocks.nothing_is_left()


async def test_a_prefill_worker_that_leaves_in_the_middle_costs_a_recompute_of_the_rest(mocks: Pair) -> None:
    await mocks.join("slow", "prefill", mock_speedup=1.0, mock_step_base_s=0.2)
    tokens = prompt(40)
    answer = await mocks.asker.send("d", tokens, prefill="slow")
    await eventually(lambda: mocks.metric("d", "transfer_blocks", direction="in") >= 4, what="the first chunk")
    await mocks.leave("slow")
    assert (await asyncio.wait_for(answer.ended, scaled(30))).reason == "length"
    expected = await mocks.asker.ask("p", tokens)
    assert answer.tokens == expected.tokens
    await mocks.nothing_is_left()


async def test_a_start_that_makes_no_sense_is_refused(mocks: Pair) -> None:
    bus, card = mocks.asker.service.bus, mocks.app("p").record.model
    tokens = [token.to_bytes(4, "little") for token in prompt(2)]
    good = StartPrefill(
        prefill_id="x",
        request_id="x",
        model=card.name,
        fingerprint=card.fingerprint,
        kv_layout=card.kv_layout,
        reader="d",
        tokens=b"".join(tokens),
        first_block=0,
        end_block=2,
        deadline_ms=2**50,
        lease_s=1.0,
    )
    changes: list[tuple[ErrorCode, dict[str, Any]]] = [
        (ErrorCode.UNSUPPORTED, {"model": "other"}),
        (ErrorCode.UNSUPPORTED, {"kv_layout": "other"}),
        (ErrorCode.UNSUPPORTED, {"fingerprint": "other"}),
        (ErrorCode.UNSUPPORTED, {"lora": "other"}),
        (ErrorCode.UNSUPPORTED, {"handover_kind": "other"}),
        (ErrorCode.INVALID_REQUEST, {"first_block": 2}),
        (ErrorCode.INVALID_REQUEST, {"first_block": -1}),
        (ErrorCode.INVALID_REQUEST, {"end_block": 3}),
        (ErrorCode.INVALID_REQUEST, {"tokens": b"".join(tokens)[:-1]}),
        (ErrorCode.INVALID_REQUEST, {"tokens": b"".join([*tokens[:-1], b"\xff\xff\xff\x7f"])}),
        (ErrorCode.INVALID_REQUEST, {"lease_s": float("nan")}),
        (ErrorCode.INVALID_REQUEST, {"reader": ""}),
        (ErrorCode.DEADLINE_EXCEEDED, {"deadline_ms": 1}),
        (ErrorCode.CONTEXT_LENGTH_EXCEEDED, {"tokens": b"\x01\0\0\0" * card.context_length}),
    ]
    for code, fields in changes:
        with pytest.raises(RequestFailed) as refused:
            await bus.request(
                bus.subjects.transfer("p"),
                msgspec.structs.replace(good, **fields),
                PrefillStarted,
                timeout_s=scaled(5),
                in_parts=True,
            )
        assert refused.value.code is code, fields
    await mocks.nothing_is_left()


def a_start(mocks: Pair, worker: str, name: str = "x", **fields: Any) -> StartPrefill:
    """Of 40 blocks."""
    card = mocks.app(worker).record.model
    start = StartPrefill(
        prefill_id=name,
        request_id=name,
        model=card.name,
        fingerprint=card.fingerprint,
        kv_layout=card.kv_layout,
        reader="d",
        tokens=b"".join(token.to_bytes(4, "little") for token in prompt(40)),
        first_block=0,
        end_block=40,
        deadline_ms=2**50,
        lease_s=1000.0,
    )
    return msgspec.structs.replace(start, **fields)


async def test_a_prompt_that_nobody_wants_any_more_when_there_is_memory_for_it_is_not_computed(
    mocks: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus, handler = mocks.asker.service.bus, mocks.app("p")._prefills
    assert handler is not None

    async def ended_meanwhile() -> None:
        await handler(EndPrefill(prefill_id="x", reason="cancelled"), anything)

    anything: Any = None
    monkeypatch.setattr(handler._stager, "prepare", ended_meanwhile)
    monkeypatch.setattr(handler, "_submit", lambda *_: pytest.fail("it is computed"))
    with pytest.raises(RequestFailed) as gone:
        await bus.request(bus.subjects.transfer("p"), a_start(mocks, "p"), PrefillStarted, timeout_s=scaled(5))
    assert gone.value.code is ErrorCode.GONE
    await mocks.nothing_is_left()


async def test_a_reader_is_not_silent_before_it_is_answered(mocks: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory to hand over may take its time to be made."""
    bus, handler = mocks.asker.service.bus, mocks.app("p")._prefills
    assert handler is not None
    subject = bus.subjects.transfer("p")
    prepared = asyncio.Event()
    monkeypatch.setattr(handler._stager, "prepare", prepared.wait)
    start = a_start(mocks, "p", lease_s=0.05)
    waiting = asyncio.create_task(bus.request(subject, start, PrefillStarted, timeout_s=scaled(5)))
    await eventually(lambda: mocks.metric("p", "remote_prefills_open") == 1, what="the job")
    other = a_start(mocks, "p", "other", lease_s=0.05)
    with monkeypatch.context() as at_once:
        at_once.setattr(handler._stager, "prepare", nothing)
        await bus.request(subject, other, PrefillStarted, timeout_s=scaled(5))
    await eventually(lambda: mocks.metric("p", "remote_prefills", outcome="expired") == 1, what="the end of the other")
    prepared.set()
    assert (await waiting).prefill_id == "x"
    await mocks.nothing_is_left()


async def test_a_start_that_takes_too_long_leaves_nothing_behind(mocks: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    bus, handler = mocks.asker.service.bus, mocks.app("p")._prefills
    assert handler is not None
    monkeypatch.setattr(handler._stager, "prepare", asyncio.Event().wait)
    with pytest.raises(RequestFailed) as late:
        await bus.request(bus.subjects.transfer("p"), a_start(mocks, "p"), PrefillStarted, timeout_s=0.1)
    assert late.value.code is ErrorCode.DEADLINE_EXCEEDED
    await mocks.nothing_is_left()


async def nothing() -> None:
    pass


async def test_a_reader_with_a_short_lease_is_found_silent_before_one_with_a_long_one(mocks: Pair) -> None:
    bus = mocks.asker.service.bus
    for name, lease_s in (("long", 1000.0), ("short", 0.2)):
        start = a_start(mocks, "p", name, lease_s=lease_s)
        await bus.request(bus.subjects.transfer("p"), start, PrefillStarted, timeout_s=scaled(5))
    await eventually(lambda: mocks.metric("p", "remote_prefills", outcome="expired") == 1, what="the end of one")
    assert mocks.metric("p", "remote_prefills_open") == 1
    await bus.request(
        bus.subjects.transfer("p"), EndPrefill(prefill_id="long", reason="done"), Done, timeout_s=scaled(5)
    )
    await mocks.nothing_is_left()


async def test_a_decode_worker_that_falls_silent_leaves_nothing_behind(mocks: Pair) -> None:
    await mocks.join("short", "prefill", prefill_lease_s=0.3)
    bus = mocks.asker.service.bus
    begin = a_start(mocks, "short")
    subject = bus.subjects.transfer("short")
    await bus.request(subject, begin, PrefillStarted, timeout_s=scaled(5))
    again = await bus.request(subject, begin, PrefillStarted, timeout_s=scaled(5))
    assert again.prefill_id == "x"
    await mocks.nothing_is_left()
    assert mocks.metric("short", "remote_prefills", outcome="expired") == 1
    ask = NextBlocks(prefill_id="x", first=0, most=4, received=0, wait_s=0.1)
    with pytest.raises(RequestFailed) as gone:
        await bus.request(subject, ask, PrefillStarted, timeout_s=scaled(5))
    assert gone.value.code is ErrorCode.GONE
    await bus.request(subject, EndPrefill(prefill_id="x", reason="done"), Done, timeout_s=scaled(5))


async def test_staging_memory_bounds_what_is_handed_over_at_a_time(mocks: Pair) -> None:
    await mocks.join("small", "prefill", staging_bytes=4 * 512)
    answers = await asyncio.gather(
        *(mocks.asker.ask("d", prompt(30, seed=seed), prefill="small") for seed in range(1, 4))
    )
    assert [answer.prefill_worker for answer in answers] == ["small"] * 3
    assert mocks.metric("d", "transfer_blocks", direction="in") == 90
    await mocks.nothing_is_left()


async def test_staging_memory_goes_with_its_worker_and_what_a_killed_one_left_with_the_next(mocks: Pair) -> None:
    folder = shm_folder()
    if folder is None:
        pytest.skip("there is no memory file system here")

    def files() -> set[Path]:
        return set(folder.glob(f"kvbus-staging-{os.getpid()}-*.arena"))

    await mocks.join("q", "prefill")
    before = files()
    await mocks.asker.ask("d", prompt(20), prefill="q")
    made = files() - before
    assert [oct(file.stat().st_mode & 0o777) for file in made] == ["0o600"]
    await mocks.leave("q")
    assert not files() & made
    left = folder / f"kvbus-staging-{os.getpid()}-left.arena"
    left.write_bytes(b"of a worker that was killed")
    await mocks.join("r", "prefill")
    assert not left.exists()


async def test_prompts_beyond_the_limit_are_computed_where_they_are_needed(mocks: Pair) -> None:
    await mocks.join("one", "prefill", max_remote_prefills=1, mock_speedup=1.0, mock_step_base_s=0.1)
    first = await mocks.asker.send("d", prompt(40), prefill="one")
    await eventually(lambda: mocks.metric("one", "remote_prefills_open") == 1, what="the first prefill")
    second = await mocks.asker.ask("d", prompt(40, seed=3), prefill="one")
    assert second.prefill_worker == ""
    assert mocks.metric("d", "remote_prefill_pulls", outcome="overloaded") == 1
    await asyncio.wait_for(first.ended, scaled(30))
    await mocks.nothing_is_left()
