"""Owners in processes of their own: one per backend and place for all tests of a module; readers live in the test's process."""

import importlib.util
import os
from collections.abc import AsyncIterator, Iterator

import pytest

from kvbus_testkit.transfer import TransferPeer, other_host
from kvbus_transfer import TransferAgent, TransferLimits

BACKENDS = ("shm", "tcp", "nixl", "ucx")
LIBRARIES = {"nixl": "nixl_cu12", "ucx": "ucxx"}
PLACES = ("process", "namespace")
SECRET = "of the cluster"
LIMITS = {"peer_bytes": 8 << 20, "batch_bytes": 4 << 20, "inline_copy_bytes": 1 << 20}


class Place:
    """Where owners run. ``here``: where they find this process; ``prefix``: how to start something there; ``devices``: the network
    device on this side and on that one (UCX would try all that it sees, whether they lead there or not)."""

    def __init__(self, here: str, there: str, prefix: tuple[str, ...], devices: tuple[str, str]) -> None:
        self.here, self.there, self.prefix, self.devices = here, there, prefix, devices


@pytest.fixture(scope="session")
def namespace_place() -> Iterator[Place | None]:
    name = f"kv{os.getpid() % 100000}"
    with other_host(name) as addresses:
        yield addresses and Place(*addresses, ("ip", "netns", "exec", name), (f"{name}h", f"{name}p"))


@pytest.fixture(params=PLACES, scope="session")
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "process":
        return Place("127.0.0.1", "127.0.0.1", (), ("lo", "lo"))
    found: Place | None = request.getfixturevalue("namespace_place")
    if found is None:
        pytest.skip("no network namespaces here")
    return found


@pytest.fixture(params=BACKENDS, scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name in LIBRARIES and importlib.util.find_spec(LIBRARIES[name]) is None:
        pytest.skip(f"{LIBRARIES[name]} is not installed")
    return name


def peer_of(place: Place, backend: str, agent_id: str = "owner") -> TransferPeer:
    options = {
        "agent_id": agent_id,
        "secret": SECRET,
        "backends": [backend],
        "limits": LIMITS,
        "host": place.there,
    }
    return TransferPeer(options, prefix=place.prefix, env={"UCX_NET_DEVICES": place.devices[1]})


@pytest.fixture(scope="session")
def shared_owner(place: Place, backend: str) -> Iterator[TransferPeer]:
    with peer_of(place, backend) as peer:
        yield peer


@pytest.fixture(autouse=True)
def network_device(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", place.devices[0])


@pytest.fixture
def owner(shared_owner: TransferPeer) -> Iterator[TransferPeer]:
    """It must have no lease left when the test is over."""
    yield shared_owner
    assert shared_owner.ask("state")["leases"] == 0


@pytest.fixture
async def reader(place: Place, backend: str) -> AsyncIterator[TransferAgent]:
    agent = TransferAgent(
        "reader",
        secret=SECRET.encode(),
        backends=[backend],
        limits=TransferLimits(**LIMITS),
        host=place.here,
    )
    async with agent:
        assert agent.unavailable == {}
        yield agent
        assert agent.leases() == 0
