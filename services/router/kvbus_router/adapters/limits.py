"""Limits that were changed at run time: one value that all routers follow, so that they agree."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from kvbus_router.core.limits import BadLimits, Thresholds, changed_limits, check_limits
from kvbus_runtime.bus import Bus
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.metrics import Metrics
from kvbus_runtime.watched import Revised, WatchedValue
from kvbus_wire.errors import ErrorCode
from kvbus_wire.message import DecodeFailed, Decoder, encode
from kvbus_wire.router import RouterLimits, SetLimits, StoredLimits, WorkerLimits

KEY = "router_limits"

_decoder = Decoder.of(StoredLimits)


class LimitsStore:
    """``configured``: what the settings say; what is stored comes on top. ``apply`` is called with what is in force from now on."""

    def __init__(
        self,
        bus: Bus,
        router_id: str,
        configured: Thresholds,
        *,
        apply: Callable[[Thresholds], None],
        metrics: Metrics,
        log: Any,
    ) -> None:
        self._router_id = router_id
        self._configured = configured
        self._apply = apply
        self._log = log
        self._stored = WorkerLimits()
        self._in_force = configured
        self._value = WatchedValue(bus, bus.subjects.settings_bucket, KEY, self._on_change)
        self._changes = metrics.counter(
            "limit_changes", "changes of limits at run time that were asked for", ("outcome",)
        )
        metrics.gauge("limits_revision", "revision of the limits in force that were changed at run time").set_function(
            lambda: float(self._value.current.revision)
        )
        in_force = metrics.gauge("limit", "limits of each worker in force (0: none)", ("limit",))
        for name in ("max_requests_per_worker", "worker_limit_factor", "busy_used_blocks_share", "busy_waiting_tokens"):
            in_force.labels(name).set_function(partial(self._value_of, name))
        metrics.gauge("cordoned_workers", "workers that get nothing new").set_function(
            lambda: float(len(self._in_force.cordoned))
        )

    def _value_of(self, name: str) -> float:
        return float(getattr(self._in_force, name))

    async def start(self, wait_s: float) -> None:
        """Follow from now on. Whoever cannot (no room on the bus for the bucket, no right to it) goes on with what the settings say
        after ``wait_s``, and takes over the changes when they come."""
        try:
            async with asyncio.timeout(wait_s):
                await self._value.start()
        except TimeoutError:
            self._log.warning("limits_not_followed", hint="changes made at run time are not known here yet")

    async def stop(self) -> None:
        await self._value.stop()

    def report(self) -> RouterLimits:
        return RouterLimits(
            router_id=self._router_id,
            revision=self._value.current.revision,
            in_force=self._in_force.as_limits(),
            stored=self._stored,
        )

    async def change(self, asked: SetLimits) -> RouterLimits:
        """Raise RequestFailed: invalid_request, or unavailable."""

        def changed(data: bytes | None) -> bytes:
            try:
                return encode(StoredLimits(limits=changed_limits(self._decoded(data), asked)))
            except BadLimits as problem:
                raise RequestFailed.of(ErrorCode.INVALID_REQUEST, str(problem), param=problem.param) from problem

        try:
            await self._value.change(changed)
        except RequestFailed as failure:
            self._changes.labels(str(failure.code)).inc()
            raise
        self._changes.labels("ok").inc()
        return self.report()

    def _on_change(self, value: Revised) -> None:
        self._stored = self._decoded(value.data)
        self._in_force = self._configured.changed(self._stored)
        self._log.info("limits_changed", revision=value.revision, limits=msgspec.to_builtins(self._in_force))
        self._apply(self._in_force)

    def _decoded(self, data: bytes | None) -> WorkerLimits:
        if data is None:
            return WorkerLimits()
        try:
            stored: StoredLimits = _decoder.decode(data)
            check_limits(stored.limits)
        except (DecodeFailed, BadLimits) as problem:
            self._log.error("bad_stored_limits", reason=str(problem))
            return WorkerLimits()
        return stored.limits
