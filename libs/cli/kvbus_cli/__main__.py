"""Entry point: picks the verb and imports only what that verb needs."""

import importlib
import os
import select
import sys
from collections.abc import Sequence

import msgspec

from kvbus_cli.services import SERVICES

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


UNREAD = 141
"""Exit status when whoever read the output has left, as `| head` does; shells have it so for a program that SIGPIPE ends."""


class Verb(msgspec.Struct, frozen=True):
    """``module`` has ``main(argv) -> int``."""

    module: str
    help: str


VERBS = {
    "up": Verb("kvbus_cli.up.command", "start the whole system on this machine, bus included"),
    "nats": Verb("kvbus_cli.nats_command", "run the embedded nats-server in the foreground"),
    "model": Verb("kvbus_cli.model_command", "list and prepare the models that come with kvbus"),
    "connect": Verb(
        "kvbus_cli.connect.command", "configurations of agents (Claude Code, Codex, ..) for a running server"
    ),
    "chat": Verb("kvbus_cli.chat.command", "chat in the terminal; shows TTFT, tokens/s and cached tokens per turn"),
    "prompt": Verb("kvbus_cli.prompt.command", "the prompt of a request, and where the prompts of two requests part"),
    "events": Verb("kvbus_cli.events.command", "follow the KV event stream"),
    "router explain": Verb("kvbus_cli.router.explain", "where a request went and why, or where a prompt would go"),
    "router limits": Verb(
        "kvbus_cli.router.limits", "limits of workers at the routers, and changing them while they run"
    ),
    "worker roles": Verb("kvbus_cli.worker.roles", "which workers compute prompts for others"),
    "worker set-role": Verb("kvbus_cli.worker.set_role", "another mix of prefill and decode workers while they run"),
    "index query": Verb("kvbus_cli.index.query", "who holds how much of a prompt, per tier"),
    "index top": Verb("kvbus_cli.index.top", "the prefixes that are read most, sharing, and reads per write"),
    "index digest": Verb("kvbus_cli.index.digest", "whether the indexers know the same"),
    "kv ls": Verb("kvbus_cli.kv.ls", "what lies in which tier of which kvbm, and how the tiers have done"),
    "kv inspect": Verb("kvbus_cli.kv.inspect", "how much of a prompt lies in which tier, and for how long"),
    "kv verify": Verb("kvbus_cli.kv.verify", "read the blocks of the tiers and drop what does not hold"),
    "kv evict": Verb("kvbus_cli.kv.evict", "free blocks in one tier"),
    "kv warm": Verb("kvbus_cli.kv.warm", "bring the blocks of a prompt up into host memory"),
    "doctor": Verb("kvbus_cli.doctor.command", "what is there, what is missing, and what does not fit together"),
    "replay": Verb("kvbus_replay.command", "what routing policies make of a trace, on a simulated cluster"),
    "trace synth": Verb("kvbus_replay.synth_command", "make up a trace of agent sessions, seeded"),
    "trace record": Verb("kvbus_replay.record_command", "write a trace of live traffic: block hashes only, no text"),
    "bench": Verb("kvbus_cli.bench.command", "measurements; without a name it lists them"),
    "check-config": Verb("kvbus_cli.service_verbs", "print the effective settings of a service and start nothing"),
    "version": Verb("kvbus_cli.version_command", "print versions"),
}


def overview() -> str:
    width = max(map(len, [*SERVICES, *VERBS])) + 2
    lines = ["usage: kvbus VERB ...", "", "services (each also alone on its own host, with --nats URL):"]
    lines += [f"  {name:<{width}}{text}" for name, text in SERVICES.items()]
    lines += ["", "tools:"]
    lines += [f"  {name:<{width}}{verb.help}" for name, verb in VERBS.items()]
    lines += ["", "kvbus VERB --help tells the rest."]
    return "\n".join(lines)


def of_group(group: str) -> str:
    """The verbs that begin with this word; empty when none does."""
    verbs = {name: verb for name, verb in VERBS.items() if name.startswith(f"{group} ")}
    width = max(map(len, verbs), default=0) + 2
    lines = [f"  kvbus {name:<{width}}{verb.help}" for name, verb in verbs.items()]
    return "\n".join([f"usage: kvbus {group} VERB ...", "", *lines]) if verbs else ""


def main(argv: Sequence[str] | None = None) -> int:
    try:
        try:
            return _run_verb(argv)
        finally:
            print(end="", flush=True)  # when the interpreter ends it would be too late to catch anything
    except BrokenPipeError:
        unread = [stream for stream in (sys.stdout, sys.stderr) if _nobody_reads(stream.fileno())]
        if not unread:  # it was another pipe
            raise
        for stream in unread:  # what is buffered must not fail again when the interpreter ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return UNREAD


def _nobody_reads(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run_verb(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if arguments else 2
    verb, rest = arguments[0], arguments[1:]
    if verb == "--version":
        verb = "version"
    if rest and f"{verb} {rest[0]}" in VERBS:
        verb, rest = f"{verb} {rest[0]}", rest[1:]
    if verb in SERVICES:
        from kvbus_cli.service_verbs import run_service_cli

        return run_service_cli(verb, rest)
    if verb not in VERBS:
        return _no_such_verb(verb, rest)
    try:
        status: int = importlib.import_module(VERBS[verb].module).main(rest)
    except KeyboardInterrupt:  # of verbs and moments that have no ending of their own, such as a download
        return INTERRUPTED
    return status


def _no_such_verb(verb: str, rest: Sequence[str]) -> int:
    group = of_group(verb)
    if group and rest and rest[0] in ("-h", "--help"):
        print(group)
        return 0
    if group and (not rest or rest[0].startswith("-")):
        print(group, file=sys.stderr)
        return 2
    name = f"{verb} {rest[0]}" if group else verb
    print(f"kvbus: there is no verb {name!r}\n\n{group or overview()}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
