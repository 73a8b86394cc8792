"""What a frontend has computed while it waits for the next request, and that it gives way to that one."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvbus_runtime.errors import RequestFailed
from kvbus_testkit.timing import eventually
from kvbus_tokenizers import byte_level_bundle
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.packing import unpack_tokens
from kvbus_wire.worker import Generate

TEMPLATE = (Path(__file__).parents[2] / "property/frontend/templates/qwen3.jinja").read_text()
"""Drops the thoughts of all turns before the last question."""

MODEL: dict[str, Any] = {
    "bundle": byte_level_bundle(chat_template=TEMPLATE, context_length=4096),
    "context_length": 4096,
}

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
QUESTION = {"role": "user", "content": "What do you see?"}
THOUGHT = "I have to look around me before I can answer that question."
CALLING = f'<think>\n{THOUGHT}\n</think>\n\n<tool_call>\n{{"name": "look", "arguments": {{"at":"it"}}}}\n</tool_call>'
ANSWER = f"<think>\n{THOUGHT}\n</think>\n\nA tree that stands alone on a hill."
ASKING = {"agent_hints": {"speculative_prefill": True}}


async def start(cluster: Any, **settings: Any) -> None:
    bundle, card = MODEL["bundle"], {"context_length": MODEL["context_length"]}
    await cluster.start(bundle=bundle, card=card, **{"speculative_prefill_min_tokens": 4, **settings})


def guesses(cluster: Any) -> list[Generate]:
    return [message for message in cluster.worker.requests if message.speculative]


async def guess(cluster: Any, outcome: str = "computed") -> Generate | None:
    def counted() -> bool:
        return bool(cluster.metric("speculative_prefills_total", outcome=outcome))

    await eventually(counted, what=f"a speculative prefill that is {outcome}")
    found = guesses(cluster)
    return found[0] if found else None


async def ask(cluster: Any, messages: list[dict[str, Any]], *, says: str, **fields: Any) -> dict[str, Any]:
    def play(output: Any) -> Any:
        return cluster.plays("x" if output.message.speculative else says)(output)

    cluster.worker.play = play
    body = {"model": "m", "messages": messages, "tools": TOOLS, "nvext": ASKING, **fields}
    status, answer = await cluster.post("/v1/chat/completions", body)
    assert status == 200, answer
    said: dict[str, Any] = answer["choices"][0]["message"]
    return said


def result(said: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "a tree"}


async def test_the_prefix_behind_a_call_is_that_of_the_next_request_with_tools_thoughts_and_the_call_as_written(
    cluster: Any,
) -> None:
    await start(cluster)
    said = await ask(cluster, [QUESTION], says=CALLING, nvext={**ASKING, "cache_salt": "acme"})
    foreseen = await guess(cluster)
    assert foreseen is not None
    await ask(cluster, [QUESTION, said, result(said)], says="ok", nvext={**ASKING, "cache_salt": "acme"})
    first, _, real = cluster.worker.requests[:3]
    assert real.tokens.startswith(foreseen.tokens)
    assert len(foreseen.tokens) > len(first.tokens)
    text = bytes(token for token in unpack_tokens(foreseen.tokens) if token < 256).decode()
    assert '"name": "look"' in text, "with the tools"
    assert THOUGHT in text
    assert '{"at":"it"}' in text, "the call as it was written"
    assert (foreseen.cache_salt, foreseen.stopping.max_tokens) == ("acme", 1)
    routed = [asked for asked in cluster.router.requests if asked.speculative]
    assert [(asked.pinned, asked.tenant) for asked in routed] == [("w1", "acme")]
    assert routed[0].hints.priority < -1000


async def test_behind_an_answer_stands_what_the_template_leaves_of_it_when_a_person_goes_on(cluster: Any) -> None:
    await start(cluster)
    said = await ask(cluster, [QUESTION], says=ANSWER, tools=[])
    foreseen = await guess(cluster)
    assert foreseen is not None
    await ask(cluster, [QUESTION, said, {"role": "user", "content": "And there?"}], says="ok", tools=[])
    real = cluster.worker.requests[2]
    assert real.tokens.startswith(foreseen.tokens)
    text = bytes(token for token in unpack_tokens(foreseen.tokens) if token < 256).decode()
    assert "A tree that stands alone" in text
    assert (THOUGHT in text) == (THOUGHT in cluster.prompts()[2])


async def test_it_runs_on_the_worker_that_served_the_turn(cluster: Any) -> None:
    await start(cluster)
    other = await cluster.add_worker("w2", **MODEL)
    served = cluster.worker
    cluster.worker = other
    nvext = {**ASKING, "decode_worker_id": "w2"}
    await ask(cluster, [QUESTION], says=CALLING, nvext=nvext)
    foreseen = await guess(cluster)
    assert foreseen in other.requests
    assert served.requests == []


async def test_it_is_given_up_when_the_real_request_comes_first(cluster: Any) -> None:
    await start(cluster)
    said = await ask(cluster, [QUESTION], says=CALLING, tools=TOOLS, nvext={})
    computing = asyncio.Event()

    async def play(output: Any) -> None:
        if output.message.speculative:
            await output.started()
            computing.set()
            return
        await cluster.plays(CALLING)(output)

    cluster.worker.play = play
    body = {"model": "m", "messages": [QUESTION], "tools": TOOLS, "nvext": ASKING}
    await cluster.post("/v1/chat/completions", body)
    await computing.wait()
    # To look at a prompt is not to ask for it.
    look = {"model": "m", "messages": [QUESTION, said, result(said)], "tools": TOOLS}
    assert (await cluster.post("/v1/prompt?api=chat", look))[0] == 200
    assert cluster.metric("speculative_prefills_running") == 1
    await ask(cluster, [QUESTION, said, result(said)], says="ok", nvext={})
    await guess(cluster, "overtaken")
    (foreseen,) = guesses(cluster)
    await eventually(lambda: bool(cluster.worker.cancels), what="a cancellation")
    assert [cancel.request_id for cancel in cluster.worker.cancels] == [foreseen.request_id]
    await eventually(lambda: cluster.router.phases(foreseen.request_id) == ["finished"], what="its end at the router")


@pytest.mark.parametrize(
    ("says", "fields"),
    [
        (CALLING, {"nvext": {}}),
        (CALLING, {"n": 2}),
        (CALLING, {"max_tokens": 5}),
        (CALLING, {"kvbus": {"session": {"id": "s", "final": True}}}),
    ],
    ids=["not asked for", "several choices", "cut off", "the last of its session"],
)
async def test_nothing_is_computed_where_nothing_can_follow(cluster: Any, says: str, fields: dict[str, Any]) -> None:
    await start(cluster)
    cluster.worker.play = cluster.plays(says, finish="length" if "max_tokens" in fields else "stop")
    body = {"model": "m", "messages": [QUESTION], "tools": TOOLS, "nvext": ASKING, **fields}
    status, _ = await cluster.post("/v1/chat/completions", body)
    assert status == 200
    assert cluster.metric("speculative_prefills_running") == 0
    assert guesses(cluster) == []


@pytest.mark.parametrize(("mode", "count"), [("always", 1), ("never", 0)])
async def test_the_setting_decides_for_those_who_do_not_ask(cluster: Any, mode: str, count: int) -> None:
    await start(cluster, speculative_prefill=mode)
    await ask(cluster, [QUESTION], says=CALLING, nvext=ASKING if mode == "never" else {})
    if count:
        await guess(cluster)
    assert len(guesses(cluster)) == count


async def test_a_prompt_that_brings_nothing_new_is_not_sent(cluster: Any) -> None:
    await start(cluster, speculative_prefill_min_tokens=4000)
    await ask(cluster, [QUESTION], says=CALLING)
    assert await guess(cluster, "nothing_new") is None


async def test_beyond_the_limit_no_more_are_computed(cluster: Any) -> None:
    await start(cluster, max_speculative_prefills=1)
    computing = asyncio.Event()

    async def play(output: Any) -> None:
        if output.message.speculative:
            await output.started()
            computing.set()
            return
        await cluster.plays(CALLING)(output)

    cluster.worker.play = play
    for content in ("one", "two"):
        messages = [{"role": "user", "content": f"{content}: what do you see?"}]
        body = {"model": "m", "messages": messages, "tools": TOOLS, "nvext": ASKING}
        await cluster.post("/v1/chat/completions", body)
        await computing.wait()
    await guess(cluster, "too_many")
    assert len(guesses(cluster)) == 1


async def test_a_router_without_room_refuses_it_and_nobody_notices(cluster: Any) -> None:
    await start(cluster)
    place = cluster.router.place

    def answer(message: Any) -> Any:
        if message.speculative:
            raise RequestFailed(ErrorReply(code=ErrorCode.OVERLOADED, message="full", retryable=True))
        return place(message)

    cluster.router.answer = answer
    await ask(cluster, [QUESTION], says=CALLING)
    assert await guess(cluster, "refused") is None


async def test_one_that_takes_too_long_is_given_up(cluster: Any) -> None:
    await start(cluster, speculative_prefill_s=0.2)

    async def play(output: Any) -> None:
        if not output.message.speculative:
            await cluster.plays(CALLING)(output)

    cluster.worker.play = play
    body = {"model": "m", "messages": [QUESTION], "tools": TOOLS, "nvext": ASKING}
    await cluster.post("/v1/chat/completions", body)
    await guess(cluster, "late")
    await eventually(lambda: bool(cluster.worker.cancels), what="a cancellation")


async def test_what_was_computed_in_advance_belongs_to_its_session_and_goes_with_it(cluster: Any) -> None:
    await start(cluster)
    await ask(cluster, [QUESTION], says=CALLING, kvbus={"session": {"id": "s1"}})
    foreseen = await guess(cluster)
    assert foreseen is not None
    keys = cluster.router.requests[-1].keys
    async with cluster.session.delete("/v1/sessions/s1") as response:
        assert response.status == 200
    assert {keys[at : at + 16] for at in range(0, len(keys), 16)} <= set(cluster.worker.dropped)


async def test_a_session_that_is_deleted_while_its_next_prompt_is_computed_leaves_nothing(cluster: Any) -> None:
    await start(cluster)
    go_on = asyncio.Event()

    async def computing(output: Any) -> None:
        if output.message.speculative:
            await go_on.wait()
        await cluster.plays("x" if output.message.speculative else CALLING)(output)

    cluster.worker.play = computing
    body = {"model": "m", "messages": [QUESTION], "tools": TOOLS, "nvext": ASKING, "kvbus": {"session": {"id": "s1"}}}
    await cluster.post("/v1/chat/completions", body)
    await eventually(lambda: guesses(cluster), what="a prompt that is computed in advance")
    async with cluster.session.delete("/v1/sessions/s1") as response:
        assert response.status == 200
    before = len(cluster.worker.drops)
    go_on.set()
    await eventually(lambda: len(cluster.worker.drops) > before, what="blocks that are dropped")
    keys = cluster.router.requests[-1].keys
    assert cluster.worker.drops[-1].keys.startswith(keys[-16:])
