"""One guided sequence: what its next token may be."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import llguidance
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORD_BITS = 32


class Guide:
    """Follows the tokens of one sequence through its grammar. For one thread at a time."""

    def __init__(self, matcher: llguidance.LLMatcher, eos_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._eos_ids = frozenset(eos_ids)

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped()

    @property
    def problem(self) -> str:
        """Why the grammar cannot be followed any further; empty while it can."""
        return self._matcher.get_error().partition("\n")[0] if self._matcher.is_error() else ""

    def accept(self, tokens: Sequence[int]) -> bool:
        """The tokens are part of the output now. False: they do not fit, or the grammar has become too complex; see `problem`."""
        return self._matcher.consume_tokens(list(tokens))

    def ends_with(self, token: int) -> bool:
        return token in self._eos_ids

    def fill(self, words: NDArray[np.uint32], stop_ids: Collection[int], *, ban_stops: bool) -> None:
        """Set the bits of the tokens that may come next. ``stop_ids`` end the sequence: they may come where the grammar may end.

        ``ban_stops``: not even there, unless nothing else may come: the grammar counts more. None is set after a failure.
        """
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            words.fill(0)
            return
        if self._matcher.is_accepting():
            _put(words, stop_ids, allowed=True)
        unwanted = self._eos_ids.union(stop_ids) if ban_stops else self._eos_ids.difference(stop_ids)
        others = words.copy()
        _put(others, unwanted, allowed=False)
        if others.any():
            words[:] = others


def _put(words: NDArray[np.uint32], tokens: Collection[int], *, allowed: bool) -> None:
    for token in tokens:
        bit = np.uint32(1 << (token % _WORD_BITS))
        if allowed:
            words[token // _WORD_BITS] |= bit
        else:
            words[token // _WORD_BITS] &= ~bit


class GuidedRow(NamedTuple):
    """A row of logits and what its next token has to follow; see `Guide.fill`."""

    at: int
    guide: Guide
    stop_ids: Collection[int]
    ban_stops: bool


def forbid(logits: Tensor, rows: Sequence[GuidedRow]) -> None:
    """Set the logits of tokens that may not come to minus infinity, in place.

    The masks are made while a GPU still computes the logits.
    """
    vocabulary = logits.shape[-1]
    words = np.zeros((len(rows), -(-vocabulary // _WORD_BITS)), dtype=np.uint32)
    for mask, row in zip(words, rows, strict=True):
        row.guide.fill(mask, row.stop_ids, ban_stops=row.ban_stops)
    if logits.device.type == "cpu":
        for mask, row in zip(words, rows, strict=True):
            logits[row.at] += bias_of(mask)[:vocabulary]
    else:
        at = [row.at for row in rows]
        logits[at] = logits[at].masked_fill(~unpacked(words, logits.device)[:, :vocabulary], float("-inf"))


def bias_of(mask: NDArray[np.uint32]) -> Tensor:
    """What to add to a row of logits: many times as fast on a CPU as to select by single bits."""
    return torch.from_numpy(np.take(_BIAS, mask.view(np.uint8), axis=0).reshape(-1))


def unpacked(words: NDArray[np.uint32], device: torch.device) -> Tensor:
    """Rows of bits as booleans on a device; the bits travel packed."""
    packed = torch.from_numpy(words.view(np.int32)).to(device)
    bits = torch.arange(_WORD_BITS, dtype=torch.int32, device=device)
    return ((packed[:, :, None] >> bits) & 1).flatten(1).bool()


def _bias_per_byte() -> NDArray[np.float32]:
    """For eight tokens, by the byte of their bits."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, 0.0, -np.inf).astype(np.float32)


_BIAS = _bias_per_byte()
