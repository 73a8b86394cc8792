"""What waits for a client is merged without losing the order, and bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_frontend.core.choice_text import TokenText
from kvbus_frontend.core.outputs import BufferFull, ChoiceOutput, Finish, OutputBuffer
from kvbus_parsers import CallArguments, CallEnded, CallStarted, Event, Reasoning, ReasoningEnded, Text
from kvbus_wire.frontend import TokenLogprob

STARTED, ENDED = CallStarted(0, "call_a", "f"), CallEnded(0, "call_a", "f", "{}")


def token(number: int) -> TokenText:
    return TokenText(number, TokenLogprob(number, -0.5))


def merged(*events: Event) -> tuple[Event, ...]:
    buffer = OutputBuffer(100)
    for event in events:
        buffer.put(0, [event])
    (output,) = buffer.take()
    return output.events


def test_what_waits_of_a_choice_becomes_one_output() -> None:
    buffer = OutputBuffer(100)
    buffer.put(0, [Text("a")], [token(1)])
    buffer.put(1, [Text("x")])
    buffer.put(0, [Text("b"), Text("c")], [token(2)])
    buffer.finish(0, Finish("stop", "END"))
    assert buffer
    assert buffer.take() == [
        ChoiceOutput(0, (Text("abc"),), (token(1), token(2)), Finish("stop", "END")),
        ChoiceOutput(1, (Text("x"),)),
    ]
    assert not buffer
    assert buffer.take() == []


def test_a_choice_that_only_ends_is_an_output_as_well() -> None:
    buffer = OutputBuffer(100)
    buffer.finish(0, Finish("length"))
    assert buffer.take() == [ChoiceOutput(0, finish=Finish("length"))]


def test_log_probabilities_alone_are_an_output() -> None:
    buffer = OutputBuffer(100)
    buffer.put(0, [], [token(1)])
    assert buffer.take() == [ChoiceOutput(0, (), (token(1),))]


def test_nothing_is_no_output() -> None:
    buffer = OutputBuffer(100)
    buffer.put(0, [])
    assert not buffer


def test_deltas_of_one_segment_are_joined() -> None:
    assert merged(Text("a"), Text("b"), Reasoning("c"), Reasoning("d"), Text("e")) == (
        Text("ab"),
        Reasoning("cd"),
        Text("e"),
    )
    assert merged(STARTED, CallArguments(0, "{"), CallArguments(0, "}"), ENDED) == (
        STARTED,
        CallArguments(0, "{}"),
        ENDED,
    )


def test_segments_and_calls_stay_apart() -> None:
    thoughts = (Reasoning("a"), ReasoningEnded(), Reasoning("b"), ReasoningEnded())
    assert merged(*thoughts) == thoughts
    around = (Text("a"), STARTED, ENDED, Text("b"))
    assert merged(*around) == around
    two = (CallArguments(0, "{}"), CallArguments(1, "{}"))
    assert merged(*two) == two


events = st.lists(
    st.one_of(
        st.builds(Text, st.text(max_size=3)),
        st.builds(Reasoning, st.text(max_size=3)),
        st.builds(CallArguments, st.integers(0, 1), st.text(max_size=3)),
        st.just(ReasoningEnded()),
        st.just(STARTED),
        st.just(ENDED),
    ),
    max_size=20,
)


@given(events, st.lists(st.integers(0, 20), max_size=5))
def test_events_mean_the_same_however_often_they_are_taken(given_events: list[Event], cuts: list[int]) -> None:
    buffer = OutputBuffer(1000)
    taken: list[Event] = []
    for i, event in enumerate(given_events):
        buffer.put(0, [event])
        if i in cuts:
            taken += [event for output in buffer.take() for event in output.events]
    taken += [event for output in buffer.take() for event in output.events]
    assert list(merged(*taken) if taken else ()) == list(merged(*given_events) if given_events else ())


def test_the_buffer_takes_exactly_its_limit() -> None:
    buffer = OutputBuffer(6)
    buffer.put(0, [Text("ab"), STARTED, CallArguments(0, "cd"), ENDED])
    buffer.put(1, [Reasoning("ef")])
    with pytest.raises(BufferFull):
        buffer.put(0, [Text("g")])
    buffer.take()
    buffer.put(0, [Text("abcdef")])
