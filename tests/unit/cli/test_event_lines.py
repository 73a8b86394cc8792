"""KV events as lines, selected and counted."""

import json

import pytest

from kvbus_cli.events.lines import Rates, Selection, as_json, as_text, rates_text, selected
from kvbus_wire.kv_events import Cleared, KvEvents, Removed, Stored

KEY_A, KEY_B, KEY_C = (bytes([n]) * 16 for n in (0xAA, 0xBB, 0xCC))
BATCH = KvEvents(
    instance_id="worker-0",
    incarnation=9,
    model="m",
    first_seq=5,
    events=(Stored(parent=KEY_A, keys=KEY_B + KEY_C), Removed(keys=KEY_A), Cleared()),
    at_ms=1_000,
)


def test_events_of_a_batch_are_numbered_from_its_first_one() -> None:
    assert [(e.seq, e.kind, len(e.keys)) for e in selected(BATCH, Selection())] == [
        (5, "stored", 2),
        (6, "removed", 1),
        (7, "cleared", 0),
    ]


@pytest.mark.parametrize(
    ("selection", "count"),
    [
        (Selection(kind="removed"), 1),
        (Selection(worker="worker-0", model="m", tier="g1"), 3),
        (Selection(worker="worker-1"), 0),
        (Selection(model="other"), 0),
        (Selection(tier="g2"), 0),
    ],
)
def test_a_selection_takes_what_it_names(selection: Selection, count: int) -> None:
    assert len(list(selected(BATCH, selection))) == count


def test_json_lines_hold_all_keys() -> None:
    stored = json.loads(as_json(next(selected(BATCH, Selection()))))
    assert stored["keys"] == [KEY_B.hex(), KEY_C.hex()]
    assert stored["parent"] == KEY_A.hex()


def test_text_lines_are_short() -> None:
    stored, removed, cleared = (as_text(e) for e in selected(BATCH, Selection()))
    assert "2 blocks bbbbbbbbbbbb..cccccccccccc after aaaaaaaaaaaa" in stored
    assert "1 blocks aaaaaaaaaaaa m" in removed
    assert cleared.endswith(" m")


def test_rates_count_events_and_blocks_and_begin_anew() -> None:
    rates = Rates()
    for event in selected(BATCH, Selection(kind="stored")):
        rates.add(event)
    rows = rates.take(2.0)
    assert rows == [
        {"instance_id": "worker-0", "tier": "g1", "kind": "stored", "events_per_s": 0.5, "blocks_per_s": 1.0}
    ]
    assert "worker-0" in rates_text(rows)
    assert rates.take(1.0) == []


def test_what_was_read_from_the_past_is_counted_without_a_rate() -> None:
    rates = Rates()
    for event in selected(BATCH, Selection(kind="stored")):
        rates.add(event)
    (row,) = rates.take_counts()
    assert (row["events"], row["blocks"]) == (1, 2)
    assert rates_text([row]).split()[-4:] == ["1", "events", "2", "blocks"]
    assert rates.take_counts() == []
