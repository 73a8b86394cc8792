"""Requests as Claude Code sends them to the Messages API, with made-up text of a given length."""

import json
import random
from typing import Any

import msgspec

from kvbus_cli.bench.agent_client import Client

AGENT = "You are Claude Code, Anthropic's official CLI for Claude."
TOOLS = ("Agent", "Bash", "Edit", "Glob", "Grep", "ListAgents", "Read", "Skill", "TodoWrite", "WebFetch", "Write")
WORDS_PER_TOOL = 200
THOUGHT_TOKENS = 500

_TEXT = (
    "the a of to and in is that it for on with as are this by from at or an be which when where each every file function "
    "module test class value error result list state queue cache index block token prompt server client request answer "
    "stream buffer thread worker router engine model folder path name type field line column branch commit change review "
    "build deploy check verify read write open close start stop send receive parse format render compute store remove keep "
    "never always only first last next before after between into without within across small large fast slow simple clear "
    "broken missing empty whole partial stable volatile repeated unused hidden public internal remote local"
)
_WORDS = _TEXT.split()


def prose(rng: random.Random, words: int) -> str:
    """Sentences in paragraphs."""
    text: list[str] = []
    while words > 0:
        length = min(words, rng.randint(6, 18))
        sentence = " ".join(rng.choice(_WORDS) for _ in range(length))
        text.append(sentence.capitalize() + "." + ("\n\n" if rng.random() < 0.15 else " "))
        words -= length
    return "".join(text).strip()


def billing_block(number: int) -> str:
    """The first system block of Claude Code: its digits differ between sessions, in some versions between requests."""
    rng = random.Random(number)
    digits, check = rng.randrange(16**3), rng.randrange(16**5)
    return f"x-anthropic-billing-header: cc_version=2.1.140.{digits:03x}; cc_entrypoint=cli; cch={check:05x};"


def _text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


class Session(msgspec.Struct, frozen=True):
    """What the requests of a session have in common. ``context``: of the project; ``file``: what a tool reads; ``thoughts``: of the
    model's first and second turn.
    """

    tools: list[dict[str, Any]]
    system: tuple[str, ...] = (AGENT,)
    context: str = ""
    file: str = ""
    thoughts: tuple[str, str] = ("", "")

    def question(self, question: str, header: str) -> dict[str, Any]:
        """The first request of a session with the project's context."""
        request = self.turn([{"role": "user", "content": [_text(question)]}], header)
        request["system"].append(_text(self.context))
        return request

    def turn(self, messages: list[dict[str, Any]], header: str) -> dict[str, Any]:
        """A later request, whose messages are as long as the context."""
        return {"system": [_text(part) for part in (header, *self.system)], "tools": self.tools, "messages": messages}

    def turn_output(self, turn: int) -> str:
        """What the model writes in its first and second turn: a thought, a remark, a call."""
        arguments = json.dumps({"file_path": f"src/part_{turn}.py"})
        call = f'<tool_call>\n{{"name": "Read", "arguments": {arguments}}}\n</tool_call>'
        return f"<think>\n{self.thoughts[turn]}\n</think>\n\nI read that file.\n{call}"

    def result(self, content: list[dict[str, Any]], result: str) -> dict[str, Any]:
        """The user's turn that answers a call."""
        [call_id] = [block["id"] for block in content if block["type"] == "tool_use"]
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": result}]}


def make_session(client: Client, tokens: int, tokens_behind_thought: int) -> Session:
    """A session whose prompts have about so many tokens, and so many of them behind the first thought of a conversation."""
    rng = random.Random(52)
    bare = Session([_tool(name, rng) for name in TOOLS])
    empty = client.count(bare.question("?", ""))
    sample = prose(rng, 2000)
    words_per_token = 2000 / (client.count(bare.question(sample, "")) - empty)

    def text(tokens: int) -> str:
        return prose(rng, max(1, int(tokens * words_per_token)))

    thought = min(THOUGHT_TOKENS, tokens // 40)
    return Session(
        bare.tools,
        system=(AGENT, text(tokens - tokens_behind_thought - empty)),
        context=text(tokens_behind_thought),
        file=text(tokens_behind_thought - 2 * thought),
        thoughts=(text(thought), text(thought)),
    )


def _tool(name: str, rng: random.Random) -> dict[str, Any]:
    parameters = {
        field: {"type": "string", "description": prose(rng, 12)} for field in ("file_path", "pattern", "description")
    }
    schema = {"type": "object", "properties": parameters, "required": ["file_path"], "additionalProperties": False}
    return {"name": name, "description": prose(rng, WORDS_PER_TOOL), "input_schema": schema}
