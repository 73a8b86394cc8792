"""Families whose arguments carry types, beyond the shared cases: what is broken, cut or prose."""

from typing import Any

import pytest

from kvbus_parsers import FinishReason, open_parser
from kvbus_parsers.collect import CallSegment, ReasoningSegment, collect


class Thought(str):
    __slots__ = ()


def segments(
    tool: str | None, text: str, finish: FinishReason = "stop", reasoning: str | None = None, **options: Any
) -> list[Any]:
    """Text, a Thought, or (name, arguments), with "cut" for calls that did not end; the same for any pieces."""
    found = []
    for size in (len(text), 1, 2, 3):
        parser = open_parser(tool=tool, reasoning=reasoning, **options)
        events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
        found.append(
            [
                (segment.name, segment.arguments, *([] if segment.complete else ["cut"]))
                if isinstance(segment, CallSegment)
                else Thought(segment.text)
                if isinstance(segment, ReasoningSegment)
                else segment.text
                for segment in collect(events + parser.finish(finish), finish).segments
            ]
        )
    assert all(one == found[0] for one in found)
    return found[0]


# ---- DeepSeek V3 and V3.1

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            f'a{CALLS}{CALL}function{SEP}f\n```json\n{{"a": "```{CALL_END}"}}\n```{CALL_END}{CALLS_END}b',
            ["a", ("f", f'{{"a": "```{CALL_END}"}}'), "b"],
        ),
        (
            f"{CALL}function{SEP}f\n```json\n{{bad}}\n```{CALL_END}\n{CALL}g{SEP}{{}}{CALL_END}b",
            [("f", "{bad}"), ("g", "{}"), "b"],
        ),
        (f"{CALLS}{CALL}f{SEP}{{}}\n{CALL_END}\n{CALL}g{SEP}\n{{\n}}", [("f", "{}"), ("g", "{\n}")]),
        (f"{CALL}function{SEP}f{CALL_END}{CALL}g{SEP}{CALL_END}", [("f", "{}"), ("g", "{}")]),
        (f'{CALL}f{SEP}{{"a": 1}}}}{CALL_END}', [("f", '{"a": 1}')]),
        (f"{CALL}function{SEP}{{}}{CALL_END}", [("function", "{}")]),
        (f"write {CALLS} or {CALL} first", [f"write {CALLS} or {CALL} first"]),
        (f"{CALLS}{CALLS_END}b", ["b"]),
    ],
)
def test_deepseek_v3(text: str, wanted: list[Any]) -> None:
    for name in ("deepseek_v3", "deepseek_v31"):
        assert segments(name, text) == wanted


@pytest.mark.parametrize(
    "written", ['["Brest"]', "null", "3", "true", '"Brest"', "in Brest", 'in {"a": 1}', '["\n", {}]']
)
def test_arguments_that_are_no_object_are_those_of_the_name_before_them(written: str) -> None:
    call = ("get_weather", written)
    for behind in (f"{CALL_END}b", f"{CALL_END}{CALLS_END}b", f"\n{CALL_END}\n{CALL}g{SEP}{{}}{CALL_END}b"):
        others = [("g", "{}")] if "g" in behind else []
        assert segments("deepseek_v3_1", f"a{CALL}get_weather{SEP}{written}{behind}") == ["a", call, *others, "b"]
    assert segments("deepseek_v3_1", f"{CALLS}{CALL}get_weather{SEP}\n{written}") == [call]
    fenced = f"{CALL}function{SEP}get_weather\n```json\n{written}\n```{CALL_END}b"
    assert segments("deepseek_v3", fenced) == [call, "b"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"precious words{SEP}f\n```json\n{{}}\n```{CALL_END}", ["precious words", ("f", "{}")]),
        (f"precious words{SEP}f```{{}}```{CALL_END}", ["precious words", ("f", "{}")]),
        (f"{'precious ' * 40}{SEP}f\n```json\n{{}}\n```{CALL_END}", [f"{CALL}{'precious ' * 40}f\n```json\n{{}}\n```"]),
        (f"{'precious ' * 40}\nf{{}}{CALL_END}", [f"{CALL}{'precious ' * 40}\nf{{}}"]),
        (f'function{SEP}["Brest"]{CALL_END}', [("function", '["Brest"]')]),
        (f"f{SEP}```json\n{{}}\n```{CALL_END}", [("f", "{}")]),
        (f"f{SEP}json\n{CALL_END}", [("f", "json")]),
        (f"function{SEP}f\n```json[1]```{CALL_END}", [("f", "[1]")]),
        (f"function{SEP}f\n```is: 3```{CALL_END}", [("f", "is: 3")]),
    ],
)
def test_words_of_deepseek_that_are_no_part_of_a_call_are_text(text: str, wanted: list[Any]) -> None:
    assert segments("deepseek_v3", f"{CALL}{text}") == wanted


def test_an_offered_tool_tells_on_which_side_of_the_separator_the_name_is() -> None:
    tools = [{"function": {"name": "get_weather", "parameters": {}}}]
    assert segments("deepseek_v3", f"{CALL}tool{SEP}get_weather\n{{}}{CALL_END}", tools=tools) == [
        "tool",
        ("get_weather", "{}"),
    ]
    assert segments("deepseek_v3", f"{CALL}get_weather{SEP}in\n```json\n{{}}\n```{CALL_END}", tools=tools) == [
        ("get_weather", "in\n```json\n{}\n```")
    ]


def test_deepseek_v3_cut() -> None:
    assert segments("deepseek_v3", f"a{CALLS}{CALL}func", "length") == ["a"]
    assert segments("deepseek_v3", f'{CALLS}{CALL}f{SEP}["a', "length") == [("f", '["a', "cut")]
    offered = [{"function": {"name": "f", "parameters": {}}}]
    assert segments("deepseek_v3", f"{CALLS}{CALL}f{SEP}nul", "length", tools=offered) == [("f", "nul", "cut")]
    assert segments("deepseek_v3", f'a{CALLS}{CALL}f{SEP}{{"a": [', "length") == ["a", ("f", '{"a": [', "cut")]


# ---- Mistral


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            'a [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}] [/TOOL_CALLS] b',
            ["a", ("f", '{"a": 1}'), "b"],
        ),
        ('[TOOL_CALLS]{"name": "f", "arguments": {}}', [("f", "{}")]),
        (
            '[TOOL_CALLS]f[ARGS]{bad}[TOOL_CALLS]g{"x": "[TOOL_CALLS]"}',
            [("f", "{bad}"), ("g", '{"x": "[TOOL_CALLS]"}')],
        ),
        ("[TOOL_CALLS]f[ARGS][/TOOL_CALLS] b", [("f", "{}"), "b"]),
        ("[TOOL_CALLS] f {} text }", [("f", "{}"), "text }"]),
        ("write [TOOL_CALLS] first", ["write [TOOL_CALLS] first"]),
        ("[TOOL_CALLS][1]x", ["[1]x"]),
        ('[TOOL_CALLS]f[ARGS]{"a":', [("f", '{"a":', "cut")]),
    ],
)
def test_mistral(text: str, wanted: list[Any]) -> None:
    assert segments("mistral", text) == wanted


def test_mistral_gives_the_ids_of_the_model() -> None:
    parser = open_parser(tool="mistral", new_id=lambda: "new")
    events = parser.feed(
        "[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}"
    ) + parser.finish("stop")
    assert [call.id for call in collect(events).tool_calls] == ["abc123def", "new"]


# ---- bare JSON


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            '{"name": "f", "parameters": {"a": ";"}}; {"name": "g", "parameters": {}} b',
            [("f", '{"a": ";"}'), ("g", "{}"), "b"],
        ),
        ('{"name": "f", "parameters": {}}\n<|python_tag|>{"name": "g", "arguments": {}}', [("f", "{}"), ("g", "{}")]),
        ('a <|python_tag|>{"type": "function", "parameters": {"b": 1}, "name": "f"}', ["a", ("f", '{"b": 1}')]),
        ('[{"name": "f", "parameters": {}}]', [("f", "{}")]),
        ('{"name": "f", "parameters": {}, "more": 1}', [("f", "{}")]),
        ('{"name": "f", "parameters": {}, "more": bad}', [("f", '{}, "more": bad}')]),
        ('{"name": 5, "parameters": {}}', ['{"name": 5, "parameters": {}}']),
        ('{"more": 1, "name": "f", "parameters": {}}', ['{"more": 1, "name": "f", "parameters": {}}']),
        (' {"name": "f"}', [' {"name": "f"}']),
        ('<|python_tag|>{"a": 1}', ['{"a": 1}']),
        ("write <|python_tag|> first", ["write <|python_tag|> first"]),
        ('text {"name": "f", "parameters": {}}', ['text {"name": "f", "parameters": {}}']),
    ],
)
def test_llama3_json(text: str, wanted: list[Any]) -> None:
    assert segments("llama3_json", text) == wanted


def test_llama3_json_cut() -> None:
    assert segments("llama3_json", '{"name": "f", "parameters": {"a": 1', "length") == [("f", '{"a": 1', "cut")]


ARRAY = '[{"name": "f", "arguments": {"a": 1}}]'


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"Here:\n```json\n{ARRAY}\n```\nb", ["Here:", ("f", '{"a": 1}'), "b"]),
        (f"```{ARRAY}```", [("f", '{"a": 1}')]),
        (f" {ARRAY} b", [("f", '{"a": 1}'), "b"]),
        (f"[TOOL_CALLS]{ARRAY}", [("f", '{"a": 1}')]),
        (f"<tool_call>{ARRAY}</tool_call>b", [("f", '{"a": 1}'), "b"]),
        ('```json\n{"a": 1}\n```', ['```json\n{"a": 1}\n```']),
        ("```python\nx\n``` [1, 2]", ["```python\nx\n``` [1, 2]"]),
        ("[1, 2]", ["[1, 2]"]),
        ('[{"name": "Bingo", "age": 3}]', ['[{"name": "Bingo", "age": 3}]']),
    ],
)
def test_xlam(text: str, wanted: list[Any]) -> None:
    assert segments("xlam", text) == wanted


def test_xlam_calls_behind_thoughts() -> None:
    assert segments("xlam", f"<think>a</think>\n{ARRAY}", reasoning="deepseek_r1") == [Thought("a"), ("f", '{"a": 1}')]


# ---- Cohere


def test_cohere_takes_off_all_its_sections_with_or_without_a_reasoning_format() -> None:
    text = (
        "<|START_THINKING|> a <|END_THINKING|><|START_ACTION|>[\n"
        '{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}},\n'
        '{"tool_call_id": "0", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|><|START_TEXT|> b <|END_TEXT|>'
    )
    wanted = [Thought("a"), ("f", '{"a": 1}'), ("g", "{}"), "b"]
    assert segments("cohere_command", text) == wanted
    assert segments("cohere_command4", text, reasoning="cohere_command4") == wanted
    assert segments("cohere_command", "<|START_ACTION|>[]<|END_ACTION|>") == []


# ---- Gemma

Q = '<|"|>'


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (
            f'k:{Q}te}}xt, "\n{Q},n:42,o:{{a:[1,-2.5,true,null,{Q}{Q}]}}',
            '{"k": "te}xt, \\"\\n", "n": 42, "o": {"a": [1, -2.5, true, null, ""]}}',
        ),
        ("", "{}"),
        (f" {Q}k k{Q} : 1 , ", '{"k k": 1}'),
        ("a:celsius,b:New York", '{"a": "celsius", "b": "New York"}'),
        ("a:1 b:2", '{"a": 1 b:2}'),
        ("junk", "{junk}"),
        (f"a:{Q}x{Q}y,b:1", '{"a": "x"y, "b": 1}'),
        (",,a:1]", '{,,"a": 1]}'),
        ("a:[1", '{"a": [1}'),
        ("a:{b:[{c:1},2]}", '{"a": {"b": [{"c": 1}, 2]}}'),
    ],
)
def test_gemma(body: str, wanted: str) -> None:
    assert segments("gemma4", f"a<|tool_call>call:f{{{body}}}<tool_call|><|tool_response>") == ["a", ("f", wanted)]
    function_gemma = body.replace(Q, "<escape>")
    assert segments("functiongemma", f"<start_function_call>call:f{{{function_gemma}}}<end_function_call>") == [
        ("f", wanted)
    ]


def test_gemma_broken_cut_and_prose() -> None:
    assert segments("gemma4", "<|tool_call>call:f{a:[1<tool_call|>b<|tool_call>call:g{}<tool_call|>") == [
        ("f", '{"a": [1'),
        "b",
        ("g", "{}"),
    ]
    assert segments("gemma4", f"<|tool_call>call:f{{a:{Q}x", "length") == [("f", '{"a": "x', "cut")]
    assert segments("gemma4", "a<|tool_call>call:", "length") == ["a"]
    assert segments("gemma4", "write <|tool_call> first") == ["write <|tool_call> first"]


def test_gemma_nesting_has_no_limit() -> None:
    (call,) = segments("gemma4", "<|tool_call>call:f{a:" + "[" * 3000 + "]" * 3000 + "}<tool_call|>")
    assert call == ("f", '{"a": ' + "[" * 3000 + "]" * 3000 + "}")


# ---- Apertus


def test_apertus_calls_amid_thoughts() -> None:
    text = '<|inner_prefix|>a<|tools_prefix|>[{"f": {}}, {"g": {"x": 1}}]<|tools_suffix|>b<|inner_suffix|>c'
    assert segments("apertus", text, reasoning="apertus") == [
        Thought("a"),
        ("f", "{}"),
        ("g", '{"x": 1}'),
        Thought("b"),
        "c",
    ]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a<|tools_prefix|>[]<|tools_suffix|>", ["a"]),
        ('<|tools_prefix|>[{"f": {"a": 1}, "g": {}}]', [("f", '{"a": 1}'), ("g", "{}")]),
        ('<|tools_prefix|>[{"f": {"a": bad}}]<|tools_suffix|> b', [("f", '{"a": bad}}]'), "b"]),
        ('<|tools_prefix|>[{"f": {"a":', [("f", '{"a":', "cut")]),
        ('<|tools_prefix|>[{"f": ["}]"]}, {"g": {}}]<|tools_suffix|>', [("f", '["}]"]'), ("g", "{}")]),
        ('<|tools_prefix|>[{"f": null}, {"g": 3}]<|tools_suffix|>b', [("f", "{}"), ("g", "3"), "b"]),
        ('<|tools_prefix|>[{"f": "{}", "g": "x"}]<|tools_suffix|>', [("f", "{}"), ("g", "x")]),
        ('<|tools_prefix|>[{"f": words}]<|tools_suffix|> b', [("f", "words}]"), "b"]),
        ("<|tools_prefix|>[junk]<|tools_suffix|> b", ["junk]b"]),
        ("write <|tools_prefix|> first", ["write <|tools_prefix|> first"]),
    ],
)
def test_apertus(text: str, wanted: list[Any]) -> None:
    assert segments("apertus", text) == wanted


@pytest.mark.parametrize("value", ["[1", '"x', "3", "nul"])
def test_a_cut_value_of_apertus_is_never_whole(value: str) -> None:
    assert segments("apertus", f'<|tools_prefix|>[{{"f": {value}', "length") == [("f", value, "cut")]


# ---- Inkling

JSON_CALL = "<|content_invoke_tool_json|>"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "<|message_model|><|content_thinking|>a<|end_message|><|message_model|><|content_text|> b <|end_message|>",
            [Thought("a"), "b"],
        ),
        (
            f'<|message_model|>f{JSON_CALL}{{"name": "f", "args": {{"a": "<|end_message|>"}}}}<|end_message|>',
            [("f", '{"a": "<|end_message|>"}')],
        ),
        (f'<|message_model|>{JSON_CALL}{{"name": "f", "args": {{bad}}}}<|end_message|>b', [("f", "{bad}}"), "b"]),
        (f'<|message_model|>{JSON_CALL}{{"nam<|end_message|>b', ['{"namb']),
        ("<|message_model|>sh<|content_invoke_tool_text|>ls -l\n<|end_message|>", [("sh", "ls -l\n")]),
        ("plain ", ["plain "]),
        ("<|message_model|>no type", ["no type"]),
        ("<|message_model|>" + "word " * 99, ["word " * 99]),
    ],
)
def test_inkling(text: str, wanted: list[Any]) -> None:
    assert segments("inkling", text) == wanted


def test_inkling_without_calls_shows_them() -> None:
    assert segments(None, f'<|message_model|>f{JSON_CALL}{{"name": "f"}}<|end_message|>', reasoning="inkling") == [
        '{"name": "f"}'
    ]


# ---- Kimi K3


def opened(tag: str) -> str:
    return f"<|open|>{tag}<|sep|>"


def closed(tag: str) -> str:
    return f"<|close|>{tag}<|sep|>"


def argument(key: str, type_name: str, value: str) -> str:
    return opened(f'argument key="{key}" type="{type_name}"') + value + closed("argument")


def test_kimi_k3_arguments_have_the_types_that_the_model_says() -> None:
    arguments = (
        argument("a", "string", '1"\n<|open|>')
        + argument("b", "number", "1.50")
        + argument("c", "object", '{"z": [1]}')
    )
    arguments += (
        argument("d", "boolean", "true") + argument("e", "integer", "bad") + argument("g &amp; &quot;", "null", "null")
    )
    call = opened('call tool="f" index="1"') + arguments + closed("call")
    response = f"{opened('response')} b {closed('response')}"
    text = f"a{closed('think')}{response}{opened('tools')}{call}{closed('tools')}{closed('message')}"
    wanted = '{"a": "1\\"\\n<|open|>", "b": 1.50, "c": {"z": [1]}, "d": true, "e": "bad", "g & \\"": null}'
    assert segments("kimi_k3", text, reasoning="kimi_k3") == [Thought("a"), "b", ("f", wanted)]


def test_kimi_k3_odd_outputs() -> None:
    assert segments("kimi_k3", f"{opened('response')} b {closed('response')}") == ["b"]
    assert segments("kimi_k3", f"a{opened('response')}b", reasoning="kimi_k3") == [Thought("a"), "b"]
    call = opened('call tool="f"')
    assert segments("kimi_k3", f"a{opened('tools')}{call}{closed('call')}", reasoning="kimi_k3") == [
        Thought("a"),
        ("f", "{}"),
    ]
    assert segments("kimi_k3", f"{call}junk{closed('call')}b") == [("f", "junk"), "b"]
    for head in ("<|open|>argument precious words<|sep|>", "<|open|>argument precious words"):
        keyless = f"{call}{head}{closed('argument')}{argument('a', 'integer', '1')}{closed('call')}b"
        assert segments("kimi_k3", keyless) == [("f", 'precious words{"a": 1}'), "b"]
    cut = opened('argument key="a" type="string"') + "x"
    assert segments("kimi_k3", f"{opened('tools')}{call}{cut}", "length") == [("f", '{"a": "x', "cut")]
    prose = f"write {opened('tools')} first <|open|>call me"
    assert segments("kimi_k3", prose) == [prose]


# ---- GigaChat 3


def test_gigachat3() -> None:
    call = '{"name": "f", "arguments": {"a": 1}}'
    assert segments("gigachat3", f"a<|message_sep|>\n\nfunction call<|role_sep|>\n{call}</s>") == [
        "a",
        ("f", '{"a": 1}'),
    ]
    assert segments("gigachat3", f"<|function_call|>{call}") == [("f", '{"a": 1}')]
    assert segments("gigachat3", "a function call<|role_sep|> b") == ["a function call<|role_sep|> b"]


# ---- all of them


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("llama3_json", '<|python_tag|><|python_tag|>{"name": "f", "parameters": {}}'),
        ("apertus", '<|tools_prefix|><|tools_prefix|>[{"f": {}}]<|tools_suffix|><|tools_suffix|>'),
        ("internlm2", '<|action_start|><|action_start|><|plugin|>{"name": "f", "parameters": {}}<|action_end|>'),
        ("lfm2", "<|tool_call_start|><|tool_call_start|>[f()]<|tool_call_end|>"),
        ("olmo3", "<function_calls>\n<function_calls>f()</function_calls>"),
        ("deepseek_v3", f"{CALLS}{CALLS}{CALL}f{SEP}{{}}{CALL_END}{CALL_END}{CALLS_END}{CALLS_END}"),
        ("deepseek_v3", f"{CALLS}f{SEP}{{}}{CALL_END}{CALLS_END}"),
        ("cohere_command", '<|START_ACTION|><|START_ACTION|>[{"tool_name": "f", "parameters": {}}]<|END_ACTION|>'),
        ("cohere_command", '<|START_ACTION|>{"tool_name": "f", "parameters": {}}]<|END_ACTION|>'),
    ],
)
def test_a_marker_too_many_or_a_bracket_too_few_does_not_show(tool: str, text: str) -> None:
    assert segments(tool, f"a {text} b") == ["a", ("f", "{}"), "b"]


def test_calls_of_an_array_without_its_opening_bracket_are_all_read() -> None:
    calls = '{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]'
    assert segments("nemotron_deci", f"<TOOLCALL>{calls}</TOOLCALL>b") == [("f", "{}"), ("g", "{}"), "b"]


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("mistral", "[TOOL_CALLS]na"),
        ("mistral", "[TOOL_CALLS]name[ARG"),
        ("mistral", '[TOOL_CALLS][{"name": "na'),
        ("internlm2", "<|action_start|><|plu"),
        ("olmo3", "<function_calls>\nna"),
        ("lfm2", "<|tool_call_start|>[na"),
        ("gemma4", "<|tool_call>call:na"),
        ("apertus", '<|tools_prefix|>[{"na'),
        ("deepseek_v3", f"{CALLS}{CALL}function{SEP}na"),
        ("deepseek_v3", f"{CALLS}{CALL}precious words{SEP}na"),
        ("deepseek_v3", f"{CALLS}{CALL}precious words{SEP}name{CALL_END[:-2]}"),
        ("deepseek_v3", f"{CALLS}{CALL}precious words{SEP}name\n``"),
        ("kimi_k3", f"{opened('tools')}<|open|>call tool"),
        ("gigachat3", "function call<|role_sep|>\n"),
        ("cohere_command", '<|START_ACTION|>[{"tool_call_id": "0", "tool_na'),
        ("inkling", f'{JSON_CALL}{{"name": "na'),
    ],
)
def test_a_call_that_is_cut_before_its_name_is_known_leaves_nothing_behind(tool: str, text: str) -> None:
    assert segments(tool, f"a{text}", "length") == ["a"]


def test_a_response_of_cohere_ends_thoughts_that_were_not_closed() -> None:
    assert segments("cohere_command", "<|START_THINKING|>a<|START_RESPONSE|>b<|END_RESPONSE|>") == [Thought("a"), "b"]


def test_what_gigachat_cannot_read_is_text_without_its_markers() -> None:
    assert segments("gigachat3", "a<|message_sep|>\n\nfunction call<|role_sep|>\n{bad</s>b") == ["a{badb"]
