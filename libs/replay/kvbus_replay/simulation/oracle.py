"""The best hit rate there can be: one cache that every worker shares and that never evicts."""

from bisect import bisect_left
from collections.abc import Sequence


class SharedCacheOracle:
    """Fed with the same calls in the same order as the cluster. A prompt is in it from its arrival, an output from its end."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def arrive(self, keys: Sequence[bytes], reusable: int) -> int:
        """How many of the first ``reusable`` blocks are there already."""
        # "Block i is there" implies that its prefix is.
        there = bisect_left(keys, True, key=lambda key: key not in self._keys)
        self._keys.update(keys[there:])
        return min(there, reusable)

    def end(self, output_keys: Sequence[bytes]) -> None:
        self._keys.update(output_keys)

    def __len__(self) -> int:
        """Distinct blocks."""
        return len(self._keys)
