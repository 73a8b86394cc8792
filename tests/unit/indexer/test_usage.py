from kvbus_indexer.core.usage import Usage, counted_depths
from kvbus_wire.indexer import Match

SYSTEM = list(range(1, 101))


def session(number: int, turns: int = 1) -> list[int]:
    """The system prompt, then blocks of its own."""
    return SYSTEM + [1000 * number + block for block in range(50 * turns)]


def held(depth: int, *workers: str) -> list[Match]:
    return [Match(instance_id=worker, tier="g1", depth=depth) for worker in workers]


def test_depths_grow_by_steps_and_end_with_the_chain() -> None:
    assert counted_depths(0) == []
    assert counted_depths(1) == [1]
    assert counted_depths(20) == [1, 2, 3, 5, 8, 12, 17, 20]
    assert len(counted_depths(3250)) < 25


def test_the_prefix_that_all_share_comes_first_with_the_deepest_place_where_all_agree() -> None:
    usage = Usage(1000, 600.0)
    for number in range(20):
        usage.read("m", session(number), held(100, "w1", "w2"), 0.0)
    first = usage.top("m", 1)[0]
    assert (first.key, first.depth, first.reads) == (SYSTEM[72], 73, 20)


def test_a_session_that_is_read_often_beats_a_short_prefix_that_many_share() -> None:
    usage = Usage(1000, 600.0)
    for _ in range(10):
        usage.read("m", session(1, turns=20), held(1100, "w1"), 0.0)
    for number in range(2, 5):
        usage.read("m", session(number), [], 0.0)
    assert usage.top("", 1)[0].depth == 1100


def test_models_are_told_apart_and_blocks_are_counted() -> None:
    usage = Usage(1000, 600.0, max_models=2)
    usage.read("a", [1, 2, 3], held(2, "w1"), 0.0)
    usage.read("b", [1], [Match(instance_id="w1", tier="g1", depth=1, predicted=True)], 0.0)
    usage.read("one too many", [1], held(1, "w1"), 0.0)
    assert (usage.of("a").asked, usage.of("a").found) == (3, 2)
    assert (usage.of("b").asked, usage.of("b").found) == (1, 0)
    assert usage.of("one too many").asked == 0
    assert {used.model for used in usage.top("", 10)} == {"a", "b"}
    assert {used.model for used in usage.top("b", 10)} == {"b"}
    assert usage.top("", 0) == []


def test_uses_of_long_ago_weigh_less_and_are_forgotten() -> None:
    usage = Usage(1000, 600.0)
    for _ in range(3):
        usage.read("m", [1], [], 0.0)
    usage.read("m", [2], [], 600.0)
    assert {used.key: used.reads for used in usage.top("m", 10)} == {1: 1.5, 2: 1.0}
    usage.read("m", [2], [], 1800.0)
    assert {used.key for used in usage.top("m", 10)} == {2}


def test_at_the_limit_what_is_read_least_is_forgotten() -> None:
    usage = Usage(4, 600.0)
    for _ in range(5):
        usage.read("m", [1], [], 0.0)
    for key in range(2, 9):
        usage.read("m", [key], [], 0.0)
    assert len(usage) == 8
    usage.read("m", [9], [], 0.0)
    assert len(usage) == 5
    assert usage.top("m", 1)[0].key == 1
