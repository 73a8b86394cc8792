"""`kvbus worker roles` and `kvbus worker set-role`, without a bus."""

import msgspec
import pytest
from rich.console import Console

from kvbus_cli.__main__ import main
from kvbus_cli.tool import BAD_USAGE
from kvbus_cli.worker.roles import role_rows, role_table
from kvbus_cli.worker.set_role import leading_words
from kvbus_testkit.routing import kvbm_record, worker_record


def test_workers_are_listed_by_model_and_role() -> None:
    records = [
        worker_record("w2", role="prefill", transfers=("shm", "tcp")),
        worker_record("w3", role="decode", draining=True),
        kvbm_record(),
        worker_record("w1", role="prefill"),
    ]
    rows = role_rows(records)
    assert [(row.worker_id, row.role) for row in rows] == [("w3", "decode"), ("w1", "prefill"), ("w2", "prefill")]
    console = Console(width=200)
    with console.capture() as capture:
        console.print(role_table(rows))
    assert "shm, tcp" in capture.get()
    assert "draining" in capture.get()
    assert msgspec.json.encode(rows)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "come first"),
        (["w1"], "one of both, prefill, decode"),
        (["prefill"], "one of both, prefill, decode"),
        (["w1", "cook"], "'cook' is no role"),
        (["--json", "w1", "prefill"], "come first"),
    ],
)
def test_a_role_needs_workers_and_its_name(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["worker", "set-role", *argv])
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == BAD_USAGE
    assert named in capsys.readouterr().err


def test_words_come_before_flags() -> None:
    assert leading_words(["a", "b", "prefill", "--json"]) == (["a", "b", "prefill"], ["--json"])
