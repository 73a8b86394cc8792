"""Text to token ids and back, for one model."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import sha256

from kvbus_tokenizers.backends import load_backend, pack_ids
from kvbus_tokenizers.bundle import TOKENIZER, TOKENIZER_CONFIG, ModelBundle
from kvbus_tokenizers.control import ControlTokens, Segment
from kvbus_tokenizers.detokenizer import Detokenizer
from kvbus_tokenizers.errors import TokenizerUnsupported
from kvbus_tokenizers.length_bound import LengthBound, bound_of
from kvbus_tokenizers.pieces import piece_decoder
from kvbus_tokenizers.spec import named_tokens, read_spec


class Tokenizer:
    """The tokenizer of one model. Thread-safe; encoding releases the GIL for long text.

    ``control``: its special tokens; a chat template makes a wider set of its own.
    ``fingerprint``: tokenizers with equal ones give equal ids.
    """

    def __init__(self, tokenizer_json: bytes, tokenizer_config: bytes | None = None) -> None:
        """Raise TokenizerUnsupported."""
        spec = self._spec = read_spec(tokenizer_json)
        self.fingerprint = sha256(tokenizer_json).digest()
        special = {token.id: token.content for token in spec.added_tokens if token.special}
        self._backend = load_backend(tokenizer_json.decode(), special)
        self._pieces = piece_decoder(spec.decoder)
        self.added_tokens = {token.id: token for token in spec.added_tokens}
        self.special_ids = frozenset(special)
        self.named_tokens = named_tokens(tokenizer_config)
        self.control = ControlTokens(token for token in spec.added_tokens if token.special)
        self.vocab_size = self._backend.vocab_size
        self._prefix, self._suffix = self._backend.affixes()
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_bundle(cls, bundle: ModelBundle) -> "Tokenizer":
        """Raise TokenizerUnsupported."""
        return cls(bundle.files[TOKENIZER], bundle.files.get(TOKENIZER_CONFIG))

    @property
    def backend_name(self) -> str:
        return self._backend.name

    @property
    def strips_leading_space(self) -> bool:
        """Whether decoding drops a space at the start of a text, so that a detokenizer must know the prompt."""
        return self._pieces.strip_start > 0

    def token_id(self, text: str) -> int | None:
        """The id of the added token that is written like this."""
        return next((token.id for token in self.added_tokens.values() if token.content == text), None)

    def encode(self, text: str, *, allow_special: bool = False, add_affixes: bool = False) -> list[int]:
        """Token ids of a text.

        ``allow_special``: special tokens spelled out in it count as such; else they are plain text.
        ``add_affixes``: with what the model wants around a whole text (such as BOS).
        Raise ValueError for text with lone surrogates, TextNotEncodable where the backend gives up.
        """
        return self.encode_segments(self.segments(text, allow_special=allow_special, add_affixes=add_affixes))

    def segments(self, text: str, *, allow_special: bool = False, add_affixes: bool = False) -> list[Segment]:
        """What `encode` encodes."""
        segments = self.control.split(text) if allow_special else [Segment(text)]
        if not add_affixes:
            return segments
        before, after = ([Segment("", token_id) for token_id in ids] for ids in (self._prefix, self._suffix))
        return [*before, *segments, *after]

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Token ids of segments, as if they were one text. Raises as `encode` does (UnicodeEncodeError is a ValueError)."""
        segments = list(segments)
        plain = [s.text for s in segments if s.token_id is None and not s.literal]
        encoded = iter(self._backend.encode_plain(plain)) if plain else iter(())
        ids: list[int] = []
        for segment in segments:
            if segment.token_id is not None:
                ids.append(segment.token_id)
            else:
                plain_ids = self._backend.encode_literal(segment.text) if segment.literal else next(encoded)
                ids.extend(self._without_special(segment.text, plain_ids))
        return ids

    def encode_packed(self, segments: Sequence[Segment]) -> list[bytes]:
        """The ids of each segment, packed as little-endian u32. Joined they are `encode_segments`. Raises as that does."""
        plain = [s.text for s in segments if s.token_id is None and not s.literal]
        encoded = iter(self._backend.encode_packed(plain)) if plain else iter(())
        packed: list[bytes] = []
        for segment in segments:
            if segment.token_id is not None:
                packed.append(pack_ids((segment.token_id,)))
            elif segment.literal or self.control.spelled_special(segment.text):
                if not segment.literal:
                    next(encoded)  # ids that may have to be taken apart
                packed.append(pack_ids(self.encode_segments((segment,))))
            else:
                packed.append(next(encoded))
        return packed

    def least_tokens(self, segments: Iterable[Segment], *, enough: int) -> int:
        """A number of tokens that the segments certainly have, found much faster than by encoding them.

        It is a few times smaller than the real one, 0 for tokenizers that allow no such statement, and no more is looked at when
        it exceeds ``enough``.
        """
        bound, least = self._length_bound, 0.0
        for segment in segments:
            if segment.token_id is not None:
                least += 1
            elif bound is not None:
                least += bound.least_tokens(segment.text, enough=enough - least)
            if least > enough:
                break
        return int(least * (1 - 1e-9))  # the sums are inexact

    @cached_property
    def _length_bound(self) -> LengthBound | None:
        """Reads the vocabulary (0.2 s for one of 150,000): only for the first prompt that needs it."""
        words = (self._backend.id_to_token(i) for i in range(self.vocab_size) if i not in self.added_tokens)
        return bound_of(self._spec, (word for word in words if word is not None), self._pieces)

    def _without_special(self, text: str, ids: list[int]) -> list[int]:
        """The ids of plain text, sure to hold no special token: should the backend find one nevertheless, it is taken apart."""
        cuts = self.control.spelled_special(text)
        if not cuts or self.special_ids.isdisjoint(ids):
            return ids
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        apart = [i for part in self._backend.encode_plain(parts) for i in part]
        if self.special_ids.isdisjoint(apart):
            return apart
        return [i for part in self._backend.encode_plain(list(text)) for i in part if i not in self.special_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for (maybe a part of a UTF-8 character); empty for an id that is not in the vocabulary."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._read_bytes(token_id)
        return data

    def _read_bytes(self, token_id: int) -> bytes:
        added = self.added_tokens.get(token_id)
        if added is not None:
            return self._pieces.bytes_of_added(added.content, special=added.special)
        piece = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return self._pieces.bytes_of(piece) if piece is not None else b""

    def detokenizer(self, *, prompt: Sequence[int] = (), keep_special: bool = False) -> Detokenizer:
        """A decoder for tokens that follow ``prompt``: decode(prompt) + its text == decode(prompt + tokens)."""
        at_start = all(token_id in self.special_ids for token_id in prompt)
        return Detokenizer(
            self.token_bytes,
            hidden=frozenset() if keep_special else self.special_ids,
            special=self.special_ids,
            strip_start=self._pieces.strip_start if at_start else 0,
        )

    def decode(self, token_ids: Iterable[int], *, keep_special: bool = False) -> str:
        """The text of a whole token sequence; bytes that are no UTF-8 become U+FFFD."""
        detokenizer = self.detokenizer(keep_special=keep_special)
        return detokenizer.push(token_ids) + detokenizer.finish()


def load_tokenizer(bundle: ModelBundle) -> Tokenizer:
    """Raise TokenizerUnsupported."""
    try:
        return Tokenizer.from_bundle(bundle)
    except UnicodeDecodeError as error:
        raise TokenizerUnsupported(f"tokenizer.json is no UTF-8: {error}") from error
