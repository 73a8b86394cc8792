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

    @property
    def deepest(self) -> int:
        """The largest depth, 0 when nobody holds anything."""
        return self._pairs[-1] if self._pairs else 0

    def _as_dict(self) -> dict[Owner, int]:
        if self._by_owner is None:
            named = zip(map(self._owners.__getitem__, self._pairs[::2]), self._pairs[1::2], strict=True)
            self._by_owner = {owner: depth for owner, depth in named if owner is not None}
        return self._by_owner

    def items(self) -> ItemsView[Owner, int]:
        return self._as_dict().items()
