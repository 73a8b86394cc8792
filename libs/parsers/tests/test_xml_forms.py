"""Outputs as the chat templates of the XML-like families write them, parsed back; and garbage made of their markers."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus_parsers import open_parser
from kvbus_parsers.collect import CallSegment, Collected, TextSegment, collect

Json = Any
Arguments = Mapping[str, Json]
Block = tuple[str, Json]  # ("text" | "reasoning", text) or ("call", (name, arguments))

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "count": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "flag": {"type": "boolean"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "place": {
                        "type": "object",
                        "properties": {
                            "name": {"type": "string"},
                            "spots": {"type": "array", "items": {"type": "integer"}},
                        },
                    },
                },
            },
        },
    }
    for name in ("lookup", "mcp.write-note")
]


@dataclass(frozen=True)
class Form:
    """``calls`` renders the calls of one turn. ``ends``: what no value may hold. ``pieces``: markup for garbage and near-markup."""

    calls: Callable[[Sequence[tuple[str, Arguments]]], str]
    ends: Sequence[str]
    pieces: Sequence[str]
    reasoning: str | None = None
    think: tuple[str, str] = ("<think>", "</think>")
    whole: Callable[[Sequence[Block]], str] | None = None


def plain(value: Json) -> str:
    """What templates write: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def function_tags(opener: str, closer: str, frame: str = "\n") -> Callable[[Sequence[tuple[str, Arguments]]], str]:
    def call(name: str, arguments: Arguments) -> str:
        body = "".join(
            f"<parameter={key}>{frame}{plain(value)}{frame}</parameter>\n" for key, value in arguments.items()
        )
        return f"{opener}\n<function={name}>\n{body}</function>\n{closer}"

    return lambda calls: "\n".join(call(*one) for one in calls)


def keys_and_values(
    gap: str, prefix: str = "", suffix: str = "", *, separator: bool = False, typed: bool = False
) -> Any:
    def tag(name: str, text: str) -> str:
        return f"<{prefix}{name}{suffix}>{text}</{prefix}{name}{suffix}>"

    def call(name: str, arguments: Arguments) -> str:
        head = name + (f"<{prefix}tool_sep{suffix}>" if separator else "")
        pairs = [
            tag("arg_key", key)
            + gap
            + (tag("arg_type", json_type(value)) + gap if typed else "")
            + tag("arg_value", plain(value))
            for key, value in arguments.items()
        ]
        return tag("tool_call", gap.join([head, *pairs]) + (gap if pairs else ""))

    def render(calls: Sequence[tuple[str, Arguments]]) -> str:
        inner = gap.join(call(*one) for one in calls)
        return tag("tool_calls", gap + inner + gap) if prefix or suffix else inner

    return render


def json_type(value: Json) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array[string]", dict: "object"}
    return names.get(type(value), "null")


def elements(before: str, invoke: str, parameter: str, after: str, *, lead: str = "", tail: str = "") -> Any:
    def call(name: str, arguments: Arguments) -> str:
        body = "".join(f'<{parameter} name="{key}">{plain(value)}</{parameter}>\n' for key, value in arguments.items())
        return f'{lead}<{invoke} name="{name}">\n{body}</{invoke}>{tail}\n'

    return lambda calls: before + "".join(call(*one) for one in calls) + after


def minicpm5(calls: Sequence[tuple[str, Arguments]]) -> str:
    def value(one: Json) -> str:
        return f"<![CDATA[{one}]]>" if isinstance(one, str) and set("<&\n") & set(one) else plain(one)

    return "\n".join(
        f'<function name="{name}">'
        + "".join(f'<param name="{key}">{value(one)}</param>' for key, one in arguments.items())
        + "</function>"
        for name, arguments in calls
    )


def dsml(block: str, space: str = "", prefix: str = "DSML") -> Any:
    mark = f"｜{prefix}｜{space}"

    def call(name: str, arguments: Arguments) -> str:
        body = "".join(
            f'<{mark}parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{plain(value)}'
            f"</{mark}parameter>\n"
            for key, value in arguments.items()
        )
        return f'<{mark}invoke name="{name}">\n{body}</{mark}invoke>\n'

    return lambda calls: f"<{mark}{block}>\n" + "".join(call(*one) for one in calls) + f"</{mark}{block}>"


def solar_open2(calls: Sequence[tuple[str, Arguments]]) -> str:
    def call(name: str, arguments: Arguments) -> str:
        pairs = [
            f"<|tool_arg:start|>{key}<|tool_arg:value|>{plain(value)}<|tool_arg:end|>\n"
            for key, value in arguments.items()
        ]
        return f"<|tool_call:start|>{name}\n{''.join(pairs)}<|tool_call:end|>"

    return "\n".join(call(*one) for one in calls)


def kimi_k3(calls: Sequence[tuple[str, Arguments]]) -> str:
    def tag(name: str, inner: str, attributes: str = "") -> str:
        return f"<|open|>{name}{attributes}<|sep|>{inner}<|close|>{name}<|sep|>"

    def argument(key: str, value: Json) -> str:
        kind = json_type(value).partition("[")[0]
        return tag("argument", plain(value), f' key="{key}" type="{kind}"')

    inner = [
        tag("call", "".join(argument(*one) for one in arguments.items()), f' tool="{name}" index="{index}"')
        for index, (name, arguments) in enumerate(calls, 1)
    ]
    return tag("tools", "".join(inner))


def kimi(calls: Sequence[tuple[str, Arguments]]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


CALL_ENDS = re.compile(r"</[^<>]*(invoke|function|tool_call)[^<>]*>\s*<|<\|close\|>call<\|sep\|>\s*<")
NS = "]<]minimax[>["


def nested(value: Json) -> str:
    if isinstance(value, dict):
        return "".join(f"{NS}<{key}>{nested(member)}{NS}</{key}>" for key, member in value.items())
    if isinstance(value, list):
        return "".join(f"{NS}<item>{nested(item)}{NS}</item>" for item in value)
    return plain(value)


def minimax_m3(calls: Sequence[tuple[str, Arguments]]) -> str:
    inner = "".join(f'{NS}<invoke name="{name}">{nested(arguments)}{NS}</invoke>\n' for name, arguments in calls)
    return f"{NS}<tool_call>\n{inner}{NS}</tool_call>"


def muse(blocks: Sequence[Block]) -> str:
    def message(kind: str, content: Json) -> str:
        if kind == "call":
            block = elements("<atem:function_calls>\n", "atem:invoke", "atem:parameter", "</atem:function_calls>")
            return f"to={content[0]}<|message|>{block([content])}"
        return f"to={'self' if kind == 'reasoning' else 'user'}<|message|>{content}"

    return " " + "<|eom|><|start|>assistant ".join(message(*block) for block in blocks) + "<|eot|>"


QWEN_PIECES = ("<function=lookup>", "<parameter=text>", "</parameter>", "</function>")
GLM_PIECES = ("<tool_call>", "</tool_call>", "lookup", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
INVOKE_PIECES = ('<invoke name="lookup">', '<parameter name="text">', "</parameter>", "</invoke>", "<invoke name='x'/>")


M3_PIECES = ('<invoke name="lookup">', "</invoke>", "<tool_call>", "</tool_call>")


def named(prefix: str, *pieces: str, suffix: str = "") -> tuple[str, ...]:
    """The tags among the pieces with their names so extended."""
    return tuple(
        piece.replace("<", f"<{prefix}", 1).replace(f"<{prefix}/", f"</{prefix}").replace(">", f"{suffix}>")
        for piece in pieces
    )


FORMS: dict[str, Form] = {
    "qwen3_coder": Form(
        function_tags("<tool_call>", "</tool_call>"),
        ("</parameter>", "<parameter=", "</function>"),
        ("<tool_call>", "</tool_call>", *QWEN_PIECES),
        "qwen3",
    ),
    "seed_oss": Form(
        function_tags("<seed:tool_call>", "</seed:tool_call>"),
        ("</parameter>", "<parameter=", "</function>"),
        ("<seed:tool_call>", "</seed:tool_call>", *QWEN_PIECES),
        "seed_oss",
        ("<seed:think>", "</seed:think>"),
    ),
    "mimo": Form(
        function_tags("<tool_call>", "</tool_call>", ""),
        ("</parameter>", "<parameter=", "</function>"),
        ("<tool_call>", "</tool_call>", *QWEN_PIECES),
        "qwen3",
    ),
    "glm45": Form(keys_and_values("\n"), ("</arg_value>",), GLM_PIECES, "glm45"),
    "glm47": Form(keys_and_values(""), ("</arg_value>",), GLM_PIECES, "glm45"),
    "hy_v3": Form(
        keys_and_values("\n", suffix=":opensource", separator=True),
        ("</arg_value:opensource>",),
        named("", *GLM_PIECES, "<tool_sep>", "<tool_calls>", "</tool_calls>", suffix=":opensource"),
        "qwen3",
    ),
    "k2_horizon": Form(
        keys_and_values("\n", "ifm|", typed=True),
        ("</ifm|arg_value>",),
        named("ifm|", *GLM_PIECES, "<tool_calls>", "</tool_calls>"),
        "k2_horizon",
        ("<ifm|think>", "</ifm|think>"),
    ),
    "minimax_m2": Form(
        elements("<minimax:tool_call>\n", "invoke", "parameter", "</minimax:tool_call>"),
        ("</parameter>",),
        ("<minimax:tool_call>", "</minimax:tool_call>", *INVOKE_PIECES),
        "minimax_m2",
    ),
    "dots": Form(
        elements("<dots_function_call>\n", "invoke", "parameter", "</dots_function_call>"),
        ("</parameter>",),
        ("<dots_function_call>", "</dots_function_call>", *INVOKE_PIECES),
    ),
    "step3": Form(
        elements(
            "<｜tool_calls_begin｜>\n",
            "steptml:invoke",
            "steptml:parameter",
            "<｜tool_calls_end｜>",
            lead="<｜tool_call_begin｜>function<｜tool_sep｜>",
            tail="<｜tool_call_end｜>",
        ),
        ("</steptml:parameter>",),
        (
            *("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "function", "<｜tool_sep｜>", "<｜tool_call_end｜>"),
            *named("steptml:", *INVOKE_PIECES),
        ),
        "step3",
    ),
    "minicpm5": Form(
        minicpm5,
        ("</param>", "]]>"),
        ('<function name="lookup">', '<param name="text">', "</param>", "</function>", "<![CDATA[", "]]>"),
        "qwen3",
    ),
    "deepseek_v3_2": Form(
        dsml("function_calls"),
        ("</｜DSML｜parameter>",),
        named("｜DSML｜", "<function_calls>", "</tool_calls>", *INVOKE_PIECES),
        "deepseek_v4",
    ),
    "deepseek_v4": Form(
        dsml("tool_calls"), ("</｜DSML｜parameter>",), ("<｜DSML｜tool_calls>", '{"text": "', '"}'), "deepseek_v4"
    ),
    "deepseek_v4_1": Form(
        dsml("calls", " "),
        ("</｜DSML｜ parameter>",),
        ("<｜DSML｜ calls>", '<｜DSML｜ invoke name="lookup">', "{", "</｜DSML｜ invoke>"),
    ),
    "gigachat35": Form(
        dsml("function_calls", prefix="GCML"),
        ("</｜GCML｜parameter>",),
        named("｜GCML｜", "<function_calls>", "</function_calls>", *INVOKE_PIECES),
        "basic",
    ),
    "solar_open2": Form(
        solar_open2,
        ("<|tool_arg:end|>", "<|tool_arg:start|>", "<|tool_call:start|>", "<|tool_call:end|>"),
        ("<|tool_call:start|>", "<|tool_call:end|>", "lookup\n", "<|tool_arg:start|>", "<|tool_arg:value|>"),
        "solar_open2",
        ("<|think:start|>", "<|think:end|>"),
    ),
    "kimi_k3": Form(
        kimi_k3,
        ("<|close|>argument<|sep|>",),
        (
            *(
                "<|open|>tools<|sep|>",
                '<|open|>call tool="lookup"<|sep|>',
                "<|close|>call<|sep|>",
                "<|open|>",
                "<|sep|>",
            ),
            *('<|open|>argument key="text" type="string"<|sep|>', "<|close|>argument<|sep|>", "<|close|>tools<|sep|>"),
        ),
        "kimi_k3",
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ),
    "kimi_k2": Form(
        kimi,
        (),
        (
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "functions.lookup:0",
            "<|tool_call_argument_begin|>",
            '{"text": "',
            '"}',
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ),
        "kimi_k2",
    ),
    "minimax_m3": Form(
        minimax_m3,
        (NS,),
        (NS, *(NS + tag for tag in ("<text>", "</text>", "<tags>", "<item>", "</item>", "</tags>", *M3_PIECES))),
        "minimax_m3",
        ("<mm:think>", "</mm:think>"),
    ),
    "muse": Form(
        lambda calls: "",
        ("</atem:parameter>", "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
        (
            *("<|start|>assistant to=lookup<|message|>", "<|message|>", "<|eom|>", "<|start|>", "assistant to=self"),
            *named("atem:", "<function_calls>", "</function_calls>", *INVOKE_PIECES),
        ),
        "muse",
        whole=muse,
    ),
}


def parsed(name: str, chunks: Iterable[str], finish: Any = "stop") -> Collected:
    reasoning = FORMS[name].reasoning
    parser = open_parser(tool=name, reasoning=reasoning, tools=TOOLS, reasoning_open=False)
    events = [event for chunk in chunks for event in parser.feed(chunk)]
    return collect(events + parser.finish(finish), finish)


def shown(collected: Collected) -> list[Block]:
    return [
        ("call", (segment.name, segment.arguments, segment.complete, segment.written))
        if isinstance(segment, CallSegment)
        else ("text" if isinstance(segment, TextSegment) else "reasoning", segment.text)
        for segment in collected.segments
    ]


CUTS = st.lists(st.integers(min_value=0), max_size=8)


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    ends = sorted({cut % (len(text) + 1) for cut in cuts} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def strings(form: Form) -> st.SearchStrategy[str]:
    """Texts of characters and half markers. What would end a value is taken out until nothing of it is left."""
    halves = [piece[:length] for piece in (*form.pieces, *form.ends) for length in (1, len(piece) // 2, len(piece) - 1)]

    def harmless(text: str) -> str:
        while any(end in text for end in form.ends):
            for end in form.ends:
                text = text.replace(end, "")
        return text

    characters = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=8)
    parts = characters | st.sampled_from(
        ["\n", " ", "<", "</", "&amp;", '"', "'", "}", "{", "\\", "null", "007", *form.pieces, *halves]
    )
    return st.lists(parts, max_size=5).map("".join).map(harmless)


def argument_texts(form: Form) -> st.SearchStrategy[str]:
    """What a template can write: no text that ends with the beginning of an end tag, for the tag would begin earlier; and no end
    of a call with another one behind it, which is read as the end of a value that was not closed.
    """

    def can_be_written(text: str) -> bool:
        return not any((text + end).find(end) < len(text) for end in form.ends) and not CALL_ENDS.search(text)

    return strings(form).filter(can_be_written)


def argument_objects(form: Form) -> st.SearchStrategy[Arguments]:
    text = argument_texts(form)
    nullable = st.none() | text.filter(lambda value: value.lower() != "null")
    numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers()
    place = st.fixed_dictionaries({}, optional={"name": text, "spots": st.lists(st.integers(), max_size=3)})
    return st.fixed_dictionaries(
        {},
        optional={
            "text": text,
            "note": nullable,
            "count": st.integers(),
            "ratio": numbers,
            "flag": st.booleans(),
            "tags": st.lists(text, max_size=3),
            "place": place,
            "unknown": text,
        },
    )


PROSE = st.text(alphabet=st.sampled_from("ab c<|｜/=>[]{}\n漢🧭'\""), min_size=1, max_size=30).filter(
    lambda text: bool(text.strip())
)


@cache
def turns(name: str) -> st.SearchStrategy[list[Block]]:
    form = FORMS[name]
    offered = st.tuples(st.sampled_from(["lookup", "mcp.write-note"]), argument_objects(form))
    unknown = st.tuples(st.just("not_offered"), st.fixed_dictionaries({}, optional={"text": argument_texts(form)}))
    call = st.tuples(st.just("call"), offered | unknown)
    text = st.tuples(st.just("text"), PROSE)
    thought = st.tuples(st.just("reasoning"), PROSE)
    kinds: list[st.SearchStrategy[Block]] = [call, text, thought] if form.reasoning else [call, text]
    return st.lists(st.one_of(kinds), min_size=1, max_size=4).filter(
        lambda blocks: all(one[0] != other[0] or one[0] == "call" for one, other in pairwise(blocks))
    )


def rendered(form: Form, blocks: Sequence[Block]) -> str:
    if form.whole:
        return form.whole(blocks)
    text = ""
    for at, (kind, content) in enumerate(blocks):
        if kind == "reasoning":
            text += f"{form.think[0]}{content}{form.think[1]}\n\n"
        elif kind == "text":
            text += content
        elif at == 0 or blocks[at - 1][0] != "call":
            run = [block[1] for block in blocks[at:]]
            length = next((n for n, block in enumerate(blocks[at:]) if block[0] != "call"), len(run))
            text += "\n" + form.calls(run[:length]) + "\n"
    return text


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_what_a_template_writes_is_parsed_back_however_it_is_cut(name: str, data: st.DataObject) -> None:
    form = FORMS[name]
    blocks = data.draw(turns(name))
    text = rendered(form, blocks)
    cuts = data.draw(CUTS)
    got = shown(parsed(name, pieces_of(text, cuts)))
    assert got == shown(parsed(name, text))
    assert [
        (kind, (content[0], json.loads(content[1]), content[2]) if kind == "call" else content.strip())
        for kind, content in got
    ] == [(kind, (*content, True) if kind == "call" else content.strip()) for kind, content in blocks]


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_cut_output_gives_its_beginning_and_no_call_that_looks_whole(name: str, data: st.DataObject) -> None:
    form = FORMS[name]
    text = rendered(form, data.draw(turns(name)))
    end = data.draw(st.integers(0, len(text)))
    whole = [content for kind, content in shown(parsed(name, [text])) if kind == "call"]
    cut = [content for kind, content in shown(parsed(name, text[:end], "length")) if kind == "call"]
    assert len(cut) <= len(whole)
    for (called, arguments, complete, written), wanted in zip(cut, whole, strict=False):
        if complete:
            assert (called, arguments, written) == (wanted[0], wanted[1], wanted[3])
        else:
            assert called == wanted[0]
            assert name == "kimi_k2" or not arguments.endswith("}") or wanted[1] != arguments


@cache
def garbage(name: str) -> st.SearchStrategy[list[str]]:
    form = FORMS[name]
    return st.lists(st.sampled_from([*form.pieces, *form.think, "\n", " ", *WORDS]), max_size=14)


WORDS = [f"wörd{number}" for number in range(8)]


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_garbage_never_raises_and_no_word_of_it_is_lost(name: str, data: st.DataObject) -> None:
    pieces = data.draw(garbage(name))
    text = "".join(pieces)
    cuts = data.draw(CUTS)
    got = shown(parsed(name, pieces_of(text, cuts)))
    assert got == shown(parsed(name, text))
    kept = "".join(content if kind != "call" else content[0] + content[1] for kind, content in got)
    prose = re.sub(
        r"<\|tool_call_begin\|>.*?<\|tool_call_argument_begin\|>", "", text, flags=re.DOTALL
    )  # without the ids of Kimi
    for word in WORDS:
        assert word in kept or word not in prose
