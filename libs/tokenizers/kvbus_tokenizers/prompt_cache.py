"""Tokens of prompts that begin like earlier ones, without tokenizing them again.

A prompt is a chain of segments, cut into steps at control tokens. The name of a step is the SHA-256 of the tokenizer and of all
segments up to the step's end, so equal names mean equal text in equal places. What is kept per step are its own tokens: a
prompt is put together from all leading steps that are known, and only the rest is tokenized. As every step has an entry, a system
prompt is found again under any conversation, and a conversation under any continuation.

Segments are encoded one by one by `Tokenizer.encode_segments`, too, so the tokens are the same with and without the cache.
"""

import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from kvbus_tokenizers.control import Segment
from kvbus_tokenizers.tokenizer import Tokenizer

STEP_BYTES = 128
"""A step holds at least this much text (the last one may be shorter): smaller ones cost more to name than to tokenize."""
ENTRY_BYTES = 200
"""Of an entry beside its value: name, node and slot in the dictionary (measured with tracemalloc: 165 to 200)."""
_TOKEN_BYTES = 4
_TOKENS, _ATTACHED = b"", b":"


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the start, but for ``entries`` and ``size_bytes``. ``hits`` and ``misses`` are steps of prompts."""

    hits: int = 0
    misses: int = 0
    cached_tokens: int = 0
    encoded_tokens: int = 0
    evictions: int = 0
    entries: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """``tokens``: packed little-endian u32; ``cached_tokens`` of them were not tokenized.

    ``ends``: how many tokens there are up to the end of each step; ``names``: of the steps.
    """

    tokens: bytes
    ends: tuple[int, ...]
    names: tuple[bytes, ...]
    cached_tokens: int

    @property
    def count(self) -> int:
        return len(self.tokens) // _TOKEN_BYTES


class PromptCache:
    """Thread-safe; one cache serves any number of tokenizers.

    It holds at most ``limit_bytes``, counted with all overhead (0: nothing is kept). What was used least recently goes first, and
    of one chain its end before its beginning.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._values: OrderedDict[bytes, bytes] = OrderedDict()
        self._stats = CacheStats()

    @property
    def stats(self) -> CacheStats:
        return self._stats

    def encode(
        self,
        tokenizer: Tokenizer,
        segments: Iterable[Segment],
        *,
        keep_up_to: int | None = None,
        counts: bool = True,
    ) -> EncodedPrompt:
        """The tokens of `Tokenizer.encode_segments`. Raises as that does. ``keep_up_to``: a prompt with more tokens is not kept.
        ``counts``: it is in the statistics; not so the beginning of one that is there already."""
        names, steps = _chain(tokenizer.fingerprint, segments)
        with self._lock:
            parts = self._known(names, _TOKENS)
        known = len(parts)
        if known < len(names):
            parts += _encoded(tokenizer, steps[known:])
        ends, end = [], 0
        for part in parts:
            end += len(part) // _TOKEN_BYTES
            ends.append(end)
        cached_tokens = ends[known - 1] if known else 0
        with self._lock:
            if keep_up_to is None or end <= keep_up_to:
                self._keep(names, _TOKENS, parts)
            if counts:
                self._count(known, len(names) - known, cached_tokens, end - cached_tokens)
        return EncodedPrompt(b"".join(parts), tuple(ends), tuple(names), cached_tokens)

    def attached(self, prompt: EncodedPrompt, label: bytes) -> list[bytes]:
        """What `attach` was given with this label for the leading steps of the prompt, as far as it is still there."""
        with self._lock:
            values = self._known(prompt.names, _ATTACHED + label)
            self._keep(prompt.names, _ATTACHED + label, values)
        return values

    def attach(self, prompt: EncodedPrompt, label: bytes, values: Sequence[bytes]) -> None:
        """Keep a value per step for all prompts that begin with the same steps: it may depend on these and the label only."""
        with self._lock:
            self._keep(prompt.names, _ATTACHED + label, values)

    def _known(self, names: Sequence[bytes], label: bytes) -> list[bytes]:
        values: list[bytes] = []
        for name in names:
            value = self._values.get(name + label)
            if value is None:
                break
            values.append(value)
        return values

    def _keep(self, names: Sequence[bytes], label: bytes, values: Sequence[bytes]) -> None:
        """The last step is touched first, so that no entry is older than one behind it: a chain is evicted from its end."""
        fitting, total = 0, 0
        for value in values:
            total += _size_of(value)
            if total > self._limit:
                break
            fitting += 1
        added = 0
        for name, value in zip(reversed(names[:fitting]), reversed(values[:fitting]), strict=True):
            key = name + label
            if key in self._values:
                self._values.move_to_end(key)
            else:
                self._values[key] = value
                added += _size_of(value)
        if added:
            self._evict(self._stats.size_bytes + added)

    def _evict(self, size_bytes: int) -> None:
        evicted = 0
        while size_bytes > self._limit:
            _, value = self._values.popitem(last=False)
            size_bytes -= _size_of(value)
            evicted += 1
        self._stats = replace(
            self._stats, size_bytes=size_bytes, entries=len(self._values), evictions=self._stats.evictions + evicted
        )

    def _count(self, hits: int, misses: int, cached_tokens: int, encoded_tokens: int) -> None:
        self._stats = replace(
            self._stats,
            hits=self._stats.hits + hits,
            misses=self._stats.misses + misses,
            cached_tokens=self._stats.cached_tokens + cached_tokens,
            encoded_tokens=self._stats.encoded_tokens + encoded_tokens,
        )

    def check_integrity(self) -> None:
        """For tests. Raise AssertionError."""
        assert self._stats.size_bytes == sum(map(_size_of, self._values.values()))  # noqa: S101
        assert self._stats.entries == len(self._values)  # noqa: S101
        assert self._stats.size_bytes <= self._limit  # noqa: S101


def step_ends(segments: Iterable[Segment]) -> list[int]:
    """Per step of such a prompt, with how many segments it ends. As `EncodedPrompt.ends`, which counts tokens."""
    ends: list[int] = []
    number, size = 0, 0
    for number, segment in enumerate(segments, 1):
        if segment.token_id is None:
            size += len(segment.text) if segment.text.isascii() else len(segment.text.encode())
        elif size >= STEP_BYTES:
            ends.append(number)
            size = 0
    if number and (not ends or ends[-1] < number):
        ends.append(number)
    return ends


def _size_of(value: bytes) -> int:
    return ENTRY_BYTES + sys.getsizeof(value)


def _chain(root: bytes, segments: Iterable[Segment]) -> tuple[list[bytes], list[list[Segment]]]:
    """Names and segments of the steps. What is hashed says where each segment ends and of what kind it is."""
    names: list[bytes] = []
    steps: list[list[Segment]] = []
    state, step, size = sha256(root), list[Segment](), 0
    for segment in segments:
        step.append(segment)
        if segment.token_id is None:
            data = segment.text.encode()
            state.update(b"%c%d:" % (b"l" if segment.literal else b"t", len(data)))
            state.update(data)
            size += len(data)
            continue
        state.update(b"c%d:" % segment.token_id)
        if size >= STEP_BYTES:
            names.append(state.digest())
            steps.append(step)
            step, size = [], 0
    if step:
        names.append(state.digest())
        steps.append(step)
    return names, steps


def _encoded(tokenizer: Tokenizer, steps: Sequence[Sequence[Segment]]) -> list[bytes]:
    packed = iter(tokenizer.encode_packed([segment for step in steps for segment in step]))
    return [b"".join(next(packed) for _ in step) for step in steps]
