"""Where in a rendered prompt the parts of a conversation end.

Found by the turns' texts, in their order: cheaper by far than rendering the conversation once per place. Behind text that the
template does not write as it is, a place lies before where it could; it never lies behind what comes next.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from kvbus_protocols.conversation import CacheBreakpoint, Part, TextPart, ToolResultPart, ToolSpec, Turn
from kvbus_tokenizers import Segment

SHORT_CHARS = 24
"""A text of up to so many characters may well stand by chance in what the template writes."""
HEADER_CHARS = 40
"""What a template writes between the beginning of a turn and its text is not longer."""


class PromptText:
    """A rendered prompt as one text. ``starts``: of the segments."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.starts: list[int] = []
        size = 0
        for segment in segments:
            self.starts.append(size)
            size += len(segment.text)
        self.text = "".join(segment.text for segment in segments)
        self._turns_may_begin = [
            start + len(segment.text)
            for start, segment in zip(self.starts, segments, strict=True)
            if segment.token_id is not None
        ]

    def begin(self, text: str, position: int) -> int:
        """Where a turn's first text begins, from ``position`` on; -1: nowhere."""
        if len(text) > SHORT_CHARS:
            return self.text.find(text, position)
        for start in self._turns_may_begin[bisect_left(self._turns_may_begin, position) :]:
            found = self.text.find(text, start, start + HEADER_CHARS + len(text))
            if found == start or (found > start and self.text[found - 1].isspace()):
                return found
        return self.text.find(text, position)

    def whole_segments(self, position: int) -> int:
        """How many segments end at or before the character ``position``."""
        if position >= len(self.text):
            return len(self.starts)
        return max(0, bisect_right(self.starts, position) - 1)


class Places:
    """``head``: where what comes before the first turn that is no system turn ends: system prompt and tools."""

    def __init__(self, prompt: PromptText, turns: Sequence[Turn], tools: Sequence[ToolSpec], *, last_turn: int) -> None:
        """``last_turn``: no place behind this turn is asked for."""
        self._prompt = prompt
        self._turns = turns
        self._systems = next((i for i, turn in enumerate(turns) if turn.role != "system"), len(turns))
        needed = max(last_turn, min(self._systems, len(turns) - 1)) + 1
        self._ends: list[list[int]] = []  # per turn, after each of its parts
        self._begins: list[int] = []
        self._find(turns[:needed])
        self.head = self._head()
        self._tools_end = self._end_of_tools(tools)

    def of(self, point: CacheBreakpoint) -> int:
        """The character up to which the breakpoint covers the prompt."""
        if not self._turns:
            return 0
        if point.turn < 0:
            return self._tools_end
        turn = min(point.turn, len(self._ends) - 1)  # it may have gone since
        ends = self._ends[turn]
        parts = max(0, len(ends) - 1 - (point.after if turn == point.turn else 0))
        return max(ends[parts], self._tools_end)

    def _find(self, turns: Sequence[Turn]) -> None:
        position = 0
        for turn in turns:
            begin, ends = -1, [position]
            for part in turn.parts:
                for text in _texts(part):
                    bare = text.strip()
                    found = self._prompt.begin(bare, position) if begin < 0 else self._prompt.text.find(bare, position)
                    if found < 0:
                        continue
                    begin = found if begin < 0 else begin
                    position = found + len(bare)
                    tail = text[len(text.rstrip()) :]  # most templates write it as it is, some leave it out
                    position += len(tail) if self._prompt.text.startswith(tail, position) else 0
                ends.append(position)
            self._begins.append(begin)
            self._ends.append(ends)

    def _head(self) -> int:
        """As whole segments, so that nothing of the turn behind it is in it."""
        if self._systems < len(self._turns) and (begin := self._begins[self._systems]) >= 0:
            segments = self._prompt.whole_segments(begin)
            return self._prompt.starts[segments] if segments < len(self._prompt.starts) else begin
        return self._ends[self._systems - 1][-1] if self._systems else 0

    def _end_of_tools(self, tools: Sequence[ToolSpec]) -> int:
        """Most templates write them before the first system text, some behind it."""
        shown = [tool for tool in tools if not tool.deferred]
        if not self._systems:
            return self.head
        system_end = self._ends[self._systems - 1][-1]
        if shown and self._prompt.text.find(shown[-1].name, system_end, self.head) >= 0:
            return self.head
        begin = self._begins[0]
        return self._prompt.starts[self._prompt.whole_segments(begin)] if shown and begin >= 0 else 0


def _texts(part: Part) -> Iterator[str]:
    if isinstance(part, TextPart):
        if part.text.strip():
            yield part.text
    elif isinstance(part, ToolResultPart):
        for inner in part.parts:
            if isinstance(inner, TextPart) and inner.text.strip():
                yield inner.text
