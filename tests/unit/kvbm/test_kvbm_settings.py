from typing import Any

import pytest

from kvbus_kvbm.cli import main
from kvbus_kvbm.settings import KvbmSettings


@pytest.mark.parametrize(
    "bad",
    [
        {"g2_bytes": 0},
        {"pool_share": 0.0},
        {"pool_share": 1.5},
        {"lease_s": 0.0},
        {"quarantine_s": -1.0},
        {"max_keys_per_request": 0},
        {"snapshot_chunk_keys": -5},
        {"lease_ttl_s": 1},
        {"g3_bytes": 0},
        {"g3_bytes": 1000, "g3_dir": "/d"},
        {"g3_deadline_s": 0.0},
        {"g3_keep_free_bytes": -1},
        {"g3_pin_share": 1.1},
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        KvbmSettings(**bad)


def test_the_core_gets_its_limits_from_the_settings() -> None:
    settings = KvbmSettings(g2_bytes=1000, max_leases_per_worker=3, quarantine_s=0.0, pool_share=1.0)
    assert settings.budget.g2_bytes == 1000
    assert settings.pool_limits.max_leases_per_instance == 3
    assert settings.pool_limits.quarantine_s == 0.0
    disk = KvbmSettings(g3_bytes=1 << 20, g3_pin_share=0.5, g3_rest_s=7.0).disk_limits
    assert (disk.capacity_bytes, disk.pin_share, disk.rest_s) == (1 << 20, 0.5, 7.0)


def test_a_memory_directory_that_is_not_there_ends_with_status_2_before_any_connection(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--arena-dir", "/nowhere/at/all", "--nats", "nats://127.0.0.1:1"]) == 2
    assert "arena_dir" in capsys.readouterr().err
