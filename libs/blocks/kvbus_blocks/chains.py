"""Prefixes of packed block keys."""

from kvbus_blocks.keys import KEY_BYTES


def common_blocks(a: bytes, b: bytes) -> int:
    """How many leading blocks two packed chains share.

    Keys are chained: where two chains have the same key, everything before is the same, too. So a binary search does.
    """
    if a[:KEY_BYTES] != b[:KEY_BYTES] or not a:
        return 0
    same, differ = 1, min(len(a), len(b)) // KEY_BYTES + 1
    while differ - same > 1:
        middle = (same + differ) // 2
        at = (middle - 1) * KEY_BYTES
        if a[at : at + KEY_BYTES] == b[at : at + KEY_BYTES]:
            same = middle
        else:
            differ = middle
    return same
