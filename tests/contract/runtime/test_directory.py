"""Discovery by leased records on a real nats-server."""

import asyncio
from collections.abc import AsyncIterator
from unittest.mock import MagicMock, call

import pytest

from kvbus_runtime.bus import Bus, open_bus
from kvbus_runtime.discovery import Directory, Registration
from kvbus_runtime.errors import Superseded
from kvbus_runtime.settings import CommonSettings
from kvbus_testkit.nats import NatsServer
from kvbus_testkit.services import running_service
from kvbus_testkit.timing import eventually, scaled
from kvbus_wire.records import InstanceRecord, KvbmRecord


def record(instance_id: str = "w.1", incarnation: int = 1, **fields: object) -> InstanceRecord:
    return InstanceRecord(
        service="worker",
        instance_id=instance_id,
        incarnation=incarnation,
        host_id="h",
        version="1",
        started_ms=1,
        **fields,  # type: ignore[arg-type]
    )


@pytest.fixture
async def bus(nats_server: NatsServer, namespace: str) -> AsyncIterator[Bus]:
    settings = CommonSettings(nats=nats_server.url, namespace=namespace, lease_ttl_s=round(scaled(2)))
    async with open_bus(settings, name="one") as one:
        yield one


class Watched:
    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.changes: list[tuple[str, int, str]] = []
        directory.on_change(lambda r, change: self.changes.append((r.instance_id, r.incarnation, change)))

    async def saw(self, *changes: tuple[str, int, str]) -> None:
        await eventually(lambda: self.changes == list(changes), what=f"changes {changes}, saw {self.changes}")


async def watch(bus: Bus) -> Watched:
    directory = Directory(bus, 2)
    await directory.start()
    return Watched(directory)


async def test_a_registered_instance_is_seen_updated_and_leaves_at_once_when_removed(bus: Bus) -> None:
    watched = await watch(bus)
    assert watched.directory.instances("worker") == []
    registration = Registration(bus, 2)
    await registration.set(record())
    await watched.saw(("w.1", 1, "joined"))
    assert watched.directory.get("w.1") == record()
    assert watched.directory.instances("worker") == [record()]
    assert watched.directory.instances("router") == []
    await registration.set(record(draining=True))
    await watched.saw(("w.1", 1, "joined"), ("w.1", 1, "updated"))
    await registration.remove()
    await watched.saw(("w.1", 1, "joined"), ("w.1", 1, "updated"), ("w.1", 1, "left"))
    assert watched.directory.get("w.1") is None


async def test_the_log_names_others_beside_the_one_who_speaks(bus: Bus) -> None:
    bus.log = MagicMock()
    watched = await watch(bus)
    await Registration(bus, 2).set(record())
    await watched.saw(("w.1", 1, "joined"))
    # "instance" and "service" are bound to the logger, and say whose line it is.
    assert bus.log.info.call_args == call("instance_joined", peer_service="worker", peer="w.1")


async def test_who_comes_later_sees_who_was_there(bus: Bus) -> None:
    for name in ("b", "a"):
        await Registration(bus, 2).set(record(name))
    watched = await watch(bus)
    assert [r.instance_id for r in watched.directory.instances("worker")] == ["a", "b"]
    assert sorted(watched.changes) == [("a", 1, "joined"), ("b", 1, "joined")]


async def test_a_lease_that_nobody_refreshes_ends(bus: Bus, nats_server: NatsServer, namespace: str) -> None:
    watched = await watch(bus)
    settings = CommonSettings(nats=nats_server.url, namespace=namespace)
    async with open_bus(settings, name="short-lived") as other:
        await Registration(other, 2).set(record())
        await watched.saw(("w.1", 1, "joined"))
    await watched.saw(("w.1", 1, "joined"), ("w.1", 1, "left"))


async def test_a_refreshed_lease_goes_on_silently(bus: Bus) -> None:
    watched = await watch(bus)
    await Registration(bus, 2).set(record())
    await eventually(lambda: bus.metrics.value("lease_refreshes_total", {"outcome": "ok"}) >= 6)
    assert watched.changes == [("w.1", 1, "joined")]


async def test_an_id_can_be_taken_again_after_its_lease_ended(
    bus: Bus, nats_server: NatsServer, namespace: str
) -> None:
    watched = await watch(bus)
    settings = CommonSettings(nats=nats_server.url, namespace=namespace)
    async with open_bus(settings, name="short-lived") as other:
        await Registration(other, 2).set(record())
    await watched.saw(("w.1", 1, "joined"), ("w.1", 1, "left"))
    await Registration(bus, 2).set(record(incarnation=2))
    await watched.saw(("w.1", 1, "joined"), ("w.1", 1, "left"), ("w.1", 2, "joined"))


async def test_a_new_incarnation_takes_the_id_over_and_the_old_one_is_told(bus: Bus) -> None:
    watched = await watch(bus)
    old, new = Registration(bus, 2), Registration(bus, 2)
    await old.set(record(incarnation=1))
    await new.set(record(incarnation=2))
    await watched.saw(("w.1", 1, "joined"), ("w.1", 1, "left"), ("w.1", 2, "joined"))
    with pytest.raises(Superseded):
        await old.set(record(incarnation=1))
    bus.tasks.spawn(asyncio.sleep(0), name="the group is alive")
    await old.remove()
    await bus.flush()
    assert watched.directory.get("w.1") == record(incarnation=2)


async def test_ids_with_any_characters_are_possible(bus: Bus) -> None:
    watched = await watch(bus)
    names = ["host/0", "a.b.c", "ünïcode x", "per%cent", "star*>"]
    for name in names:
        await Registration(bus, 2).set(record(name))
    await eventually(lambda: len(watched.directory.instances("worker")) == len(names))
    assert {r.instance_id for r in watched.directory.instances("worker")} == set(names)


async def test_namespaces_do_not_see_each_other(bus: Bus, nats_server: NatsServer, namespace: str) -> None:
    async with (
        running_service(nats_server.url, namespace + "-2") as foreign,
        running_service(nats_server.url, namespace) as ours,
    ):
        await eventually(lambda: all(one.directory.get(one.instance_id) for one in (ours, foreign)))
        for service in (ours, foreign):
            assert [r.instance_id for r in service.directory.instances("worker")] == [service.instance_id]


async def test_a_failing_callback_does_not_hurt_the_others(bus: Bus) -> None:
    directory = Directory(bus, 2)
    await directory.start()
    directory.on_change(lambda r, change: [][0])
    watched = Watched(directory)
    await Registration(bus, 2).set(record())
    await watched.saw(("w.1", 1, "joined"))


async def test_a_service_registers_with_what_it_offers_and_can_update_it(
    nats_server: NatsServer, namespace: str
) -> None:
    async with (
        running_service(nats_server.url, namespace, name="kvbm", host_id="h9", health_port=0) as kvbm,
        running_service(nats_server.url, namespace, name="router") as router,
    ):
        await kvbm.register(kvbm=KvbmRecord(g2_bytes=5))
        await eventually(lambda: [r.kvbm for r in router.directory.instances("kvbm")] == [KvbmRecord(g2_bytes=5)])
        (seen,) = router.directory.instances("kvbm")
        assert (seen.host_id, seen.incarnation, seen.health_url) == ("h9", kvbm.incarnation, kvbm.health_url)
        assert kvbm.health_url.startswith("http://127.0.0.1:")
        name = kvbm.instance_id
    assert name.startswith("kvbm-")
