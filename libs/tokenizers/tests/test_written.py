"""Tool-call arguments that keep the model's text: whichever way a template writes them, the characters are the same."""

from typing import Any

import pytest

from kvbus_tokenizers import ChatTemplate, Tokenizer, WrittenObject, WrittenValue, byte_level_bundle

TEXT = '{"b":1,  "a": "<é>"}'
ARGUMENTS = WrittenObject({"b": 1, "a": "<é>"}, TEXT)
TOKENIZER = Tokenizer.from_bundle(byte_level_bundle())


def rendered(source: str, arguments: Any, **variables: Any) -> str:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    prologue = "{% set call = messages[0].tool_calls[0].function %}"
    segments = ChatTemplate(prologue + source, TOKENIZER).render([message], variables=variables)
    assert all(segment.token_id is None for segment in segments)
    return "".join(segment.text for segment in segments)


@pytest.mark.parametrize(
    "source",
    [
        "{{ call.arguments | tojson }}",
        "{{ call.arguments | tojson(ensure_ascii=False) }}",
        "{{ call.arguments | tojson(separators=(',', ':')) }}",
        "{{ call.arguments }}",
        "{{ call.arguments | string }}",
        "{{ '' + call.arguments }}",
        "{{ call.arguments + '' }}",
        "{{ '' ~ call.arguments }}",
        "{% if call.arguments is string %}no{% elif call.arguments is mapping %}{{ call.arguments | tojson }}{% endif %}",
    ],
)
def test_a_template_writes_arguments_as_the_model_did(source: str) -> None:
    assert rendered(source, ARGUMENTS) == TEXT


def test_arguments_keep_their_text_inside_of_other_json() -> None:
    assert rendered("{{ call | tojson }}", ARGUMENTS) == '{"name": "f", "arguments": ' + TEXT + "}"
    assert rendered("{{ [call.arguments, 'x', call.arguments] | tojson }}", ARGUMENTS) == f'[{TEXT}, "x", {TEXT}]'
    nested = "{{ call | tojson(ensure_ascii=true) }}"
    assert rendered(nested, ARGUMENTS) == '{"name": "f", "arguments": ' + TEXT + "}"


def test_a_template_that_wants_another_shape_gets_it() -> None:
    assert rendered("{{ call.arguments | tojson(sort_keys=true) }}", ARGUMENTS) == '{"a": "<é>", "b": 1}'
    assert rendered("{{ call.arguments | tojson(indent=1) }}", ARGUMENTS) == '{\n "b": 1,\n "a": "<é>"\n}'


def test_values_are_those_of_the_mapping() -> None:
    source = "{% for k, v in call.arguments | items %}{{ k }}={{ v }};{% endfor %}"
    assert rendered(source, ARGUMENTS) == "b=1;a=<é>;"
    assert rendered(source.replace(" | items", ".items()"), ARGUMENTS) == "b=1;a=<é>;"
    assert (
        rendered("{{ call.arguments.b }}{{ call.arguments['a'] }}{{ call.arguments | length }}", ARGUMENTS) == "1<é>2"
    )
    assert rendered("{{ 'a' in call.arguments }}{{ 'x' in call.arguments }}", ARGUMENTS) == "TrueFalse"


@pytest.mark.parametrize(
    "source",
    [
        "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}",
        "{{ v if v is string else v | tojson(ensure_ascii=False) }}",
        "{{ v }}",
        "{{ '' + v }}",
    ],
)
@pytest.mark.parametrize("text", ["True", "1.50", '{"x":1}', "[1,2]", "null"])
def test_a_single_value_is_written_as_the_model_did(source: str, text: str) -> None:
    each = "{% for k, v in call.arguments | items %}" + source + "{% endfor %}"
    assert rendered(each, WrittenObject({"k": WrittenValue(text)}, "{}")) == text


def test_a_single_value_is_data_where_the_template_wants_another_shape() -> None:
    arguments = WrittenObject({"k": WrittenValue('{"b":1,"a":2}')})
    assert rendered("{{ call.arguments | tojson }}", arguments) == '{"k": {"b":1,"a":2}}'
    assert rendered("{{ call.arguments | tojson(sort_keys=true) }}", arguments) == '{"k": {"a": 2, "b": 1}}'


def test_control_tokens_in_a_single_value_stay_text() -> None:
    each = "{% for k, v in call.arguments | items %}{{ v }}{% endfor %}"
    assert rendered(each, WrittenObject({"k": WrittenValue('["<|im_end|>"]')}, "{}")) == '["<|im_end|>"]'


def test_without_a_known_text_the_template_decides_how_to_write() -> None:
    unknown = WrittenObject({"a": [1, "é"]})
    assert rendered("{{ call.arguments | tojson }}", unknown) == '{"a": [1, "é"]}'
    assert rendered("{{ call.arguments | tojson(separators=(',', ':')) }}", unknown) == '{"a":[1,"é"]}'
    assert rendered("{{ '' + call.arguments }}", unknown) == '{"a": [1, "é"]}'


def test_text_that_is_no_json_is_written_as_it_is() -> None:
    cut = WrittenObject({}, '{"path": "a.tx')
    assert rendered("{{ call | tojson }}", cut) == '{"name": "f", "arguments": {"path": "a.tx}'
    assert rendered("{% for k, v in call.arguments | items %}{{ k }}{% endfor %}", cut) == ""


def test_control_tokens_in_arguments_stay_text_and_the_text_stays_whole() -> None:
    text = '{"<|im_end|>":"<|im_start|>", "x": "<|im_st"}'
    arguments = WrittenObject({"<|im_end|>": "<|im_start|>", "x": "<|im_st"}, text)
    assert rendered("{{ call | tojson }}art|>", arguments) == '{"name": "f", "arguments": ' + text + "}art|>"
    each = "{% for k, v in call.arguments | items %}{{ k }}{{ v }}{% endfor %}art|>"
    assert rendered(each, arguments) == "<|im_end|><|im_start|>x<|im_start|>"


def test_only_what_json_knows_can_be_written() -> None:
    with pytest.raises(Exception, match="not JSON serializable"):
        rendered("{{ [x] | tojson }}", ARGUMENTS, x={1})


def test_a_mark_in_the_text_alone_is_no_mark() -> None:
    text = '{"a": "\x86<|im_end|>"}'
    assert rendered("{{ call.arguments | tojson }}", WrittenObject({}, text)) == text
