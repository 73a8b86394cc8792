"""What `kvbus bench index` stores and asks. Seeded: each run has the same shape, and random keys."""

import random
from collections.abc import Iterator
from typing import NamedTuple

from kvbus_blocks.index import Owner
from kvbus_blocks.keys import KEY_BYTES, ShortKeys

WORKERS = 1000
DEPTH = 3250
APPLICATIONS = 50
SESSIONS = 300


def owner(worker: int) -> Owner:
    return Owner(f"worker-{worker % WORKERS}", "g1")


def distinct_chains(blocks: int, rng: random.Random) -> Iterator[ShortKeys]:
    """Of `DEPTH` blocks each."""
    for _ in range(max(1, blocks // DEPTH)):
        yield ShortKeys(rng.randbytes(KEY_BYTES * DEPTH))


class Chain(NamedTuple):
    """One worker's part of a prompt."""

    worker: int
    keys: ShortKeys


class MixedLoad:
    """Applications share system prompts among many workers, sessions their history among few."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._prompts = [rng.randbytes(KEY_BYTES * rng.randint(400, 1500)) for _ in range(APPLICATIONS)]
        self._holders = [rng.sample(range(WORKERS), WORKERS // (place + 1)) for place in range(APPLICATIONS)]
        self.chains = [
            Chain(worker, ShortKeys(prompt))
            for prompt, holders in zip(self._prompts, self._holders, strict=True)
            for worker in holders
        ]
        self._sessions: list[bytes] = []
        for _ in range(SESSIONS):
            application = self._popular()
            session = self._below(application)
            self._sessions.append(session)
            for worker in rng.sample(
                self._holders[application], min(len(self._holders[application]), rng.randint(1, 3))
            ):
                depth = rng.randint(len(self._prompts[application]) // KEY_BYTES, DEPTH)
                self.chains.append(Chain(worker, ShortKeys(session[: KEY_BYTES * depth])))
        rng.shuffle(self.chains)

    @property
    def blocks(self) -> int:
        return sum(len(chain.keys) for chain in self.chains)

    def queries(self, count: int, depth: int) -> list[ShortKeys]:
        """Prompts of known sessions and, one in four, of new ones."""
        found = []
        for _ in range(count):
            known = self._rng.random() < 0.75
            prompt = self._rng.choice(self._sessions) if known else self._below(self._popular())
            found.append(ShortKeys(prompt[: KEY_BYTES * depth]))
        return found

    def _popular(self) -> int:
        return self._rng.choices(range(APPLICATIONS), [len(holders) for holders in self._holders])[0]

    def _below(self, application: int) -> bytes:
        prompt = self._prompts[application]
        return prompt + self._rng.randbytes(KEY_BYTES * DEPTH - len(prompt))
