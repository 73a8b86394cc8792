"""Cases of Chat Completions with known answers, judged on the running server."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvbus_testkit.api_cases import by_id, parsers_of, read_cases
from kvbus_tokenizers import byte_level_bundle
from kvbus_wire.packing import unpack_tokens

CASES = read_cases(Path(__file__).with_name("api_cases.jsonl"), "chat_request")
REQUESTS = [case for case in CASES if "model_output" not in case]
ANSWERS = [case for case in CASES if "model_output" in case]

TEMPLATES = {
    # Calls as lists of pairs: a template that needs the arguments as objects.
    "objects": """
{%- for message in messages %}
{{- {"role": message.role, "calls": []} | tojson }}
{%- for call in message.tool_calls or [] %}
{{- '\n' + [call.function.name, call.function.arguments.items() | list] | tojson }}
{%- endfor %}
{{- '\n' }}
{%- endfor %}
""",
    # How models of this family are prompted: thoughts of the turn that goes on are shown, those of finished turns are not.
    "qwen3.5": """
{%- set turn = namespace(begin=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set turn.begin = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- set role = 'user' if message.role == 'tool' else message.role %}
{{- '<|im_start|>' + role + '\n' }}
{%- if message.role == 'tool' %}
{{- '<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- elif message.role == 'assistant' %}
{%- if message.reasoning_content and (preserve_thinking or loop.index0 > turn.begin) %}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for name, value in call.function.arguments.items() %}
{{- '<parameter=' + name + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}
{%- endfor %}
{%- else %}
{{- message.content }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}
""",
}


def prompt_text(cluster: Any) -> str:
    tokens = unpack_tokens(cluster.worker.requests[-1].tokens)
    return bytes(token for token in tokens if token < 256).decode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", **by_id(REQUESTS))
async def test_a_request_is_taken_or_refused_and_rendered_as_the_case_says(
    cluster: Any, case: dict[str, Any], stream: bool
) -> None:
    expected = case["expected"]
    renders = expected.get("renders", {})
    template = TEMPLATES[renders.get("template_family", "objects")]
    await cluster.start(bundle=byte_level_bundle(chat_template=template))
    body = {**case["request"], "stream": stream}
    if "preserve_thinking" in renders:
        body["chat_template_kwargs"] = {"preserve_thinking": renders["preserve_thinking"]}
    async with cluster.session.post("/v1/chat/completions", json=body) as response:
        assert response.status in expected.get("http_status_in", [expected.get("http_status", 200)])
        if response.status != 200:
            assert {*(await response.json())["error"]} == {"message", "type", "param", "code"}
            return
    prompt = prompt_text(cluster)
    assert all(text in prompt for text in renders.get("must_contain", ()))
    assert not any(text in prompt for text in renders.get("must_not_contain", ()))
    for wanted in expected.get("template_messages_contain", ()):
        calls = [
            (name, dict(arguments))
            for line in prompt.splitlines()
            if line.startswith("[")
            for name, arguments in [json.loads(line)]
        ]
        assert calls == [(call["name"], call["arguments"]) for call in wanted["tool_calls"]]


@pytest.mark.parametrize("size", [1, 10_000], ids=["bytes", "whole"])
@pytest.mark.parametrize("case", **by_id(ANSWERS))
async def test_an_answer_is_what_the_case_says_however_it_is_cut(cluster: Any, case: dict[str, Any], size: int) -> None:
    await cluster.start(card=parsers_of(case))
    cluster.says(case["model_output"], size=size, finish=case.get("finish", "stop"))
    request = {key: value for key, value in case["request"].items() if not key.startswith("stream")}
    status, body = await cluster.post("/v1/chat/completions", request)
    assert status == 200
    check_choice(body["choices"][0], case["expected"])
    options = {"stream_options": case["request"]["stream_options"]} if "stream_options" in case["request"] else {}
    events = await cluster.stream("/v1/chat/completions", {**request, **options})
    check_choice(assembled(events), case["expected"])
    for rule in case["expected"].get("chunk_rules", ()):
        RULES[rule](events)


def check_choice(choice: dict[str, Any], expected: dict[str, Any]) -> None:
    message, wanted = choice["message"], expected["message"]
    content = message["content"] or ""
    assert all(words in content for words in wanted.get("content_contains", ()))
    assert not any(words in content for words in expected.get("never_in_content", ()))
    if "content" in wanted:
        assert content == wanted["content"]
    if "tool_calls" in wanted:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        found = [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in calls]
        assert found == (wanted["tool_calls"] or [])
    if "finish_reason" in expected:
        assert choice["finish_reason"] in (expected["finish_reason"], *expected.get("accept_finish_reason", ()))
    assert choice["finish_reason"] != expected.get("not_finish_reason")


def choices_of(events: list[Any]) -> list[dict[str, Any]]:
    return [choice for event in events if event != "[DONE]" for choice in event["choices"]]


def deltas_of(events: list[Any]) -> list[dict[str, Any]]:
    return [choice["delta"] for choice in choices_of(events)]


def assembled(events: list[Any]) -> dict[str, Any]:
    content = "".join(delta.get("content") or "" for delta in deltas_of(events))
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas_of(events):
        for call in delta.get("tool_calls", ()):
            function = calls.setdefault(call["index"], {"name": "", "arguments": ""})
            function["name"] += call["function"].get("name", "")
            function["arguments"] += call["function"]["arguments"]
    tool_calls = [{"function": calls[index]} for index in sorted(calls)]
    [finish] = [choice["finish_reason"] for choice in choices_of(events) if choice["finish_reason"]]
    return {"message": {"content": content, "tool_calls": tool_calls}, "finish_reason": finish}


def role_only_in_first_delta(events: list[Any]) -> None:
    assert [delta.get("role") for delta in deltas_of(events)] == ["assistant"] + [None] * (len(deltas_of(events)) - 1)


def tool_id_and_name_once_per_index(events: list[Any]) -> None:
    calls = [call for delta in deltas_of(events) for call in delta.get("tool_calls", ())]
    for index in {call["index"] for call in calls}:
        own = [call for call in calls if call["index"] == index]
        assert ["id" in call and "name" in call["function"] for call in own] == [True] + [False] * (len(own) - 1)
        assert not any("id" in call or "name" in call["function"] for call in own[1:])


def indexes_contiguous_from_0(events: list[Any]) -> None:
    indexes = [call["index"] for delta in deltas_of(events) for call in delta.get("tool_calls", ())]
    assert sorted(indexes) == indexes
    assert {*indexes} == {*range(max(indexes) + 1)}


def one_finish_reason_per_choice(events: list[Any]) -> None:
    assert sum(choice["finish_reason"] is not None for choice in choices_of(events)) == 1


def done_sentinel_once(events: list[Any]) -> None:
    assert events.index("[DONE]") == len(events) - 1


def usage_chunk_last_with_empty_choices(events: list[Any]) -> None:
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] > 0


def other_chunks_usage_null_or_absent(events: list[Any]) -> None:
    assert all(event.get("usage") is None for event in events[:-2])


RULES = {
    rule.__name__: rule
    for rule in (
        role_only_in_first_delta,
        tool_id_and_name_once_per_index,
        indexes_contiguous_from_0,
        one_finish_reason_per_choice,
        done_sentinel_once,
        usage_chunk_last_with_empty_choices,
        other_chunks_usage_null_or_absent,
    )
}
