"""What a match has found, as it was found: naming a thousand owners one by one would take longer than finding them."""

from array import array
from collections.abc import ItemsView, Iterator, Mapping, Sequence

from kvbus_blocks.index import Owner


class Depths(Mapping[Owner, int]):
    """The depth of each owner, shallow ones first. ``pairs``: (index into ``owners``, depth), one after the other."""

    __slots__ = ("_by_owner", "_owners", "_pairs")

    def __init__(self, owners: Sequence[Owner | None], pairs: "array[int]") -> None:
        self._owners = owners
        self._pairs = pairs
        self._by_owner: dict[Owner, int] | None = None

    def __len__(self) -> int:
        return len(self._pairs) // 2

    def __iter__(self) -> Iterator[Owner]:
        return iter(self._as_dict())

    def __getitem__(self, owner: Owner) -> int:
        return self._as_dict()[owner]

    def __repr__(self) -> str:
        return repr(self._as_dict())

    def items(self) -> ItemsView[Owner, int]:
        return _Items(self)

    def named(self) -> Iterator[tuple[Owner, int]]:
        """Without a dict, which takes most of the time where all are wanted once."""
        found = zip(map(self._owners.__getitem__, self._pairs[::2]), self._pairs[1::2], strict=True)
        return ((owner, depth) for owner, depth in found if owner is not None)

    def _as_dict(self) -> dict[Owner, int]:
        if self._by_owner is None:
            self._by_owner = dict(self.named())
        return self._by_owner


class _Items(ItemsView[Owner, int]):
    _mapping: Depths

    def __iter__(self) -> Iterator[tuple[Owner, int]]:
        return self._mapping.named()
