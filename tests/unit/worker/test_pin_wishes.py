from kvbus_blocks.retention import Directive
from kvbus_worker.core.pin_wishes import PinWishes

A, B, C = (bytes([i]) * 16 for i in range(3))
LEASE = Directive("pinned", 0, 10.0, "t")


def test_a_wish_counts_more_than_what_g1_grants_until_it_ends() -> None:
    wishes = PinWishes(10)
    wishes.note([A, B, C], [LEASE, None, Directive("ephemeral")])
    held = [Directive(priority=50), Directive(), Directive("ephemeral")]
    assert wishes.with_wishes([A, B, C], held, 5.0) == [LEASE, *held[1:]]
    assert wishes.with_wishes([A, B, C], held, 10.0) == held


def test_at_the_limit_the_oldest_wishes_are_forgotten() -> None:
    wishes = PinWishes(2)
    wishes.note([A, B], [LEASE, LEASE])
    wishes.note([A], [LEASE])
    wishes.note([C], [LEASE])
    assert len(wishes) == 2
    held = [Directive()] * 3
    assert wishes.with_wishes([A, B, C], held, 0.0) == [LEASE, Directive(), LEASE]
