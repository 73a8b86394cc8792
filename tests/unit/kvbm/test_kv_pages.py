import pytest

from kvbus_kvbm.core.lower import BlockMeta
from kvbus_kvbm.core.spec import PoolSpec
from kvbus_kvbm.handlers.kv import page_of

ONE, OTHER = (PoolSpec("m", layout, 512, 16) for layout in ("one", "other"))


def block(spec: PoolSpec, key: bytes) -> tuple[PoolSpec, BlockMeta]:
    return spec, BlockMeta(key, b"", 0, 0)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 9])
def test_no_block_is_left_out_where_a_page_ends_between_layouts_that_share_a_key(limit: int) -> None:
    blocks = [
        block(ONE, b"a"),
        *(block(spec, key) for key in (b"b", b"c") for spec in (ONE, OTHER)),
        block(OTHER, b"d"),
    ]
    seen: list[tuple[PoolSpec, BlockMeta]] = []
    after = b""
    while True:
        page, after = page_of(blocks, after, limit)
        assert len(page) <= limit + 1
        seen += page
        if not after:
            break
    assert seen == blocks


def test_an_empty_tier_has_one_empty_page() -> None:
    assert page_of([], b"", 5) == ([], b"")
    assert page_of([block(ONE, b"a")], b"a", 5) == ([], b"")
