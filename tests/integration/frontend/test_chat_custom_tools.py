"""Custom tools of Chat Completions: their input is text for the client, and one JSON string for the model."""

from typing import Any

TOOLS = [{"type": "custom", "custom": {"name": "patch", "description": "apply a patch"}}]
WRITTEN = '<tool_call>\n{"name": "patch", "arguments": {"input": "say \\"hi\\"\\n\\u00e9"}}\n</tool_call>'
INPUT = 'say "hi"\né'


async def play(output: Any) -> None:
    await output.started()
    for character in WRITTEN:
        await output.say(character)
    await output.end()


async def test_the_input_of_a_custom_call_comes_as_text(cluster: Any) -> None:
    await cluster.start(card={"tool_call_parser": "hermes"})
    cluster.worker.play = play
    _, answer = await cluster.chat(tools=TOOLS)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"input": INPUT, "name": "patch"})


async def test_the_input_of_a_custom_call_streams_as_it_is_written(cluster: Any) -> None:
    await cluster.start(card={"tool_call_parser": "hermes"})
    cluster.worker.play = play
    events = await cluster.chat_stream(tools=TOOLS)
    deltas = [
        delta
        for event in events
        if isinstance(event, dict)
        for choice in event["choices"]
        for delta in choice["delta"].get("tool_calls", ())
    ]
    assert (deltas[0]["type"], deltas[0]["custom"]) == ("custom", {"input": "", "name": "patch"})
    assert all("id" not in delta and "type" not in delta and "name" not in delta["custom"] for delta in deltas[1:])
    assert "".join(delta["custom"]["input"] for delta in deltas) == INPUT


async def test_a_custom_call_of_an_earlier_turn_is_shown_to_the_model_as_the_json_it_writes(cluster: Any) -> None:
    await cluster.start(card={"tool_call_parser": "hermes"})
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": 'a "b"'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    status, _ = await cluster.post("/v1/chat/completions", {"model": "m", "messages": messages, "tools": TOOLS})
    assert status == 200
