"""What templates make of thoughts and calls is found by trying them."""

from pathlib import Path

import pytest

from kvbus_frontend.core.template_traits import TemplateTraits, traits_of
from kvbus_tokenizers import ChatTemplate, Tokenizer, byte_level_bundle

FOLDER = Path(__file__).parents[2] / "property" / "frontend" / "templates"
TOKENIZER = Tokenizer.from_bundle(byte_level_bundle())
HISTORY = {"preserve_thinking", "truncate_history_thinking", "clear_thinking", "enable_thinking", "thinking"}


def traits(source: str) -> TemplateTraits:
    found = traits_of(ChatTemplate(source, TOKENIZER))
    return TemplateTraits(
        **{name: getattr(found, name) for name in TemplateTraits.__struct_fields__ if name != "variables"},
        variables=found.variables & HISTORY,
    )


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen3", TemplateTraits(fields=("reasoning_content",))),
        (
            "qwen35",
            TemplateTraits(
                fields=("reasoning_content",),
                values_as_json=True,
                variables=frozenset({"enable_thinking", "preserve_thinking"}),
            ),
        ),
        (
            "nemotron3",
            TemplateTraits(
                fields=("reasoning_content",),
                values_as_json=True,
                variables=frozenset({"enable_thinking", "truncate_history_thinking"}),
            ),
        ),
        (
            "glm",
            TemplateTraits(
                fields=("reasoning_content",),
                values_as_json=True,
                variables=frozenset({"enable_thinking", "clear_thinking"}),
            ),
        ),
        ("minimax", TemplateTraits(fields=("reasoning_content",), values_as_json=True)),
        ("kimi", TemplateTraits(fields=("reasoning_content",), thought_apart=False)),
        ("deepseek31", TemplateTraits(inline=False)),
        ("deepseek32", TemplateTraits(fields=("reasoning_content",), values_as_json=True)),
        ("mistral", TemplateTraits(blocks=True, text_apart=False, short_ids=True)),
        ("harmony", TemplateTraits(fields=("thinking",), thought_with_both=False, thought_apart=False, parallel=False)),
        ("plain_chatml", TemplateTraits()),
    ],
)
def test_families_differ(family: str, expected: TemplateTraits) -> None:
    found = traits((FOLDER / f"{family}.jinja").read_text())
    assert found == expected


LOOP = "{% for m in messages %}[{{ m.role }}]"
CALLS = "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (LOOP + "{{ m.content }}{% endfor %}", TemplateTraits()),
        (LOOP + "{{ m.content }}{{ m.reasoning or m.reasoning_content }}{% endfor %}", TemplateTraits(fields=("reasoning",))),
        (LOOP + "{{ m.content.split('</think>')[-1] }}{% endfor %}", TemplateTraits(inline=False)),
        (
            LOOP + "{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}{% endfor %}",
            TemplateTraits(empty_content=None, text_with_calls=False, thought_with_both=False),
        ),
        (
            LOOP + "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
            "{{ m.content }}" + CALLS + "{% endfor %}",
            TemplateTraits(parallel=False),
        ),
        (
            LOOP + "{% if loop.previtem and loop.previtem.role == m.role == 'assistant' %}"
            "{{ raise_exception('alternate') }}{% endif %}"
            "{{ m.content }}" + CALLS + "{% endfor %}",
            TemplateTraits(successive=False, text_apart=False, thought_apart=False),
        ),
        (LOOP + CALLS + "{{ m.content }}{% endfor %}", TemplateTraits(text_with_calls=False, thought_with_both=False)),
        ("{{ messages | tojson }}", TemplateTraits(fields=("reasoning_content", "reasoning", "thinking", "tool_plan"))),
        ("{{ raise_exception('never') }}", TemplateTraits(successive=False, inline=False)),
    ],
)  # fmt: skip
def test_templates_tell_by_what_they_write(source: str, expected: TemplateTraits) -> None:
    assert traits(source) == expected


def test_without_a_template_there_is_nothing_to_try() -> None:
    assert traits_of(None) == TemplateTraits()
