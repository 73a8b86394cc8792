"""A prompt and what the model wrote after it is how the next prompt begins.

An answer is made in the wire form: by the template itself, out of what the "model" says in its own spelling. It is parsed as
the frontend does, goes through a client that writes everything anew, and is rendered again as history. Tried with templates of
all families that keep thoughts, and with real ones: `TEST_CHAT_TEMPLATES` names a folder of ``*.jinja`` files.
"""

import json
import os
import string
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvbus_frontend.core.formats import Formats, schemas
from kvbus_frontend.core.message_style import style_of
from kvbus_frontend.core.requests import PromptForm, render_conversation
from kvbus_frontend.core.template_limits import limits_of
from kvbus_frontend.core.template_traits import traits_of
from kvbus_frontend.core.written_calls import WrittenCall, WrittenCalls
from kvbus_parsers import CallEnded, Reasoning, ReasoningEnded, Text, open_parser
from kvbus_parsers.choose import choose, reasoning_open
from kvbus_protocols.conversation import (
    Conversation,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    ToolSpec,
    Turn,
)
from kvbus_protocols.errors import InvalidRequest
from kvbus_protocols.generation import GenerationRequest
from kvbus_tokenizers import ChatTemplate, TemplateFailed, Tokenizer, byte_level_bundle

HERE = Path(__file__).parent / "templates"
REAL = sorted(Path(folder).glob("*.jinja")) if (folder := os.environ.get("TEST_CHAT_TEMPLATES")) else []
TOKENIZER = Tokenizer.from_bundle(byte_level_bundle())

BARE = {"qwen3_coder", "glm47", "glm45", "minimax_m2", "seed_oss"}
"""Formats in which arguments are bare text, typed by the tool's schema."""
TYPED = {"deepseek_v3_2", "deepseek_v4"}
"""Formats in which arguments say whether they are strings."""
ENDS = (
    "<|im_end|>", "<|user|>", "<|observation|>", "<｜end▁of▁sentence｜>", "<|eot_id|>", "</s>", "<|call|>", "<|return|>", "<turn|>",
    "<|tool_response>", "<|END_OF_TURN_TOKEN|>", "<seed:eos>", "[e~[", "<|end|>", "<｜User｜>",
)  # fmt: skip

PARAMETERS = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "deep": {"type": "boolean"},
    "options": {"type": "object"},
    "names": {"type": "array"},
}
TOOLS = tuple(
    ToolSpec(
        name=name,
        description="does it",
        parameters={
            "type": "object",
            "properties": {key: {**kind, "description": "d"} for key, kind in PARAMETERS.items()},
            "required": ["text"],
        },
    )
    for name in ("read_file", "run")
)


class Family(msgspec.Struct, frozen=True):
    """``shapes``: answers that the template keeps in a tool loop: of a thought (t), text (x) and calls (c). ``kept``: those that it
    keeps also behind the next question. ``most``: how many calls an answer may have."""

    name: str
    shapes: tuple[str, ...] = ("tc", "txc", "c", "xc")
    kept: tuple[str, ...] = ()
    most: int = 3


FAMILIES = (
    Family("qwen3"),
    Family("qwen35", kept=("tx", "x")),
    Family("nemotron3", shapes=("tc", "txc"), kept=("tx",)),
    Family("glm", kept=("tx",)),
    Family("minimax", shapes=("tc", "txc")),
    Family("kimi"),
    Family("deepseek31", shapes=("c", "xc"), kept=("x",)),
    Family("deepseek32", kept=("tx", "x")),
    Family("mistral", kept=("tx", "x")),
    Family("harmony", shapes=("tc",), most=1),
    Family("plain_chatml", shapes=("c", "xc"), kept=("x",)),
)


DONE, NEXT = "§ done", "§ And now?"
"""What follows an answer, in characters that no answer has."""

# what models say

letters = string.ascii_letters + " éß日🎉.,;:!?'\"\\{}()=&|>-_*`#\n\t"
prose = st.text(letters, min_size=1, max_size=60).map(str.strip).filter(bool)
words = st.text(letters + "[]", max_size=20)
json_strings = st.text(letters + "<[]/", max_size=20)
numbers = st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6, allow_nan=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | json_strings,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(string.ascii_letters, max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
spellings = st.tuples(st.sampled_from([", ", ",", " , ", ",\n"]), st.sampled_from([": ", ":", " : "]), st.booleans())


def spelled(value: Any, how: tuple[str, str, bool]) -> str:
    return json.dumps(value, separators=how[:2], ensure_ascii=how[2])


json_texts = st.builds(spelled, json_values, spellings)
objects = st.builds(
    spelled, st.dictionaries(st.text(string.ascii_letters, max_size=4), json_values, max_size=3), spellings
)
arrays = st.builds(spelled, st.lists(json_values, max_size=3), spellings)
BARE_TEXTS: dict[str, st.SearchStrategy[str]] = {
    "text": words,
    "count": st.sampled_from(["0", "-7", "007", "+3", "12"]),
    "share": st.sampled_from(["0.5", "1.50", "-2e3", "3"]),
    "deep": st.sampled_from(["true", "True", "FALSE"]),
    "options": objects.filter(lambda text: "<" not in text),
    "names": arrays.filter(lambda text: "<" not in text),
}


@st.composite
def json_arguments(draw: st.DrawFn) -> WrittenCall:
    members = draw(st.dictionaries(st.sampled_from(list(PARAMETERS)), json_values, max_size=4))
    return WrittenCall("", "", spelled(members, draw(spellings)))


@st.composite
def bare_arguments(draw: st.DrawFn) -> WrittenCall:
    """The values of their JSON text do not matter: only the bare texts are written."""
    keys = draw(st.lists(st.sampled_from(list(PARAMETERS)), unique=True, max_size=4))
    texts = {key: draw(BARE_TEXTS[key]) for key in keys}
    values = {key: "" if key == "text" else None for key in keys}
    return WrittenCall("", "", json.dumps(values | ({"text": texts["text"]} if "text" in texts else {})), texts)


@st.composite
def typed_arguments(draw: st.DrawFn) -> WrittenCall:
    keys = draw(st.lists(st.sampled_from(list(PARAMETERS)), unique=True, max_size=4))
    members = {
        key: json.dumps(draw(words)) if key == "text" else draw(json_texts.filter(_is_no_string)) for key in keys
    }
    return WrittenCall("", "", "{" + ", ".join(f'"{key}": {text}' for key, text in members.items()) + "}")


def _is_no_string(text: str) -> bool:
    return not text.startswith('"') and "<" not in text


# what clients do

clients = st.tuples(
    st.sampled_from([(",", ":"), (", ", ": ")]), st.booleans(), st.sampled_from(["", "_", "_.:"]), st.booleans()
)


def sent_back(parts: Sequence[Part], client: tuple[tuple[str, str], bool, str, bool]) -> tuple[Part, ...]:
    """Arguments written anew, ids without some characters; in one API the thoughts come first, then the text, then the calls."""
    separators, sort_keys, dropped, as_chat = client
    out: list[Part] = []
    for part in parts:
        if isinstance(part, ToolCallPart):
            arguments = json.dumps(json.loads(part.arguments), separators=separators, sort_keys=sort_keys)
            part = ToolCallPart(without(part.id, dropped), part.name, arguments)
        out.append(part)
    if as_chat:
        kinds = (ReasoningPart, TextPart, ToolCallPart)
        out.sort(key=lambda part: next(i for i, kind in enumerate(kinds) if isinstance(part, kind)))
    return tuple(out)


def without(text: str, characters: str) -> str:
    return text.translate(dict.fromkeys(map(ord, characters)))


# the way there and back


class Model:
    def __init__(self, source: str) -> None:
        template, choice = ChatTemplate(source, TOKENIZER), choose(source)
        self.formats = Formats(choice.tool, choice.reasoning)
        style = style_of(traits_of(template), self.formats)
        self.form = PromptForm(template, limits_of(template, style), style)

    def prompt(self, *turns: Turn, store: WrittenCalls | None = None) -> str:
        conversation = Conversation(
            generation=GenerationRequest(model="m"),
            turns=(Turn("system", (TextPart("You help."),)), Turn("user", (TextPart("Do it."),)), *turns),
            tools=TOOLS,
        )
        known = store if store is not None else new_store()
        segments = render_conversation(
            conversation, self.form, lambda call_id, name, arguments: known.find(call_id, name, arguments, now=0.0)
        )
        return "".join(segment.text for segment in segments)

    def parsed(self, raw: str, prompt: str, store: WrittenCalls) -> list[Part]:
        reasoning = self.formats.reasoning
        parser = open_parser(
            tool=self.formats.tool,
            reasoning=reasoning,
            tools=schemas(TOOLS),
            reasoning_open=reasoning_open(prompt[-512:], reasoning) if reasoning is not None else None,
        )
        parts: list[Part] = []
        new = True
        for event in [*parser.feed(raw), *parser.finish("stop")]:
            match event:
                case Text(text) | Reasoning(text):
                    kind = TextPart if isinstance(event, Text) else ReasoningPart
                    last = parts[-1] if parts and not new else None
                    if isinstance(last, kind):
                        parts[-1] = kind(last.text + text)
                    else:
                        parts.append(kind(text))
                    new = False
                case ReasoningEnded():
                    new = True
                case CallEnded(_, call_id, name, arguments, written):
                    store.add(WrittenCall(call_id, name, arguments, written), now=0.0)
                    parts.append(ToolCallPart(call_id, name, arguments))
        return parts


def new_store() -> WrittenCalls:
    return WrittenCalls(limit_bytes=1 << 24, limit_calls=100, ttl_s=1.0)


def follow_up(calls: Sequence[ToolCallPart]) -> Turn:
    if not calls:
        return Turn("user", (TextPart(NEXT),))
    return Turn("tool", tuple(ToolResultPart(call.id, (TextPart(DONE),)) for call in calls))


def calls_of(parts: Sequence[Part]) -> list[ToolCallPart]:
    return [part for part in parts if isinstance(part, ToolCallPart)]


def arguments_of(model: Model) -> st.SearchStrategy[WrittenCall]:
    if model.formats.tool in BARE:
        return bare_arguments()
    return typed_arguments() if model.formats.tool in TYPED else json_arguments()


def said(draw: st.DrawFn, model: Model, shape: str, most: int) -> tuple[list[Part], WrittenCalls]:
    """What a model says, and how it writes its calls."""
    store, parts = new_store(), list[Part]()
    if "t" in shape:
        parts.append(ReasoningPart(draw(prose)))
    if "x" in shape:
        parts.append(TextPart(draw(prose)))
    for i in range(draw(st.integers(1, most)) if "c" in shape else 0):
        name = draw(st.sampled_from(["read_file", "run"]))
        call = draw(arguments_of(model))
        call_id = f"functions.{name}:{i}" if model.form.style.numbered_calls else f"call{i:05d}"
        store.add(msgspec.structs.replace(call, id=call_id, name=name), now=0.0)
        parts.append(ToolCallPart(call_id, name, call.arguments))
    return parts, store


def check(data: st.DataObject, model: Model, shape: str, most: int, *, must_keep: bool) -> None:
    draw = data.draw
    parts, own = said(draw, model, shape, most)  # type: ignore[arg-type]
    answer = Turn("assistant", tuple(parts))
    prompt = model.prompt()
    whole = model.prompt(answer, follow_up(calls_of(parts)), store=own)
    if not must_keep:
        assume(whole.startswith(prompt))
    assert whole.startswith(prompt)
    rest = whole[len(prompt) :]
    after = max(rest.find(text) for text in (DONE, NEXT))
    ends = [at for end in ENDS if (at := rest.rfind(end, 0, after)) >= 0]
    if not must_keep:
        assume(ends)
    raw = rest[: max(ends)]
    for end in ENDS:  # the first of the markers behind the answer
        at = rest.rfind(end, 0, len(raw))
        if at >= 0 and not rest[at + len(end) : len(raw)].strip():
            raw = rest[:at]
    store = new_store()
    parsed = model.parsed(raw, prompt, store)
    if not must_keep:
        assume([call.name for call in calls_of(parsed)] == [call.name for call in calls_of(parts)])
    assert [call.name for call in calls_of(parsed)] == [call.name for call in calls_of(parts)]
    back = sent_back(parsed, draw(clients))
    again = model.prompt(Turn("assistant", back), follow_up(calls_of(back)), store=store)
    assert again.startswith(prompt + raw)


MODELS = {family.name: Model((HERE / f"{family.name}.jinja").read_text()) for family in FAMILIES}
quick = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@given(data=st.data())
@quick
def test_in_a_tool_loop_the_next_prompt_begins_with_what_was_generated(family: Family, data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(family.shapes))
    check(data, MODELS[family.name], shape, family.most, must_keep=True)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.kept], ids=lambda family: family.name)
@given(data=st.data())
@quick
def test_thoughts_are_kept_behind_the_next_question_where_the_template_can(family: Family, data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(family.kept))
    check(data, MODELS[family.name], shape, family.most, must_keep=True)


@cache
def real(path: Path) -> Model | None:
    try:
        model = Model(path.read_text())
        model.prompt()
    except (TemplateFailed, InvalidRequest):
        return None
    return model


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
@given(data=st.data())
@quick
def test_real_templates_keep_what_they_show(path: Path, data: st.DataObject) -> None:
    model = real(path)
    if model is None:
        pytest.skip("the template cannot be rendered")
    shape = data.draw(st.sampled_from(["tc", "txc", "c", "xc", "tx", "x"]))
    check(data, model, shape, 1 if not model.form.style.traits.parallel else 2, must_keep=False)
