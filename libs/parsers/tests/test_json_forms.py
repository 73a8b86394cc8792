"""Outputs as the chat templates of families with typed arguments write them, parsed back; and garbage made of their markers."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus_parsers import FinishReason, names, open_parser
from kvbus_parsers.collect import CallSegment, Collected, TextSegment, collect
from kvbus_parsers.parser import Parser

Calls = Sequence[tuple[str, str]]
"""Names, and arguments as text in the form's own notation."""
Block = tuple[str, Any]
"""("reasoning" | "text", text) or ("calls", [(name, arguments as text, their value)])."""

BAR = "｜"
BLOCK = "▁"


@dataclass(frozen=True)
class Form:
    """``calls`` renders the calls of one turn, ``whole`` a whole output. ``notation`` writes arguments; where it is JSON they come
    back byte for byte. ``strings``: what no string in an argument may hold. ``tokens``: markers for garbage, and for no text.
    """

    tool: str
    calls: Callable[[Calls], str]
    reasoning: str | None = None
    think: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    say: tuple[str, str] = ("", "")
    notation: Callable[[Any], str] = json.dumps
    strings: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    alphabet: str = "ab1 <>|/[]{}\"'`\\\n:=,é🙂"
    leads: bool = False
    """Calls only begin the content."""
    single: bool = False
    """One call a turn."""
    whole: Callable[[Sequence[Block]], str] | None = None
    opens: bool = True
    """The prompt may open the reasoning."""
    headers: bool = False
    """Messages have headers, whose words are not shown."""

    def render(self, blocks: Sequence[Block], *, opened: bool = False) -> str:
        """``opened``: the prompt holds the opener of the first thoughts."""
        blocks = [(kind, [call[:2] for call in content] if kind == "calls" else content) for kind, content in blocks]
        if self.whole:
            return self.whole(blocks)
        parts: list[str] = []
        for kind, content in blocks:
            if kind == "reasoning":
                parts.append(content if opened and not parts else self.think[0] + content)
                parts.append(self.think[1])
            else:
                parts.append(self.calls(content) if kind == "calls" else self.say[0] + content + self.say[1])
        return "".join(parts)

    def markers(self) -> set[str]:
        tool = names.tool_format(self.tool)
        reasoning = names.reasoning_format(self.reasoning) if self.reasoning else None
        found = {*tool.openers, *tool.strays, *self.tokens}
        if reasoning:
            found |= {*reasoning.openers, *reasoning.closers, *reasoning.framing}
        return found


def object_text(name: str, arguments: str, keys: tuple[str, str] = ("name", "arguments")) -> str:
    return f'{{"{keys[0]}": {json.dumps(name)}, "{keys[1]}": {arguments}}}'


def each(
    before: str, after: str = "", between: str = "", keys: tuple[str, str] = ("name", "arguments")
) -> Callable[[Calls], str]:
    return lambda calls: between.join(before + object_text(*call, keys) + after for call in calls)


def array(before: str = "", after: str = "", keys: tuple[str, str] = ("name", "arguments")) -> Callable[[Calls], str]:
    return lambda calls: before + "[" + ", ".join(object_text(*call, keys) for call in calls) + "]" + after


def named(before: str, middle: str, after: str, opener: str = "", closer: str = "") -> Callable[[Calls], str]:
    return lambda calls: (
        opener + "".join(f"{before}{name}{middle}{arguments}{after}" for name, arguments in calls) + closer
    )


def python_value(value: Any) -> str:
    """The arguments of a Python call."""
    return ", ".join(f"{key}={member!r}" for key, member in value.items())


def python_calls(before: str, between: str, after: str) -> Callable[[Calls], str]:
    return lambda calls: before + between.join(f"{name}({arguments})" for name, arguments in calls) + after


def gemma_value(delimiter: str) -> Callable[[Any], str]:
    def write(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{write(member)}" for key, member in sorted(value.items())) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(write, value)) + "]"
        return f"{delimiter}{value}{delimiter}" if isinstance(value, str) else json.dumps(value)

    return write


def _harmony(blocks: Sequence[Block]) -> str:
    messages = []
    for kind, content in blocks:
        if kind == "calls":
            messages += [
                f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
                for name, arguments in content
            ]
        else:
            messages.append(f"<|channel|>{'analysis' if kind == 'reasoning' else 'final'}<|message|>{content}<|end|>")
    return "<|start|>assistant".join(messages)


def _inkling(blocks: Sequence[Block]) -> str:
    parts = []
    for kind, content in blocks:
        if kind == "calls":
            parts += [
                f"{name}<|content_invoke_tool_json|>" + object_text(name, arguments, ("name", "args"))
                for name, arguments in content
            ]
        else:
            parts.append(f"<|content_{'thinking' if kind == 'reasoning' else 'text'}|>{content}")
    return "".join(f"<|message_model|>{part}<|end_message|>" for part in parts) + "<|content_model_end_sampling|>"


def _deepseek(before: str, middle: str, after: str) -> Callable[[Calls], str]:
    def token(name: str) -> str:
        return f"<{BAR}{name.replace(' ', BLOCK)}{BAR}>"

    return named(
        token("tool call begin") + before.replace("SEP", token("tool sep")),
        middle.replace("SEP", token("tool sep")),
        after + token("tool call end"),
        token("tool calls begin"),
        token("tool calls end"),
    )


PLAIN = "ab1 .\n:=é"
FORMS = {
    "hermes": Form("hermes", each("\n<tool_call>\n", "\n</tool_call>"), "qwen3"),
    "longcat": Form(
        "longcat",
        each("<longcat_tool_call>\n", "\n</longcat_tool_call>", "\n"),
        "longcat",
        ("<longcat_think>\n", "\n</longcat_think>\n"),
    ),
    "ernie45": Form(
        "ernie45", each("\n<tool_call>\n", "\n</tool_call>\n"), "ernie45", say=("<response>\n", "\n</response>\n")
    ),
    "nemotron_deci": Form("nemotron_deci", array("<TOOLCALL>", "</TOOLCALL>"), "nemotron_deci"),
    "default": Form("default", array("<TOOLCALL>", "</TOOLCALL>"), "nemotron_deci"),
    "default_tag": Form("default", array("<|python_tag|>"), single=True),
    "default_bare": Form("default", array(), leads=True, alphabet=PLAIN),
    "jamba": Form("jamba", array(" <tool_calls>", "</tool_calls>")),
    "hunyuan_a13b": Form(
        "hunyuan_a13b", array("<tool_calls>", "</tool_calls>"), "hunyuan_a13b", say=("<answer>\n", "\n</answer>")
    ),
    "granite": Form(
        "granite",
        array("<|tool_call|>"),
        "granite",
        ("Here is my thought process:\n", "\nHere is my response:\n"),
        alphabet=PLAIN,
        opens=False,
    ),
    "granite4": Form("granite4", each("<tool_call>\n", "\n</tool_call>", "\n")),
    "granite_20b_fc": Form("granite_20b_fc", each("<function_call> ", "\n")),
    "phi4": Form("phi4", array("functools")),
    "internlm2": Form(
        "internlm2", each("<|action_start|><|plugin|>\n", "<|action_end|>\n", keys=("name", "parameters")), single=True
    ),
    "gigachat3": Form("gigachat3", each("<|message_sep|>\n\nfunction call<|role_sep|>\n", "</s>"), single=True),
    "llama3_json": Form(
        "llama3_json",
        each("", between="; ", keys=("name", "parameters")),
        leads=True,
        alphabet=PLAIN,
        strings=("<|python_tag|>",),
    ),
    "llama3_json_tag": Form("llama3_json", each("<|python_tag|>", keys=("name", "parameters")), single=True),
    "xlam": Form("xlam", array("```json\n", "\n```\n"), alphabet=PLAIN),
    "xlam_bare": Form("xlam", array(), "deepseek_r1", leads=True, alphabet=PLAIN),
    "mistral_array": Form("mistral", array("[TOOL_CALLS]"), "mistral", ("[THINK]", "[/THINK]")),
    "mistral_v11": Form("mistral", named("[TOOL_CALLS]", "", ""), "mistral", ("<think>\n", "\n</think>\n")),
    "mistral_v13": Form("mistral", named("[TOOL_CALLS]", "[ARGS]", ""), "mistral", ("[THINK]", "[/THINK]")),
    "cohere_command": Form(
        "cohere_command",
        array("<|START_ACTION|>", "<|END_ACTION|>", ("tool_name", "parameters")),
        "cohere_command",
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "apertus": Form(
        "apertus",
        lambda calls: "<|tools_prefix|>[" + ", ".join(f'{{"{n}": {a}}}' for n, a in calls) + "]<|tools_suffix|>",
        "apertus",
        ("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    "deepseek_v3": Form("deepseek_v3", _deepseek("functionSEP", "\n```json\n", "\n```"), "deepseek_r1"),
    "deepseek_v3_1": Form("deepseek_v3_1", _deepseek("", "SEP", ""), "deepseek_v3"),
    "kimi_k2": Form(
        "kimi_k2",
        lambda calls: (
            "<|tool_calls_section_begin|>"
            + "".join(
                f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
                for index, (name, arguments) in enumerate(calls)
            )
            + "<|tool_calls_section_end|>"
        ),
        "kimi_k2",
    ),
    "harmony": Form(
        "harmony",
        each(""),
        "gpt_oss",
        whole=_harmony,
        headers=True,
        opens=False,
        tokens=(
            "<|start|>",
            "<|end|>",
            "<|message|>",
            "<|channel|>",
            "<|constrain|>",
            "<|call|>",
            "<|return|>",
            " to=functions.f",
            "analysis",
        ),
    ),
    "inkling": Form(
        "inkling",
        each(""),
        "inkling",
        whole=_inkling,
        headers=True,
        opens=False,
        tokens=(
            "<|message_model|>",
            "<|content_text|>",
            "<|content_thinking|>",
            "<|content_invoke_tool_json|>",
            "<|end_message|>",
        ),
    ),
    "pythonic": Form("pythonic", python_calls("[", ", ", "]"), notation=python_value, alphabet=PLAIN, leads=True),
    "llama4_pythonic": Form(
        "llama4_pythonic",
        python_calls("<|python_start|>[", ", ", "]<|python_end|>"),
        notation=python_value,
        alphabet=PLAIN,
    ),
    "olmo3": Form(
        "olmo3", python_calls("<function_calls>\n", "\n", "\n</function_calls>"), "olmo3", notation=python_value
    ),
    "lfm2": Form("lfm2", python_calls("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"), notation=python_value),
    "gemma4": Form(
        "gemma4",
        named("<|tool_call>call:", "", "<tool_call|>"),
        "gemma4",
        ("<|channel>thought\n", "<channel|>"),
        notation=gemma_value('<|"|>'),
        strings=('<|"|>',),
    ),
    "functiongemma": Form(
        "functiongemma",
        named("<start_function_call>call:", "", "<end_function_call>"),
        notation=gemma_value("<escape>"),
        strings=("<escape>",),
    ),
}

NAMES = ("lookup", "mcp.write-note", "f")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in NAMES]
FRAGMENTS = (
    '{"name": "f", "arguments": {',
    '"name": ',
    "{}",
    "[",
    "]",
    "}",
    '"',
    "\\",
    ", ",
    ":",
    "f(",
    "a=1",
    ")",
    "null",
    "\n",
    " ",
    "```",
)


@st.composite
def texts(draw: st.DrawFn, form: Form) -> str:
    marked = form.markers()
    return draw(
        st.text(form.alphabet, min_size=1, max_size=30)
        .map(str.strip)
        .filter(lambda text: text and not any(marker in f"{text}\n" for marker in marked))
    )


def values(form: Form) -> st.SearchStrategy[Any]:
    """Strings hold the markers of the form: inside an argument they are data."""
    forbidden = form.strings
    pieces = st.sampled_from([*sorted(form.markers()), '"', "\\", "\n", "}]", "'", "😀", "\x7f", "```"]) | st.text(
        max_size=5
    )
    string = st.lists(pieces, max_size=4).map("".join).filter(lambda text: not any(part in text for part in forbidden))
    scalar = (
        st.none()
        | st.booleans()
        | st.integers(-(10**20), 10**20)
        | st.floats(allow_nan=False, allow_infinity=False)
        | string
    )
    keys = st.from_regex(r"[a-z_]{1,6}", fullmatch=True) if form.notation is not json.dumps else string
    nested = st.recursive(
        scalar, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=6
    )
    return st.dictionaries(keys, nested, max_size=3)


@st.composite
def calls(draw: st.DrawFn, form: Form) -> tuple[str, str, Any]:
    """A name, arguments as text, and their value. Templates differ in how they write JSON."""
    name, value = draw(st.sampled_from(NAMES)), draw(values(form))
    if form.notation is not json.dumps:
        return name, form.notation(value), value
    separators = draw(st.sampled_from([None, (",", ":"), (" , ", " : ")]))
    indent = draw(st.sampled_from([None, 2]))
    return name, json.dumps(value, ensure_ascii=draw(st.booleans()), indent=indent, separators=separators), value


@st.composite
def outputs(draw: st.DrawFn, form: Form) -> list[Block]:
    """Thoughts, text and calls, in the orders that the family writes."""
    blocks: list[Block] = []
    if form.reasoning and draw(st.booleans()):
        blocks.append(("reasoning", draw(texts(form))))
    if not form.leads and draw(st.booleans()):
        blocks.append(("text", draw(texts(form))))
    if draw(st.booleans()):
        blocks.append(("calls", draw(st.lists(calls(form), min_size=1, max_size=1 if form.single else 3))))
    if draw(st.booleans()) and (not blocks or blocks[-1][0] != "text"):
        blocks.append(("text", draw(texts(form))))
    return blocks


def parsed(
    form: Form, text: str, pieces: Sequence[int], finish: FinishReason = "stop", **options: Any
) -> tuple[Collected, Parser]:
    parser = open_parser(tool=form.tool, reasoning=form.reasoning, tools=TOOLS, **options)
    events, at, sizes = [], 0, chain(pieces, iter(lambda: len(text) + 1, 0))
    while at < len(text):
        size = next(sizes)
        events += parser.feed(text[at : at + size])
        at += size
    return collect(events + parser.finish(finish), finish), parser


def shown(collected: Collected) -> list[tuple[str, Any]]:
    return [
        (segment.name, segment.arguments)
        if isinstance(segment, CallSegment)
        else ("text" if isinstance(segment, TextSegment) else "reasoning", segment.text)
        for segment in collected.segments
    ]


def expected(form: Form, blocks: Sequence[Block]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for kind, content in blocks:
        is_json = form.notation is json.dumps
        found += (
            [(name, text if is_json else value) for name, text, value in content]
            if kind == "calls"
            else [(kind, content)]
        )
    return found


def loaded(form: Form, segments: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Notations other than JSON are compared by their values."""
    if form.notation is json.dumps:
        return segments
    return [(name, json.loads(content) if name in NAMES else content) for name, content in segments]


PIECES = st.lists(st.integers(1, 7), max_size=60)
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@each_form
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_what_a_template_writes_is_read_back_however_it_is_cut(form: Form, data: st.DataObject) -> None:
    blocks = data.draw(outputs(form))
    opened = bool(blocks) and blocks[0][0] == "reasoning" and form.opens and data.draw(st.booleans())
    text = form.render(blocks, opened=opened)
    collected, _ = parsed(form, text, data.draw(PIECES), reasoning_open=opened)
    assert loaded(form, shown(collected)) == expected(form, blocks)
    assert all(call.complete for call in collected.tool_calls)
    assert len({call.id for call in collected.tool_calls}) == len(collected.tool_calls)


@each_form
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_a_cut_output_shows_whole_calls_only_where_the_model_wrote_them(form: Form, data: st.DataObject) -> None:
    blocks = data.draw(outputs(form))
    text = form.render(blocks)
    text = text[: data.draw(st.integers(0, len(text)))]
    pieces = data.draw(PIECES)
    # The prompt holds no opener: else, where no thoughts are, whatever comes before a closer in an argument were thoughts.
    collected, _ = parsed(form, text, pieces, "length", reasoning_open=False)
    assert shown(collected) == shown(parsed(form, text, [], "length", reasoning_open=False)[0])
    wanted = [segment for segment in expected(form, blocks) if segment[0] in NAMES]
    whole = [(call.name, call.arguments) for call in collected.tool_calls if call.complete]
    assert loaded(form, whole) == wanted[: len(whole)]
    for call in collected.tool_calls[len(whole) :]:
        assert not call.complete
        if is_json(call.arguments):
            assert loaded(form, [(call.name, call.arguments)]) == wanted[len(whole) :][:1]


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@each_form
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_garbage_gives_the_same_in_any_pieces_in_linear_time_and_loses_no_word(form: Form, data: st.DataObject) -> None:
    words = (f"w{number}w" for number in range(100))
    pieces = st.sampled_from(
        [*sorted(form.markers()), *FRAGMENTS, "WORD", "WORD ", form.calls([("f", form.notation({"a": 1}))])]
    )
    text = "".join(
        next(words) if piece.strip() == "WORD" else piece for piece in data.draw(st.lists(pieces, max_size=20))
    )
    finish: FinishReason = data.draw(st.sampled_from(("stop", "length")))
    sizes = data.draw(PIECES)
    collected, parser = parsed(form, text, sizes, finish)
    assert shown(collected) == shown(parsed(form, text, [], finish)[0])
    assert parser._source.scanned < 40 * (len(text) + 10)
    if finish == "stop" and not form.headers:
        everything = json.dumps(shown(collected))
        lost = [f"w{number}w" for number in range(100) if f"w{number}w" in text and f"w{number}w" not in everything]
        assert not lost
