"""`kvbus worker roles`: which workers compute prompts for others, which have them computed, and how."""

from collections.abc import Sequence

import msgspec
from rich.table import Table

from kvbus_cli.asking import NotAnswered, instances, run
from kvbus_cli.tables import print_table, right_aligned
from kvbus_cli.tool import ToolSettings, failed, print_json, tool_settings
from kvbus_wire.records import InstanceRecord


class RoleSettings(ToolSettings, frozen=True, kw_only=True):
    pass


class RoleRow(msgspec.Struct, frozen=True):
    """``transfers``: ways in which it moves blocks. ``layout``: workers with the same one can use each other's blocks."""

    worker_id: str
    model: str
    role: str
    transfers: tuple[str, ...]
    layout: str
    block_size: int
    host_id: str
    draining: bool


def main(argv: Sequence[str]) -> int:
    settings = tool_settings(
        RoleSettings,
        "worker roles",
        "List the workers by model, with their roles: both (computes its own prompts), prefill (computes those of others), decode "
        "(has them computed).",
        argv,
    )
    try:
        records = run(settings, "worker", lambda bus: instances(bus, "worker"))
    except NotAnswered as failure:
        return failed("worker roles", failure)
    rows = role_rows(records)
    if settings.json:
        print_json(rows)
    else:
        print_table(role_table(rows))
    return 0


def role_rows(records: Sequence[InstanceRecord]) -> list[RoleRow]:
    rows = [
        RoleRow(
            record.instance_id,
            record.worker.model.name,
            record.worker.role,
            record.worker.transfers,
            record.worker.model.kv_layout,
            record.worker.model.block_size,
            record.host_id,
            record.draining,
        )
        for record in records
        if record.worker is not None
    ]
    return sorted(rows, key=lambda row: (row.model, row.role, row.worker_id))


def role_table(rows: Sequence[RoleRow]) -> Table:
    table = right_aligned("worker", "model", "role", "transfers", "block", "layout", "host", "", first=8)
    for row in rows:
        table.add_row(
            row.worker_id,
            row.model,
            row.role,
            ", ".join(row.transfers) or "none",
            str(row.block_size),
            row.layout,
            row.host_id,
            "draining" if row.draining else "",
        )
    return table
