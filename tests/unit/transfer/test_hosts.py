"""What is known of hosts."""

from pathlib import Path

import pytest

from kvbus_transfer import TransferLimits, hosts
from kvbus_transfer.backends.nixl import NixlBackend


@pytest.mark.parametrize(("devices", "found"), [(None, False), ([], False), (["mlx5_0"], True)])
def test_a_network_that_reads_memory_is_found(
    devices: list[str] | None, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "infiniband"
    for name in devices or ():
        (folder / name).mkdir(parents=True)
    if devices == []:
        folder.mkdir()
    monkeypatch.setattr(hosts, "_RDMA", folder)
    hosts.has_rdma.cache_clear()
    try:
        assert hosts.has_rdma() is found
        backend = NixlBackend("agent", memoryview(bytearray(8)), TransferLimits())
        assert backend.can_reach(b"1", same_host=True)
        assert backend.can_reach(b"1", same_host=False) is found
        assert not backend.can_reach(b"", same_host=True)
    finally:
        hosts.has_rdma.cache_clear()
