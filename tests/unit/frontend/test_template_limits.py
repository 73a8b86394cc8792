"""Turns are rearranged for templates that refuse or drop some of them; no text is lost, a longer conversation begins as before."""

from datetime import datetime
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus_frontend.core.formats import Formats
from kvbus_frontend.core.message_style import style_of
from kvbus_frontend.core.requests import PromptForm, render_conversation
from kvbus_frontend.core.template_limits import TemplateLimits, fitted, limits_of
from kvbus_frontend.core.template_traits import traits_of
from kvbus_parsers.choose import choose
from kvbus_protocols.conversation import Conversation, ReasoningPart, TextPart, ToolCallPart, ToolResultPart, Turn
from kvbus_protocols.generation import GenerationRequest
from kvbus_tokenizers import ChatTemplate, byte_level_bundle, load_tokenizer

TOKENIZER = load_tokenizer(byte_level_bundle())
EVERYTHING = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}"
)
DROPS_LATE = (
    "{% if messages[0].role == 'system' %}[system] {{ messages[0].content }}\n{% endif %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
)
HOISTS = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
)
ALTERNATES = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}"
)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, TOKENIZER, clock=lambda: datetime(2026, 1, 1))


def turn(role: str, *texts: str) -> Turn:
    return Turn(role, tuple(TextPart(text) for text in texts))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "limits"),
    [
        (EVERYTHING, TemplateLimits()),
        (FIRST_ONLY, TemplateLimits(systems=False, late_system=False)),
        (DROPS_LATE, TemplateLimits(systems=False, late_system=False)),
        (HOISTS, TemplateLimits(late_system=False)),
        (ALTERNATES, TemplateLimits(system=False, systems=False, late_system=False, users=False)),
    ],
    ids=["everything", "first-only", "drops-late", "hoists", "alternates"],
)
def test_what_a_template_cannot_do_is_found_by_trying(source: str, limits: TemplateLimits) -> None:
    assert limits_of(template(source)) == limits


def test_a_model_without_a_template_has_no_limits() -> None:
    assert limits_of(None) == TemplateLimits()


def test_turns_that_need_no_change_are_left_alone() -> None:
    turns = (turn("system", "a"), turn("user", "b"))
    assert fitted(turns, TemplateLimits()) is turns


def test_leading_system_turns_become_one() -> None:
    turns = (turn("system", "a"), turn("system", "b"), turn("user", "c"))
    assert fitted(turns, TemplateLimits(systems=False)) == (turn("system", "a", "", "b"), turn("user", "c"))


def test_a_late_system_turn_becomes_a_marked_user_turn_in_its_place() -> None:
    turns = (turn("user", "a"), turn("system", "note"), turn("assistant", "b"))
    noted = turn("user", "<system-reminder>", "note", "</system-reminder>")
    assert fitted(turns, TemplateLimits(late_system=False)) == (turn("user", "a"), noted, turn("assistant", "b"))


def test_user_turns_in_a_row_become_one() -> None:
    turns = (turn("user", "a"), turn("user", "b"), turn("assistant", "c"), turn("user", "d"))
    assert fitted(turns, TemplateLimits(users=False)) == (
        turn("user", "a", "", "b"),
        turn("assistant", "c"),
        turn("user", "d"),
    )


def test_a_system_turn_that_a_template_refuses_begins_the_first_user_turn() -> None:
    turns = (turn("system", "a"), turn("user", "b"))
    assert fitted(turns, TemplateLimits(system=False)) == (turn("user", "a", "", "b"),)
    assert fitted((turn("system", "a"),), TemplateLimits(system=False)) == (turn("user", "a"),)


ROLES = st.lists(st.sampled_from(["system", "user"]), min_size=1, max_size=6)


@pytest.mark.parametrize("source", [FIRST_ONLY, DROPS_LATE, HOISTS, ALTERNATES])
@settings(deadline=None)
@given(roles=ROLES)
def test_every_text_is_rendered_in_its_order(source: str, roles: list[str]) -> None:
    chat = template(source)
    turns = tuple(turn(role, f"text-{i}.") for i, role in enumerate(roles))
    fit = fitted(turns, limits_of(chat))
    messages = [{"role": t.role, "content": "\n".join(p.text for p in t.parts if isinstance(p, TextPart))} for t in fit]
    text = "".join(segment.text for segment in chat.render(messages))
    places = [text.find(f"text-{i}.") for i in range(len(roles))]
    assert -1 not in places
    assert places == sorted(places)


# behind the results of tools

TEMPLATES = Path(__file__).parents[2] / "property" / "frontend" / "templates"


@cache
def form_of(name: str) -> PromptForm:
    source = (TEMPLATES / f"{name}.jinja").read_text()
    chat, choice = template(source), choose(source)
    style = style_of(traits_of(chat), Formats(choice.tool, choice.reasoning))
    return PromptForm(chat, limits_of(chat, style), style)


def rendered(name: str, *turns: Turn) -> str:
    conversation = Conversation(generation=GenerationRequest(model="m"), turns=turns)
    text = "".join(segment.text for segment in render_conversation(conversation, form_of(name)))
    said = [part.text.strip() for turn in turns for part in turn.parts if isinstance(part, TextPart)]
    assert [text.count(words) for words in said] == [1] * len(said)
    return text


def loop(step: int) -> tuple[Turn, ...]:
    call = ToolCallPart(f"call0000{step}", "run", "{}")
    answer = Turn("assistant", (ReasoningPart(f"thought-{step}"), call))
    return answer, Turn("tool", (ToolResultPart(call.id, (TextPart(f"result-{step}"),)),))


REMINDER = turn("user", "<system-reminder>\nThe list is empty.\n</system-reminder>\n")
FAMILIES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("note", [REMINDER, turn("system", "Be brief.")], ids=["reminder", "system"])
def test_a_note_behind_results_leaves_what_came_before_it_as_it_was(name: str, note: Turn) -> None:
    turns = (turn("user", "go"), *loop(1), *loop(2))
    before = rendered(name, *turns)
    noted = rendered(name, *turns, note, *loop(3))
    start = before[: before.rfind("result-2") + len("result-2")]
    assert noted.startswith(start)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_user_says_behind_results_is_taken_by_every_template(name: str) -> None:
    words = turn("user", REMINDER.parts[0].text, "Stop, do it another way.")  # type: ignore[union-attr]
    text = rendered(name, turn("user", "go"), *loop(1), words, *loop(2), turn("user", "again"))
    assert text.find("result-1") < text.find("another way") < text.find("result-2") < text.find("again")


def test_a_note_goes_to_the_results_only_where_the_template_would_drop_thoughts_for_it() -> None:
    turns = (turn("user", "go"), *loop(1), REMINDER)
    dropping = TemplateLimits(note_keeps_thoughts=False)
    assert fitted(turns, TemplateLimits()) is turns
    kept = (TextPart("result-1"), TextPart(""), *REMINDER.parts)
    assert fitted(turns, dropping)[-1] == Turn("tool", (ToolResultPart("call00001", kept),))  # type: ignore[arg-type]
    mixed = (
        *turns[:-1],
        turn("user", "<system-reminder>a</system-reminder>\nand b\n<system-reminder>c</system-reminder>"),
    )
    assert fitted(mixed, dropping)[-1] == mixed[-1], "the user's own words are no note"
    assert fitted(mixed, TemplateLimits(user_after_results=False))[-1].role == "tool"
