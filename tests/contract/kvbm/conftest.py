"""The stores that G4 may lie in: each test runs with each of them."""

import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvbus_kvbm.adapters.cluster.directory import DirectoryStore
from kvbus_kvbm.adapters.cluster.s3 import S3Bucket
from kvbus_kvbm.adapters.cluster.store import ClusterStore
from kvbus_testkit.s3_server import BUCKET, S3Server

OpenStore = Callable[[], ClusterStore]


@pytest.fixture(params=["directory", "s3"])
async def open_store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[OpenStore]:
    """Opens the test's store anew with each call, as another host does."""
    opened: list[ClusterStore] = []
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
    prefix = secrets.token_hex(6)

    def opens() -> ClusterStore:
        is_s3 = request.param == "s3"
        opened.append(S3Bucket(f"s3://{BUCKET}/{prefix}", 10.0) if is_s3 else DirectoryStore(tmp_path / "store", 4))
        return opened[-1]

    yield opens
    for store in opened:
        await store.close()


@pytest.fixture
def store(open_store: OpenStore) -> ClusterStore:
    return open_store()
