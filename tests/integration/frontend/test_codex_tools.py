"""Tools of Codex that come up within a conversation: shown where they come up, called by their own schemas and namespaces."""

from pathlib import Path
from typing import Any

from kvbus_testkit.agent_requests.openai_responses import (
    Codex,
    additional_tools,
    apply_patch,
    codex_tools,
    namespace,
    tool_search,
)
from kvbus_testkit.responses import check_stream, parse_events
from kvbus_tokenizers import byte_level_bundle
from kvbus_wire.packing import unpack_tokens

TEMPLATE = Path(__file__).parents[2] / "property" / "frontend" / "templates" / "qwen35.jinja"
CARD = {"tool_call_parser": "qwen3_coder", "reasoning_parser": "qwen3", "context_length": 500_000}
COUNTED = {
    "type": "function",
    "name": "send",
    "parameters": {"type": "object", "properties": {"count": {"type": "integer"}, "to": {"type": "string"}}},
}


async def start(cluster: Any) -> None:
    bundle = byte_level_bundle(chat_template=TEMPLATE.read_text())
    await cluster.start(bundle=bundle, card=CARD, model_aliases="*=m")


def written(name: str, **arguments: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"\n</think>\n\n<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


async def turn(cluster: Any, agent: Codex, says: str) -> list[dict[str, Any]]:
    """The calls of the answer, which the agent has taken."""
    cluster.says(says, size=7)
    sent = agent.request()
    async with cluster.session.post(sent.path, json=sent.body, headers=sent.headers) as response:
        data = await response.read()
        assert response.status == 200, data
    final = check_stream(parse_events(data))
    agent.take(final)
    return [item for item in final["output"] if item["type"].endswith("_call")]


def prompts(cluster: Any) -> list[str]:
    return [
        bytes(token if token < 256 else 0 for token in unpack_tokens(message.tokens)).decode()
        for message in cluster.worker.requests
    ]


def check_shown_in_second_turn(cluster: Any, text: str) -> None:
    """It stands in what the second of three prompts adds to the first, and nothing before it has changed."""
    first, second, third = prompts(cluster)
    assert second.startswith(first)
    assert third.startswith(second)
    assert text in second[len(first) :]


async def test_what_a_search_finds_is_called_by_its_schema_and_namespace_and_leaves_the_top_alone(cluster: Any) -> None:
    await start(cluster)
    agent = Codex(tools=[*codex_tools(), tool_search()])
    agent.ask("send two mails")
    (search,) = await turn(cluster, agent, written("tool_search", query="mail", limit="3"))
    assert (search["type"], search["execution"], search["arguments"]) == (
        "tool_search_call",
        "client",
        {"query": "mail", "limit": 3},
    )
    agent.give([namespace("mcp__mail", COUNTED)])
    (call,) = await turn(cluster, agent, written("send", count="2", to="12"))
    assert (call["name"], call["namespace"], call["arguments"]) == ("send", "mcp__mail", '{"count": 2, "to": "12"}')
    agent.give("sent")
    await turn(cluster, agent, "\n</think>\n\nDone.")
    check_shown_in_second_turn(cluster, '"name":"send"')


async def test_tools_that_come_later_leave_the_top_alone(cluster: Any) -> None:
    await start(cluster)
    agent = Codex(tools=[], first=(additional_tools(),))
    agent.ask("go")
    (code,) = await turn(cluster, agent, written("exec", input="1 + 1"))
    assert (code["type"], code["namespace"], code["name"], code["input"]) == (
        "custom_tool_call",
        "functions",
        "exec",
        "1 + 1",
    )
    agent.give("2")
    agent.items.append({"type": "additional_tools", "role": "developer", "tools": [COUNTED]})
    (call,) = await turn(cluster, agent, written("send", count="2"))
    assert ("namespace" in call, call["arguments"]) == (False, '{"count": 2}')
    agent.give("sent")
    await turn(cluster, agent, "\n</think>\n\nDone.")
    check_shown_in_second_turn(cluster, '"name":"send"')


async def test_a_patch_is_free_text_there_and_back(cluster: Any) -> None:
    await start(cluster)
    agent = Codex(tools=[*codex_tools(), apply_patch()])
    agent.ask("patch it")
    patch = '*** Begin Patch\n+ print("hi")\n*** End Patch'
    (call,) = await turn(cluster, agent, written("apply_patch", input=patch))
    assert (call["type"], call["input"]) == ("custom_tool_call", patch)
    agent.give([{"type": "input_text", "text": "Done."}])
    await turn(cluster, agent, "\n</think>\n\nDone.")
    first, second = prompts(cluster)
    assert second.startswith(first + written("apply_patch", input=patch))


async def test_thoughts_whose_summary_the_client_has_dropped_leave_the_prompt_as_it_was(cluster: Any) -> None:
    await start(cluster)
    agent = Codex()
    agent.ask("run echo hello")
    await turn(cluster, agent, "I think.\n" + written("exec_command", command="echo hello"))
    agent.give("hello")
    await turn(cluster, agent, "\n</think>\n\nDone.")
    for item in agent.items:
        if item["type"] == "reasoning":
            assert item["encrypted_content"]
            item["summary"] = []
            item.pop("content")
    agent.items.pop()
    await turn(cluster, agent, "\n</think>\n\nDone.")
    _, before, after = prompts(cluster)
    assert after == before
    assert "I think." in after
