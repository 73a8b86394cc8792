"""Log probabilities come out with the text of their token."""

from kvbus_frontend.core.choice_text import ChoiceText, Piece
from kvbus_tokenizers import byte_level_bundle, load_tokenizer
from kvbus_wire.frontend import TokenLogprob

TOKENIZER = load_tokenizer(byte_level_bundle())


def choice(*stops: str) -> ChoiceText:
    return ChoiceText(TOKENIZER.detokenizer(), stops, token_by_token=True)


def push(text: ChoiceText, tokens: bytes) -> Piece:
    return text.push(list(tokens), [TokenLogprob(token, -1.0) for token in tokens])


def ids(piece: Piece) -> list[int]:
    return [token.logprob.token_id for token in piece.tokens]


def test_a_token_is_shown_with_its_text() -> None:
    text = choice()
    assert ids(push(text, b"ab")) == list(b"ab")


def test_tokens_of_a_held_back_text_wait_with_it() -> None:
    text = choice("end")
    first = push(text, b"aen")
    assert (first.text, ids(first)) == ("a", list(b"a"))
    second = push(text, b"x")
    assert (second.text, ids(second)) == ("enx", list(b"enx"))


def test_tokens_of_a_stop_string_are_dropped_with_it() -> None:
    text = choice("end")
    piece = push(text, b"aend more")
    assert (piece.text, ids(piece), text.matched) == ("a", list(b"a"), "end")
    assert text.output_tokens == 4
    assert not text.finish()


def test_the_offset_counts_characters_of_the_text() -> None:
    text = choice()
    piece = push(text, "é!".encode())
    assert [token.offset for token in piece.tokens] == [0, 0, 1]


def test_the_rest_of_a_text_comes_at_the_end() -> None:
    text = choice("end")
    assert push(text, b"en").text == ""
    rest = text.finish()
    assert (rest.text, ids(rest)) == ("en", list(b"en"))


def test_without_stops_and_log_probabilities_tokens_go_through_together() -> None:
    text = ChoiceText(TOKENIZER.detokenizer(), ())
    assert text.push(list("hé".encode())[:2]).text == "h"
    assert text.push(list("hé".encode())[2:]).text == "é"
    assert text.output_tokens == 3
