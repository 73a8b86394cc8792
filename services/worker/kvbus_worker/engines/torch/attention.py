"""Causal attention of a step's tokens over the paged KV cache.

The query heads that share a KV head are laid side by side as further rows of that head's query matrix, so K and V are never
repeated. A sequence whose blocks are adjacent is read in place; otherwise its blocks are gathered.

    row        one token of the step
    segment    the rows of one sequence: the last ``rows`` of its ``context`` tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """``table``: the blocks that hold the context, own rows included. ``first_row``: where its rows lie in the step."""

    first_row: int
    rows: int
    context: int
    table: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Single:
    """One sequence on its own. ``first_slot``: where its adjacent blocks begin; else ``blocks`` are to be gathered."""

    segment: Segment
    first_slot: int | None
    blocks: Tensor | None
    mask: Tensor | None


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
        self, segments: Sequence[Segment], block_size: int, groups: int, like: Tensor, *, padded: bool
    ) -> None:
        self._block_size = block_size
        self._groups = groups
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
            self._attend_single(single, query, keys, values, out)
        return out.flatten(1)

    def _plan_single(self, segment: Segment, like: Tensor) -> _Single:
        table = segment.table
        adjacent = all(table[i + 1] == table[i] + 1 for i in range(len(table) - 1))
        blocks = None if adjacent else torch.tensor(table, device=like.device)
        first_slot = table[0] * self._block_size if adjacent else None
        return _Single(segment, first_slot, blocks, self._causal_mask(segment, like))

    def _causal_mask(self, segment: Segment, like: Tensor) -> Tensor | None:
        """[group * row][context]: 0 where a row may look, minus infinity behind its own position."""
        if segment.rows == 1:
            return None
        first = segment.context - segment.rows
        mask = torch.full((segment.rows, segment.context), float("-inf"), device=like.device, dtype=like.dtype)
        return mask.triu_(first + 1).repeat(self._groups, 1)

    def _attend_single(self, single: _Single, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        segment, kv_heads, dim = single.segment, keys.shape[1], keys.shape[2]
        rows = slice(segment.first_row, segment.first_row + segment.rows)
        # [row][kv head][group][dim] -> [kv head][group * row][dim]
        q = query[rows].view(-1, kv_heads, self._groups, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, dim)
        k, v = self._context(single, keys), self._context(single, values)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=single.mask)
        result = attended.view(kv_heads, self._groups, segment.rows, dim).permute(2, 0, 1, 3)
        out[rows] = result.reshape(segment.rows, -1, dim)

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
