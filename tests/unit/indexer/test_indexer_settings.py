import pytest

from kvbus_indexer.settings import IndexerSettings
from kvbus_runtime.settings import parse_settings


def test_settings_become_the_limits_of_the_core() -> None:
    settings = parse_settings(
        IndexerSettings,
        service="indexer",
        description="",
        argv=["--max-entries", "7"],
        env={"KVBUS_INDEXER_LAG_S": "0.5"},
    )
    assert settings.limits.max_entries == 7
    assert settings.limits.lag_s == 0.5


@pytest.mark.parametrize(
    "flags",
    [["--max-entries", "0"], ["--refill-ratio", "1.5"], ["--repair-backoff-s", "2", "--repair-backoff-max-s", "1"]],
)
def test_limits_that_make_no_sense_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_settings(IndexerSettings, service="indexer", description="", argv=flags, env={})
    assert end.value.code == 2
