"""How much of a prompt the one before it has made already, for requests as Claude Code and OpenClaw send them, in tokens.

The shares are those that such requests reach with nothing volatile in them. Of templates that show the whole description of
a tool; the tokenizer has one token per byte.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbus_frontend.core.formats import Formats
from kvbus_frontend.core.message_style import style_of
from kvbus_frontend.core.requests import PromptForm, render_conversation
from kvbus_frontend.core.stability import Stability
from kvbus_frontend.core.template_limits import limits_of
from kvbus_frontend.core.template_traits import traits_of
from kvbus_frontend.settings import FrontendSettings
from kvbus_parsers.choose import choose
from kvbus_protocols import RequestDecoder
from kvbus_protocols.headers import read_headers
from kvbus_protocols.messages import MessagesRequest
from kvbus_protocols.messages_turns import messages_conversation
from kvbus_testkit.agent_requests.anthropic import (
    Body,
    all_requests,
    assistant,
    claude_code,
    claude_headers,
    compaction,
    openclaw,
    references,
    reminder,
    text,
    thinking,
    tool_result,
    tool_use,
    user,
)
from kvbus_tokenizers import ChatTemplate, PromptCache, Tokenizer, byte_level_bundle
from kvbus_wire.packing import unpack_tokens

TEMPLATES = Path(__file__).parents[2] / "property" / "frontend" / "templates"
FAMILIES = ("deepseek32", "glm", "harmony", "kimi", "minimax", "mistral", "nemotron3", "qwen3", "qwen35")
TOOLS_FIRST = ("glm", "kimi")
TOKENIZER = Tokenizer.from_bundle(byte_level_bundle())
DECODER = RequestDecoder(MessagesRequest)
STABILITY = Stability.of(FrontendSettings())

OTHER = "please print something else with the shell"
CALL = assistant(thinking("I run it."), tool_use("toolu_1a", "Bash", command="echo hello"))
RESULT = user(tool_result("toolu_1a", "hello"))
LOOP = (CALL, RESULT)
DONE = assistant(thinking("Done."), text("It printed hello."))
SEARCH = assistant(tool_use("toolu_2b", "ToolSearch", query="select:WebFetch,WebSearch"))
FOUND = user(tool_result("toolu_2b", references("WebFetch", "WebSearch")))


@cache
def form_of(name: str) -> PromptForm:
    source = (TEMPLATES / f"{name}.jinja").read_text()
    template, choice = ChatTemplate(source, TOKENIZER), choose(source)
    style = style_of(traits_of(template), Formats(choice.tool, choice.reasoning))
    return PromptForm(template, limits_of(template, style), style)


def tokens(name: str, body: Body) -> list[int]:
    harness = read_headers(claude_headers()).harness if "metadata" in body else ""
    conversation = messages_conversation(DECODER.decode(msgspec.json.encode(body)))
    conversation = STABILITY.stabilised(msgspec.structs.replace(conversation, harness=harness))
    segments = render_conversation(conversation, form_of(name))
    return unpack_tokens(PromptCache(1 << 20).encode(TOKENIZER, segments).tokens)


def words_of(ids: list[int]) -> str:
    return bytes(token for token in ids if token < 256).decode()


def shared(first: list[int], second: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def asked_to_compact(body: Body) -> Body:
    last = body["messages"][-1]
    return {**body, "messages": [*body["messages"][:-1], {**last, "content": [*last["content"], compaction()]}]}


def old(*history: Body, **fields: Any) -> Body:
    return claude_code(*history, version="2.1.140", **fields)


def with_bare_ids(*messages: Body) -> list[Body]:
    return json.loads(json.dumps(messages).replace("toolu_", "toolu"))  # type: ignore[no-any-return]


LATER = claude_code(*LOOP, request=2)
PAIRS = {
    "another session, another question": (claude_code(), claude_code(session=2, question=OTHER), 79),
    "turn 2": (claude_code(), LATER, 99),
    "the next question": (LATER, claude_code(*LOOP, DONE, user(text("and now list it")), request=3), 99),
    "tools were found": (LATER, claude_code(*LOOP, SEARCH, FOUND, loaded=("WebFetch", "WebSearch"), request=3), 99),
    "compaction": (LATER, asked_to_compact(LATER), 89),
    "2.1.140, turn 2": (old(), old(*LOOP, request=2), 99),
    "2.1.140, another session": (old(), old(session=2, question=OTHER), 99),
    "2.1.42, another session": (claude_code(version="2.1.42"), claude_code(version="2.1.42", session=2, question=OTHER), 99),
    "OpenClaw, turn 2": (openclaw(), openclaw(*with_bare_ids(*LOOP)), 98),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_request_reuses_what_the_one_before_it_has_made(name: str, pair: str) -> None:
    before, after, percent = PAIRS[pair]
    first, second = tokens(name, before), tokens(name, after)
    _, opens, rest = words_of(second).partition("<functions>")
    new_tools = (
        len(rest.partition("</functions>")[0].encode()) if opens else 0
    )  # descriptions that nobody had seen before
    assert 100 * shared(first, second) >= percent * (len(second) - new_tools)


@pytest.mark.parametrize("name", FAMILIES)
def test_in_another_directory_tools_are_reused_where_the_template_shows_them_first(name: str) -> None:
    other = claude_code(session=2, directory="/srv/elsewhere/app", git=False, question=OTHER)
    first, second = tokens(name, claude_code()), tokens(name, other)
    assert 100 * shared(first, second) >= (71 if name in TOOLS_FIRST else 7) * len(second)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_second_session_computes_little_more_than_its_question(name: str) -> None:
    first, second = tokens(name, claude_code()), tokens(name, claude_code(session=2, question=OTHER))
    assert 100 * shared(first, second) >= 99 * len(second)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_reminder_in_a_long_tool_loop_costs_nothing_that_came_before(name: str) -> None:
    steps: list[Body] = []
    for i in range(10):
        steps.append(assistant(thinking(f"Step {i}."), tool_use(f"toolu_{i}", "Bash", command=f"echo {i}")))
        steps.append(user(tool_result(f"toolu_{i}", f"{i}")))
    noted = [*steps[:-1], user(*steps[-1]["content"], reminder("The list of tasks is empty."))]
    first, second = tokens(name, claude_code(*steps)), tokens(name, claude_code(*noted))
    assert shared(first, second) >= len(first) - 100


@pytest.mark.parametrize("name", FAMILIES)
def test_a_form_that_a_client_changes_from_turn_to_turn_does_not_change_the_prompt(name: str) -> None:
    """The place of cache_control, text as a string or in blocks, the spelling of arguments, ids, fields beside the content."""
    late = {"role": "system", "content": "Be brief."}
    body = claude_code(*LOOP, late)
    other = json.loads(json.dumps(body).replace("toolu_", "toolu"))
    other["messages"][1] = {
        "role": "system",
        "content": [text(body["messages"][1]["content"], cache_control={"type": "ephemeral"})],
    }
    other["messages"][-1] = {**late, "output_config": {"effort": "medium"}}
    other["messages"][-2]["content"][0]["content"] = [text("hello")]
    other["tools"][0]["cache_control"] = {"type": "ephemeral"}
    assert body != other
    assert tokens(name, body) == tokens(name, other)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "none"}},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"max_tokens": 128_000, "stream": False, "metadata": None},
        {"context_management": None, "container": None, "betas": ["unknown-2031-01-01"], "speed": "fast"},
        {"output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}}},
        {"thinking": {"type": "adaptive", "display": "updates"}},
        {"cache_control": {"type": "ephemeral", "ttl": "1h"}, "temperature": 0.5},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_is_asked_for_beside_the_text_does_not_change_the_prompt(name: str, fields: dict[str, Any]) -> None:
    assert tokens(name, LATER | fields) == tokens(name, LATER)


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_every_template_takes_what_every_client_sends_and_shows_what_users_and_systems_say(name: str) -> None:
    for client, body in all_requests().items():
        words = words_of(tokens(name, body))
        for message in (message for message in body["messages"] if message["role"] != "assistant"):
            blocks = message["content"] if isinstance(message["content"], list) else [text(message["content"])]
            for block in blocks:
                assert block.get("text", "").strip() in words, client
