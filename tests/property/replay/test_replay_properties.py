"""Chains against plain lists, the oracle against a plain set, virtual time against sorting."""

import hypothesis.strategies as st
from hypothesis import given

from kvbus_replay.simulation.clock import VirtualClock
from kvbus_replay.simulation.oracle import SharedCacheOracle
from kvbus_replay.trace.calls import Chain

links = st.lists(
    st.tuples(st.integers(0, 5), st.floats(0, 1), st.lists(st.integers(0, 2**64 - 1), max_size=5)), max_size=12
)


@given(links)
def test_a_chain_is_what_it_keeps_and_what_it_adds(steps: list[tuple[int, float, list[int]]]) -> None:
    chains, lists = [Chain()], [list[int]()]
    for base, share, own in steps:
        base %= len(chains)
        keep = int(share * len(lists[base]))
        chains.append(Chain(own, chains[base], keep))
        lists.append(lists[base][:keep] + own)
    for chain, plain in zip(chains, lists, strict=True):
        assert chain.hashes().tolist() == plain
        assert len(chain) == len(plain) == len(chain.keys())


@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=6), st.integers(0, 6)), max_size=20))
def test_the_oracle_finds_the_longest_known_prefix(prompts: list[tuple[str, int]]) -> None:
    oracle, known = SharedCacheOracle(), set[str]()
    for text, reusable in prompts:
        prefixes = [text[: end + 1] for end in range(len(text))]
        expected = next((i for i, prefix in enumerate(prefixes) if prefix not in known), len(prefixes))
        assert oracle.arrive([prefix.encode() for prefix in prefixes], reusable) == min(expected, reusable)
        known.update(prefixes)
    assert len(oracle) == len(known)


@given(st.lists(st.floats(0, 100), max_size=20))
def test_what_is_due_first_happens_first_and_equal_times_in_the_order_of_planning(times: list[float]) -> None:
    clock, happened = VirtualClock(), list[tuple[float, int]]()

    def happen(number: int) -> None:
        happened.append((clock.now, number))

    for number, when in enumerate(times):
        clock.at(when, lambda number=number: happen(number))  # type: ignore[misc]
    clock.run()
    assert happened == sorted((when, number) for number, when in enumerate(times))
