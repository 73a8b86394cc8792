import tracemalloc

from kvbus_blocks.index import Owner
from kvbus_blocks.plain_index import PlainIndex

A = Owner("a", "g1")


def test_memory_per_block_is_bounded() -> None:
    tracemalloc.start()
    index = PlainIndex()
    blocks = 50_000
    index.store(A, None, range(1 << 40, (1 << 40) + blocks))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / blocks < 400
    assert index.sizes().entries == blocks
