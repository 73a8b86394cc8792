"""POST /v1/responses/compact"""

from typing import Any

import pytest

from kvbus_frontend.core.compaction import INSTRUCTION
from kvbus_protocols.responses_turns import SUMMARY_INTRODUCTION
from kvbus_testkit.responses import check_schema

HISTORY = [
    {"role": "developer", "content": "rules"},
    {"role": "user", "content": "launch on Tuesday"},
    {"role": "assistant", "content": "Understood."},
    {"type": "function_call", "call_id": "c", "name": "note", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "noted"},
    {"role": "user", "content": "and tell support"},
]


def says(text: str) -> Any:
    async def play(output: Any) -> None:
        await output.started()
        await output.say(text)
        await output.end()

    return play


async def start(cluster: Any, text: str = "They launch on Tuesday.") -> None:
    await cluster.start(card={"context_length": 4096})
    cluster.worker.play = says(text)


async def compact(cluster: Any, **fields: Any) -> tuple[int, Any]:
    found: tuple[int, Any] = await cluster.post("/v1/responses/compact", {"model": "m", "input": HISTORY, **fields})
    return found


async def test_a_conversation_becomes_what_was_asked_and_a_sealed_summary(cluster: Any) -> None:
    await start(cluster)
    status, body = await compact(cluster, prompt_cache_key="k")
    assert status == 200
    check_schema("CompactResource", body)
    assert [item["type"] for item in body["output"]] == ["message", "message", "message", "compaction"]
    assert [item["role"] for item in body["output"][:3]] == ["developer", "user", "user"]
    assert body["usage"]["output_tokens"] == len("They launch on Tuesday.")
    (prompt,) = cluster.prompts()
    assert INSTRUCTION in prompt
    assert prompt.index("Tuesday") < prompt.index("noted") < prompt.index(INSTRUCTION)


async def test_the_conversation_goes_on_from_the_summary(cluster: Any) -> None:
    await start(cluster)
    _, body = await compact(cluster)
    status, found = await cluster.respond([*body["output"], {"role": "user", "content": "go on"}])
    assert status == 200
    prompt = cluster.prompts()[1]
    assert f"{SUMMARY_INTRODUCTION}They launch on Tuesday." in prompt
    assert "noted" not in prompt
    assert prompt.index("rules") < prompt.index("and tell support") < prompt.index("summary") < prompt.index("go on")
    status, _ = await cluster.respond("more", previous_response_id=found["id"])
    assert status == 200


async def test_a_stored_conversation_can_be_compacted(cluster: Any) -> None:
    await start(cluster)
    _, first = await cluster.respond("remember slate")
    status, body = await compact(cluster, previous_response_id=first["id"], input=None)
    assert status == 200
    assert [item["type"] for item in body["output"]] == ["message", "compaction"]
    assert body["output"][0]["content"][0]["text"] == "remember slate"


async def test_a_conversation_that_is_too_long_already_can_still_be_compacted(cluster: Any) -> None:
    await start(cluster)
    long = [{"role": "user", "content": f"<{i}>" + "x" * 500} for i in range(20)]
    assert (await cluster.respond(long))[0] == 400
    status, body = await compact(cluster, input=long)
    assert status == 200
    assert len(body["output"]) == 21


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": None}, 400, "model"),
        ({"input": []}, 400, "input"),
        ({"input": None}, 400, "input"),
        ({"previous_response_id": "resp_nowhere"}, 400, "previous_response_id"),
        ({"input": [{"role": "robot", "content": "x"}]}, 400, "input[0].role"),
        ({"model": "other"}, 404, "model"),
    ],
)
async def test_what_cannot_be_compacted_is_refused(
    cluster: Any, fields: dict[str, Any], status: int, param: str
) -> None:
    await start(cluster)
    found, body = await compact(cluster, **fields)
    assert (found, body["error"]["param"]) == (status, param)


async def test_a_model_that_says_nothing_compacts_nothing(cluster: Any) -> None:
    await start(cluster, " \n")
    status, body = await compact(cluster)
    assert (status, body["error"]["code"]) == (500, "no_summary")


@pytest.mark.parametrize(("asked", "limit"), [(None, 100), (40, 40), (5000, 100)])
async def test_a_summary_has_a_longest_length_and_counts_when_it_is_cut_there(
    cluster: Any, asked: int | None, limit: int
) -> None:
    async def play(output: Any) -> None:
        await output.started()
        await output.say("They launch on")
        await output.end("length")

    await cluster.start(card={"context_length": 4096}, compaction_max_tokens=100)
    cluster.worker.play = play
    status, body = await compact(cluster, max_tokens=asked)
    assert (status, body["output"][-1]["type"]) == (200, "compaction")
    assert cluster.worker.requests[0].stopping.max_tokens == limit


async def test_a_foreign_or_changed_summary_is_refused(cluster: Any) -> None:
    await start(cluster)
    _, body = await compact(cluster)
    item = body["output"][-1]
    for sealed in ("gAAAAforeign", item["encrypted_content"][:-6] + "AAAAA="):
        status, refusal = await cluster.respond([{**item, "encrypted_content": sealed}])
        assert (status, refusal["error"]["param"]) == (400, "input[0].encrypted_content")
