"""Route requests: ask the index, then place, queue or refuse."""

import asyncio
import time
from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any

import msgspec

from kvbus_blocks.keys import KEY_BYTES
from kvbus_router.adapters.index import IndexClient
from kvbus_router.adapters.metrics import RouterMetrics
from kvbus_router.core.choosing import LEAST_FACTOR, MOST_FACTOR
from kvbus_router.core.dispatcher import Dispatcher, Placed, Queued, Refused, Settled
from kvbus_runtime.bus import Bus, RequestContext
from kvbus_runtime.errors import PayloadTooLarge, RequestFailed
from kvbus_wire.errors import ErrorCode
from kvbus_wire.router import Placement, RouteRequest

Outcome = asyncio.Future[Placed | Refused]


class RouteHandler:
    """Holds the requests whose outcome is still open: each waits for the dispatcher to settle it."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        index: IndexClient,
        bus: Bus,
        *,
        metrics: RouterMetrics,
        changed: Callable[[], None],
        log: Any,
    ) -> None:
        self._dispatcher = dispatcher
        self._index = index
        self._bus = bus
        self._metrics = metrics
        self._changed = changed
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, Outcome] = {}
        self._draining = False

    async def __call__(self, request: RouteRequest, context: RequestContext) -> Placement:
        check_request(request)
        if self._draining:
            raise RequestFailed.of(ErrorCode.DRAINING, "the router stops", retryable=True)
        deadline = self._deadline(request, context)
        matches = await self._index.query(request.model, request.keys)
        outcome, others = self._dispatcher.submit(request, matches, deadline, self._loop.time())
        self.settle(others)
        if isinstance(outcome, Queued):
            outcome = await self._wait(request)
        if isinstance(outcome, Refused):
            self._metrics.refused(outcome)
            reply = outcome.reply
            self._log.info("refused", request=request.request_id, model=request.model, code=reply.code)
            if outcome.cause is not None:
                self._log.error("placing_failed", request=request.request_id, exc_info=outcome.cause)
            raise RequestFailed(reply)
        await self._announce(request, outcome)
        return outcome.placement

    def settle(self, settled: Iterable[Settled]) -> None:
        """Hand outcomes to those who wait for them."""
        for one in settled:
            future = self._open.pop(one.request_id, None)
            if future is not None and not future.done():
                future.set_result(one.outcome)
            elif isinstance(one.outcome, Placed):
                # Nobody waits for it any more.
                self._dispatcher.give_up(one.request_id)

    def stop(self) -> None:
        """From now on everybody is sent away, those who wait as well."""
        self._draining = True
        self.settle(self._dispatcher.refuse_all(ErrorCode.DRAINING, "the router stops"))

    def _deadline(self, request: RouteRequest, context: RequestContext) -> float:
        """On the loop's clock: the request's own, or when the requester stops waiting for the reply, if that is sooner."""
        deadline = self._loop.time() + request.deadline_ms / 1000 - time.time()
        return deadline if context.deadline is None else min(deadline, context.deadline)

    async def _wait(self, request: RouteRequest) -> Placed | Refused:
        future: Outcome = self._loop.create_future()
        self._open[request.request_id] = future
        self._changed()
        try:
            return await future
        except asyncio.CancelledError:
            # The requester has gone: give up the place in the queue or on a worker, unless a later try of the request holds it.
            waits = self._open.get(request.request_id) is future
            if waits:
                del self._open[request.request_id]
            if waits or (future.done() and not future.cancelled() and isinstance(future.result(), Placed)):
                self._dispatcher.give_up(request.request_id)
            raise

    async def _announce(self, request: RouteRequest, placed: Placed) -> None:
        self._metrics.placed(placed)
        placement, chosen = placed.placement, placed.chosen
        subject = self._bus.subjects.decisions(request.model)
        try:
            await self._bus.publish(subject, placed.decision)
        except PayloadTooLarge:
            # The replicas then only miss that the prefix is being computed.
            await self._bus.publish(subject, msgspec.structs.replace(placed.decision, keys=b""))
        self._log.info(
            "placed",
            request=request.request_id,
            model=request.model,
            worker=placement.worker_id,
            policy=placement.policy,
            policy_class=placed.decision.policy_class,
            tenant=request.tenant or None,
            session=request.session.id if request.session is not None else None,
            parent=request.session.parent if request.session is not None else None,
            input=request.hints.input_trigger or None,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=placement.cached_tokens,
            onboard_tokens=placement.onboard_tokens,
            uncached_tokens=chosen.uncached_tokens,
            predicted_ttft_s=round(chosen.ttft_s, 4),
            queued_s=round(placement.queued_s, 4),
            prefill_worker=placement.prefill.worker_id if placement.prefill is not None else None,
        )


def check_request(request: RouteRequest) -> None:
    """Raise RequestFailed for a request that makes no sense."""
    if len(request.keys) % KEY_BYTES:
        raise RequestFailed.of(ErrorCode.INVALID_REQUEST, f"keys are {KEY_BYTES} bytes each", param="keys")
    if request.prompt_tokens <= 0:
        raise RequestFailed.of(ErrorCode.INVALID_REQUEST, "there is no prompt", param="prompt_tokens")
    if not request.model:
        raise RequestFailed.of(ErrorCode.INVALID_REQUEST, "there is no model", param="model")
    if not all(LEAST_FACTOR <= factor <= MOST_FACTOR for factor in request.preferred_taints.values()):
        message = f"a factor goes from {LEAST_FACTOR:g} to {MOST_FACTOR:g}"
        raise RequestFailed.of(ErrorCode.INVALID_REQUEST, message, param="preferred_taints")
    if not isfinite(request.hints.latency_sensitivity or 0.0) or not isfinite(request.hints.priority):
        raise RequestFailed.of(ErrorCode.INVALID_REQUEST, "a hint that is no finite number", param="hints")
    if not request.request_id:
        raise RequestFailed.of(ErrorCode.INVALID_REQUEST, "there is no request id", param="request_id")
