"""Compacting a conversation: the model sums it up, and the sum, sealed, takes the place of what was said.

What the user and the developer wrote stays as it was, the newest first as far as there is room; the assistant's side, with its
calls and results, lives on in the summary only.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvbus_protocols.conversation import Conversation, TextPart, ToolChoice, Turn
from kvbus_protocols.responses.response import OutputItem, OutputMessage

PURPOSE = "compaction"
KEPT_USER_CHARS = 64_000
SUMMARY_REQUEST = "create a detailed summary of the conversation so far"
SUMMARY_REQUEST_WITHIN = 4000
INSTRUCTION = """\
The conversation has become too long and will be replaced by your summary of it. Write that summary now, for yourself: whoever goes
on has only your text, the instructions and the user's own messages. Keep what is needed to continue the work without repeating it:
what the user wants, constraints and preferences; what has been done and found, with exact names, paths, commands, numbers and
errors; decisions and their reasons; what is open and the next step. Write no greeting and nothing about this request. Call no
tools."""


def summarising(conversation: Conversation, *, max_tokens: int) -> Conversation:
    """The same prompt with one more turn, so that what a worker holds of it counts. ``max_tokens``: of the summary."""
    turns = (*conversation.turns, Turn("user", (TextPart(INSTRUCTION),)))
    asked = conversation.generation.token_limit
    generation = msgspec.structs.replace(
        conversation.generation, max_tokens=max_tokens if asked is None else min(asked, max_tokens)
    )
    return msgspec.structs.replace(
        conversation,
        generation=generation,
        turns=turns,
        tool_choice=ToolChoice("none"),
        output_format=None,
        condensing=True,
    )


def asks_for_summary(conversation: Conversation) -> bool:
    """Whether Claude Code condenses its history: it says so in words only."""
    if conversation.harness != "claude-code" or not conversation.turns or conversation.turns[-1].role != "user":
        return False
    texts = [part.text for part in conversation.turns[-1].parts if isinstance(part, TextPart)]
    return bool(texts) and SUMMARY_REQUEST in texts[-1][:SUMMARY_REQUEST_WITHIN]


def summary_of(output: Sequence[OutputItem]) -> str:
    texts = [part.text for item in output if isinstance(item, OutputMessage) for part in item.content]
    return "\n\n".join(text for text in texts if text.strip()).strip()


def kept_items(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What stays beside the summary, in order."""
    room = KEPT_USER_CHARS
    kept: list[dict[str, Any]] = []
    for item in reversed(items):
        if item["type"] == "additional_tools" or item.get("role") in ("system", "developer"):
            kept.append(item)
        elif item["type"] == "message" and item.get("role") == "user" and room > 0:
            room -= len(msgspec.json.encode(item.get("content")))
            if room >= 0:
                kept.append(item)
    return kept[::-1]
