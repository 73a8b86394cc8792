"""Calls of the store with a deadline, counted; a store that has trouble is left alone for a while."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

from kvbus_kvbm.adapters.cluster.store import StoreFailed
from kvbus_kvbm.core.breaker import Breaker
from kvbus_kvbm.core.cluster_limits import ClusterLimits
from kvbus_kvbm.core.lower import TierCounters

T = TypeVar("T")

Use = Literal["read", "write", "delete"]


class Reaching:
    """One breaker per use: a full store can still be read, and made less full."""

    def __init__(self, limits: ClusterLimits, counters: TierCounters, clock: Callable[[], float], log: Any) -> None:
        self._counters = counters
        self._clock = clock
        self._log = log
        self._deadlines_s: dict[Use, float] = {
            "read": limits.read_deadline_s,
            "write": limits.write_deadline_s,
            "delete": limits.write_deadline_s,
        }
        self._turns = {use: asyncio.Semaphore(limits.parallel) for use in self._deadlines_s}
        self._breakers: dict[Use, Breaker] = {
            use: Breaker(failures=limits.failures, rest_s=limits.rest_s, trial_s=2 * deadline_s)
            for use, deadline_s in self._deadlines_s.items()
        }

    def passes(self, *uses: Use) -> bool:
        """May it be used for all of these now? Yes makes the use a trial of those that are open."""
        now_s = self._clock()
        if not all(self._breakers[use].can_pass(now_s) for use in uses):
            return False
        return all(self._breakers[use].passes(now_s) for use in uses)

    def is_closed(self, use: Use) -> bool:
        return self._breakers[use].is_closed

    async def call(self, use: Use, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Raise StoreFailed, whatever has happened. Some calls at a time; the deadline begins with the turn."""
        breaker = self._breakers[use]
        opened = breaker.opened
        async with self._turns[use]:
            if breaker.opened != opened:  # while we waited; not all that wait shall find out for themselves
                raise StoreFailed("it is left alone")
            return await self._call(use, call)

    async def _call(self, use: Use, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            async with asyncio.timeout(self._deadlines_s[use]):
                result = await call()
        except TimeoutError as error:
            raise self._failed(
                use, StoreFailed(f"no answer within {self._deadlines_s[use]:g} s"), at_once=True
            ) from error
        except StoreFailed as error:
            raise self._failed(use, error, at_once=error.refused or error.full) from error
        except Exception as error:
            self._log.exception("g4_store_broke", use=use)
            raise self._failed(use, StoreFailed(f"{type(error).__name__}: {error}")) from error
        if not self._breakers[use].is_closed:
            self._log.info("g4_store_is_back", use=use)
        self._breakers[use].succeeded()
        return result

    def _failed(self, use: Use, failure: StoreFailed, *, at_once: bool = False) -> StoreFailed:
        breaker = self._breakers[use]
        was_closed = breaker.is_closed
        self._counters.failures += 1
        breaker.failed(self._clock(), at_once=at_once)
        if was_closed and not breaker.is_closed:
            self._log.warning("g4_store_bypassed", use=use, reason=str(failure))
        return failure
