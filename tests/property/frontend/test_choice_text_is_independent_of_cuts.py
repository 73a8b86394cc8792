"""Text, stop strings and log probabilities of a choice do not depend on how its tokens arrive."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus_frontend.core.choice_text import ChoiceText, Piece
from kvbus_tokenizers import byte_level_bundle, load_tokenizer
from kvbus_wire.frontend import TokenLogprob

TOKENIZER = load_tokenizer(byte_level_bundle())

texts = st.text(st.sampled_from("ab<é🎉"), max_size=20)
stop_lists = st.lists(st.text(st.sampled_from("ab<é🎉"), min_size=1, max_size=4), max_size=3)
cuts = st.lists(st.integers(0, 5), max_size=60)


def run(tokens: list[int], stops: list[str], sizes: list[int]) -> tuple[list[Piece], ChoiceText]:
    choice = ChoiceText(TOKENIZER.detokenizer(), stops, token_by_token=True)
    pieces = []
    start = 0
    for size in [*sizes, len(tokens)]:
        part = tokens[start : start + size]
        start += size
        pieces.append(choice.push(part, [TokenLogprob(token, -1.0) for token in part]))
        if choice.matched is not None:
            break
    return [*pieces, choice.finish()], choice


@given(text=texts, stops=stop_lists, sizes=cuts)
@settings(deadline=None)
def test_any_grouping_of_tokens_gives_the_same_choice(text: str, stops: list[str], sizes: list[int]) -> None:
    tokens = TOKENIZER.encode(text)
    grouped, choice = run(tokens, stops, sizes)
    single, reference = run(tokens, stops, [1] * len(tokens))
    assert "".join(piece.text for piece in grouped) == "".join(piece.text for piece in single)
    assert [token for piece in grouped for token in piece.tokens] == [
        token for piece in single for token in piece.tokens
    ]
    assert (choice.matched, choice.output_tokens) == (reference.matched, reference.output_tokens)


@given(text=texts, stops=stop_lists, sizes=cuts)
@settings(deadline=None)
def test_the_text_is_cut_exactly_before_the_stop_string(text: str, stops: list[str], sizes: list[int]) -> None:
    pieces, choice = run(TOKENIZER.encode(text), stops, sizes)
    shown = "".join(piece.text for piece in pieces)
    if choice.matched is None:
        assert shown == text
        assert all(stop not in text for stop in stops)
    else:
        assert text.startswith(shown + choice.matched)
        assert all(stop not in shown for stop in stops)


@given(text=texts, stops=stop_lists, sizes=cuts)
@settings(deadline=None)
def test_every_shown_token_has_its_log_probability_once_and_in_order(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    tokens = TOKENIZER.encode(text)
    pieces, choice = run(tokens, stops, sizes)
    entries = [entry for piece in pieces for entry in piece.tokens]
    assert [entry.logprob.token_id for entry in entries] == tokens[: len(entries)]
    shown = "".join(piece.text for piece in pieces)
    assert all(entry.offset <= len(shown) for entry in entries)
    if choice.matched is None:
        assert len(entries) == len(tokens)


@given(text=texts, stops=stop_lists, sizes=cuts)
@settings(deadline=None)
def test_a_log_probability_never_comes_before_its_text(text: str, stops: list[str], sizes: list[int]) -> None:
    pieces, _ = run(TOKENIZER.encode(text), stops, sizes)
    shown = 0
    for piece in pieces:
        shown += len(piece.text)
        assert all(entry.offset <= shown for entry in piece.tokens)
