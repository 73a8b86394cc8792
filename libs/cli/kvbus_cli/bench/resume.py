"""`kvbus bench resume`: time to first token (TTFT) of an agent's next turn after a tool call during which others needed the memory.

Starts the whole system. A session asks with a prompt of --tokens tokens, waits for --idle-s seconds (the tool call), and asks again
with the answer and a result. Meanwhile other prompts fill G1 (room for --g1-prompts of them), so that its blocks have to go:

    never left G1      nobody else asked
    prefetched         its first request said when the next one comes: the blocks are back before that
    prefetched, G3     the same, from the disk: G2 has room for less than what was asked meanwhile, too
    from G2            they come up from the memory of the host when the request is there
    from G3            from its disk
    recomputed         there is no kvbm

The mock engine takes its time as published for a B200 (as in `kvbus bench prefix-stability`); the torch engine computes, so name a
small --tokens, and an --idle-s of which three quarters are enough for four such prompts. One session after the other; the figures
are medians of --repetitions. Exit status 1 when a prefetched session takes more than 1.1 times as long as one that never left G1,
or one that comes from a tier is recomputed.

Fields of the JSON file:
    kvbus_version, python, cores, engine, tokens, idle_s, repetitions, block_bytes
    max_ratio, within       the limit, and whether it is kept
    figures[]               name
        ttft_ms             median of samples_ms
        ratio               ttft_ms / that of a session that never left G1
        input_tokens, cached_tokens     of the last request; as in the usage of its answer
"""

import argparse
import asyncio
import os
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from kvbus_cli.bench import agent_model
from kvbus_cli.bench.agent_client import Answer, AnswerFailed, Client
from kvbus_cli.bench.agent_session import prose
from kvbus_cli.bench.prefix_stability import FIXED_S, PREFILL_TOKENS_PER_S, PUBLISHED_TOKENS
from kvbus_cli.bench.starting import run_with_services, start_in_order
from kvbus_cli.model_command import DEFAULT_MODEL, prepared_folder, prepared_model
from kvbus_cli.up.embedded_nats import start_nats
from kvbus_cli.up.plan import STOP_ORDER, UpOptions, plan
from kvbus_cli.up.ports import free_port_picker
from kvbus_cli.up.processes import ProcessSet
from kvbus_runtime.arguments import ArgumentParser
from kvbus_runtime.nats_server import NatsServerNotFound
from kvbus_tokenizers import TokenizerError

MAX_RATIO = 1.1
BASE = "never left G1"
BLOCK_SIZE = 16
MOCK_BLOCK_BYTES = 4096
TORCH_BLOCK_BYTES = 2 * 30 * 3 * 64 * BLOCK_SIZE * 4
"""Of the small model on a CPU: K and V, layers, heads, width, tokens, float32."""
OTHERS = 4
"""Prompts of the same length that others ask with while a session is idle."""
LEAD = 0.25
"""Part of the time for which a session waits in which it is prefetched."""
ANSWER_WORDS, RESULT_WORDS = 60, 150
TIERS = ("from G2", "from G3")
MODEL = "agent-model"


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """``system``: which of `SYSTEMS` it runs on; ``alone``: nobody else asks; ``prefetch``: the next request is announced."""

    system: str
    alone: bool = False
    prefetch: bool = False


SYSTEMS = ("large G2", "small G2", "no kvbm")
ARMS: Mapping[str, Arm] = {
    BASE: Arm(system="large G2", alone=True),
    "prefetched": Arm(system="large G2", prefetch=True),
    "from G2": Arm(system="large G2"),
    "prefetched, G3": Arm(system="small G2", prefetch=True),
    "from G3": Arm(system="small G2"),
    "recomputed": Arm(system="no kvbm"),
}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured."""

    engine: str
    tokens: int
    idle_s: float
    repetitions: int
    g1_prompts: float
    arms: tuple[str, ...]

    @property
    def block_bytes(self) -> int:
        return MOCK_BLOCK_BYTES if self.engine == "mock" else TORCH_BLOCK_BYTES

    def blocks(self, prompts: float) -> int:
        return int(prompts * self.tokens / BLOCK_SIZE) + 64


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    ttft_ms: float
    ratio: float
    input_tokens: int
    cached_tokens: int
    samples_ms: tuple[float, ...]


class ResumeFigures(msgspec.Struct, frozen=True, kw_only=True):
    kvbus_version: str
    python: str
    cores: int
    engine: str
    tokens: int
    idle_s: float
    repetitions: int
    block_bytes: int
    max_ratio: float
    within: bool
    figures: tuple[Figure, ...]


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="kvbus bench resume",
        description="Measure the first token of a session that was idle under memory pressure.",
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures there")
    parser.add_argument("--engine", choices=("mock", "torch"), default="mock", help="(mock)")
    parser.add_argument("--tokens", type=int, default=0, help=f"length of a prompt ({PUBLISHED_TOKENS}; torch: 1500)")
    parser.add_argument("--idle-s", type=float, default=30.0, help="how long a session waits (30)")
    parser.add_argument("--repetitions", type=int, default=4, help="sessions of each kind (4)")
    parser.add_argument("--g1-prompts", type=float, default=1.5, help="so many prompts fit into G1 (1.5)")
    parser.add_argument("--only", nargs="+", choices=tuple(ARMS), default=list(ARMS), metavar="NAME", help="(all)")
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    tokens = arguments.tokens or (PUBLISHED_TOKENS if arguments.engine == "mock" else 1500)
    if tokens < 500 or arguments.repetitions < 1 or arguments.idle_s <= 0 or arguments.g1_prompts < 1.1:
        print("kvbus bench resume: --tokens from 500, --g1-prompts from 1.1, the others above 0", file=sys.stderr)
        return 2
    chosen = Plan(
        engine=arguments.engine,
        tokens=tokens,
        idle_s=arguments.idle_s,
        repetitions=arguments.repetitions,
        g1_prompts=arguments.g1_prompts,
        arms=tuple(name for name in ARMS if name in arguments.only or name == BASE),
    )
    try:
        with tempfile.TemporaryDirectory(prefix="kvbus-bench-") as folder:
            figures = measure(Path(folder), chosen)
    except (ChildProcessError, NatsServerNotFound, TimeoutError, AnswerFailed, TokenizerError, OSError) as error:
        print(f"kvbus bench resume: {error}", file=sys.stderr)
        return 1
    _print(figures)
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")
    return 0 if figures.within else 1


def measure(state_dir: Path, chosen: Plan) -> ResumeFigures:
    """Raise ChildProcessError or TimeoutError when a service does not get ready, AnswerFailed when one answers badly."""
    if chosen.engine == "torch":
        model = prepared_model(DEFAULT_MODEL)
    else:
        model = str(agent_model.write(state_dir / MODEL, prepared_folder(DEFAULT_MODEL)))
    answers: dict[str, list[Answer]] = {}
    for number, system in enumerate(SYSTEMS):
        arms = {name: ARMS[name] for name in chosen.arms if ARMS[name].system == system}
        if arms:
            folder = state_dir / str(number)
            (folder / "logs").mkdir(parents=True)
            answers |= run_with_services(_on_system(folder, system, model, chosen, arms))
    figures = _figures({name: answers[name] for name in chosen.arms})
    return ResumeFigures(
        kvbus_version=version("kvbus"),
        python=platform.python_version(),
        cores=os.cpu_count() or 1,
        engine=chosen.engine,
        tokens=chosen.tokens,
        idle_s=chosen.idle_s,
        repetitions=chosen.repetitions,
        block_bytes=chosen.block_bytes,
        max_ratio=MAX_RATIO,
        within=_is_within(figures, chosen.tokens),
        figures=figures,
    )


async def _on_system(
    folder: Path, system: str, model: str, chosen: Plan, arms: Mapping[str, Arm]
) -> dict[str, list[Answer]]:
    processes = ProcessSet(folder / "logs", lambda child: None)
    stop = threading.Event()
    free_port = free_port_picker(random.Random())
    port = free_port()
    options = UpOptions(
        engine=chosen.engine,
        model=model,
        served_model_name=MODEL,
        workers=1,
        http_port=port,
        drain_timeout_s=2.0,
        overrides=_overrides(system, folder, chosen),
    )
    try:
        _, nats_url = await start_nats(processes, folder)
        specs = plan(options, nats_url=nats_url, python=sys.executable, free_port=free_port)
        await start_in_order(processes, [spec for spec in specs if spec.group != "kvbm" or system != "no kvbm"])
        bench = _Bench(Client(f"http://127.0.0.1:{port}", MODEL), chosen, stop)
        return await asyncio.to_thread(bench.run, arms)
    finally:
        stop.set()
        await processes.stop(STOP_ORDER, grace_s=10.0)


def _overrides(system: str, folder: Path, chosen: Plan) -> tuple[tuple[str, str, str], ...]:
    # What was asked since a session began, twice: of what went before nobody needs anything.
    recent = 2 * (OTHERS + 2)
    g2_prompts = recent if system == "large G2" else chosen.g1_prompts
    slack = 1 << 20
    kvbm = {"g2_bytes": str(chosen.blocks(g2_prompts) * chosen.block_bytes + slack), "pool_share": "1"}
    if system == "small G2":
        g3_bytes = chosen.blocks(recent) * chosen.block_bytes + (64 << 20)
        kvbm |= {"g3_dir": str(folder / "g3"), "g3_bytes": str(g3_bytes), "g3_segment_bytes": str(32 << 20)}
    worker = {"kv_blocks": str(chosen.blocks(chosen.g1_prompts))}
    if chosen.engine == "mock":
        worker |= {
            "mock_prefill_tokens_per_s": str(PREFILL_TOKENS_PER_S),
            "mock_step_base_s": str(FIXED_S),
            "mock_attention_s_per_pair": "0",
            "max_batched_tokens": "131072",  # a prompt is one step
            "mock_block_bytes": str(MOCK_BLOCK_BYTES),
            "tool_call_parser": agent_model.TOOL_CALL_PARSER,
            "reasoning_parser": agent_model.REASONING_PARSER,
        }
    frontend = {"prefetch_lead_s": str(chosen.idle_s * LEAD)}
    settings = {"kvbm": kvbm, "worker": worker, "frontend": frontend}
    return tuple((service, name, value) for service, values in settings.items() for name, value in values.items())


class _Bench:
    """Asks, one session after the other. ``stop``: at once, when it is set."""

    def __init__(self, client: Client, chosen: Plan, stop: threading.Event) -> None:
        self._client = client
        self._chosen = chosen
        self._stop = stop
        self._text = self._text_of(chosen.tokens)
        self._number = 0

    def run(self, arms: Mapping[str, Arm]) -> dict[str, list[Answer]]:
        """Raise AnswerFailed."""
        self._client.ask(self._opening(), self._says(), max_tokens=16)  # what is only done once
        order = random.Random(6)
        answers: dict[str, list[Answer]] = {name: [] for name in arms}
        for _ in range(self._chosen.repetitions):
            for name in order.sample(list(arms), len(arms)):
                answers[name].append(self._session(arms[name]))
        return answers

    def _session(self, arm: Arm) -> Answer:
        """The answer to its second turn."""
        opening = self._opening()
        name = f"session {self._number}"
        announced = {"prefetch": {"after_s": self._chosen.idle_s}} if arm.prefetch else {}
        first = self._client.ask(opening, self._says(), max_tokens=16, session={"id": name}, **announced)
        waits_from = time.monotonic()
        if not arm.alone:
            for number in range(OTHERS):  # over the first half of the time
                self._sleep_until(waits_from + self._chosen.idle_s / 2 * (number + 1) / OTHERS)
                self._client.ask(self._opening(), self._says(), max_tokens=1)
            took_s = time.monotonic() - waits_from
            if took_s > self._chosen.idle_s * (1 - LEAD):
                raise AnswerFailed(
                    f"the others took {took_s:.0f} s of --idle-s: give them more time, or fewer --tokens"
                )
        self._sleep_until(waits_from + self._chosen.idle_s)
        result = f"Result {self._number}: {prose(random.Random(self._number), RESULT_WORDS)}"
        messages = [
            *opening["messages"],
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": result},
        ]
        return self._client.ask({**opening, "messages": messages}, self._says(), max_tokens=16, session={"id": name})

    def _sleep_until(self, when: float) -> None:
        """Raise AnswerFailed when it is stopped."""
        if self._stop.wait(max(when - time.monotonic(), 0.0)):
            raise AnswerFailed("it was stopped")

    def _opening(self) -> dict[str, Any]:
        """Of a new session, which shares nothing with others."""
        self._number += 1
        content = f"Project {self._number} of {random.Random(self._number).random()}.\n{self._text}"
        return {"system": f"You work on project {self._number}.", "messages": [{"role": "user", "content": content}]}

    def _says(self) -> str | None:
        return prose(random.Random(self._number), ANSWER_WORDS) if self._chosen.engine == "mock" else None

    def _text_of(self, tokens: int) -> str:
        rng = random.Random(52)
        sample = prose(rng, 1000)
        empty = self._client.count({"messages": [{"role": "user", "content": "?"}]})
        words_per_token = 1000 / (self._client.count({"messages": [{"role": "user", "content": sample}]}) - empty)
        return prose(rng, int(tokens * words_per_token))


def _figures(answers: Mapping[str, Sequence[Answer]]) -> tuple[Figure, ...]:
    medians = {name: statistics.median(answer.first_token_s for answer in found) for name, found in answers.items()}
    return tuple(
        Figure(
            name=name,
            ttft_ms=round(medians[name] * 1000, 2),
            ratio=round(medians[name] / medians[BASE], 4),
            input_tokens=found[-1].input_tokens,
            cached_tokens=found[-1].cached_tokens,
            samples_ms=tuple(round(answer.first_token_s * 1000, 2) for answer in found),
        )
        for name, found in answers.items()
    )


def _is_within(figures: Sequence[Figure], tokens: int) -> bool:
    prefetched = all(figure.ratio <= MAX_RATIO for figure in figures if ARMS[figure.name].prefetch)
    return prefetched and all(figure.cached_tokens > 0.9 * tokens for figure in figures if figure.name in TIERS)


def _print(figures: ResumeFigures) -> None:
    print(f"{'the next turn of a session':<28}{'TTFT ms':>9}{'ratio':>7}{'tokens':>8}{'cached':>8}")
    for figure in figures.figures:
        print(
            f"  {figure.name:<26}{figure.ttft_ms:>9.1f}{figure.ratio:>7.2f}{figure.input_tokens:>8}{figure.cached_tokens:>8}"
        )
    verdict = "within" if figures.within else "NOT WITHIN"
    print(
        f"medians of {figures.repetitions}, ratios to a session that never left G1; prefetched ones are {verdict} "
        f"{figures.max_ratio:g} ({figures.engine}, idle for {figures.idle_s:g} s, {figures.cores} cores)"
    )
