import pytest

from kvbus_kvbm.core.spec import PoolSpec
from kvbus_kvbm.handlers.kv import page_of

ONE, OTHER = (PoolSpec("m", layout, 512, 16) for layout in ("one", "other"))


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 9])
def test_no_block_is_left_out_where_a_page_ends_between_layouts_that_share_a_key(limit: int) -> None:
    entries = [(b"a", ONE), *((key, spec) for key in (b"b", b"c") for spec in (ONE, OTHER)), (b"d", OTHER)]
    seen: list[tuple[bytes, PoolSpec]] = []
    after = b""
    while True:
        page, after = page_of(entries, after, limit)
        assert len(page) <= limit + 1
        seen += page
        if not after:
            break
    assert seen == entries


def test_an_empty_tier_has_one_empty_page() -> None:
    assert page_of([], b"", 5) == ([], b"")
    assert page_of([(b"a", ONE)], b"a", 5) == ([], b"")
