"""Causal attention of a step's tokens over the paged KV cache.

K and V are never repeated for the query heads that share them. A sequence whose blocks are adjacent is read in place; otherwise its
blocks are gathered. A long prefill is attended to in pieces of rows, each over the keys up to its own end only: less work, and one
small mask serves all pieces, layers and steps.

    row        one token of the step
    segment    the rows of one sequence: the last ``rows`` of its ``context`` tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

_PIECE_ROWS = 128


@dataclass(frozen=True, slots=True)
class Segment:
    """``table``: the blocks that hold the context, own rows included. ``first_row``: where its rows lie in the step."""

    first_row: int
    rows: int
    context: int
    table: Sequence[int]


class CausalMask:
    """[row][key]: 0 where a row may look, minus infinity behind it. Any piece's mask is its lower right corner."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._whole = self._make(1024)

    def _make(self, keys: int) -> Tensor:
        whole = torch.full((_PIECE_ROWS, keys), float("-inf"), device=self._device, dtype=self._dtype)
        return whole.triu_(keys - _PIECE_ROWS + 1)

    def corner(self, rows: int, keys: int) -> Tensor:
        """For the last ``rows`` (at most `_PIECE_ROWS`) of ``keys`` tokens."""
        if keys > self._whole.shape[1]:
            self._whole = self._make(1 << (keys - 1).bit_length())
        return self._whole[_PIECE_ROWS - rows :, self._whole.shape[1] - keys :]


@dataclass(frozen=True, slots=True)
class _Single:
    """One sequence on its own. ``first_slot``: where its adjacent blocks begin; else ``blocks`` are to be gathered."""

    segment: Segment
    first_slot: int | None
    blocks: Tensor | None


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences with one row each, padded to the longest."""

    rows: Tensor
    blocks: Tensor
    mask: Tensor


class AttentionPlan:
    """What is the same in all layers of a step: indexes and masks.

    ``padded``: decoding sequences are attended to together, padded to the longest context. Right where a call costs more than
    its arithmetic (GPUs), wrong where it does not (CPUs).
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        block_size: int,
        groups: int,
        causal: CausalMask,
        like: Tensor,
        *,
        padded: bool,
    ) -> None:
        self._block_size = block_size
        self._groups = groups
        self._causal = causal
        decodes = [s for s in segments if s.rows == 1] if padded else []
        self._decodes = self._plan_decodes(decodes, like) if len(decodes) > 1 else None
        singles = segments if self._decodes is None else [s for s in segments if s.rows > 1]
        self._singles = [self._plan_single(segment, like) for segment in singles]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """``query`` [row][head][dim]; ``keys``, ``values`` [slot][kv head][dim]. Gives [row][head * dim]."""
        out = torch.empty_like(query)
        if self._decodes is not None:
            self._attend_decodes(self._decodes, query, keys, values, out)
        for single in self._singles:
            segment = single.segment
            rows = slice(segment.first_row, segment.first_row + segment.rows)
            k, v = self._context(single, keys), self._context(single, values)
            if segment.rows == 1:
                out[rows] = self._attend_one(query[rows], k, v)
            else:
                self._attend_many(query[rows], k, v, out[rows])
        return out.flatten(1)

    def _plan_single(self, segment: Segment, like: Tensor) -> _Single:
        table = segment.table
        adjacent = all(table[i + 1] == table[i] + 1 for i in range(len(table) - 1))
        blocks = None if adjacent else torch.tensor(table, device=like.device)
        return _Single(segment, table[0] * self._block_size if adjacent else None, blocks)

    def _attend_one(self, query: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The heads of a group are the rows of one small product."""
        q = query.view(1, k.shape[1], self._groups, k.shape[3])
        return F.scaled_dot_product_attention(q, k, v).view_as(query)

    def _attend_many(self, query: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        rows, (_, kv_heads, context, dim) = query.shape[0], k.shape
        # [row][kv head][group][dim] -> [kv head][group][row][dim]; keys [kv head][1][context][dim] stand for all groups
        q = query.view(rows, kv_heads, self._groups, dim).permute(1, 2, 0, 3)
        k, v = (x.transpose(0, 1).expand(kv_heads, self._groups, context, dim) for x in (k, v))
        for first in range(0, rows, _PIECE_ROWS):
            last = min(first + _PIECE_ROWS, rows)
            end = context - rows + last
            mask = self._causal.corner(last - first, end)
            piece = F.scaled_dot_product_attention(q[:, :, first:last], k[:, :, :end], v[:, :, :end], attn_mask=mask)
            out[first:last] = piece.permute(2, 0, 1, 3).flatten(1, 2)

    def _context(self, single: _Single, stored: Tensor) -> Tensor:
        """The sequence's part of ``stored`` as [1][kv head][context][dim]."""
        context = single.segment.context
        if single.blocks is None:
            first = single.first_slot or 0
            tokens = stored[first : first + context]
        else:
            blocks = self._by_block(stored).index_select(0, single.blocks)
            tokens = blocks.flatten(0, 1)[:context]
        return tokens.transpose(0, 1).unsqueeze(0)

    def _by_block(self, stored: Tensor) -> Tensor:
        return stored.view(-1, self._block_size, *stored.shape[1:])

    def _plan_decodes(self, segments: Sequence[Segment], like: Tensor) -> _Decodes:
        longest = max(len(segment.table) for segment in segments)
        tables = [[*segment.table, *[0] * (longest - len(segment.table))] for segment in segments]
        contexts = torch.tensor([segment.context for segment in segments], device=like.device)
        positions = torch.arange(longest * self._block_size, device=like.device)
        hidden = positions >= contexts[:, None]
        mask = torch.zeros(hidden.shape, device=like.device, dtype=like.dtype).masked_fill_(hidden, float("-inf"))
        rows = torch.tensor([segment.first_row for segment in segments], device=like.device)
        return _Decodes(rows, torch.tensor(tables, device=like.device), mask[:, None, None, :])

    def _attend_decodes(self, decodes: _Decodes, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        kv_heads, dim = keys.shape[1], keys.shape[2]
        q = query[decodes.rows].view(-1, kv_heads, self._groups, dim)

        def gather(stored: Tensor) -> Tensor:
            blocks = self._by_block(stored)[decodes.blocks]
            return blocks.flatten(1, 2).transpose(1, 2)  # [sequence][kv head][padded context][dim]

        attended = F.scaled_dot_product_attention(q, gather(keys), gather(values), attn_mask=decodes.mask)
        out[decodes.rows] = attended.flatten(1, 2)
