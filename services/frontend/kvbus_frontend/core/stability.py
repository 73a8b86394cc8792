"""Prompt stability: what varies per session or turn and carries no meaning for the model goes before tokenising.

A prefix cache knows a prompt from its first token on, so one changing line at the top costs the whole prompt. Harnesses put
such lines there: Claude Code opens its system prompt with a billing block that differs per session, in some versions per request.
"""

import re
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from kvbus_protocols.conversation import Conversation, Part, TextPart, Turn


class Rule(msgspec.Struct, frozen=True):
    """A volatile piece of text: what ``pattern`` finds is replaced. Looked for in text parts that hold ``needle``, in the first
    ``turns`` turns of the role only: later ones are the conversation proper.
    """

    name: str
    harness: str
    role: Literal["system", "user"]
    needle: str
    pattern: "re.Pattern[str]"
    replacement: str = ""
    turns: int = 1


RULES = (
    Rule(
        "anthropic-preamble",
        "Claude Code",
        "system",
        "x-anthropic-billing-header:",
        # The first line of the prompt, and the block with it when nothing else is in it. Its fields change per session and with
        # the first user text, in some versions (cch=) per request.
        re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*(?:\n\s*|\Z)"),
    ),
    Rule(
        "openclaw-session",
        "OpenClaw",
        "user",
        "Runtime: ",
        # "Runtime: agent=main | session=... | sessionId=... | host=... | model=...": ids only, the rest of the line stays.
        re.compile(r"^(Runtime: [^\n]*?)(?: \| (?:session|sessionId)=[^|\n]*?(?= \||$))+", re.MULTILINE),
        replacement=r"\1",
    ),
)
"""Each can be switched off by its name."""


class StabilitySettings(Protocol):
    @property
    def strip_anthropic_preamble(self) -> bool: ...

    @property
    def keep_volatile(self) -> str: ...


class Stability:
    """The rules in force."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = tuple(rules)

    @classmethod
    def of(cls, settings: StabilitySettings) -> "Stability":
        """Raise ValueError for the name of a rule that does not exist."""
        kept = {name.strip() for name in settings.keep_volatile.split(",") if name.strip()}
        unknown = kept - {rule.name for rule in RULES}
        if unknown:
            known = ", ".join(rule.name for rule in RULES)
            raise ValueError(f"keep_volatile names {sorted(unknown)}; there are: {known}")
        if not settings.strip_anthropic_preamble:
            kept.add("anthropic-preamble")
        return cls([rule for rule in RULES if rule.name not in kept])

    def stabilised(self, conversation: Conversation) -> Conversation:
        """The same object when nothing had to go."""
        turns = conversation.turns
        for rule in self._rules:
            turns = _without(turns, rule)
        return conversation if turns is conversation.turns else msgspec.structs.replace(conversation, turns=turns)


def _without(turns: tuple[Turn, ...], rule: Rule) -> tuple[Turn, ...]:
    seen = 0
    changed: list[Turn] | None = None
    for i, turn in enumerate(turns):
        if turn.role != rule.role:
            continue
        seen += 1
        if seen > rule.turns:
            break
        parts = _stripped(turn.parts, rule)
        if parts is not turn.parts:
            changed = list(turns) if changed is None else changed
            changed[i] = msgspec.structs.replace(turn, parts=parts)
    if changed is None:
        return turns
    return tuple(turn for turn in changed if turn.parts or turn.role != "system")


def _stripped(parts: tuple[Part, ...], rule: Rule) -> tuple[Part, ...]:
    """The same object when nothing was found; a part of which nothing is left goes."""
    kept: list[Part] = []
    found = False
    for part in parts:
        if isinstance(part, TextPart) and rule.needle in part.text:
            text = rule.pattern.sub(rule.replacement, part.text)
            if text != part.text:
                found = True
                if text:
                    kept.append(TextPart(text))
                continue
        kept.append(part)
    return tuple(kept) if found else parts
