"""A value that several instances share, on a real nats-server."""

import asyncio
from collections.abc import AsyncIterator, Mapping

import pytest

from kvbus_runtime import jetstream
from kvbus_runtime.bus import Bus, open_bus
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.jetstream import JetStreamRefused, PubAck
from kvbus_runtime.settings import CommonSettings
from kvbus_runtime.watched import MAX_TRIES, Revised, WatchedValue
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.timing import eventually
from kvbus_wire.errors import ErrorCode

KEY = "name"


@pytest.fixture
async def buses(nats_server: NatsServer, namespace: str) -> AsyncIterator[tuple[Bus, Bus]]:
    settings = CommonSettings(nats=nats_server.url, namespace=namespace)
    async with open_bus(settings, name="one") as one, open_bus(settings, name="other") as other:
        yield one, other


class Follower:
    def __init__(self, bus: Bus) -> None:
        self.seen: list[bytes | None] = []
        self.value = WatchedValue(bus, bus.subjects.settings_bucket, KEY, self._on_change)

    def _on_change(self, value: Revised) -> None:
        self.seen.append(value.data)


async def follow(bus: Bus) -> Follower:
    follower = Follower(bus)
    await follower.value.start()
    return follower


def added(letter: bytes, stored: bytes | None) -> bytes:
    return (stored or b"") + letter


async def test_everybody_sees_a_change_and_whoever_comes_later_too(buses: tuple[Bus, Bus]) -> None:
    one, other = await follow(buses[0]), await follow(buses[1])
    assert (one.value.current, one.seen) == (Revised(), [])
    written = await one.value.change(lambda stored: added(b"a", stored))
    assert one.value.current == written
    await eventually(lambda: other.value.current == written)
    late = await follow(buses[1])
    await eventually(lambda: late.seen == [b"a"])
    assert one.seen == [b"a"], "the writer is told once"
    for follower in (one, other, late):
        await follower.value.stop()


async def test_changes_at_the_same_time_are_made_one_on_top_of_the_other(buses: tuple[Bus, Bus]) -> None:
    one, other = await follow(buses[0]), await follow(buses[1])
    letters = [b"a", b"b", b"c", b"d"]
    changes = (
        follower.value.change(lambda stored, letter=letter: added(letter, stored))  # type: ignore[misc]
        for follower, letter in zip([one, other, one, other], letters, strict=True)
    )
    await asyncio.gather(*changes)
    await eventually(lambda: len(one.value.current.data or b"") == 4)
    await eventually(lambda: one.value.current == other.value.current)
    assert sorted(one.value.current.data or b"") == sorted(b"abcd")
    for follower in (one, other):
        await follower.value.stop()


async def test_an_entry_that_somebody_deleted_is_no_value(buses: tuple[Bus, Bus]) -> None:
    one = await follow(buses[0])
    await one.value.change(lambda _stored: b"a")
    subject = f"$KV.{buses[0].subjects.settings_bucket}.{KEY}"
    await jetstream.publish(buses[0], subject, b"", {jetstream.HEADER_KV_OPERATION: "DEL"})
    await eventually(lambda: one.seen == [b"a", None])
    written = await one.value.change(lambda stored: added(b"b", stored))
    assert written.data == b"b"
    await one.value.stop()


async def test_who_is_always_too_late_gives_up(buses: tuple[Bus, Bus], monkeypatch: pytest.MonkeyPatch) -> None:
    one = await follow(buses[0])
    tries = 0

    async def too_late(bus: Bus, subject: str, data: bytes, headers: Mapping[str, str]) -> PubAck:
        nonlocal tries
        tries += 1
        raise JetStreamRefused(400, jetstream.WRONG_LAST_SEQUENCE[0], "wrong last sequence")

    monkeypatch.setattr(jetstream, "publish", too_late)
    with pytest.raises(RequestFailed) as failure:
        await one.value.change(lambda _stored: b"a")
    assert (failure.value.code, failure.value.retryable, tries) == (ErrorCode.UNAVAILABLE, True, MAX_TRIES)
    await one.value.stop()
