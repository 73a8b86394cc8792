"""`kvbus router limits`: which limits of workers are in force at the routers, and changing them while they run."""

from collections.abc import Sequence
from typing import Annotated

from kvbus_cli.asking import NotAnswered, Reply, ask_each, ask_one, instances, run
from kvbus_cli.router.tables import limits_lines, limits_table
from kvbus_cli.tables import print_table
from kvbus_cli.tool import FAILED, ToolSettings, failed, print_json, tool_settings
from kvbus_runtime.bus import Bus
from kvbus_runtime.settings import Flag
from kvbus_wire.router import GetLimits, RouterLimits, SetLimits, WorkerLimits

DISAGREE = 3


class LimitSettings(ToolSettings, frozen=True, kw_only=True):
    """Without a change: show."""

    max_requests_per_worker: Annotated[int | None, Flag("requests placed on a worker (0: by its slots)")] = None
    worker_limit_factor: Annotated[float | None, Flag("the same as a multiple of its max_num_seqs")] = None
    busy_used_blocks_share: Annotated[
        float | None, Flag("a worker whose requests use this part of its blocks gets nothing new (0: off)")
    ] = None
    busy_waiting_tokens: Annotated[
        int | None, Flag("a worker with so many tokens still to compute gets nothing new (0: off)")
    ] = None
    cordon: Annotated[tuple[str, ...], Flag("workers that get nothing new from now on")] = ()
    uncordon: Annotated[tuple[str, ...], Flag("workers that do again")] = ()
    reset: Annotated[tuple[str, ...], Flag("limits that are as the routers' settings say again, or all")] = ()

    @property
    def change(self) -> SetLimits | None:
        """None when nothing is to change."""
        names = WorkerLimits.__struct_fields__
        limits = WorkerLimits(**{name: getattr(self, name) for name in names if name != "cordoned"})
        reset = tuple(name.replace("-", "_") for name in self.reset)
        asked = SetLimits(
            limits=limits, reset=names if reset == ("all",) else reset, cordon=self.cordon, uncordon=self.uncordon
        )
        return None if asked == SetLimits() else asked


def main(argv: Sequence[str]) -> int:
    settings = tool_settings(
        LimitSettings,
        "router limits",
        "Show the limits of workers that are in force at each router, or change them for all routers. The exit status is "
        f"{DISAGREE} when the routers differ.",
        argv,
    )
    change = settings.change

    async def ask(bus: Bus) -> list[Reply]:
        if settings.cordon:
            known = {record.instance_id for record in await instances(bus, "worker")}
            for worker_id in sorted(set(settings.cordon) - known):
                failed("router limits", f"there is no worker {worker_id} now; should it come, it is cordoned")
        if change is not None:
            changed: RouterLimits = await ask_one(bus, bus.subjects.routers_control, change, RouterLimits)
            return [Reply(changed.router_id, changed)]
        return await ask_each(bus, "router", bus.subjects.router_control, GetLimits(), RouterLimits)

    try:
        replies = run(settings, "router", ask)
    except NotAnswered as failure:
        return failed("router limits", failure)
    told = [reply.message for reply in replies if isinstance(reply.message, RouterLimits)]
    if settings.json:
        print_json(told)
    else:
        print_table(limits_table(told), *limits_lines(told))
    for reply in replies:
        if reply.problem:
            failed("router limits", f"{reply.instance_id}: {reply.problem}")
    return status(replies)


def status(replies: Sequence[Reply]) -> int:
    """``DISAGREE`` when routers have different limits in force; a moment after a change that is normal."""
    if any(reply.problem for reply in replies):
        return FAILED
    return DISAGREE if len({reply.message.in_force for reply in replies}) > 1 else 0
