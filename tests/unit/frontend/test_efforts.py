"""The efforts that a template knows are found by trying them."""

import pytest

from kvbus_frontend.core.efforts import COMMON_EFFORTS, efforts_of
from kvbus_tokenizers import ChatTemplate, byte_level_bundle, load_tokenizer

TOKENIZER = load_tokenizer(byte_level_bundle())
MESSAGES = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "efforts"),
    [
        ("", ()),
        ("Effort: {{ reasoning_effort }}", COMMON_EFFORTS),
        ("{% if reasoning_effort == 'max' %}Think hard.{% endif %}", ("max",)),
        ("{% if thinking and reasoning_effort in ('low', 'high') %}{{ reasoning_effort }}{% endif %}", ("low", "high")),
        (
            "{% if reasoning_effort not in ('low', 'medium') %}{{ raise_exception('no') }}{% endif %}{{ reasoning_effort }}",
            ("low", "medium"),
        ),
    ],
    ids=["has-none", "writes-any", "knows-one", "knows-two", "refuses-others"],
)
def test_an_effort_counts_when_it_changes_the_prompt(source: str, efforts: tuple[str, ...]) -> None:
    assert efforts_of(ChatTemplate(source + MESSAGES, TOKENIZER)) == efforts


def test_a_model_without_a_template_knows_no_effort() -> None:
    assert efforts_of(None) == ()
