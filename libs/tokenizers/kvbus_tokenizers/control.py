"""Control tokens in text: finding those that the template wrote, and guarding against those that a user wrote.

A chat template mixes its own text with strings from the request. Before rendering, every control token that is spelled out in
such a string gets a mark (one character that occurs nowhere in the request) after each of its characters. The rendered text
is then split at the control tokens that are still whole: those are the template's own. In between, the marks are taken out
again, and the text is encoded without looking for control tokens.

The text is split at control tokens ONLY: there BPE never merges across. Template text beside user text stays in one segment
with it; split there, content that begins with a space or a newline would get other token ids than the whole text.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvbus_tokenizers.spec import AddedToken
from kvbus_tokenizers.written import WrittenObject, WrittenValue

_MARKS = (*range(0x86, 0xA0), *range(0xE000, 0xF8FF))
"""Control characters (no white space, not escaped in JSON) before private-use ones: text with them has one byte per character."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt. ``token_id``: it is this control token. Else plain text; ``literal``: it spells out a marker (an added
    token that is no special one), which must not be matched either."""

    text: str
    token_id: int | None = None
    literal: bool = False


class ControlTokens:
    """The tokens with a meaning to the model that text from a request must not be able to write.

    ``special`` ones are guarded wherever a request spells them; ``markers`` (such as ``<think>`` or ``<tool_call>``: added
    tokens that the template writes) are left alone in the assistant's own messages, where the model itself wrote them.
    """

    def __init__(self, special: Iterable[AddedToken], markers: Iterable[AddedToken] = ()) -> None:
        self._special = {token.content: token for token in special if token.content}
        self._all = self._special | {
            token.content: token for token in markers if token.content and token.content not in self._special
        }
        self._find_special = _compile(self._special)
        self._find_all = _compile(self._all)
        self._split = _compile(self._all, with_strip=True)
        self._prefixes = {text[:end] for text in self._all for end in range(1, len(text))}
        self._longest = max(map(len, self._all), default=0)
        self._first_chars = sorted({text[0] for text in self._all})

    def split(self, text: str) -> list[Segment]:
        """Text in which every control token counts as such."""
        return list(self._segments(text, ""))

    def split_guarded(self, text: str, mark: str) -> list[Segment]:
        """Rendered text whose request strings went through `guard` with this mark (empty: nothing had to be guarded)."""
        return list(self._segments(text, mark))

    def _segments(self, text: str, mark: str) -> Iterable[Segment]:
        position = 0
        for match in self._split.finditer(text) if self._split is not None else ():
            if match.start() > position:
                yield self._plain(text[position : match.start()], mark)
            yield Segment(match[0], self._id_of(match[0]))
            position = match.end()
        if position < len(text):
            yield self._plain(text[position:], mark)

    def _id_of(self, matched: str) -> int:
        spellings = (matched, matched.lstrip(), matched.rstrip(), matched.strip())
        return next(self._all[text].id for text in spellings if text in self._all)

    def _plain(self, text: str, mark: str) -> Segment:
        if not mark or mark not in text:
            return Segment(text)
        text = text.replace(mark, "")
        found = self._find_all.finditer(text) if self._find_all is not None else ()
        return Segment(text, literal=any(match[0] not in self._special for match in found))

    def spelled_special(self, text: str) -> list[int]:
        """Where special tokens are spelled out in a text: positions after their first characters."""
        return (
            [match.start() + 1 for match in self._find_special.finditer(text)] if self._find_special is not None else []
        )

    def guard(self, value: Any, *, own_words: Callable[[Any], bool] | None = None) -> tuple[Any, str]:
        """A copy of a JSON value with every spelled-out control token broken by a mark, and that mark ("" when there was none).

        ``own_words``: whether an object is a message of the assistant.
        """
        strings: list[str] = []
        _collect(value, strings)
        if not any(self._spells(text) for text in strings):
            return value, ""
        mark = _free_mark(strings)
        return self._guarded(value, mark, own_words, self._find_all), mark

    def _may_hold(self, text: str) -> bool:
        """A quick look that spares most strings the search."""
        return any(char in text for char in self._first_chars)

    def _spells(self, text: str) -> bool:
        return self._may_hold(text) and (
            (self._find_all is not None and self._find_all.search(text) is not None) or self._ends_open(text)
        )

    def _ends_open(self, text: str) -> bool:
        """Whether the end of the text could become a control token with what the template writes after it."""
        tail = text[-self._longest :]
        return self._may_hold(tail) and any(tail[i:] in self._prefixes for i in range(len(tail)))

    def _guarded(
        self, value: Any, mark: str, own_words: Callable[[Any], bool] | None, find: "re.Pattern[str] | None"
    ) -> Any:
        if isinstance(value, str):
            if not self._may_hold(value):
                return value
            if find is not None:
                value = find.sub(lambda match: "".join(c + mark for c in match[0]), value)
            return value + mark if self._ends_open(value) else value
        if isinstance(value, dict | WrittenObject):
            if own_words is not None and own_words(value):
                find = self._find_special
            copy = {
                self._guarded(key, mark, None, find): self._guarded(item, mark, own_words, find)
                for key, item in value.items()
            }
            if isinstance(value, WrittenObject):
                return WrittenObject(copy, self._guarded(value.json_text, mark, None, find))
            return copy
        if isinstance(value, WrittenValue):
            return WrittenValue(self._guarded(value.json_text, mark, None, find))
        if isinstance(value, list):
            return [self._guarded(item, mark, own_words, find) for item in value]
        return value


def _collect(value: Any, strings: list[str]) -> None:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            strings.append(item)
        elif isinstance(item, dict | WrittenObject):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
        if isinstance(item, WrittenValue):
            stack.append(item.json_text)


def _free_mark(strings: Sequence[str]) -> str:
    others = [text for text in strings if not text.isascii()]
    return next(mark for mark in map(chr, _MARKS) if not any(mark in text for text in others))


def _compile(tokens: dict[str, AddedToken], *, with_strip: bool = False) -> "re.Pattern[str] | None":
    """A pattern for the longest token at the leftmost place; as a trie, since some vocabularies have thousands."""
    if not tokens:
        return None
    if not with_strip:
        return re.compile(_trie_pattern(tokens))
    groups: dict[tuple[bool, bool], list[str]] = {}
    for text, token in tokens.items():
        groups.setdefault((token.lstrip, token.rstrip), []).append(text)
    parts = [
        (r"\s*" if lstrip else "") + _trie_pattern(texts) + (r"\s*" if rstrip else "")
        for (lstrip, rstrip), texts in sorted(groups.items())
    ]
    return re.compile("|".join(parts))


def _trie_pattern(texts: Iterable[str]) -> str:
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return f"(?:{_node_pattern(root)})"


def _node_pattern(node: dict[str, Any]) -> str:
    # A chain without branches is written as plain text, so the recursion is as deep as there are branches, not characters.
    branches: list[str] = []
    for char, child in sorted(node.items()):
        if not char:
            continue
        text = char
        while len(child) == 1 and "" not in child:
            char, child = next(iter(child.items()))
            text += char
        rest = _node_pattern(child) if any(child) else ""
        branches.append(re.escape(text) + (rest if not rest else f"(?:{rest}){'?' if '' in child else ''}"))
    return "|".join(branches)
