"""The NATS micro services protocol (ADR-32): every service answers ``$SRV.PING``, ``$SRV.INFO`` and ``$SRV.STATS``."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from nats.aio.msg import Msg

from kvbus_runtime.bus import Bus, Subscription
from kvbus_wire.subjects import escape

_TYPE = "io.nats.micro.v1.{}_response"


class MicroResponder:
    """Facts come from the live bus: its served subjects are the endpoints."""

    def __init__(self, bus: Bus, *, service: str, instance_id: str, version: str, metadata: Mapping[str, str]) -> None:
        self._bus = bus
        self._identity = {
            "name": f"kvbus-{service}",
            "id": escape(instance_id),
            "version": version,
            "metadata": dict(metadata),
        }
        self._started = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        for verb in ("PING", "INFO", "STATS"):
            for tail in ("", f".{self._identity['name']}", f".{self._identity['name']}.{self._identity['id']}"):
                self._subscriptions.append(
                    await self._bus.subscribe_raw(f"$SRV.{verb}{tail}", self._answer, pending_limit_bytes=1 << 20)
                )

    async def _answer(self, msg: Msg) -> None:
        if not msg.reply:
            return
        verb = msg.subject.split(".")[1].lower()
        body: dict[str, Any] = {**self._identity, "type": _TYPE.format(verb)}
        if verb == "info":
            body["description"] = f"kvbus {self._identity['name']}"
            body["endpoints"] = [
                {"name": name, "subject": stats.subject, "queue_group": stats.queue, "metadata": {}}
                for name, stats in self._endpoints()
            ]
        elif verb == "stats":
            body["started"] = self._started
            body["endpoints"] = [
                {
                    "name": name,
                    "subject": stats.subject,
                    "queue_group": stats.queue,
                    "num_requests": stats.requests,
                    "num_errors": stats.errors,
                    "last_error": stats.last_error,
                    "processing_time": int(stats.processing_s * 1e9),
                    "average_processing_time": int(stats.processing_s * 1e9 / max(1, stats.requests)),
                }
                for name, stats in self._endpoints()
            ]
        await self._bus.send_reply_bytes(msg.reply, msgspec.json.encode(body), {})

    def _endpoints(self) -> list[tuple[str, Any]]:
        return [(f"endpoint-{number}", stats) for number, stats in sorted(self._bus.endpoints.items())]

    async def stop(self) -> None:
        for subscription in self._subscriptions:
            await subscription.stop()
        self._subscriptions.clear()
