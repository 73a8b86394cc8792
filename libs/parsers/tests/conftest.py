from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import settings

from kvbus_parsers import FinishReason
from kvbus_parsers.cases import case_parser
from kvbus_parsers.collect import CallSegment, Collected, ReasoningSegment, collect

# How long one example takes says how busy the machine is, no more.
settings.register_profile("parsers", deadline=None)
settings.load_profile("parsers")

Read = Callable[..., list[object]]


@pytest.fixture
def read() -> Read:
    """Parses an output whole and by characters. Text comes as text, reasoning in a list, a call as (name, arguments' text).

    A call that the output cuts off has ``…`` behind its arguments.
    """

    def parse(
        output: str,
        parser: str | Mapping[str, str],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        finish: FinishReason = "stop",
    ) -> list[object]:
        case = {"parser": parser, "tools": list(tools), "request": {"prompt_closed_reasoning": True}}

        def run(chunks: Sequence[str]) -> Collected:
            opened = case_parser(case)
            events = [event for chunk in chunks for event in opened.feed(chunk)]
            return collect(events + opened.finish(finish), finish)

        whole = shown(run([output]))
        assert shown(run(list(output))) == whole
        return whole

    return parse


def shown(collected: Collected) -> list[object]:
    found: list[object] = []
    for segment in collected.segments:
        if isinstance(segment, CallSegment):
            found.append((segment.name, segment.arguments + ("" if segment.complete else "…")))
        else:
            found.append([segment.text] if isinstance(segment, ReasoningSegment) else segment.text)
    return found
