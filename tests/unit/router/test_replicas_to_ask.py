"""Which replica of a service is asked."""

from random import Random

from kvbus_router.core.replicas import Replicas


def replicas(*names: str) -> Replicas:
    made = Replicas(max_failures=2, pause_s=1.0, rng=Random(1))
    made.set(names)
    return made


def test_all_replicas_get_a_share() -> None:
    asked = replicas("a", "b")
    assert {asked.pick(0.0) for _ in range(20)} == {"a", "b"}


def test_one_that_fails_is_paused_and_the_others_are_not() -> None:
    asked = replicas("a", "b")
    assert not asked.failed("a", 0.0)
    assert {asked.pick(0.0) for _ in range(20)} == {"a", "b"}
    assert asked.failed("a", 0.0)
    assert {asked.pick(0.9) for _ in range(20)} == {"b"}
    assert asked.pick(0.9, {"b"}) is None


def test_after_the_pause_one_question_at_a_time_tries_it() -> None:
    asked = replicas("a")
    asked.failed("a", 0.0)
    asked.failed("a", 0.0)
    assert asked.pick(1.0) == "a"
    assert asked.pick(1.0) is None, "the first one has not come back yet"
    assert not asked.failed("a", 1.3), "it was paused before"
    assert asked.pick(2.2) is None
    assert asked.pick(2.3) == "a"
    asked.answered("a")
    assert asked.pick(2.3) == asked.pick(2.3) == "a"


def test_an_answer_forgets_earlier_failures() -> None:
    asked = replicas("a")
    for _ in range(5):
        asked.failed("a", 0.0)
        asked.answered("a")
    assert asked.pick(0.0) == "a"


def test_what_is_known_of_a_replica_lasts_as_long_as_it_is_there() -> None:
    asked = replicas("a", "b")
    asked.failed("a", 0.0)
    asked.failed("a", 0.0)
    asked.set(["a"])
    assert asked.pick(0.0) is None
    asked.set([])
    asked.failed("a", 0.0)
    asked.answered("a")
    asked.set(["a"])
    assert asked.pick(0.0) == "a"
