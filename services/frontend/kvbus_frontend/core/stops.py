"""Stop strings in streamed text: found however the text is cut, and never shown in part."""

from collections.abc import Sequence


class StopMatcher:
    """Feeds text through; holds back what may turn out to be the beginning of a stop string.

    The stop string that is complete first wins (of several that end at one place: the longest), so that the outcome does not
    depend on how the text is cut. After a match no more text comes out.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certainly no part of a stop string."""
        if self.matched is not None or not self._stops:
            return text if self.matched is None else ""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        keep = max(_open_end(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _open_end(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a beginning of the stop string."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
