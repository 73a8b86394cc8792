"""Other names of models, and lists in pages."""

from typing import Any

import pytest

from kvbus_frontend.core.aliases import Aliases
from kvbus_frontend.core.pages import page_of
from kvbus_frontend.settings import FrontendSettings
from kvbus_protocols import InvalidRequest

SERVED = {"org/a", "b"}


@pytest.mark.parametrize(
    ("text", "name", "model"),
    [
        ("", "b", "b"),
        ("", "other", "other"),
        ("claude=org/a", "claude", "org/a"),
        (" claude = org/a , x=b,", "x", "b"),
        ("b=org/a", "b", "b"),
        ("*=b,claude=org/a", "claude", "org/a"),
        ("*=b", "anything", "b"),
        ("claude=gone", "claude", "gone"),
    ],
)
def test_a_name_stands_for_a_model(text: str, name: str, model: str) -> None:
    assert Aliases.parse(text).resolve(name, SERVED) == model


def test_only_aliases_of_served_models_are_listed() -> None:
    aliases = Aliases.parse("claude=org/a,x=gone,b=org/a,*=b")
    assert list(aliases.of(SERVED)) == [("claude", "org/a")]


@pytest.mark.parametrize("text", ["claude", "=b", "x=", "x=a,x=b"])
def test_a_pair_that_is_none_is_a_bad_configuration(text: str) -> None:
    with pytest.raises(ValueError, match="model_aliases"):
        Aliases.parse(text)
    with pytest.raises(ValueError, match="model_aliases"):
        FrontendSettings(model_aliases=text)


@pytest.mark.parametrize(
    ("query", "items", "has_more"),
    [
        ({}, "abcdefghij", False),
        ({"limit": "3"}, "abc", True),
        ({"limit": "3", "after_id": "c"}, "def", True),
        ({"limit": "3", "after_id": "g"}, "hij", False),
        ({"after_id": "j"}, "", False),
        ({"limit": "3", "before_id": "e"}, "bcd", True),
        ({"limit": "3", "before_id": "c"}, "ab", False),
        ({"limit": "1000"}, "abcdefghij", False),
    ],
)
def test_pages_follow_ids(query: dict[str, str], items: str, has_more: bool) -> None:
    page = page_of("abcdefghij", str, query)
    assert ("".join(page.items), page.has_more) == (items, has_more)


def test_pages_of_the_default_size_cover_a_long_list_once() -> None:
    ids = [str(i) for i in range(45)]
    seen: list[Any] = []
    query: dict[str, str] = {}
    while (page := page_of(ids, str, query)).items:
        seen += page.items
        query = {"after_id": page.items[-1]}
    assert seen == ids


@pytest.mark.parametrize(
    "query", [{"limit": "0"}, {"limit": "1001"}, {"limit": "x"}, {"limit": "-1"}, {"limit": "²"}, {"limit": "9" * 9000},
              {"after_id": "z"}, {"before_id": ""}],
)  # fmt: skip
def test_a_page_that_cannot_be_is_refused(query: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        page_of("abc", str, query)
    assert refusal.value.param in query
