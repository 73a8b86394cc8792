"""Reading a streamed answer, however it is cut into lines and events."""

import pytest

from kvbus_cli.chat.client import ChatFailed, Piece, Turn, sse_data


def chunk(text: str) -> bytes:
    return f'{{"choices": [{{"index": 0, "delta": {{"content": "{text}"}}, "finish_reason": null}}]}}'.encode()


END = b'{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}'
USAGE = b'{"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 32}}}'


def test_events_are_read_until_done_and_comments_are_skipped() -> None:
    lines = [
        b": keep-alive\n",
        b"\n",
        b"data: a\r\n",
        b"\r\n",
        b"data:b\n",
        b"data: c\n",
        b"\n",
        b"data: [DONE]\n",
        b"\n",
        b"data: x\n",
    ]
    assert list(sse_data(lines)) == [b"a", b"b\nc"]


def test_an_event_without_its_closing_empty_line_is_dropped() -> None:
    assert list(sse_data([b"data: a\n", b"\n", b"data: cut"])) == [b"a"]


def test_a_turn_gives_its_pieces_and_then_its_figures() -> None:
    reasoning = b'{"choices": [{"delta": {"reasoning_content": "hm"}}]}'
    turn = Turn([reasoning, chunk("Pa"), chunk("ris"), END, USAGE], sent_at=0.0)
    assert list(turn) == [Piece("hm", reasoning=True), Piece("Pa"), Piece("ris")]
    figures = turn.figures
    assert (figures.prompt_tokens, figures.cached_tokens, figures.output_tokens, figures.finish_reason) == (
        40,
        32,
        3,
        "stop",
    )
    assert "32 cached (80%)" in str(figures)


def test_an_error_in_the_stream_is_raised() -> None:
    with pytest.raises(ChatFailed, match="no worker"):
        list(Turn([chunk("a"), b'{"error": {"message": "no worker"}}'], sent_at=0.0))


def test_a_stream_that_ends_before_the_answer_is_an_error() -> None:
    with pytest.raises(ChatFailed, match="ended before"):
        list(Turn([chunk("a")], sent_at=0.0))


def test_a_turn_without_output_has_figures_too() -> None:
    turn = Turn([END], sent_at=0.0)
    assert list(turn) == []
    assert str(turn.figures).startswith("no output")
