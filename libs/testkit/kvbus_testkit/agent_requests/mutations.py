"""Requests with mistakes in them: fields dropped, nulls, other types, blocks in another order or twice, huge and empty strings."""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

JUNK: tuple[Any, ...] = (
    None, "", "x", "x" * 100_000, "\u0000", "é☃🎉", "<|im_end|>", 0, -1, 1.5, 2**63, 1e300, True, [], {}, [[]], [None], [{}],
    {"type": "text"}, {"type": "new"}, [{"type": "text", "text": "x"}], {"type": "text", "text": ""},
)  # fmt: skip

Place = tuple[Any, Any]
"""A list or an object, and an index or a key in it."""


def mutated(body: dict[str, Any], source: random.Random, most: int = 3) -> dict[str, Any]:
    """A copy with one to ``most`` mistakes."""
    body = copy.deepcopy(body)
    for _ in range(source.randint(1, most)):
        places = list(_places(body))
        if not places:
            return body
        source.choice(_MUTATIONS)(*source.choice(places), source)
    return body


def _places(value: Any) -> Iterator[Place]:
    """Every place in it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


def _drop(owner: Any, key: Any, _source: random.Random) -> None:
    del owner[key]


def _replace(owner: Any, key: Any, source: random.Random) -> None:
    owner[key] = copy.deepcopy(source.choice(JUNK))


def _retype(owner: Any, key: Any, source: random.Random) -> None:
    """As another type of nearly the same meaning."""
    value = owner[key]
    owner[key] = source.choice([[value], {"type": "text", "text": value}, str(value), {"0": value}])


def _double(owner: Any, key: Any, _source: random.Random) -> None:
    if isinstance(owner, list):
        owner.insert(key, copy.deepcopy(owner[key]))
    else:
        owner[f"{key}_2"] = copy.deepcopy(owner[key])


def _shuffle(owner: Any, key: Any, source: random.Random) -> None:
    if isinstance(owner[key], list):
        source.shuffle(owner[key])
    elif isinstance(owner, list):
        source.shuffle(owner)
    else:
        other = source.choice(list(owner))
        owner[key], owner[other] = owner[other], owner[key]


def _nest(owner: Any, key: Any, _source: random.Random) -> None:
    for _ in range(150):
        owner[key] = [owner[key]]


_MUTATIONS: tuple[Callable[[Any, Any, random.Random], None], ...] = (
    _drop, _drop, _replace, _replace, _replace, _retype, _double, _shuffle, _nest,
)  # fmt: skip
