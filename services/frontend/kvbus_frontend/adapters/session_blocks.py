"""The blocks of sessions, wherever they lie: how many are in which tier, and dropping those that nobody needs."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from kvbus_blocks.keys import KEY_BYTES
from kvbus_frontend.core.sessions import Freed
from kvbus_frontend.settings import FrontendSettings
from kvbus_runtime.bus import Bus, RequestFailed
from kvbus_runtime.discovery import Directory
from kvbus_runtime.metrics import Metrics
from kvbus_wire.errors import ErrorCode
from kvbus_wire.frontend import HeldBlocks, WhoseBlocks
from kvbus_wire.indexer import IndexQuery, IndexReply
from kvbus_wire.kvbm import DropBlocks, DroppedBlocks
from kvbus_wire.message import Message

KEYS_PER_MESSAGE = 16_384
CHAINS_PER_MESSAGE = 16


class SessionBlocks:
    """``held``: how many leading blocks of a chain the sessions of this frontend hold."""

    def __init__(
        self,
        bus: Bus,
        directory: Directory,
        frontend_id: str,
        held: Callable[[bytes], int],
        settings: FrontendSettings,
        metrics: Metrics,
        log: Any,
    ) -> None:
        self._bus = bus
        self._directory = directory
        self._frontend_id = frontend_id
        self._held = held
        self._timeout_s = settings.session_timeout_s
        self._log = log
        self._dropped = metrics.counter("session_blocks_dropped", "blocks that were freed, by tier", ("tier",))
        self._failures = metrics.counter("session_questions_failed", "unanswered, by whom", ("service",))

    # looking

    async def tiers(self, model: str, keys: bytes) -> dict[str, int] | None:
        """Leading blocks of the chain per tier, on the instance that has most; None: nobody tells."""
        if not keys:
            return {}
        try:
            reply: IndexReply = await self._bus.request(
                self._bus.subjects.index_query(model),
                IndexQuery(model=model, keys=keys, counts=False),
                IndexReply,
                timeout_s=self._timeout_s,
            )
        except RequestFailed:
            self._failures.labels("indexer").inc()
            return None
        tiers: dict[str, int] = {}
        for match in reply.matches:
            if not match.predicted:
                tiers[match.tier] = max(match.depth, tiers.get(match.tier, 0))
        return dict(sorted(tiers.items()))

    # asking other frontends

    async def ask_others(self, message: Message, reply: type[Message], *, timeout_s: float | None = None) -> list[Any]:
        """The answers of all other frontends that answer in time."""
        others = [
            record.instance_id
            for record in self._directory.instances("frontend")
            if record.instance_id != self._frontend_id
        ]
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        answers = await _together([self._ask(other, message, reply, wait_s) for other in others])
        return [answer for answer in answers if answer is not None]

    async def _ask(self, frontend_id: str, message: Message, reply: type[Message], timeout_s: float) -> Any:
        """None: no answer."""
        try:
            subject = self._bus.subjects.frontend_control(frontend_id)
            return await self._bus.request(subject, message, reply, timeout_s=timeout_s, in_parts=True)
        except RequestFailed as failure:
            if failure.code is ErrorCode.GONE:
                return None
            self._failures.labels("frontend").inc()
            self._log.info("frontend_does_not_answer", frontend=frontend_id, reason=str(failure))
            return None

    # dropping

    async def drop(self, freed: Iterable[Freed]) -> dict[str, int]:
        """From all tiers, without what a session of any frontend still needs. How many blocks were freed, by tier."""
        chains = [chain for part in _pieces(list(freed), CHAINS_PER_MESSAGE) for chain in await self._needed(part)]
        depths: dict[str, dict[bytes, int]] = {}
        for chain in chains:
            found = depths.setdefault(chain.model, {})
            for at in range(chain.kept * KEY_BYTES, len(chain.keys), KEY_BYTES):
                found[chain.keys[at : at + KEY_BYTES]] = at
        total: dict[str, int] = {}
        for model, found in depths.items():
            # The last ones first: a block that others hang below stays.
            keys = sorted(found, key=found.__getitem__, reverse=True)
            for blocks in await _together([self._drop_at(target, model, keys) for target in self._holders(model)]):
                for tier, count in blocks.items():
                    total[tier] = total.get(tier, 0) + count
        for tier, count in total.items():
            self._dropped.labels(tier).inc(count)
        return total

    async def _needed(self, chains: Sequence[Freed]) -> list[Freed]:
        """With what is needed of each by now, here or at other frontends."""
        asked = WhoseBlocks(chains=tuple(chain.keys for chain in chains))
        answers = [reply.counts for reply in await self.ask_others(asked, HeldBlocks)]
        return [
            msgspec.structs.replace(
                chain,
                kept=max([chain.kept, self._held(chain.keys), *(counts[i] for counts in answers if i < len(counts))]),
            )
            for i, chain in enumerate(chains)
        ]

    def _holders(self, model: str) -> list[str]:
        workers = (
            record.instance_id
            for record in self._directory.instances("worker")
            if record.worker is not None and record.worker.model.name == model
        )
        return [*workers, *(record.instance_id for record in self._directory.instances("kvbm"))]

    async def _drop_at(self, instance_id: str, model: str, keys: Sequence[bytes]) -> dict[str, int]:
        total: dict[str, int] = {}
        with suppress(RequestFailed):  # what has gone holds nothing; the others let go of it by themselves, later
            for part in _pieces(keys, KEYS_PER_MESSAGE):
                reply: DroppedBlocks = await self._bus.request(
                    self._bus.subjects.control(instance_id),
                    DropBlocks(model=model, keys=b"".join(part)),
                    DroppedBlocks,
                    timeout_s=self._timeout_s,
                    in_parts=True,
                )
                for tier, count in reply.blocks.items():
                    total[tier] = total.get(tier, 0) + count
        return total


def _pieces(items: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    return (items[at : at + size] for at in range(0, len(items), size))


async def _together(work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    return list(await asyncio.gather(*work))
