"""`kvbus worker set-role WORKER.. ROLE`: another mix of prefill and decode workers while they run."""

from collections.abc import Sequence

from kvbus_cli.asking import NotAnswered, Reply, ask_one, instances, run
from kvbus_cli.tool import BAD_USAGE, FAILED, ToolSettings, failed, print_json, tool_settings
from kvbus_runtime.bus import Bus
from kvbus_runtime.errors import RequestFailed
from kvbus_wire.worker import Done, SetRole

ROLES = ("both", "prefill", "decode")


class SetRoleSettings(ToolSettings, frozen=True, kw_only=True):
    pass


def main(argv: Sequence[str]) -> int:
    words, flags = leading_words(argv)
    if not words and not {"-h", "--help"} & set(flags):
        return failed("worker set-role", "the workers and their role come first, options behind them", BAD_USAGE)
    settings = tool_settings(
        SetRoleSettings,
        "worker set-role WORKER .. ROLE",
        f"Give workers another role from now on: {', '.join(ROLES)}. What runs goes on to its end. The exit status is {FAILED} "
        "when a worker did not take it.",
        flags,
    )
    if len(words) < 2:
        return failed("worker set-role", f"give one worker or more, and then one of {', '.join(ROLES)}", BAD_USAGE)
    if words[-1] not in ROLES:
        return failed("worker set-role", f"{words[-1]!r} is no role; there are {', '.join(ROLES)}", BAD_USAGE)
    *workers, role = words

    async def ask(bus: Bus) -> list[Reply]:
        replies = []
        there = [record.instance_id for record in await instances(bus, "worker") if record.worker]
        for worker_id in workers:
            if worker_id not in there:
                replies.append(Reply(worker_id, problem=f"no such worker; there are: {', '.join(there) or 'none'}"))
                continue
            try:
                await ask_one(bus, bus.subjects.control(worker_id), SetRole(role=role), Done)
                replies.append(Reply(worker_id, role))
            except RequestFailed as failure:
                replies.append(Reply(worker_id, problem=str(failure)))
        return replies

    try:
        replies = run(settings, "worker", ask)
    except NotAnswered as failure:
        return failed("worker set-role", failure)
    if settings.json:
        print_json({reply.instance_id: reply.message for reply in replies if not reply.problem})
    else:
        for reply in replies:
            if not reply.problem:
                print(f"{reply.instance_id}: {role}")
    for reply in replies:
        if reply.problem:
            failed("worker set-role", f"{reply.instance_id}: {reply.problem}")
    return FAILED if any(reply.problem for reply in replies) else 0


def leading_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those before the first flag, and the rest."""
    count = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    return list(argv[:count]), list(argv[count:])
