from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_transfer.layout import KvLayout, LayoutMismatch, Relayout, fingerprint, why_not

WIDE = KvLayout(dtype="float32", layers=2, heads=4, dim=8, block_size=16)


def test_a_layout_is_told_by_its_text() -> None:
    assert WIDE.text == "lkthd1-float32-l2-h4-d8-b16"
    assert KvLayout.parse(WIDE.text) == WIDE
    split = KvLayout(dtype="bfloat16", layers=3, heads=8, dim=64, block_size=32, rank=1, ranks=2)
    assert split.text == "lkthd1-bfloat16-l3-h8-d64-b32-r1of2"
    assert KvLayout.parse(split.text) == split
    assert WIDE.block_bytes == 2 * 2 * 16 * 4 * 8 * 4
    assert fingerprint("weights-a", WIDE.text) != fingerprint("weights-b", WIDE.text)


@pytest.mark.parametrize(
    ("there", "here", "reason"),
    [
        ("mock-1-4096", "mock-1-4096", ""),
        ("mock-1-4096", "mock-1-8192", "no layout"),
        (WIDE.text, "lkthd1-float32-l2-h4-d8-b32", ""),
        (WIDE.text, "lkthd1-float32-l2-h4-d8-b16-r1of2", ""),
        (WIDE.text, "lkthd1-float32-l2-h4-d8-b24", "tokens"),
        (WIDE.text, "lkthd1-bfloat16-l2-h4-d8-b16", "dtype"),
        (WIDE.text, "lkthd1-float32-l3-h4-d8-b16", "layers"),
        (WIDE.text, "lkthd1-float32-l2-h8-d8-b16", "heads"),
        (WIDE.text, "lkthd1-float32-l2-h4-d8-b16-r1of3", "rank"),
        (WIDE.text, "lkthd1-float32-l2-h4-d8-b16-r2of2", "rank"),
        (WIDE.text, "lkthd1-int3-l2-h4-d8-b16", "dtype"),
        (WIDE.text, "lkthd1-float32-l2-h4-d8-b0", "below 1"),
    ],
)
def test_whether_blocks_can_move_is_known_from_the_texts(there: str, here: str, reason: str) -> None:
    told = why_not(there, here)
    assert reason in told
    assert bool(told) == bool(reason)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[KvLayout, KvLayout]:
    small = draw(st.integers(1, 5))
    sizes = [small, small * draw(st.integers(1, 4))]
    if draw(st.booleans()):
        sizes.reverse()
    heads = draw(st.sampled_from([1, 2, 4, 6, 12]))
    ranks = [draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 12) if heads % n == 0])) for _ in range(2)]
    shape: dict[str, Any] = {
        "dtype": draw(st.sampled_from(["float32", "float16", "int8"])),
        "layers": draw(st.integers(1, 3)),
        "heads": heads,
        "dim": draw(st.integers(1, 4)),
    }
    source = KvLayout(**shape, block_size=sizes[0], ranks=ranks[0])
    target = KvLayout(**shape, block_size=sizes[1], ranks=ranks[1], rank=draw(st.integers(0, ranks[1] - 1)))
    return source, target


def blocks_of(whole: np.ndarray, layout: KvLayout) -> list[memoryview]:
    """The naive way: cut [layer][kv][token][head][dim] along tokens and heads."""
    heads = layout.own_heads
    return [
        memoryview(
            bytearray(
                np.ascontiguousarray(whole[:, :, at : at + layout.block_size, heads.start : heads.stop]).tobytes()
            )
        )
        for at in range(0, whole.shape[2], layout.block_size)
    ]


@given(layouts=pairs(), seed=st.integers(0, 2**32 - 1))
def test_blocks_of_one_layout_become_those_of_another(layouts: tuple[KvLayout, KvLayout], seed: int) -> None:
    source, target = layouts
    relayout = Relayout(source, target)
    tokens = 2 * max(source.block_size, target.block_size)
    shape = (source.layers, 2, tokens, source.heads, source.head_bytes)
    whole = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    sources: dict[tuple[int, int], memoryview] = {}
    for rank in range(source.ranks):
        layout = KvLayout.parse(f"{source.text.split('-r')[0]}-r{rank}of{source.ranks}")
        for number, block in enumerate(blocks_of(whole, layout)):
            sources[rank, number] = block
    expected = blocks_of(whole, target)
    assert relayout.whole_blocks(tokens // source.block_size) == len(expected)
    for number, wanted in enumerate(expected):
        made = memoryview(bytearray(target.block_bytes))
        relayout.copy(number, sources, made)
        assert made == wanted
        runs = list(relayout.runs(number))
        assert sum(length for *_, length in runs) == target.block_bytes
        assert {rank for (rank, _), *_ in runs} == set(relayout.ranks)


def test_equal_layouts_are_copied_in_few_pieces_and_wrong_sizes_are_refused() -> None:
    relayout = Relayout(WIDE, WIDE)
    assert relayout.is_copy
    assert len(list(relayout.runs(0))) == WIDE.layers * 2
    block = memoryview(bytearray(WIDE.block_bytes))
    with pytest.raises(ValueError, match="target"):
        relayout.copy(0, {(0, 0): block}, block[:-1])
    with pytest.raises(ValueError, match="block"):
        relayout.copy(0, {(0, 0): block[:-1]}, block)
    with pytest.raises(LayoutMismatch):
        Relayout(WIDE, KvLayout.parse("lkthd1-float32-l2-h4-d9-b16"))
