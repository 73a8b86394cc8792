"""One guided sequence: what its next token may be."""

from collections.abc import Collection, Sequence

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


def allowed_tokens(rows: Sequence[tuple[Guide, Collection[int], bool]], logits: Tensor) -> Tensor:
    """Per (guide, stop ids, whether those are banned) which tokens may come next: booleans [row][vocabulary].

    The masks are made while a GPU still computes ``logits``, of which only shape and place are used.
    """
    vocabulary = logits.shape[-1]
    words = np.zeros((len(rows), -(-vocabulary // _WORD_BITS)), dtype=np.uint32)
    for row, (guide, stop_ids, ban_stops) in zip(words, rows, strict=True):
        guide.fill(row, stop_ids, ban_stops=ban_stops)
    packed = torch.from_numpy(words.view(np.int32)).to(logits.device, non_blocking=True)
    bits = torch.arange(_WORD_BITS, dtype=torch.int32, device=logits.device)
    return ((packed[:, :, None] >> bits) & 1).flatten(1)[:, :vocabulary].bool()
