"""Guidance as a grammar: what it lets through, with markers as text and as special tokens."""

import json
from typing import Any

import pytest

pytest.importorskip("llguidance")

import llguidance

from kvbus_wire.guidance import CallSection, FreeBlock, Guidance, GuidedArgument, GuidedCall
from kvbus_worker.engines.torch.grammar import BadGrammar, Source, alone, compose, parser_limits, sources
from kvbus_worker.engines.torch.grammar_check import plain_problem

OBJECT = '{"type":"object"}'
POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
END = 256
SPECIALS = {"<think>": 257, "</think>": 258, "<call>": 259, "</call>": 260, "<other>": 261}
THINK = FreeBlock(begin="<think>", end="</think>")
HERMES = CallSection(
    calls=(
        GuidedCall(begin='<call>\n{"name": "f", "arguments": ', end="}\n</call>", schema=json.dumps(POINT)),
        GuidedCall(begin='<call>\n{"name": "g", "arguments": ', end="}\n</call>", schema=OBJECT),
    ),
    separator="\n",
    trigger="<call>",
)
ELEMENTS = CallSection(
    calls=(
        GuidedCall(
            begin="<call>\n<f>\n",
            end="</f>\n</call>",
            arguments=(
                GuidedArgument(begin="<a>\n", kind="text", end="\n</a>\n", required=True),
                GuidedArgument(begin="<n>\n", kind="json", end="\n</n>\n", text='{"type":"integer"}'),
                GuidedArgument(begin="<m>\n", kind="regex", end="\n</m>\n", text="on|off"),
            ),
        ),
        GuidedCall(begin="<call>\n<g>\n", end="</g>\n</call>", any_content=True),
    ),
    trigger="<call>",
)
F1 = '<call>\n{"name": "f", "arguments": {"x": 1}}\n</call>'
G = '<call>\n{"name": "g", "arguments": {}}\n</call>'


class Vocabulary:
    """Single bytes, an end, and perhaps special tokens."""

    eos_token_id = END
    bos_token_id = None

    def __init__(self, specials: dict[str, int]) -> None:
        self.specials = specials
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"] + [text.encode() for text in specials]
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        while text:
            marker = next((marker for marker in self.specials if text.startswith(marker)), None)
            tokens += [self.specials[marker]] if marker else text[0].encode()
            text = text[len(marker or " ") :]
        return tokens


@pytest.fixture(params=["text", "special"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return Vocabulary(SPECIALS if request.param == "special" else {})


def follows(guidance: Guidance, text: str, vocabulary: Vocabulary) -> bool | None:
    """Whether a text is a whole output; None: it is the beginning of one."""
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary))
    grammar = compose(guidance, vocabulary.specials, (END,))
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    assert not matcher.get_error()
    if not matcher.consume_tokens(vocabulary.encode(text)):
        return False
    return matcher.is_accepting() or None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"x": 1}', True),
        ('{\n    "x": -5\n}', True),
        ('{"x"', None),
        ('{"x": "1"}', False),
        ('{"x": 1}\n', False),
        (" {}", False),
        ('{ "x": 1 }', True),
        ('{"x": 1\r\n\t}', True),
        ("{  ", False),
        ("{\n\n", False),
        ("{\n" + " " * 32 + '"x": 1}', True),
        ("{\n" + " " * 33, False),
    ],
)
def test_json_follows_its_schema(text: str, expected: bool | None, vocabulary: Vocabulary) -> None:
    assert follows(Guidance(form="json_schema", text=json.dumps(POINT)), text, vocabulary) is expected


@pytest.mark.parametrize(("text", "expected"), [("{}", True), ('{"a": [1, {"b": null}]}', True), ("[1]", False)])
def test_any_object_is_json_mode(text: str, expected: bool, vocabulary: Vocabulary) -> None:
    assert follows(Guidance(form="json_object"), text, vocabulary) is expected


@pytest.mark.parametrize(
    ("guidance", "text", "expected"),
    [
        (Guidance(form="regex", text="a/b+"), "a/bb", True),
        (Guidance(form="regex", text="a/b+"), "ab", False),
        (Guidance(form="regex", text="a\nb"), "a\nb", True),
        (Guidance(form="lark", text='start: WORD+\nWORD: /[a-z]+/ "!"'), "ab!c!", True),
        (Guidance(form="lark", text='start: WORD+\nWORD: /[a-z]+/ "!"'), "ab!1", False),
    ],
)
def test_patterns_and_grammars_bind(guidance: Guidance, text: str, expected: bool, vocabulary: Vocabulary) -> None:
    assert follows(guidance, text, vocabulary) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>so {x}</think>\n\n{}", True),
        ("<think></think>{}", True),
        ("<think>a</think><think>b</think>{}", True),
        ("{}", True),
        ("<think>so {}", None),
        ("<think>so</think>", None),
        ("<think>so</think>text", False),
        ("text", False),
    ],
)
def test_thoughts_may_come_first(text: str, expected: bool | None, vocabulary: Vocabulary) -> None:
    assert follows(Guidance(form="json_object", blocks=(THINK,)), text, vocabulary) is expected


@pytest.mark.parametrize(("text", "expected"), [("so</think>{}", True), ("</think> {}", True), ("{}", None)])
def test_a_thought_that_the_prompt_has_begun_has_to_end(
    text: str, expected: bool | None, vocabulary: Vocabulary
) -> None:
    guidance = Guidance(form="json_object", blocks=(THINK,), open_block=True)
    assert follows(guidance, text, vocabulary) is expected


def test_a_lead_and_a_tail_frame_the_text(vocabulary: Vocabulary) -> None:
    guidance = Guidance(form="json_object", lead="<other>", tail="</call>")
    assert follows(guidance, "<other>{}</call>", vocabulary) is True
    assert follows(guidance, "<other>{}", vocabulary) is None
    assert follows(guidance, "{}", vocabulary) is False


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (F1, True),
        (G, True),
        (f"{F1}\n{G}", True),
        (f"{F1}{G}", False),
        (F1.replace("1", '"1"'), False),
        (F1.replace('"f"', '"h"'), False),
        (F1.removesuffix("</call>"), None),
        ("text", False),
        (f"\n{F1}", False),
    ],
)
def test_required_calls_are_nothing_but_calls(text: str, expected: bool | None, vocabulary: Vocabulary) -> None:
    assert follows(Guidance(form="none", section=HERMES), text, vocabulary) is expected


def test_one_call_is_all_when_calls_are_not_parallel(vocabulary: Vocabulary) -> None:
    one = CallSection(calls=HERMES.calls, separator="\n", parallel=False)
    assert follows(Guidance(form="none", section=one), F1, vocabulary) is True
    assert follows(Guidance(form="none", section=one), f"{F1}\n", vocabulary) is False


def test_a_section_frames_its_calls(vocabulary: Vocabulary) -> None:
    calls = tuple(GuidedCall(begin=f'{{"{name}": ', end="}", schema=OBJECT) for name in "fg")
    array = CallSection(calls=calls, begin="<call>[", end="]</call>", separator=", ", trigger="<call>")
    guidance = Guidance(form="none", section=array)
    assert follows(guidance, '<call>[{"f": {}}, {"g": {}}]</call>', vocabulary) is True
    assert follows(guidance, "<call>[]</call>", vocabulary) is False
    free = Guidance(form="free", section=array)
    assert follows(free, 'so <call>[{"f": {}}, {"g": {}}]</call> and', vocabulary) is True
    assert follows(free, 'so <call>[{"h"', vocabulary) is False


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("<a>\nany </text>\n\n</a>\n", True),
        ("<a>\n\n</a>\n", True),
        ("<a>\n</a>\n", False),
        ("<a>\nx\n</a>\n<n>\n12\n</n>\n<m>\noff\n</m>\n", True),
        ("<a>\nx\n</a>\n<m>\non\n</m>\n", True),
        ("<n>\n12\n</n>\n", False),
        ("<a>\nx\n</a>\n<n>\nx\n</n>\n", False),
        ("<a>\nx\n</a>\n<m>\nup\n</m>\n", False),
        ("<a>\nx</a>y\n</a>\n", False),
        ("", False),
    ],
)
def test_elements_hold_their_values(body: str, expected: bool, vocabulary: Vocabulary) -> None:
    guidance = Guidance(form="none", section=ELEMENTS)
    assert follows(guidance, f"<call>\n<f>\n{body}</f>\n</call>", vocabulary) is expected


def test_a_call_may_hold_anything_up_to_its_end(vocabulary: Vocabulary) -> None:
    guidance = Guidance(form="none", section=ELEMENTS)
    assert follows(guidance, "<call>\n<g>\n<z>1</z></g>\n</call>", vocabulary) is True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ("no call at all", True),
        (F1, True),
        (f"I call. {F1}\n{G} done", True),
        (f"<think>call?</think>{G}", True),
        ("a <call>\n", None),
        ("a <call>f", False),
        (f"a <other> {F1.replace('1', 'true')}", False),
        ("a < b <cal", True),
    ],
)
def test_free_text_binds_from_the_trigger_on(text: str, expected: bool | None, vocabulary: Vocabulary) -> None:
    assert follows(Guidance(form="free", section=HERMES), text, vocabulary) is expected


def test_json_or_calls_are_told_by_their_beginning(vocabulary: Vocabulary) -> None:
    guidance = Guidance(form="json_schema", text=json.dumps(POINT), section=HERMES)
    assert follows(guidance, '{"x": 1}', vocabulary) is True
    assert follows(guidance, G, vocabulary) is True
    assert follows(guidance, '{"name": "f"', vocabulary) is False


def test_special_tokens_are_not_text() -> None:
    vocabulary = Vocabulary(SPECIALS)
    spelled = Vocabulary({})
    guidance = Guidance(form="json_object", blocks=(THINK,))
    assert follows(guidance, "<think>a<other>", vocabulary) is False
    assert follows(guidance, '{"a": "<think>"}', spelled) is True
    assert follows(guidance, '{"a": "<think>"}', vocabulary) is False


def test_schemas_of_several_tools_keep_their_own_references(vocabulary: Vocabulary) -> None:
    def call(name: str, kind: str) -> GuidedCall:
        schema = {"$ref": "#/$defs/t", "$defs": {"t": {"type": kind}}}
        return GuidedCall(begin=f"{name}:", end=";", schema=json.dumps(schema))

    guidance = Guidance(form="none", section=CallSection(calls=(call("f", "integer"), call("g", "string"))))
    assert follows(guidance, 'f:1;g:"1";', vocabulary) is True
    assert follows(guidance, 'f:"1"', vocabulary) is False


def test_a_custom_grammar_stands_inside_its_element(vocabulary: Vocabulary) -> None:
    argument = GuidedArgument(
        begin="<in>\n", kind="lark", end="\n</in>\n", text='start: "x" start | "y"', required=True
    )
    call = GuidedCall(begin="<call>", end="</call>", arguments=(argument,), param="tools[0]")
    guidance = Guidance(form="none", section=CallSection(calls=(call,)))
    assert follows(guidance, "<call><in>\nxxy\n</in>\n</call>", vocabulary) is True
    assert follows(guidance, "<call><in>\nxx\n", vocabulary) is False
    assert sources(guidance) == [Source("lark", 'start: "x" start | "y"', param="tools[0]")]


def test_what_cannot_be_enforced_counts_only_where_it_must() -> None:
    unique = json.dumps({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}})

    def error(*, strict: bool) -> str:
        tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Vocabulary({})))
        return llguidance.LLMatcher(tokenizer, alone(Source("json", unique, strict)), log_level=0).get_error()

    assert not error(strict=False)
    assert "uniqueItems" in error(strict=True)


@pytest.mark.parametrize("text", ["", "{", "[]", "false", "3", "[" * 100_000])
def test_a_schema_is_an_object(text: str) -> None:
    with pytest.raises(BadGrammar) as caught:
        compose(Guidance(form="json_schema", text=text, param="response_format"), {})
    assert caught.value.param == "response_format"


def test_problems_are_told_in_one_line() -> None:
    told = "at 1(8): invalid regex\n  regex parse error:\n      (\n      ^\n  error: unclosed group\n"
    assert plain_problem(told) == "unclosed group"
    assert plain_problem('Unimplemented keys: ["not"]\nmore') == 'Unimplemented keys: ["not"]'
    assert len(plain_problem("x" * 10_000)) == 500
