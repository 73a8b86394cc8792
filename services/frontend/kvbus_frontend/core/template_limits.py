"""What a chat template refuses or silently drops, and turns rearranged so that it takes them.

Agents put system messages between others, several in a row, two user messages one after the other, and notes behind the results of
tools. Some templates raise then, some drop the text, some take a note for a new question and drop the thoughts before it. What a
template can do is found by trying it, once, when the model is loaded; the rearrangement depends on nothing but the turns before, so
a conversation that grows keeps its prefix.
"""

from collections.abc import Sequence

import msgspec

from kvbus_frontend.core.conversation import template_messages
from kvbus_frontend.core.message_style import MessageStyle, template_variables
from kvbus_frontend.core.template_traits import traits_of
from kvbus_protocols.conversation import (
    Conversation,
    ImagePart,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    Turn,
)
from kvbus_protocols.generation import GenerationRequest
from kvbus_tokenizers import ChatTemplate, TemplateFailed

NOTE, NOTE_ENDS = "<system-reminder>", "</system-reminder>"
"""Around what is no user's own within user messages, in the words of most agents."""

_PROBES = ("k-one", "k-two", "k-three")
_THOUGHT = "k-thought"
_LOOP = (
    Turn("user", (TextPart("k-one"),)),
    Turn("assistant", (ReasoningPart(_THOUGHT), ToolCallPart("kcall0000", "ktool", "{}"))),
    Turn("tool", (ToolResultPart("kcall0000", (TextPart("k-two"),)),)),
)


class TemplateLimits(msgspec.Struct, frozen=True):
    """``system``: takes a system message at all; ``systems``: several in a row; ``late_system``: one after the first user message;
    ``users``: two user messages in a row; ``user_after_results``: one behind the results of tools; ``note_keeps_thoughts``: and
    shows the thoughts before it as it would without it."""

    system: bool = True
    systems: bool = True
    late_system: bool = True
    users: bool = True
    user_after_results: bool = True
    note_keeps_thoughts: bool = True


def limits_of(template: ChatTemplate | None, style: MessageStyle | None = None) -> TemplateLimits:
    """``style``: how messages for this template are written; None: as the template alone tells."""
    if template is None:
        return TemplateLimits()
    trial = _Trial(template, style or MessageStyle(traits_of(template)))
    loop, noted = trial.rendered(_LOOP), trial.rendered((*_LOOP, Turn("user", (TextPart("k-three"),))))
    return TemplateLimits(
        system=trial.takes("system", "user"),
        systems=trial.takes("system", "system", "user"),
        late_system=trial.takes("user", "system") and trial.takes("user", "assistant", "system"),
        users=trial.takes("user", "user"),
        user_after_results=not loop or _stand_in_order(noted, _PROBES),
        note_keeps_thoughts=_THOUGHT not in loop or _THOUGHT in noted,
    )


class _Trial:
    def __init__(self, template: ChatTemplate, style: MessageStyle) -> None:
        self._template = template
        self._style = style

    def takes(self, *roles: str) -> bool:
        """Texts in another order would move with the conversation: a late system message at the top costs the whole prefix."""
        turns = [Turn(role, (TextPart(text),)) for role, text in zip(roles, _PROBES, strict=False)]  # type: ignore[arg-type]
        return _stand_in_order(self.rendered(turns), _PROBES[: len(roles)])

    def rendered(self, turns: Sequence[Turn]) -> str:
        """Empty when the template refuses the turns."""
        conversation = Conversation(generation=GenerationRequest(model=""), turns=tuple(turns))
        variables = template_variables(conversation, self._style.traits)
        try:
            segments = self._template.render(template_messages(turns, self._style), variables=variables)
        except TemplateFailed:
            return ""
        return "".join(segment.text for segment in segments)


def _stand_in_order(rendered: str, texts: Sequence[str]) -> bool:
    places = [rendered.find(text) for text in texts]
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
        if turn.role == "user" and out and out[-1].role == "tool" and _belongs_to_results(turn, limits):
            out[-1] = _with_results(out[-1], turn)
            continue
        if turn.role == "user" and out and out[-1].role == "user" and not limits.users:
            out[-1] = _joined(out[-1], turn)
            continue
        out.append(turn)
    if not limits.system and out and out[0].role == "system":
        out = _folded(out)
    return tuple(out)


def _belongs_to_results(turn: Turn, limits: TemplateLimits) -> bool:
    """Whether what is said behind results goes to the end of the last one: notes that would cost the thoughts before them, or
    anything where the template takes nothing there. What the user says stays the user's otherwise."""
    return not limits.user_after_results or (not limits.note_keeps_thoughts and _is_note(turn))


def _is_note(turn: Turn) -> bool:
    """Whether there is nothing but notes in it, one behind the other."""
    text = "\n".join(part.text for part in turn.parts if isinstance(part, TextPart))
    *notes, rest = text.split(NOTE_ENDS)
    return bool(notes) and not rest.strip() and all(note.lstrip().startswith(NOTE) for note in notes)


def _with_results(results: Turn, said: Turn) -> Turn:
    last = results.parts[-1]
    texts = tuple(part for part in said.parts if isinstance(part, TextPart | ImagePart))
    if isinstance(last, ToolResultPart):
        last = msgspec.structs.replace(last, parts=(*last.parts, TextPart(""), *texts))
    return msgspec.structs.replace(results, parts=(*results.parts[:-1], last))


def _folded(turns: Sequence[Turn]) -> list[Turn]:
    """The leading system message becomes the beginning of the first user message."""
    first = msgspec.structs.replace(turns[0], role="user")
    if len(turns) > 1 and turns[1].role == "user":
        return [_joined(first, turns[1]), *turns[2:]]
    return [first, *turns[1:]]


def _joined(first: Turn, second: Turn) -> Turn:
    return Turn(first.role, (*first.parts, TextPart(""), *second.parts), first.name)


def _as_user(turn: Turn) -> Turn:
    return Turn("user", as_note(turn.parts), turn.name)


def as_note(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Within a message of the user, and marked as what it is."""
    return (TextPart(NOTE), *parts, TextPart(NOTE_ENDS))
