"""One choice from tokens to text, thoughts and calls: counted, and ended where it has to end."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus_frontend.core.choice_stream import ChoiceStream, Said
from kvbus_frontend.core.choice_text import ChoiceText
from kvbus_frontend.core.outputs import Finish
from kvbus_parsers import CallArguments, CallEnded, CallStarted, Event, Reasoning, ReasoningEnded, Text, open_parser
from kvbus_tokenizers import byte_level_bundle, load_tokenizer
from kvbus_wire.frontend import TokenLogprob

TOKENIZER = load_tokenizer(byte_level_bundle())
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALL_END = CALL.index("}}") + 2


def stream(
    *stops: str, reasoning: str | None = None, tool: str | None = None, max_calls: int | None = None, **options: Any
) -> ChoiceStream:
    ids = iter(f"call_{number}" for number in range(100))
    parser = open_parser(tool=tool, reasoning=reasoning, tools=TOOLS, new_id=lambda: next(ids), **options)
    return ChoiceStream(ChoiceText(TOKENIZER.detokenizer(), stops), parser, max_calls=max_calls)


def run(choice: ChoiceStream, *pieces: str, finish: str = "stop") -> tuple[list[Event], Finish, int]:
    """Events with adjacent deltas joined, the end, and how many pieces were consumed."""
    events: list[Event] = []
    for number, piece in enumerate(pieces, 1):
        said = choice.push(list(piece.encode()))
        events += said.events
        if said.finish is not None:
            return joined(events), said.finish, number
    said = choice.finish(Finish(finish))
    assert said.finish is not None
    return joined([*events, *said.events]), said.finish, len(pieces)


def joined(events: Sequence[Event]) -> list[Event]:
    out: list[Event] = []
    for event in events:
        match (out[-1] if out else None, event):
            case (Text(a), Text(b)):
                out[-1] = Text(a + b)
            case (Reasoning(a), Reasoning(b)):
                out[-1] = Reasoning(a + b)
            case (CallArguments(i, a), CallArguments(j, b)) if i == j:
                out[-1] = CallArguments(i, a + b)
            case _:
                out.append(event)
    return out


def test_without_a_parser_all_is_text() -> None:
    choice = ChoiceStream(ChoiceText(TOKENIZER.detokenizer(), ()))
    assert run(choice, "<think>a</think>", CALL) == ([Text(f"<think>a</think>{CALL}")], Finish("stop"), 2)
    assert (choice.output_tokens, choice.reasoning_tokens) == (16 + len(CALL), 0)


def test_tokens_of_thoughts_are_counted_with_their_markers() -> None:
    choice = stream(reasoning="qwen3", reasoning_open=True)
    events, _, _ = run(choice, "why</think>", "so")
    assert events == [Reasoning("why"), ReasoningEnded(), Text("so")]
    assert (choice.reasoning_tokens, choice.output_tokens) == (len("why</think>"), len("why</think>so"))


def test_tokens_after_a_thought_do_not_count_as_thought_even_when_they_come_in_one_step() -> None:
    one_step, many = (stream(reasoning="qwen3", reasoning_open=True) for _ in range(2))
    text = "why</think>so"
    run(one_step, text)
    run(many, *text)
    assert one_step.reasoning_tokens == many.reasoning_tokens == len("why</think>")


def test_a_closed_thought_costs_nothing() -> None:
    choice = stream(reasoning="qwen3", reasoning_open=False)
    run(choice, "answer")
    assert choice.reasoning_tokens == 0


def test_a_call_ends_with_its_last_character() -> None:
    choice = stream(tool="hermes")
    before = choice.push(list(CALL[: CALL_END - 1].encode()))
    assert not any(isinstance(event, CallEnded) for event in before.events)
    after = choice.push(list(CALL[CALL_END - 1 : CALL_END].encode()))
    assert CallEnded(0, "call_0", "f", '{"a": 1}') in after.events


def test_the_last_allowed_call_ends_the_choice() -> None:
    choice = stream(tool="hermes", max_calls=1)
    events, finish, consumed = run(choice, "x", CALL, CALL, "more")
    assert consumed == 2
    assert finish == Finish("stop")
    assert events == [
        Text("x"),
        CallStarted(0, "call_0", "f"),
        CallArguments(0, '{"a": 1}'),
        CallEnded(0, "call_0", "f", '{"a": 1}'),
    ]
    assert choice.output_tokens == 1 + CALL_END, "tokens after the call are not consumed"


def test_the_last_allowed_call_ends_a_choice_whose_calls_come_out_at_its_end() -> None:
    """Some formats tell a call from prose only when the output is over."""

    class Late:
        in_reasoning = False

        def feed(self, text: str) -> list[Event]:
            return []

        def finish(self, reason: str) -> list[Event]:
            return [
                event
                for i in range(2)
                for event in (CallStarted(i, f"call_{i}", "f"), CallEnded(i, f"call_{i}", "f", "{}"))
            ]

    choice = ChoiceStream(ChoiceText(TOKENIZER.detokenizer(), ()), Late(), max_calls=1)  # type: ignore[arg-type]
    events, finish, _ = run(choice, "f() g()", finish="length")
    assert events == [CallStarted(0, "call_0", "f"), CallEnded(0, "call_0", "f", "{}")]
    assert finish == Finish("stop")


def test_a_second_allowed_call_may_come() -> None:
    events, finish, consumed = run(stream(tool="hermes", max_calls=2), CALL, "\n", CALL, "more")
    assert [event.index for event in events if isinstance(event, CallEnded)] == [0, 1]
    assert (finish, consumed) == (Finish("stop"), 3)


def test_a_stop_string_in_a_call_cuts_it_off() -> None:
    events, finish, consumed = run(stream('"a"', tool="hermes"), *CALL, "more")
    assert events == [CallStarted(0, "call_0", "f"), CallArguments(0, "{")]
    assert finish == Finish("stop", '"a"')
    assert consumed < len(CALL)


def test_a_stop_string_in_a_thought_ends_it() -> None:
    events, finish, _ = run(stream("END", reasoning="qwen3", reasoning_open=True), "why EN", "D</think>so")
    assert events[0] == Reasoning("why")
    assert not any(isinstance(event, Text) for event in events)
    assert finish == Finish("stop", "END")


@pytest.mark.parametrize(("reason", "stop"), [("length", None), ("stop", "END")])
def test_a_call_that_is_cut_off_is_never_closed(reason: str, stop: str | None) -> None:
    choice = stream(*([stop] if stop else []), tool="hermes")
    events, finish, _ = run(choice, CALL[: CALL_END - 2], stop or "", finish=reason)
    assert [type(event) for event in events] == [CallStarted, CallArguments]
    assert finish == Finish(reason, stop)


def test_what_is_held_back_comes_out_at_the_end() -> None:
    events, finish, _ = run(stream("END", tool="hermes"), "a <tool_", "call is a marker E")
    assert events == [Text("a <tool_call is a marker E")]
    assert finish == Finish("stop")


def test_log_probabilities_come_with_their_tokens_whatever_those_mean() -> None:
    parser = open_parser(tool="hermes", reasoning="qwen3", reasoning_open=True, tools=TOOLS)
    choice = ChoiceStream(ChoiceText(TOKENIZER.detokenizer(), (), token_by_token=True), parser)
    output = f"why</think>so {CALL}"
    tokens = list(output.encode())
    said = choice.push(tokens, [TokenLogprob(token, -1.0) for token in tokens])
    assert [token.logprob.token_id for token in said.tokens] == tokens
    assert [token.offset for token in said.tokens] == list(range(len(tokens)))


OUTPUT = f"why é</think>so {CALL}\n{CALL}bye 🎉"


@given(
    cuts=st.lists(st.integers(0, len(OUTPUT.encode())), max_size=8), stops=st.sampled_from([(), ("bye",), ('a": 1}}',)])
)
@settings(deadline=None)
def test_the_steps_of_the_engine_leave_no_trace(cuts: list[int], stops: tuple[str, ...]) -> None:
    """Cut anywhere, inside of characters, too: as after a migration, where the rest comes from another worker."""
    data = OUTPUT.encode()
    bounds = [0, *sorted(cuts), len(data)]

    def result(parts: Sequence[bytes]) -> tuple[list[Event], Finish | None, int, int]:
        choice = stream(*stops, tool="hermes", reasoning="qwen3", reasoning_open=True)
        events: list[Event] = []
        said = Said()
        for part in parts:
            said = choice.push(list(part))
            events += said.events
            if said.finish is not None:
                break
        else:
            said = choice.finish(Finish("stop"))
            events += said.events
        return joined(events), said.finish, choice.output_tokens, choice.reasoning_tokens

    assert result([data[a:b] for a, b in pairwise(bounds)]) == result([data[i : i + 1] for i in range(len(data))])
