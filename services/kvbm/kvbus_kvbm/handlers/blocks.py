"""The messages of workers about blocks, each one call of the core."""

from collections.abc import Callable

from kvbus_kvbm.core.errors import Draining, LeaseGone
from kvbus_kvbm.core.pools import OpenPool, Pools
from kvbus_kvbm.handlers.attach import Attaching
from kvbus_kvbm.handlers.onboard import Onboarding
from kvbus_kvbm.handlers.refusals import refusals
from kvbus_kvbm.handlers.retention import Retention
from kvbus_runtime.bus import RequestContext
from kvbus_wire.kvbm import AttachPool, CommitBlocks, PinBlocks, ReleaseLease, ReserveBlocks, RetainBlocks
from kvbus_wire.message import Message
from kvbus_wire.worker import Done

REQUESTS: tuple[type[Message], ...] = (
    AttachPool,
    ReserveBlocks,
    CommitBlocks,
    PinBlocks,
    ReleaseLease,
    RetainBlocks,
)
Request = AttachPool | ReserveBlocks | CommitBlocks | PinBlocks | ReleaseLease | RetainBlocks


class BlockRequests:
    """``changed`` is called with the pool after each request that reached it, also a refused one (something may have been due);
    ``used`` with the blocks that a request was about."""

    def __init__(
        self,
        pools: Pools,
        attaching: Attaching,
        onboarding: Onboarding,
        retention: Retention,
        *,
        changed: Callable[[OpenPool], None],
        used: Callable[[OpenPool, bytes], None],
        clock: Callable[[], float],
    ) -> None:
        self._pools = pools
        self._onboarding = onboarding
        self._retention = retention
        self._used = used
        self._attaching = attaching
        self._changed = changed
        self._clock = clock
        self.draining = False

    async def handle(self, request: Request, context: RequestContext) -> Message:
        with refusals():
            match request:
                case AttachPool():
                    self._check_open()
                    return await self._attaching.attach(request)
                case PinBlocks():
                    self._check_open()
                    return await self._onboarding.pin(request)
                case ReserveBlocks():
                    self._check_open()
                    return self._reserve(request)
                case RetainBlocks():
                    return await self._retention.retain(request)
                case CommitBlocks() | ReleaseLease():
                    return self._end(request)

    def _reserve(self, request: ReserveBlocks) -> Message:
        pool = self._pools.get(request.pool_id)
        try:
            return pool.pool.reserve(
                request.instance_id, request.parent, request.keys, self._clock(), request.directives
            )
        finally:
            self._changed(pool)
            self._used(pool, request.keys)

    def _end(self, request: CommitBlocks | ReleaseLease) -> Message:
        pool = self._pools.of_lease(request.lease_id)
        if pool is None:
            if isinstance(request, CommitBlocks):
                raise LeaseGone(f"lease {request.lease_id} is of no pool here")
            return Done()
        try:
            if isinstance(request, CommitBlocks):
                pool.pool.commit(request.lease_id, request.checksums, self._clock())
            else:
                pool.pool.release(request.lease_id, request.corrupt, self._clock())
        finally:
            self._changed(pool)
        return Done()

    def _check_open(self) -> None:
        if self.draining:
            raise Draining("kvbm is going away")
