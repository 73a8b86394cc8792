"""What workers are told of how long prompts are worth keeping, and what clients are told became of that."""

from typing import Any

import pytest

from kvbus_tokenizers import byte_level_bundle
from kvbus_wire.packing import unpack_tokens
from kvbus_wire.worker import Generate

SYSTEM = "You are an agent. "
ASKED: dict[str, Any] = {
    "model": "m",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "What do you see in there? "}],
}
KEPT = {"cache_control": {"type": "ephemeral"}}


def kept_text(message: Generate, end: int) -> str:
    return bytes(token for token in unpack_tokens(message.tokens)[:end] if token < 256).decode()


def keeps_less(unpinned: int) -> Any:
    async def play(output: Any) -> None:
        await output.started()
        await output.say("ok")
        await output.end(unpinned=unpinned)

    return play


async def test_the_system_prompt_has_a_priority_of_its_own(cluster: Any) -> None:
    await cluster.start(head_priority=70)
    await cluster.chat(messages=[{"role": "system", "content": SYSTEM}, *ASKED["messages"]])
    (message,) = cluster.worker.requests
    (kept,) = message.retention
    assert (kept.start, kept.priority, kept.kind, kept.ttl_s) == (0, 70, "normal", None)
    text = kept_text(message, kept.end)
    assert "agent." in text
    assert "What" not in text


async def test_a_prompt_without_a_system_turn_says_nothing(cluster: Any) -> None:
    await cluster.start()
    await cluster.chat()
    assert not any(kept.kind != "normal" for kept in cluster.worker.requests[0].retention)


async def test_a_breakpoint_behind_text_that_ends_in_a_space_keeps_that_text(cluster: Any) -> None:
    await cluster.start(head_priority=0)
    system = [{"type": "text", "text": SYSTEM}]
    content = [{"type": "text", "text": "What do you see in there? ", **KEPT}, {"type": "text", "text": "Say it now."}]
    body = {**ASKED, "system": system, "messages": [{"role": "user", "content": content}]}
    status, found = await cluster.post("/v1/messages", body)
    assert status == 200
    (message,) = cluster.worker.requests
    (kept,) = message.retention
    text = kept_text(message, kept.end + 4)
    assert "in there?" in text, "all but less than a block of it"
    assert "Say" not in kept_text(message, kept.end)
    assert found["usage"]["cache_creation"]["ephemeral_5m_input_tokens"] == kept.end


async def test_what_could_not_be_pinned_is_told_on_every_api(cluster: Any) -> None:
    await cluster.start()
    cluster.worker.play = keeps_less(8)
    system = [{"type": "text", "text": SYSTEM, **KEPT}]
    _, found = await cluster.post("/v1/messages", {**ASKED, "system": system})
    assert found["usage"]["unpinned_tokens"] == 8
    lease = max(kept.end for kept in cluster.worker.requests[0].retention if kept.kind == "pinned")
    assert found["usage"]["cache_creation_input_tokens"] == lease - 8
    retention = [{"class": "pinned", "ttl_s": 60.0}]
    _, found = await cluster.chat(kvbus={"retention": retention})
    assert found["usage"]["prompt_tokens_details"]["unpinned_tokens"] == 8
    _, found = await cluster.respond(prompt_cache_retention="24h")
    assert found["usage"]["input_tokens_details"]["unpinned_tokens"] == 8


async def test_a_retention_time_of_responses_pins_the_prompt_and_tells_what_it_wrote(cluster: Any) -> None:
    await cluster.start(head_priority=0)
    _, found = await cluster.respond(prompt_cache_retention="24h", prompt_cache_key="k")
    pinned, rest = cluster.worker.requests[0].retention
    assert (pinned.kind, pinned.ttl_s, pinned.priority) == ("pinned", 86_400.0, 20)
    assert (rest.start, rest.end, rest.kind) == (pinned.end, 0, "normal")
    assert found["usage"]["input_tokens_details"]["cache_write_tokens"] == pinned.end
    for given in ("for ever", "24h\n", "0h", "99999999d", "1e300s"):
        status, found = await cluster.respond(prompt_cache_retention=given)
        assert (status, found["error"]["param"]) == (400, "prompt_cache_retention")
        assert "expected 'in_memory', or a time such as '24h'" in found["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/completions"])
async def test_everything_of_an_ephemeral_session_goes_first(cluster: Any, path: str) -> None:
    await cluster.start()
    body = {"model": "m", "prompt": "hi"} if path.endswith("/completions") and "chat" not in path else ASKED
    await cluster.post(path, {**body, "kvbus": {"session": {"id": "s", "ephemeral": True}}})
    (kept,) = cluster.worker.requests[0].retention
    assert (kept.start, kept.end, kept.kind) == (0, 0, "ephemeral")


async def test_a_history_that_is_being_compacted_loses_its_value(cluster: Any) -> None:
    await cluster.start(bundle=byte_level_bundle(context_length=4096), card={"context_length": 4096})
    body = {"model": "m", "input": "What do you see?", "instructions": SYSTEM}
    status, _ = await cluster.post("/v1/responses/compact", body)
    assert status == 200
    head, rest = cluster.worker.requests[0].retention
    assert (head.start, head.priority, head.kind) == (0, 50, "normal")
    assert (rest.start, rest.end, rest.kind) == (head.end, 0, "ephemeral")


async def test_claude_code_says_in_words_that_it_condenses(cluster: Any) -> None:
    await cluster.start()
    ask = "Your task is to create a detailed summary of the conversation so far, paying close attention to it."
    body = {
        **ASKED,
        "system": SYSTEM,
        "messages": [{"role": "user", "content": [{"type": "text", "text": ask, **KEPT}]}],
    }
    await cluster.post("/v1/messages", body, headers={"User-Agent": "claude-cli/2.0 (external)"})
    (message,) = cluster.worker.requests
    pinned, *_, rest = message.retention
    assert (rest.kind, rest.end) == ("ephemeral", 0)
    assert (pinned.kind, pinned.priority) == ("pinned", 50), "what the next session begins with stays"
    assert "Your task" not in kept_text(message, pinned.end)


async def test_a_worker_is_told_whose_share_a_request_counts_against(cluster: Any) -> None:
    await cluster.start()
    await cluster.post("/v1/chat/completions", cluster.body(), headers={"x-tenant-id": "acme"})
    assert cluster.worker.requests[0].tenant == "acme"


@pytest.mark.parametrize(("tells", "unpinned"), [(True, 8), (False, None)])
async def test_what_was_pinned_is_told_by_the_worker_also_where_a_stop_string_ends_the_answer(
    cluster: Any, tells: bool, unpinned: int | None
) -> None:
    await cluster.start(rest_timeout_s=30.0 if tells else 0.01)

    async def play(output: Any) -> None:
        await output.started()
        await output.say("one END")
        await cluster.worker.cancelled()
        await output.say("more")
        if tells:
            await output.end("cancelled", unpinned=8)

    cluster.worker.play = play
    retention = [{"class": "pinned", "ttl_s": 60.0}]
    _, found = await cluster.chat(kvbus={"retention": retention}, stop=["END"])
    assert found["choices"][0]["message"]["content"] == "one "
    assert found["choices"][0]["finish_reason"] == "stop"
    # What nobody tells counts as not kept.
    expected = unpinned or found["usage"]["prompt_tokens"]
    assert found["usage"]["prompt_tokens_details"]["unpinned_tokens"] == expected
    assert len(cluster.worker.cancels) == 1
