"""What a pool keeps when room is needed: the directives of its blocks, and the order in which they go."""

# ruff: noqa: S101 (check_integrity asserts)

from collections.abc import Callable, Iterable, Mapping, Sequence

from kvbus_blocks.retention import Directive, EvictionOrder, PinCaps, apply, directive, effective
from kvbus_kvbm.core.block import Block
from kvbus_kvbm.core.errors import InvalidRequest
from kvbus_wire.kvbm import BlockDirective

MAX_DIRECTIVES = 256


def directives_of(said: Sequence[BlockDirective], count: int, now_s: float) -> list[Directive | None]:
    """For each of ``count`` blocks what a message says of it; None: nothing. Raise InvalidRequest."""
    if len(said) > MAX_DIRECTIVES:
        raise InvalidRequest(f"{len(said)} directives in one request; at most {MAX_DIRECTIVES}")
    by_position: list[Directive | None] = [None] * count
    for one in said:
        if not 0 <= one.start <= one.end:
            raise InvalidRequest(f"a directive for the blocks [{one.start}, {one.end})")
        try:
            meant = directive(one.kind, one.priority, one.ttl_s, one.tenant, now_s)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        start, end = min(one.start, count), min(one.end, count)
        by_position[start:end] = [meant] * (end - start)
    return by_position


class Keeping:
    """Part of a pool. ``evicted`` counts by class; ``refused``: pins that were not granted, or not for as long as was asked."""

    def __init__(self, live: Callable[[], int], slots: int, pin_share: float, *, lru: bool = False) -> None:
        self.order: EvictionOrder[Block] = EvictionOrder(live, lru=lru)
        self.caps = PinCaps(slots, pin_share)

    def said(self, block: Block, said: Directive, now_s: float, *, is_new: bool = False) -> bool:
        """A user says this of a block. True: it asked for a pin, and the block has none that lasts as long.

        ``is_new``: nobody else has used it yet.
        """
        held = None if is_new else block.directive
        block.directive, refused = apply(self.caps, block.key, held, said, now_s)
        self.order.offer(block)
        return refused

    def forget(self, block: Block) -> None:
        self.caps.forget(block.key)

    def check_integrity(self, blocks: Mapping[bytes, Block], held: Iterable[Block], now_s: float) -> None:
        self.caps.expire(now_s)
        pinned = [b for b in blocks.values() if effective(b.directive, now_s).kind == "pinned"]
        assert len(self.caps) == len(pinned), "a pin is lost, or counted for a block that is gone"
        for tenant in {b.directive.tenant for b in pinned}:
            counted = sum(b.directive.tenant == tenant for b in pinned)
            assert self.caps.pinned(tenant) == counted <= self.caps.limit
        assert self.order.offered() == {block for block in held if block.is_evictable}
