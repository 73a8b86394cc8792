"""The indexes of all models together, under one limit of entries."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvbus_blocks.index import Held, Owner, PrefixIndex


class Stored(NamedTuple):
    """What became of a Stored event's keys. ``refused``: there was no room for them."""

    added: int = 0
    orphans: int = 0
    collisions: int = 0
    refused: int = 0


class Written:
    """Entries that came and went since the model's index was last empty."""

    __slots__ = ("removed", "stored")

    def __init__(self) -> None:
        self.stored = 0
        self.removed = 0


class Content:
    """One index per model, made when first needed and gone when empty."""

    def __init__(self, make_index: Callable[[], PrefixIndex], max_entries: int) -> None:
        self._make_index = make_index
        self._max_entries = max_entries
        self._indexes: dict[str, PrefixIndex] = {}
        self._entries = 0
        self._written: dict[str, Written] = {}

    @property
    def entries(self) -> int:
        """Pairs of an owner and a block, over all models: what the memory grows with."""
        return self._entries

    @property
    def indexes(self) -> dict[str, PrefixIndex]:
        return self._indexes

    def written(self, model: str) -> Written:
        return self._written.get(model) or Written()

    def store(self, model: str, owner: Owner, parent: int | None, keys: Sequence[int]) -> Stored:
        """All of the keys or, when they might not fit, none: a part of a chain would be right but would look whole."""
        if self._entries + len(keys) > self._max_entries:
            return Stored(refused=len(keys))
        index = self._indexes.get(model)
        if index is None:
            index = self._indexes[model] = self._make_index()
            self._written[model] = Written()
        outcome = index.store(owner, parent, keys)
        self._entries += outcome.added
        self._written[model].stored += outcome.added
        self._discard_if_empty(model, index)
        return Stored(*outcome)

    def remove(self, model: str, owner: Owner, keys: Sequence[int]) -> int:
        index = self._indexes.get(model)
        return 0 if index is None else self._removed(model, index, index.remove(owner, keys))

    def clear(self, model: str, owner: Owner) -> int:
        index = self._indexes.get(model)
        return 0 if index is None else self._removed(model, index, index.clear(owner))

    def drop(self, instance_id: str) -> int:
        return sum(self._removed(model, index, index.drop(instance_id)) for model, index in list(self._indexes.items()))

    def match(self, model: str, keys: Sequence[int]) -> Mapping[Owner, int]:
        index = self._indexes.get(model)
        return {} if index is None else index.match(keys)

    def held(self, model: str, owner: Owner) -> Held:
        index = self._indexes.get(model)
        return Held(array("Q"), array("Q")) if index is None else index.held(owner)

    def check_integrity(self) -> None:
        for index in self._indexes.values():
            index.check_integrity()
        sizes = [index.sizes().entries for index in self._indexes.values()]
        if not all(sizes) or sum(sizes) != self._entries or self._entries > self._max_entries:
            raise AssertionError(f"entries are off: {sizes}, {self._entries} of {self._max_entries}")

    def _removed(self, model: str, index: PrefixIndex, count: int) -> int:
        self._entries -= count
        self._written[model].removed += count
        self._discard_if_empty(model, index)
        return count

    def _discard_if_empty(self, model: str, index: PrefixIndex) -> None:
        if not index.sizes().entries:
            del self._indexes[model], self._written[model]
