"""Questions to services over the bus, from outside of any service."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from kvbus_cli.running import bus_hint
from kvbus_runtime.bus import Bus, open_bus
from kvbus_runtime.discovery import Directory
from kvbus_runtime.errors import BusUnreachable, RequestFailed, UnsupportedServer
from kvbus_runtime.settings import CommonSettings
from kvbus_runtime.tasks import first_cause
from kvbus_wire.errors import ErrorCode
from kvbus_wire.message import Message
from kvbus_wire.records import InstanceRecord

TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0

T = TypeVar("T")


class NotAnswered(Exception):
    """No bus, nobody to ask, or a refusal; the text is for the person at the terminal."""


class Reply(msgspec.Struct, frozen=True):
    """``message``: None when the instance did not answer, or refused; then ``problem`` says why."""

    instance_id: str
    message: Any = None
    problem: str = ""


def run(settings: CommonSettings, service: str, ask: Callable[[Bus], Coroutine[Any, Any, T]]) -> T:
    """Connect, ask, disconnect. ``service``: who is asked. Raise NotAnswered."""

    async def connected() -> T:
        async with open_bus(settings, name=f"kvbus-{service}-tool", connect_timeout_s=CONNECT_TIMEOUT_S) as bus:
            return await ask(bus)

    try:
        return asyncio.run(connected())
    except Exception as problem:
        # What a task of the bus raised arrives in an exception group.
        cause = first_cause(problem)
        if isinstance(cause, RequestFailed) and cause.code is ErrorCode.UNAVAILABLE:
            raise NotAnswered(f"no {service} answers in the namespace {settings.namespace!r}") from problem
        if isinstance(cause, BusUnreachable) and not cause.refused:
            raise NotAnswered(f"{cause}{bus_hint(settings)}") from problem
        if isinstance(cause, (BusUnreachable, NotAnswered, RequestFailed, UnsupportedServer)):
            raise NotAnswered(str(cause)) from problem
        raise


async def instances(bus: Bus, *services: str) -> list[InstanceRecord]:
    """Those that are registered, by service and id."""
    directory = Directory(bus, bus.settings.lease_ttl_s)
    await directory.start()
    try:
        return [record for service in services for record in directory.instances(service)]
    finally:
        await directory.stop()


async def ask_one(bus: Bus, subject: str, question: Message, reply: type[Message]) -> Any:
    """Raise RequestFailed."""
    return await bus.request(subject, question, reply, timeout_s=TIMEOUT_S)


async def ask_any(
    bus: Bus, service: str, subject: Callable[[str], str], question: Message, reply: type[Message]
) -> Any:
    """The first reply of an instance of the service, whichever. All are asked, because one may be cut off without anybody having
    noticed yet. Raise RequestFailed when none answers, NotAnswered when there is none."""
    names = await _names(bus, service)
    replies = [asyncio.create_task(ask_one(bus, subject(name), question, reply)) for name in names]
    failures = []
    try:
        for first in asyncio.as_completed(replies):
            try:
                return await first
            except RequestFailed as failure:
                failures.append(failure)
        raise failures[0]
    finally:
        for task in replies:
            task.cancel()
        await asyncio.gather(*replies, return_exceptions=True)


async def ask_each(
    bus: Bus, service: str, subject: Callable[[str], str], question: Message, reply: type[Message]
) -> list[Reply]:
    """One reply per instance of the service, by id; ``subject``: of an instance. Raise NotAnswered when there is none."""

    async def ask(instance_id: str) -> Reply:
        try:
            return Reply(instance_id, await ask_one(bus, subject(instance_id), question, reply))
        except RequestFailed as failure:
            return Reply(instance_id, problem=str(failure))

    return list(await asyncio.gather(*map(ask, await _names(bus, service))))


async def _names(bus: Bus, service: str) -> list[str]:
    found = [record.instance_id for record in await instances(bus, service)]
    if not found:
        raise NotAnswered(f"there is no {service} in the namespace {bus.settings.namespace!r}")
    return found
