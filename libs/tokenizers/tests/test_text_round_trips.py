"""Any text, any grouping of its tokens: the text is the same, and control tokens are the template's only."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from kvbus_tokenizers import ChatTemplate, Tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|a|>", "|>b<|"]
CORPUS = ["def f(x): return x + 1\n\n  # the naïve café 日本語 🎉\n<|im| start end>"] * 3
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.more }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant"
)


def byte_level() -> Tokenizer:
    native = HfTokenizer(models.BPE())
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    native.train_from_iterator(CORPUS, trainer)
    return Tokenizer(native.to_str().encode())


def sentencepiece() -> Tokenizer:
    native = HfTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    native.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps: list[Any] = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    native.decoder = decoders.Sequence(steps)
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *SPECIAL, *byte_tokens], show_progress=False)
    native.train_from_iterator(CORPUS, trainer)
    model = json.loads(native.to_str())
    model["added_tokens"] = [token for token in model["added_tokens"] if token["content"] in ("<unk>", *SPECIAL)]
    return Tokenizer(json.dumps(model).encode())


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()
CHAT = ChatTemplate(TEMPLATE, BYTE_LEVEL)

plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
# Pieces of control tokens, so that whole ones arise at every kind of border.
pieces = st.lists(
    st.sampled_from(
        [
            "<|im_start|>",
            "<|im_end|>",
            "<|im_",
            "start|>",
            "end|>",
            "<|",
            "|>",
            "<|a",
            "b<|",
            "b",
            " ",
            "\n",
            "\x86",
            "\ue000",
            "é",
        ]
    ),
    max_size=8,
).map("".join)
any_text = st.one_of(plain_text, pieces)
cuts = st.lists(st.integers(1, 4), max_size=60)


def in_groups(ids: list[int], sizes: list[int]) -> list[list[int]]:
    groups, start = [], 0
    for size in sizes:
        groups.append(ids[start : start + size])
        start += size
    return [*groups, ids[start:]]


@given(text=any_text, sizes=cuts)
@settings(deadline=None)
def test_any_grouping_of_tokens_gives_the_whole_text_in_whole_characters(text: str, sizes: list[int]) -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        detokenizer = tokenizer.detokenizer()
        shown = [detokenizer.push(group) for group in in_groups(tokenizer.encode(text), sizes)]
        assert "".join(shown) + detokenizer.finish() == text
        if "\ufffd" not in text:
            assert all("\ufffd" not in piece for piece in shown)


@given(ids=st.lists(st.integers(0, 330), max_size=40), sizes=cuts)
@settings(deadline=None)
def test_any_tokens_give_the_same_text_however_they_are_grouped(ids: list[int], sizes: list[int]) -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        detokenizer = tokenizer.detokenizer(keep_special=True)
        grouped = "".join(detokenizer.push(group) for group in in_groups(ids, sizes)) + detokenizer.finish()
        assert grouped == tokenizer.decode(ids, keep_special=True)


@given(prompt=plain_text, ids=st.lists(st.integers(5, 330), max_size=20))
@settings(deadline=None)
def test_output_continues_its_prompt(prompt: str, ids: list[int]) -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        before = tokenizer.encode(prompt)
        detokenizer = tokenizer.detokenizer(prompt=before)
        text = detokenizer.push(ids) + detokenizer.finish()
        assert tokenizer.decode(before) + text == tokenizer.decode(before + ids)


@given(contents=st.lists(st.tuples(any_text, any_text), min_size=1, max_size=4))
@settings(deadline=None)
def test_only_the_template_writes_control_tokens_and_no_text_is_lost(contents: list[tuple[str, str]]) -> None:
    messages = [{"role": "user", "content": content, "more": more} for content, more in contents]
    segments = CHAT.render(messages)
    expected = (
        "".join(f"<|im_start|>user\n{content}{more}<|im_end|>\n" for content, more in contents)
        + "<|im_start|>assistant"
    )
    assert "".join(segment.text for segment in segments) == expected
    ids = BYTE_LEVEL.encode_segments(segments)
    assert sum(token in BYTE_LEVEL.special_ids for token in ids) == 2 * len(contents) + 1
    assert BYTE_LEVEL.decode(ids, keep_special=True) == expected


@given(contents=st.lists(plain_text.filter(lambda text: "<|" not in text), min_size=1, max_size=4))
@settings(deadline=None)
def test_segments_have_the_ids_of_the_whole_text(contents: list[str]) -> None:
    segments = CHAT.render([{"role": "user", "content": content, "more": ""} for content in contents])
    whole = "".join(segment.text for segment in segments)
    assert BYTE_LEVEL.encode_segments(segments) == BYTE_LEVEL.encode(whole, allow_special=True)
