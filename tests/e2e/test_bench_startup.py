"""The services are light: the figures of `kvbus bench startup`, and the limits they must keep."""

import json
from pathlib import Path

from kvbus_testkit.up import run_kvbus

FIELDS = {
    "kvbus_version", "python", "engine", "workers", "cores", "services", "idle_s", "idle_cpu_percent", "system_ready_s",
}  # fmt: skip
SERVICE_FIELDS = {"name", "service", "ready_s", "rss_mb", "cpu_percent"}
RSS_LIMIT_MB = 150


def test_every_service_is_measured_and_stays_below_its_memory_limit(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "startup.json"
    result = run_kvbus(
        "bench", "startup", "--json", str(file), "--idle-s", "2", "--model", str(tiny_model), timeout_s=100
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(file.read_text())
    assert set(figures) == FIELDS
    assert [service["name"] for service in figures["services"]] == [
        "nats", "indexer", "kvbm", "worker-0", "worker-1", "router", "frontend",
    ]  # fmt: skip
    for service in figures["services"]:
        assert set(service) == SERVICE_FIELDS
        assert 0 < service["rss_mb"] < RSS_LIMIT_MB, service
        assert service["ready_s"] > 0
