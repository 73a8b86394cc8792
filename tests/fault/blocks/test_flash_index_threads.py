"""Matches beside changes: what nobody changes is told right at any moment."""

import random
import threading
from collections.abc import Callable

import pytest

from kvbus_blocks.flash import layout
from kvbus_blocks.flash.index import FlashIndex
from kvbus_blocks.index import Owner
from kvbus_blocks.keys import ShortKeys
from kvbus_testkit.flash import flash_index

STABLE = [Owner(f"stable-{number}", "g1") for number in range(5)]
CHAINS, LENGTH = 24, 300


class Stress:
    """Chains that the stable owners hold to different depths, and others keep storing, cutting, extending and dropping."""

    def __init__(self) -> None:
        rng = random.Random(7)
        self.index: FlashIndex = flash_index()
        self.chains = [ShortKeys(rng.randbytes(16 * LENGTH)) for _ in range(CHAINS)]
        self.depths: list[dict[Owner, int]] = []
        for chain in self.chains:
            depths = {owner: rng.randint(1, LENGTH) for owner in rng.sample(STABLE, 3)}
            for owner, depth in depths.items():
                self.index.store(owner, None, chain[:depth])
            self.depths.append(depths)
        self.writing = threading.Event()
        self.writing.set()
        self.matches = 0
        self.problems: list[object] = []

    def read(self, seed: int) -> None:
        rng = random.Random(seed)
        while self.writing.is_set() and not self.problems:
            number = rng.randrange(CHAINS)
            found = self.index.match(self.chains[number])
            stable = {owner: depth for owner, depth in found.items() if owner in STABLE}
            if stable != self.depths[number] or not all(0 < depth <= LENGTH for depth in found.values()):
                self.problems.append((number, stable, self.depths[number]))
            self.matches += 1

    def run(self, *writers: Callable[[], None]) -> None:
        def guarded(work: Callable[[], None]) -> None:
            try:
                work()
            except BaseException as problem:
                self.problems.append(problem)

        readers = [threading.Thread(target=guarded, args=(lambda seed=seed: self.read(seed),)) for seed in (1, 2)]
        working = [threading.Thread(target=guarded, args=(writer,)) for writer in writers]
        for thread in readers + working:
            thread.start()
        for thread in working:
            thread.join()
        self.writing.clear()
        for thread in readers:
            thread.join()
        assert self.problems == []
        assert self.matches > 0
        self.index.check_integrity()
        for chain, depths in zip(self.chains, self.depths, strict=True):
            assert depths.items() <= self.index.match(chain).items()


@pytest.fixture
def stress() -> Stress:
    return Stress()


def test_owners_of_shared_blocks_come_and_go(stress: Stress) -> None:
    """Owner sets are made, freed and used again all the time; there are more owners than a set has bits at first."""

    def writer(name: str) -> Callable[[], None]:
        def work() -> None:
            rng = random.Random(name)
            for step in range(1500):
                owner, chain = Owner(f"{name}-{rng.randrange(50)}", "g1"), rng.choice(stress.chains)
                match step % 3:
                    case 0:
                        stress.index.store(owner, None, chain[: rng.randint(1, LENGTH)])
                    case 1:
                        stress.index.remove(owner, chain[rng.randrange(LENGTH) :])
                    case 2:
                        stress.index.drop(f"{name}-{rng.randrange(50)}")

        return work

    stress.run(writer("x"), writer("y"))


def test_tables_grow_and_shrink_and_nodes_are_moved(stress: Stress) -> None:
    def writer(name: str) -> Callable[[], None]:
        def work() -> None:
            rng, owner = random.Random(name), Owner(name, "g1")
            for _ in range(5):
                for _ in range(20):
                    stress.index.store(owner, None, ShortKeys(rng.randbytes(16 * layout.CHUNK_KEYS)))
                stress.index.clear(owner)
                for _ in range(100):
                    stress.index.store(owner, None, ShortKeys(rng.randbytes(16)))

        return work

    stress.run(writer("x"), writer("y"))
