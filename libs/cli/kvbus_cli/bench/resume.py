"""`kvbus bench resume`: what the next turn of a session costs that has waited for a tool while others needed its memory.

The whole system (mock engine, one worker, kvbm) with room in G1 for one and a half such sessions. Each repetition has sessions of
its own, of --tokens tokens, in random order:

    stayed          nobody else asks while the tool runs: all blocks are still in G1
    prefetched      another session takes the memory; the request before has said `kvbus.prefetch {after_s}`
    from a tier     the same without a word: the next turn brings its blocks up itself
    recomputed      a session of the same length that nobody has seen

The engine's times are those of `kvbus bench prefix-stability`. The figures are medians of --repetitions.

Fields of the JSON file:
    kvbus_version, python, cores, tokenizer, repetitions, tokens, tool_s, block_bytes
    max_ratio, within       prefetched may take so many times as long as stayed, and whether it does
    figures[]               name
        ttft_ms             of the next turn
        ratio               to stayed
        input_tokens, cached_tokens
        samples_ms
"""

import argparse
import asyncio
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from kvbus_cli.bench import agent_model
from kvbus_cli.bench.agent_client import Answer, AnswerFailed, Client
from kvbus_cli.bench.agent_session import prose
from kvbus_cli.bench.prefix_stability import FIXED_S, MODEL, PREFILL_TOKENS_PER_S, PUBLISHED_TOKENS
from kvbus_cli.bench.starting import start_in_order
from kvbus_cli.model_command import DEFAULT_MODEL, prepared_folder
from kvbus_cli.up.embedded_nats import start_nats
from kvbus_cli.up.plan import STOP_ORDER, ProcessSpec, UpOptions, plan
from kvbus_cli.up.ports import free_port_picker
from kvbus_cli.up.processes import ProcessSet
from kvbus_runtime.nats_server import NatsServerNotFound
from kvbus_tokenizers import TokenizerError

MAX_RATIO = 1.10
BLOCK_SIZE = 16
G1_SESSIONS = 1.5
PRESSURE = 1.4
"""Length of what takes the memory, in sessions: nothing of the one that waits stays in G1."""
G2_SESSIONS = 12
PAUSE_S = 1.0
"""Before a request that counts: copies and events of the one before it are out of the way."""
SAID = "Let me look at that."


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
    tokenizer: str
    repetitions: int
    tokens: int
    tool_s: float
    block_bytes: int
    max_ratio: float
    within: bool
    figures: tuple[Figure, ...]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured."""

    tokens: int
    repetitions: int
    tool_s: float
    block_bytes: int


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvbus bench resume",
        description="Measure the next turn of a session that has waited for a tool while others needed its memory.",
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures there")
    parser.add_argument(
        "--tokens", type=int, default=PUBLISHED_TOKENS, help=f"length of a session ({PUBLISHED_TOKENS})"
    )
    parser.add_argument("--tool-s", type=float, default=30.0, help="how long the tool runs (30)")
    parser.add_argument("--repetitions", type=int, default=5, help="of each (5)")
    parser.add_argument("--block-bytes", type=int, default=16 << 10, help="size of a KV block (16384)")
    parser.add_argument(
        "--tokenizer",
        default=None,
        metavar="DIR",
        help=f"folder of a model whose tokenizer is used, or 'bytes'; default: {DEFAULT_MODEL} if it is prepared, else bytes",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.tokens < 2000 or arguments.repetitions < 1 or arguments.tool_s < 1 or arguments.block_bytes < 64:
        print(
            "kvbus bench resume: at least 2000 --tokens, 1 for --repetitions and --tool-s, 64 for --block-bytes",
            file=sys.stderr,
        )
        return 2
    given = arguments.tokenizer
    tokenizer = prepared_folder(DEFAULT_MODEL) if given is None else None if given == "bytes" else Path(given)
    wanted = Plan(
        tokens=arguments.tokens,
        repetitions=arguments.repetitions,
        tool_s=arguments.tool_s,
        block_bytes=arguments.block_bytes,
    )
    try:
        with tempfile.TemporaryDirectory(prefix="kvbus-bench-") as folder:
            figures = asyncio.run(measure(Path(folder), tokenizer, wanted))
    except (ChildProcessError, NatsServerNotFound, TimeoutError, AnswerFailed, TokenizerError, OSError) as error:
        print(f"kvbus bench resume: {error}", file=sys.stderr)
        return 1
    _print(figures)
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")
    return 0 if figures.within else 1


async def measure(state_dir: Path, tokenizer: Path | None, wanted: Plan) -> ResumeFigures:
    """Raise ChildProcessError or TimeoutError when a service does not get ready, AnswerFailed when one answers badly."""
    (state_dir / "logs").mkdir()
    model = agent_model.write(state_dir / MODEL, tokenizer)
    processes = ProcessSet(state_dir / "logs", lambda child: None)
    free_port = free_port_picker(random.Random())
    port = free_port()
    try:
        _, nats_url = await start_nats(processes, state_dir)
        await start_in_order(processes, _specs(str(model), wanted, port, nats_url, free_port))
        client = Client(f"http://127.0.0.1:{port}", MODEL)
        answers = await asyncio.to_thread(lambda: _Bench(client, wanted).run())
    finally:
        await processes.stop(STOP_ORDER, grace_s=10.0)
    figures = _figures(answers)
    return ResumeFigures(
        kvbus_version=version("kvbus"),
        python=platform.python_version(),
        cores=os.cpu_count() or 1,
        tokenizer=tokenizer.name if tokenizer is not None else "bytes",
        repetitions=wanted.repetitions,
        tokens=wanted.tokens,
        tool_s=wanted.tool_s,
        block_bytes=wanted.block_bytes,
        max_ratio=MAX_RATIO,
        within=next(figure.ratio for figure in figures if figure.name == "prefetched") <= MAX_RATIO,
        figures=figures,
    )


def _specs(model: str, wanted: Plan, port: int, nats_url: str, free_port: Callable[[], int]) -> Sequence[ProcessSpec]:
    blocks = int(wanted.tokens * G1_SESSIONS) // BLOCK_SIZE
    engine = {
        "mock_prefill_tokens_per_s": str(PREFILL_TOKENS_PER_S),
        "mock_step_base_s": str(FIXED_S),
        "mock_attention_s_per_pair": "0",
        "mock_block_bytes": str(wanted.block_bytes),
        "max_batched_tokens": str(2 * wanted.tokens),  # a prompt is one step
        "kv_blocks": str(blocks),
        "tool_call_parser": agent_model.TOOL_CALL_PARSER,
        "reasoning_parser": agent_model.REASONING_PARSER,
    }
    g2_bytes = G2_SESSIONS * (wanted.tokens // BLOCK_SIZE + 1) * (wanted.block_bytes + 4096)
    options = UpOptions(
        engine="mock",
        model=model,
        workers=1,
        http_port=port,
        drain_timeout_s=2.0,
        overrides=(
            *(("worker", name, value) for name, value in engine.items()),
            ("kvbm", "g2_bytes", str(g2_bytes)),
        ),
    )
    return plan(options, nats_url=nats_url, python=sys.executable, free_port=free_port)


class _Bench:
    """Asks, one request after the other."""

    def __init__(self, client: Client, wanted: Plan) -> None:
        self._client = client
        self._wanted = wanted
        self._number = 0
        self._words = self._words_of(wanted.tokens)
        self._arms: Mapping[str, Callable[[], Answer]] = {
            "stayed": self._stayed,
            "prefetched": lambda: self._under_pressure(prefetch=True),
            "from a tier": lambda: self._under_pressure(prefetch=False),
            "recomputed": lambda: self._next_turn(self._session()),
        }

    def run(self) -> dict[str, list[Answer]]:
        """Raise AnswerFailed. The first answers fill caches of text and do not count."""
        order = random.Random(6)
        self._stayed()
        answers: dict[str, list[Answer]] = {name: [] for name in self._arms}
        for _ in range(self._wanted.repetitions):
            for name in order.sample(list(self._arms), len(self._arms)):
                time.sleep(PAUSE_S)
                answers[name].append(self._arms[name]())
        return answers

    def _words_of(self, tokens: int) -> int:
        """So many words have about so many tokens."""
        sample = 2000
        found = self._client.count({"messages": [_user(prose(random.Random(0), sample))], "max_tokens": 1})
        return sample * tokens // found

    def _session(self, length: float = 1.0) -> tuple[str, list[dict[str, Any]]]:
        """An id, and a first request of this length."""
        self._number += 1
        text = f"Session {self._number}. " + prose(random.Random(self._number), int(self._words * length))
        return f"resume-{self._number}", [_user(text)]

    def _ask(self, session: tuple[str, list[dict[str, Any]]], **kvbus: Any) -> Answer:
        name, messages = session
        return self._client.ask({"messages": messages, "kvbus": {"session": {"id": name}, **kvbus}}, SAID)

    def _next_turn(self, session: tuple[str, list[dict[str, Any]]]) -> Answer:
        name, messages = session
        said = {"role": "assistant", "content": [{"type": "text", "text": SAID}]}
        return self._ask((name, [*messages, said, _user("This is what the tool has found: nothing.")]))

    def _stayed(self) -> Answer:
        session = self._session()
        self._ask(session)
        time.sleep(PAUSE_S)
        return self._next_turn(session)

    def _under_pressure(self, *, prefetch: bool) -> Answer:
        session = self._session()
        end = {"prefetch": {"after_s": self._wanted.tool_s}} if prefetch else {}
        self._ask(session, **end)
        begun = time.monotonic()
        time.sleep(min(PAUSE_S, self._wanted.tool_s / 4))
        self._ask(self._session(PRESSURE))
        time.sleep(max(0.0, begun + self._wanted.tool_s - time.monotonic()))
        return self._next_turn(session)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _figures(answers: Mapping[str, Sequence[Answer]]) -> tuple[Figure, ...]:
    medians = {name: statistics.median(answer.first_token_s for answer in found) for name, found in answers.items()}
    return tuple(
        Figure(
            name=name,
            ttft_ms=round(medians[name] * 1000, 2),
            ratio=round(medians[name] / medians["stayed"], 4),
            input_tokens=found[-1].input_tokens,
            cached_tokens=found[-1].cached_tokens,
            samples_ms=tuple(round(answer.first_token_s * 1000, 2) for answer in found),
        )
        for name, found in answers.items()
    )


def _print(figures: ResumeFigures) -> None:
    print(f"{'the next turn':<20}{'TTFT ms':>9}{'ratio':>7}{'tokens':>8}{'cached':>8}")
    for figure in figures.figures:
        print(
            f"  {figure.name:<18}{figure.ttft_ms:>9.1f}{figure.ratio:>7.2f}{figure.input_tokens:>8}{figure.cached_tokens:>8}"
        )
    verdict = "within" if figures.within else "NOT WITHIN"
    print(
        f"medians of {figures.repetitions}, ratios to what has stayed; prefetched is {verdict} {figures.max_ratio:g} "
        f"(a tool of {figures.tool_s:g} s, tokenizer {figures.tokenizer}, {figures.cores} cores)"
    )
