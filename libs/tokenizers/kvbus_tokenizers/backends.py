"""The libraries that turn text into token ids, behind one Protocol: fastokens where it can load the model, else HF tokenizers."""

import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import msgspec

from kvbus_tokenizers.errors import TextNotEncodable, TokenizerUnsupported


class Backend(Protocol):
    """Thread-safe. Text is valid Unicode (no lone surrogates)."""

    name: str

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id, added tokens included."""

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids per text. Special tokens are not matched, other added tokens are. Raise TextNotEncodable."""

    def encode_packed(self, texts: Sequence[str]) -> list[bytes]:
        """As `encode_plain`, with the ids packed as little-endian u32: for long texts, where a list of objects costs more."""

    def encode_literal(self, text: str) -> list[int]:
        """Ids of a text in which no added token is matched at all. Raise TextNotEncodable."""

    def affixes(self) -> tuple[list[int], list[int]]:
        """What the post-processor puts before and after a text (such as BOS)."""

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token, None for an unknown id."""


class FastBackend:
    """fastokens: 20 to 50 times as fast as HF tokenizers on long text, with equal ids; BPE models only."""

    name = "fastokens"

    def __init__(self, tokenizer_json: str) -> None:
        from fastokens import Tokenizer  # type: ignore[import-untyped]  # loaded with the first model: importing this package stays light

        try:
            self._native: Any = Tokenizer.from_json_str(tokenizer_json)
        except BaseException as error:
            if not _is_theirs(error):
                raise
            raise TokenizerUnsupported(f"fastokens cannot load the tokenizer: {error}") from error
        # Files may carry the limits of a training run; a prompt is never cut or padded.
        self._native.no_truncation()
        self._native.no_padding()

    @property
    def vocab_size(self) -> int:
        highest = max((int(token["id"]) for token in self._native.added_tokens()), default=-1)
        return max(int(self._native.vocab_size), highest + 1)

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        with _typed_failures():
            if len(texts) == 1:
                return [self._native.encode(texts[0], split_special_tokens=True).ids]
            return [encoding.ids for encoding in self._native.encode_batch(list(texts), split_special_tokens=True)]

    def encode_packed(self, texts: Sequence[str]) -> list[bytes]:
        with _typed_failures():
            ids, offsets = self._native.encode_batch_flat(list(texts), split_special_tokens=True)
        ends = array("Q", offsets)
        if sys.byteorder == "big":
            ends.byteswap()
        return [ids[4 * start : 4 * end] for start, end in pairwise(ends)]

    def encode_literal(self, text: str) -> list[int]:
        with _typed_failures():
            ids: list[int] = self._native.encode_ordinary(text).ids
        return ids

    def affixes(self) -> tuple[list[int], list[int]]:
        return _affixes(self._native.encode("a").ids, self._native.encode("a", add_special_tokens=True).ids)

    def id_to_token(self, token_id: int) -> str | None:
        token: str | None = self._native.id_to_token(token_id)
        return token


class HfBackend:
    """HF tokenizers, for models that fastokens does not know (Unigram, WordPiece, ...)."""

    name = "tokenizers"

    def __init__(self, tokenizer_json: str) -> None:
        self._native = _load_hf(tokenizer_json)
        self._native.encode_special_tokens = True
        self._json = tokenizer_json
        self._bare: Any = None

    @property
    def vocab_size(self) -> int:
        return max(self._native.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        with _typed_failures():
            return [encoding.ids for encoding in self._native.encode_batch(list(texts), add_special_tokens=False)]

    def encode_packed(self, texts: Sequence[str]) -> list[bytes]:
        return [pack_ids(ids) for ids in self.encode_plain(texts)]

    def encode_literal(self, text: str) -> list[int]:
        if self._bare is None:
            self._bare = _load_hf(_without_added_tokens(self._json))
        with _typed_failures():
            ids: list[int] = self._bare.encode(text, add_special_tokens=False).ids
        return ids

    def affixes(self) -> tuple[list[int], list[int]]:
        return _affixes(self._native.encode("a", add_special_tokens=False).ids, self._native.encode("a").ids)

    def id_to_token(self, token_id: int) -> str | None:
        token: str | None = self._native.id_to_token(token_id)
        return token


def load_backend(tokenizer_json: str, special: Mapping[int, str]) -> Backend:
    """The fast backend if it loads the model and keeps its special tokens (text by id) out of plain text.

    fastokens 0.3.5 finds special tokens as ordinary vocabulary where a character of their spelling has no token of its own (seen
    with small byte-fallback vocabularies). Raise TokenizerUnsupported when neither library can load the model.
    """
    try:
        backend = FastBackend(tokenizer_json)
    except TokenizerUnsupported:
        return HfBackend(tokenizer_json)
    probes = [probe for text in special.values() for probe in (text, f"a{text}", f"{text} b")]
    leaks = any(not special.keys().isdisjoint(ids) for ids in backend.encode_plain(probes)) if probes else False
    return HfBackend(tokenizer_json) if leaks else backend


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


@contextmanager
def _typed_failures() -> Iterator[None]:
    """The regular expressions of fastokens give up on a million spaces in a row. Lone surrogates stay a UnicodeEncodeError."""
    try:
        yield
    except UnicodeEncodeError:
        raise
    except BaseException as error:
        if not _is_theirs(error):
            raise
        raise TextNotEncodable(str(error)) from error


def _is_theirs(error: BaseException) -> bool:
    """The bindings raise ValueError, plain Exception, and for a panic something that is no Exception at all."""
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"


def _load_hf(tokenizer_json: str) -> Any:
    from tokenizers import Tokenizer  # as above

    try:
        native = Tokenizer.from_str(tokenizer_json)
    except BaseException as error:
        if not _is_theirs(error):
            raise
        raise TokenizerUnsupported(f"no backend can load the tokenizer: {error}") from error
    native.no_truncation()
    native.no_padding()
    return native


def _without_added_tokens(tokenizer_json: str) -> str:
    model = msgspec.json.decode(tokenizer_json)
    model["added_tokens"] = []
    model["post_processor"] = None
    return msgspec.json.encode(model).decode()


def _affixes(bare: list[int], whole: list[int]) -> tuple[list[int], list[int]]:
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []
