"""Requests to routers over the bus, from outside of any service."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from kvbus_runtime.bus import Bus, open_bus
from kvbus_runtime.discovery import Directory
from kvbus_runtime.errors import RequestFailed, UnsupportedServer
from kvbus_runtime.settings import CommonSettings
from kvbus_runtime.tasks import first_cause
from kvbus_wire.errors import ErrorCode
from kvbus_wire.message import Message

TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0

T = TypeVar("T")


class NotAnswered(Exception):
    """No bus, no router, or a refusal; the text is for the person at the terminal."""


class Reply(msgspec.Struct, frozen=True):
    """``message``: None when the router did not answer, or refused; then ``problem`` says why."""

    router_id: str
    message: Any = None
    problem: str = ""


def run(settings: CommonSettings, ask: Callable[[Bus], Coroutine[Any, Any, T]]) -> T:
    """Connect, ask, disconnect. Raise NotAnswered."""

    async def connected() -> T:
        async with open_bus(settings, name="kvbus-router-tool", connect_timeout_s=CONNECT_TIMEOUT_S) as bus:
            return await ask(bus)

    try:
        return asyncio.run(connected())
    except Exception as problem:
        # What a task of the bus raised arrives in an exception group.
        cause = first_cause(problem)
        if isinstance(cause, TimeoutError):
            raise NotAnswered(f"no bus at {settings.nats}") from problem
        if isinstance(cause, RequestFailed) and cause.code is ErrorCode.UNAVAILABLE:
            raise NotAnswered(f"no router answers in the namespace {settings.namespace!r}") from problem
        if isinstance(cause, (NotAnswered, RequestFailed, UnsupportedServer)):
            raise NotAnswered(str(cause)) from problem
        raise


async def ask_any(bus: Bus, question: Message, reply: type[Message]) -> Any:
    """Raise RequestFailed."""
    return await bus.request(bus.subjects.routers_control, question, reply, timeout_s=TIMEOUT_S)


async def ask_each(bus: Bus, question: Message, reply: type[Message]) -> list[Reply]:
    """One reply per router that is registered, by id. Raise NotAnswered when there is none."""
    directory = Directory(bus, bus.settings.lease_ttl_s)
    await directory.start()
    try:
        routers = [record.instance_id for record in directory.instances("router")]
    finally:
        await directory.stop()
    if not routers:
        raise NotAnswered(f"there is no router in the namespace {bus.settings.namespace!r}")

    async def ask(router_id: str) -> Reply:
        subject = bus.subjects.router_control(router_id)
        try:
            return Reply(router_id, await bus.request(subject, question, reply, timeout_s=TIMEOUT_S))
        except RequestFailed as failure:
            return Reply(router_id, problem=str(failure))

    return list(await asyncio.gather(*map(ask, routers)))
