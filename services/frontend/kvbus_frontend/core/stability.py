"""Prompt stability: what varies per session or turn and carries no meaning for the model goes before tokenising, and what sessions
share comes before what they do not.

A prefix cache knows a prompt from its first token on, so one changing line at the top costs the whole prompt. Harnesses put
such lines there: Claude Code opens its system prompt with a billing block that differs per session, in some versions per request.
It also describes the environment, a fifth of its prompt and the same for all sessions in a directory, behind the first question.
OpenClaw adds a note to each request that is gone from the next one.
"""

import re
from collections.abc import Callable, Sequence
from itertools import accumulate, compress
from typing import Literal, Protocol

import msgspec

from kvbus_frontend.core.template_limits import as_note
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


_OPENCLAW_IDS = re.compile(r"^(Runtime: [^\n]*?)(?: \| (?:session|sessionId)=[^|\n]*?(?= \||$))+", re.MULTILINE)
"""In "Runtime: agent=main | session=... | sessionId=... | host=... | model=...": ids only, the rest of the line stays."""

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
    # The line ends the first question over Chat, the instructions over Messages and Responses.
    Rule("openclaw-session", "OpenClaw", "user", "Runtime: ", _OPENCLAW_IDS, r"\1"),
    Rule("openclaw-session", "OpenClaw", "system", "Runtime: ", _OPENCLAW_IDS, r"\1"),
)
OPENCLAW_CONTEXT = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"
"""How its note begins."""


class StabilitySettings(Protocol):
    @property
    def strip_anthropic_preamble(self) -> bool: ...

    @property
    def keep_volatile(self) -> str: ...


class Change(msgspec.Struct, frozen=True):
    """What a rule made of the text of a part; ``after``: "" for one that went as a whole."""

    rule: str
    before: str
    after: str


class Stability:
    """The rules in force."""

    def __init__(self, rules: Sequence[Rule], moves: Sequence["Move"]) -> None:
        self._rules = tuple(rules)
        self._moves = tuple(moves)

    @classmethod
    def of(cls, settings: StabilitySettings) -> "Stability":
        """Raise ValueError for the name of a rule that does not exist."""
        kept = {name.strip() for name in settings.keep_volatile.split(",") if name.strip()}
        unknown = kept.difference(RULE_NAMES)
        if unknown:
            raise ValueError(f"keep_volatile names {sorted(unknown)}; there are: {', '.join(RULE_NAMES)}")
        if not settings.strip_anthropic_preamble:
            kept.add("anthropic-preamble")
        return cls(
            [rule for rule in RULES if rule.name not in kept],
            [move for name, move in MOVES.items() if name not in kept],
        )

    def stabilised(self, conversation: Conversation) -> Conversation:
        """The same object when nothing had to go."""
        turns = conversation.turns
        for rule in self._rules:
            turns, _ = _without(turns, rule)
        if turns is not conversation.turns:
            conversation = _filled(msgspec.structs.replace(conversation, turns=turns))
        for move in self._moves:
            if (moved := move(conversation)) is not None:
                conversation = moved.conversation
        return conversation

    def changes(self, conversation: Conversation) -> list[Change]:
        """What `stabilised` does to texts, in order; one that only moves is the same before and after."""
        turns, all_changes = conversation.turns, list[Change]()
        for rule in self._rules:
            turns, changes = _without(turns, rule)
            all_changes += changes
        conversation = _filled(msgspec.structs.replace(conversation, turns=turns))
        for move in self._moves:
            if (moved := move(conversation)) is not None:
                conversation = moved.conversation
                texts = [part.text for part in moved.turn.parts if isinstance(part, TextPart)]
                all_changes += [Change(moved.rule, text, text) for text in texts]
        return all_changes


class Moved(msgspec.Struct, frozen=True):
    """``turn``: as it stood in its old place."""

    rule: str
    turn: Turn
    conversation: Conversation


Move = Callable[[Conversation], Moved | None]


def _environment_first(conversation: Conversation) -> Moved | None:
    """Claude Code's system message right behind the first question, put before it, as a note at the head of the user's message.

    That is where Claude Code itself puts it for models that take no system messages. The model answers to both in any case, and
    every later request of the session has it there as well."""
    turns = conversation.turns
    first = next((i for i, turn in enumerate(turns) if turn.role != "system"), len(turns))
    if conversation.harness != "claude-code" or [turn.role for turn in turns[first : first + 2]] != ["user", "system"]:
        return None
    question, environment = turns[first : first + 2]
    question = msgspec.structs.replace(question, parts=(*as_note(environment.parts), *question.parts))
    return _moved(conversation, "claude-environment", first + 1, (*turns[:first], question, *turns[first + 2 :]))


def _context_last(conversation: Conversation) -> Moved | None:
    """OpenClaw's internal context, put behind all that came since the question. There OpenClaw itself has it over Chat and
    Messages; over Responses it stays behind the question while tools run, and the next question would part from the prompt
    there."""
    turns = conversation.turns
    last = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=len(turns))
    if last >= len(turns) - 1 or not _is_context(turns[last]):
        return None
    return _moved(conversation, "openclaw-context", last, (*turns[:last], *turns[last + 1 :], turns[last]))


def _is_context(turn: Turn) -> bool:
    texts = [part.text for part in turn.parts if isinstance(part, TextPart)]
    return 0 < len(texts) == len(turn.parts) and all(text.startswith(OPENCLAW_CONTEXT) for text in texts)


MOVES: dict[str, Move] = {"claude-environment": _environment_first, "openclaw-context": _context_last}

RULE_NAMES = (*dict.fromkeys(rule.name for rule in RULES), *MOVES)
"""Each can be switched off by its name."""


def _moved(conversation: Conversation, rule: str, turn: int, turns: tuple[Turn, ...]) -> Moved:
    """``turn``: which one has moved. A breakpoint keeps as much of what else comes before it."""
    points = tuple(
        msgspec.structs.replace(
            point, turn=point.turn - (point.turn >= turn), after=0 if point.turn == turn else point.after
        )
        for point in conversation.breakpoints
    )
    changed = msgspec.structs.replace(conversation, turns=turns, breakpoints=points)
    return Moved(rule, conversation.turns[turn], changed)


def _without(turns: tuple[Turn, ...], rule: Rule) -> tuple[tuple[Turn, ...], list[Change]]:
    """The same object when nothing was found."""
    seen = 0
    changed: list[Turn] = []
    changes: list[Change] = []
    for turn in turns:
        seen += turn.role == rule.role
        if turn.role == rule.role and seen <= rule.turns and (found := _found(turn.parts, rule)):
            turn = msgspec.structs.replace(turn, parts=_stripped(turn.parts, found))
            changes += found.values()
        changed.append(turn)
    if not changes:
        return turns, []
    return tuple(changed), changes


def _filled(conversation: Conversation) -> Conversation:
    """Without the system turns of which nothing is left. What a breakpoint there kept are the turns before it."""
    stays = [bool(turn.parts) or turn.role != "system" for turn in conversation.turns]
    if all(stays):
        return conversation
    moved = list(accumulate(stays, initial=-1))[1:]
    return msgspec.structs.replace(
        conversation,
        turns=tuple(compress(conversation.turns, stays)),
        breakpoints=tuple(
            point
            if point.turn < 0
            else msgspec.structs.replace(point, turn=moved[point.turn], after=point.after if stays[point.turn] else 0)
            for point in conversation.breakpoints
        ),
    )


def _found(parts: tuple[Part, ...], rule: Rule) -> dict[int, Change]:
    """By the part's index."""
    found: dict[int, Change] = {}
    for i, part in enumerate(parts):
        if isinstance(part, TextPart) and rule.needle in part.text:
            text = rule.pattern.sub(rule.replacement, part.text)
            if text != part.text:
                found[i] = Change(rule.name, part.text, text)
    return found


def _stripped(parts: tuple[Part, ...], found: dict[int, Change]) -> tuple[Part, ...]:
    """A part of which nothing is left goes."""
    changed = (TextPart(found[i].after) if i in found else part for i, part in enumerate(parts))
    return tuple(part for i, part in enumerate(changed) if i not in found or found[i].after)
