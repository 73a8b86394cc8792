"""What a chat template refuses or silently drops, and turns rearranged so that it takes them.

Agents put system messages between others, several in a row, and two user messages one after the other. Some templates raise
then, some drop the text. What a template can do is found by trying it, once, when the model is loaded; the rearrangement
depends on nothing but the turns before, so a conversation that grows keeps its prefix.
"""

from collections.abc import Mapping, Sequence

import msgspec

from kvbus_protocols.conversation import TextPart, Turn
from kvbus_tokenizers import ChatTemplate, TemplateFailed

_PROBES = ("k-one", "k-two", "k-three")


class TemplateLimits(msgspec.Struct, frozen=True):
    """``system``: takes a system message at all; ``systems``: several in a row; ``late_system``: one after the first user message;
    ``users``: two user messages in a row."""

    system: bool = True
    systems: bool = True
    late_system: bool = True
    users: bool = True


def limits_of(template: ChatTemplate | None) -> TemplateLimits:
    if template is None:
        return TemplateLimits()
    return TemplateLimits(
        system=_takes(template, "system", "user"),
        systems=_takes(template, "system", "system", "user"),
        late_system=_takes(template, "user", "system") and _takes(template, "user", "assistant", "system"),
        users=_takes(template, "user", "user"),
    )


def _takes(template: ChatTemplate, *roles: str) -> bool:
    messages: list[Mapping[str, object]] = [
        {"role": role, "content": text} for role, text in zip(roles, _PROBES, strict=False)
    ]
    try:
        rendered = "".join(segment.text for segment in template.render(messages))
    except TemplateFailed:
        return False
    places = [rendered.find(text) for text in _PROBES[: len(roles)]]
    # Texts in another order would move with the conversation: a late system message hoisted to the top costs the whole prefix.
    return -1 not in places and places == sorted(places)


def fitted(turns: tuple[Turn, ...], limits: TemplateLimits) -> tuple[Turn, ...]:
    """Turns that the template takes, all text kept and in order; the same object when nothing had to change."""
    if limits == TemplateLimits():
        return turns
    out: list[Turn] = []
    for turn in turns:
        only_system_before = all(before.role == "system" for before in out)
        if turn.role == "system" and only_system_before:
            if out and not limits.systems:
                out[-1] = _joined(out[-1], turn)
                continue
        elif turn.role == "system" and not limits.late_system:
            turn = _as_user(turn)
        if turn.role == "user" and out and out[-1].role == "user" and not limits.users:
            out[-1] = _joined(out[-1], turn)
            continue
        out.append(turn)
    if not limits.system and out and out[0].role == "system":
        out = _folded(out)
    return tuple(out)


def _folded(turns: Sequence[Turn]) -> list[Turn]:
    """The leading system message becomes the beginning of the first user message."""
    first = msgspec.structs.replace(turns[0], role="user")
    if len(turns) > 1 and turns[1].role == "user":
        return [_joined(first, turns[1]), *turns[2:]]
    return [first, *turns[1:]]


def _joined(first: Turn, second: Turn) -> Turn:
    return Turn(first.role, (*first.parts, TextPart(""), *second.parts), first.name)


def _as_user(turn: Turn) -> Turn:
    """Marked as what it is, in the words that agents use for such notes within user messages."""
    return Turn("user", (TextPart("<system-reminder>"), *turn.parts, TextPart("</system-reminder>")), turn.name)
