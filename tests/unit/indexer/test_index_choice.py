"""Which index is used, and that it is large enough for all that the limits allow."""

import asyncio
import random
from typing import Any

import pytest

from kvbus_blocks.flash import FlashUnavailable
from kvbus_blocks.plain_index import PlainIndex
from kvbus_indexer.adapters import indexes
from kvbus_indexer.adapters.indexes import MakeIndex, index_maker
from kvbus_indexer.core.limits import Limits
from kvbus_indexer.core.predictions import Predictions
from kvbus_runtime.settings import BadSettings


class Log:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, event: str, **fields: Any) -> None:
        self.warnings.append(f"{event}: {fields['reason']}")


def choose(kind: str, limits: Limits, log: Log) -> MakeIndex:
    return asyncio.run(index_maker(kind, limits, log))


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(max_blocks: int) -> MakeIndex:
        raise FlashUnavailable("no numba")

    monkeypatch.setattr(indexes, "flash_maker", refuse)


@pytest.mark.usefixtures("without_numba")
def test_where_the_compiled_index_cannot_be_had_the_plain_one_serves_and_says_so() -> None:
    log = Log()
    assert choose("auto", Limits(), log) is PlainIndex
    assert log.warnings == ["compiled_index_unavailable: no numba"]


@pytest.mark.usefixtures("without_numba")
def test_who_asks_for_the_compiled_index_gets_no_other() -> None:
    with pytest.raises(BadSettings, match="no numba"):
        choose("flash", Limits(), Log())


def test_the_index_has_room_for_predictions_however_few_entries_are_allowed() -> None:
    limits = Limits(max_entries=10)
    predictions = Predictions(limits, choose("flash", limits, Log()))
    for number in range(2):
        keys = [random.Random(number).getrandbits(64) for _ in range(limits.max_predicted_keys)]
        predictions.decided(f"r{number}", "w", "m", keys, 0.0, has_events=True, capacity=len(keys))
        assert predictions.match("m", keys, 0.0) == {"w": len(keys)}
    assert predictions.keys == limits.max_predicted_keys
