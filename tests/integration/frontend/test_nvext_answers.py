"""What `nvext` asks to be told besides the answer, on both OpenAI APIs that have it."""

import json
from typing import Any

import pytest

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "m", "prompt": "hi"},
}


@pytest.mark.parametrize("path", PATHS)
async def test_extra_fields_come_with_the_whole_answer(cluster: Any, path: str) -> None:
    await cluster.start()
    asked = {"extra_fields": ["worker_id", "timing", "completion_token_ids", "brand_new"]}
    status, answer = await cluster.post(path, {**PATHS[path], "nvext": asked})
    assert status == 200
    told = answer["nvext"]
    assert told["worker_id"] == {"prefill_worker_id": "w1", "decode_worker_id": "w1"}
    assert bytes(told["completion_token_ids"]).decode() == "Hello world"
    assert told["timing"]["total_time_ms"] >= told["timing"]["ttft_ms"] > 0
    assert told["timing"]["kv_hit_rate"] == 0


@pytest.mark.parametrize("path", PATHS)
async def test_extra_fields_come_in_a_chunk_of_their_own_before_the_end_of_a_stream(cluster: Any, path: str) -> None:
    await cluster.start()
    events = await cluster.stream(path, {**PATHS[path], "nvext": {"extra_fields": ["worker_id"]}})
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["nvext"] == {"worker_id": {"prefill_worker_id": "w1", "decode_worker_id": "w1"}}
    assert all("nvext" not in event for event in events[:-2])


@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_without_extra_fields_has_no_nvext(cluster: Any, path: str) -> None:
    await cluster.start()
    _, answer = await cluster.post(
        path, {**PATHS[path], "nvext": {"extra_fields": ["brand_new"], "annotations": ["x"]}}
    )
    assert "nvext" not in answer


@pytest.mark.parametrize("path", PATHS)
async def test_annotations_are_events_around_the_chunks(cluster: Any, path: str) -> None:
    await cluster.start()
    names = ["request_id", "formatted_prompt", "token_ids", "llm_metrics", "brand_new"]
    events = await cluster.stream(path, {**PATHS[path], "nvext": {"annotations": names}})
    named = {}
    for event in events:
        if isinstance(event, str) and event.startswith("event: "):
            name, _, data = event.partition("\n")
            named[name.removeprefix("event: ")] = json.loads(data.removeprefix("data: "))
    assert list(named) == ["request_id", "formatted_prompt", "token_ids", "llm_metrics"]
    chunks = [event for event in events if isinstance(event, dict)]
    assert named["request_id"] == chunks[0]["id"]
    assert "hi" in named["formatted_prompt"]
    assert len(named["token_ids"]) == named["llm_metrics"]["input_tokens"]
    assert named["llm_metrics"]["output_tokens"] == len("Hello world")


async def test_a_raw_prompt_goes_to_the_model_without_the_chat_template(cluster: Any) -> None:
    await cluster.start()
    events = await cluster.stream(
        "/v1/chat/completions",
        {
            **PATHS["/v1/chat/completions"],
            "messages": [{"role": "system", "content": "ab"}, {"role": "user", "content": "cd"}],
            "nvext": {"use_raw_prompt": True, "annotations": ["formatted_prompt"]},
        },
    )
    assert events[0] == 'event: formatted_prompt\ndata: "abcd"'
