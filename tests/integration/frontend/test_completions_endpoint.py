"""POST /v1/completions over a real bus."""

from typing import Any

import pytest

from kvbus_wire.packing import unpack_tokens


async def post(cluster: Any, prompt: Any, **fields: Any) -> tuple[int, Any]:
    status, body = await cluster.post("/v1/completions", {"model": "m", "prompt": prompt, **fields})
    return status, body


async def test_a_text_prompt_is_completed(cluster: Any) -> None:
    await cluster.start()
    status, body = await post(cluster, "Say:")
    assert status == 200
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["prompt_tokens"] == 4
    message = cluster.worker.requests[0]
    assert (bytes(unpack_tokens(message.tokens)), message.stopping.max_tokens) == (b"Say:", 16)


async def test_control_tokens_count_in_a_raw_prompt(cluster: Any) -> None:
    await cluster.start()
    await post(cluster, "<|im_start|>user\n")
    assert unpack_tokens(cluster.worker.requests[0].tokens) == [257, *b"user\n"]


async def test_token_ids_are_taken_as_they_are(cluster: Any) -> None:
    await cluster.start()
    await post(cluster, [72, 105, 258])
    assert unpack_tokens(cluster.worker.requests[0].tokens) == [72, 105, 258]


async def test_several_prompts_with_several_choices_are_numbered_in_order(cluster: Any) -> None:
    await cluster.start()

    async def play(output: Any) -> None:
        await output.started()
        await output.say(bytes(unpack_tokens(output.message.tokens)) + output.message.request_id[-1].encode())
        await output.end()

    cluster.worker.play = play
    status, body = await post(cluster, ["ab", "cde"], n=2, echo=True)
    assert status == 200
    assert [c["text"] for c in body["choices"]] == ["abab0", "abab1", "cdecde2", "cdecde3"]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 5


async def test_echo_of_token_ids_is_their_text(cluster: Any) -> None:
    await cluster.start()
    _, body = await post(cluster, [72, 105], echo=True)
    assert body["choices"][0]["text"] == "HiHello world"


async def test_log_probabilities_have_the_legacy_shape(cluster: Any) -> None:
    await cluster.start()

    async def play(output: Any) -> None:
        await output.started()
        await output.say("ab", logprobs=True)
        await output.end()

    cluster.worker.play = play
    _, body = await post(cluster, "x", logprobs=2)
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "?": -1.5}, {"b": -0.5, "?": -1.5}],
        "text_offset": [0, 1],
    }
    assert cluster.worker.requests[0].sampling.logprobs == 2


async def test_a_stream_has_whole_objects_and_ends_with_the_sentinel(cluster: Any) -> None:
    await cluster.start()
    body = {"model": "m", "prompt": "x", "echo": True, "stream_options": {"include_usage": True}}
    events = await cluster.stream("/v1/completions", body)
    assert events[-1] == "[DONE]"
    assert cluster.text(events) == "xHello world"
    assert {event["object"] for event in events[:-1]} == {"text_completion"}
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-2]]
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) <= {None}
    assert (events[-2]["choices"], events[-2]["usage"]["completion_tokens"]) == ([], 11)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"n": 65}, "n"),
    ],
)
async def test_what_cannot_be_done_is_refused_with_the_field(cluster: Any, fields: dict[str, Any], param: str) -> None:
    await cluster.start()
    status, body = await cluster.post("/v1/completions", {"model": "m", "prompt": "x", **fields})
    assert (status, body["error"]["param"]) == (400, param)
    assert not cluster.router.requests


async def test_too_long_a_prompt_is_refused_with_the_numbers(cluster: Any) -> None:
    await cluster.start()
    status, body = await post(cluster, "x" * 512, max_tokens=7)
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "prompt")
    assert "maximum context length is 512 tokens" in body["error"]["message"]
    assert "(512 in the messages, 7 in the completion)" in body["error"]["message"]
