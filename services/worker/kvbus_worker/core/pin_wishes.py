"""Which blocks requests want pinned. What G1 does not grant kvbm may, when the block is written through to it."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvbus_blocks.retention import Directive


class PinWishes:
    """At most ``limit`` blocks: of what was wished for longest ago nothing is known any more."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._wishes: OrderedDict[bytes, Directive] = OrderedDict()

    def __len__(self) -> int:
        return len(self._wishes)

    def note(self, keys: Sequence[bytes], said: Iterable[Directive | None]) -> None:
        for key, directive in zip(keys, said, strict=False):
            if directive is not None and directive.kind == "pinned":
                self._wishes[key] = directive
                self._wishes.move_to_end(key)
        while len(self._wishes) > self._limit:
            self._wishes.popitem(last=False)

    def with_wishes(self, keys: Sequence[bytes], held: Sequence[Directive], now_s: float) -> list[Directive]:
        """``held``: what holds in G1."""
        wishes = (self._wishes.get(key) for key in keys)
        return [
            wish if wish is not None and (wish.expires_s is None or wish.expires_s > now_s) else directive
            for wish, directive in zip(wishes, held, strict=True)
        ]
