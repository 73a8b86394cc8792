"""Which blocks are still somebody's: the chains that sessions hold, as a tree of runs that part where chains part.

A claim holds all blocks of a chain. When it is released, the blocks that are in no other claim come free: they are found from the
end of the chain upwards, in as many steps as there are runs, however long these are and however many other claims there are.
"""

from collections.abc import Iterator

from kvbus_blocks.chains import common_blocks
from kvbus_blocks.keys import KEY_BYTES

RUN_BYTES = 400
"""Of a run beside its keys: the object, its dictionary, its place in that of its parent."""


class Run:
    """Blocks one after the other, below the last one of ``parent``. ``claims``: that end with the last block of this run."""

    __slots__ = ("children", "claims", "keys", "parent")

    def __init__(self, parent: "Run | None", keys: bytes) -> None:
        self.parent = parent
        self.keys = keys
        self.children: dict[bytes, Run] = {}
        self.claims = 0


class BlockClaims:
    def __init__(self) -> None:
        self._root = Run(None, b"")
        self.size_bytes = 0

    def claim(self, keys: bytes) -> Run:
        """Of a chain (packed, from the root on). Each claim is to be released once."""
        run, rest = self._root, keys
        while rest:
            child = run.children.get(rest[:KEY_BYTES])
            if child is None:
                run, rest = self._grow(run, rest), b""
                break
            common = common_blocks(child.keys, rest) * KEY_BYTES
            run = child if common == len(child.keys) else self._split(child, common)
            rest = rest[common:]
        run.claims += 1
        return run

    def release(self, run: Run) -> list[bytes]:
        """The blocks that no claim holds any more: runs of keys, the last ones of the chain first."""
        run.claims -= 1
        freed: list[bytes] = []
        while run.parent is not None and not run.claims and not run.children:
            freed.append(run.keys)
            self.size_bytes -= len(run.keys) + RUN_BYTES
            del run.parent.children[run.keys[:KEY_BYTES]]
            run = run.parent
        if run.parent is not None and not run.claims and len(run.children) == 1:
            self._join(run)
        return freed

    def held(self, keys: bytes) -> int:
        """How many leading blocks of a chain some claim holds."""
        run, done = self._root, 0
        while done < len(keys):
            child = run.children.get(keys[done : done + KEY_BYTES])
            if child is None:
                break
            common = common_blocks(child.keys, keys[done:]) * KEY_BYTES
            done += common
            if common < len(child.keys):
                break
            run = child
        return done // KEY_BYTES

    @staticmethod
    def chain(run: Run) -> bytes:
        """All keys from the root to the end of the run."""
        runs: list[bytes] = []
        at: Run | None = run
        while at is not None:
            runs.append(at.keys)
            at = at.parent
        return b"".join(reversed(runs))

    def _grow(self, parent: Run, keys: bytes) -> Run:
        run = Run(parent, keys)
        parent.children[keys[:KEY_BYTES]] = run
        self.size_bytes += len(keys) + RUN_BYTES
        return run

    def _split(self, run: Run, at: int) -> Run:
        """A new run takes the first ``at`` bytes; ``run`` keeps its end, and so its claims."""
        parent = run.parent
        assert parent is not None  # noqa: S101  (the root has no keys to split)
        upper = Run(parent, run.keys[:at])
        parent.children[upper.keys[:KEY_BYTES]] = upper
        run.parent, run.keys = upper, run.keys[at:]
        upper.children[run.keys[:KEY_BYTES]] = run
        self.size_bytes += RUN_BYTES
        return upper

    def _join(self, run: Run) -> None:
        """A run that nothing ends with, and its only child, become one: the child, since its claims name it."""
        [child] = run.children.values()
        parent = run.parent
        assert parent is not None  # noqa: S101
        child.keys, child.parent = run.keys + child.keys, parent
        parent.children[child.keys[:KEY_BYTES]] = child
        self.size_bytes -= RUN_BYTES

    def check_integrity(self) -> None:
        """For tests. Raise AssertionError."""
        size = 0
        for run in self._runs(self._root):
            size += len(run.keys) + RUN_BYTES
            assert run.keys, "no run is empty"  # noqa: S101
            assert run.claims or len(run.children) > 1, "each run ends a claim or parts chains"  # noqa: S101
            assert all(child.parent is run for child in run.children.values())  # noqa: S101
            assert all(child.keys.startswith(key) for key, child in run.children.items())  # noqa: S101
        assert size == self.size_bytes  # noqa: S101

    def _runs(self, run: Run) -> Iterator[Run]:
        for child in run.children.values():
            yield child
            yield from self._runs(child)
