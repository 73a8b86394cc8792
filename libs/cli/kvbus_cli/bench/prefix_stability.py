"""`kvbus bench prefix-stability`: time to first token (TTFT) of a coding agent's requests when their beginning changes or stays.

Starts the whole system with the mock engine and two frontends, one of which strips the billing line that Claude Code puts at
the top of its system prompt; the other does not. Prompts have --tokens tokens, nearly all of them tools and system prompt. The
engine takes its time as published for a B200: 168 ms for a prompt of 52,000 tokens that it has seen, 744 ms more for one that it
has not. What frontend, router, bus and worker take comes on top.

    stable prefix       the billing line is the same in every request
    varying header      it differs in every request, and reaches the model
    header stripped     it differs in every request, and the frontend drops it
    thinking kept       the next turn of a conversation with two thoughts and tool calls, sent back as they were
    thinking changed    the same, but the first thought has changed: all behind it is computed again

The requests of one repetition follow each other in random order; the figures are medians. Exit status 1 when header
stripped or thinking kept take more than 1.05 times as long as the stable prefix. A busy machine needs more --repetitions; how many
there are never depends on the figures.

Fields of the JSON file:
    kvbus_version, python, cores, workers, tokenizer, repetitions
    fixed_ms, prefill_tokens_per_s  of the engine's timing model
    max_ratio, within       the limit, and whether it is kept
    figures[]               name
        ttft_ms             median of samples_ms
        ratio               ttft_ms / that of the stable prefix
        input_tokens, cached_tokens     of the last request; as in the usage of its answer
        engine_ms           what the timing model takes for that; the rest of ttft_ms is this system's own
        published_ms, published_ratio   of another server on a B200, 52,000 tokens
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
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from kvbus_cli.bench import agent_model
from kvbus_cli.bench.agent_client import Answer, AnswerFailed, Client
from kvbus_cli.bench.agent_session import billing_block, make_session, prose
from kvbus_cli.bench.starting import run_with_services, start_in_order
from kvbus_cli.model_command import DEFAULT_MODEL, prepared_folder
from kvbus_cli.up.embedded_nats import start_nats
from kvbus_cli.up.plan import STOP_ORDER, ProcessSpec, UpOptions, plan
from kvbus_cli.up.ports import free_port_picker
from kvbus_cli.up.processes import ProcessSet
from kvbus_runtime.arguments import ArgumentParser
from kvbus_runtime.nats_server import NatsServerNotFound
from kvbus_tokenizers import TokenizerError

MAX_RATIO = 1.05
PUBLISHED_MS = {
    "stable prefix": 168.0,
    "varying header": 912.0,
    "header stripped": 169.0,
    "thinking kept": 167.0,
    "thinking changed": 322.0,
}
PUBLISHED_TOKENS = 52_000
FIXED_S = PUBLISHED_MS["stable prefix"] / 1000
PREFILL_TOKENS_PER_S = PUBLISHED_TOKENS * 1000 / (PUBLISHED_MS["varying header"] - PUBLISHED_MS["stable prefix"])
"""The difference of the two is the prefill of the whole prompt."""
BEHIND_THOUGHT = 0.2
"""Share of the prompt behind the thought that changes: as much as the published difference takes at this rate."""
QUESTION_WORDS = 400
"""As much new text as a turn of the model with a thought and the result of its call."""
KV_BLOCKS = 131_072
"""Per worker, of 16 tokens: nothing is evicted."""
PAUSE_S = 0.2
"""Before a request that counts: events and copies of the blocks of the one before it are out of the way."""
MODEL = "agent-model"


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    ttft_ms: float
    ratio: float
    input_tokens: int
    cached_tokens: int
    engine_ms: float
    published_ms: float
    published_ratio: float
    samples_ms: tuple[float, ...]


class StabilityFigures(msgspec.Struct, frozen=True, kw_only=True):
    kvbus_version: str
    python: str
    cores: int
    workers: int
    tokenizer: str
    repetitions: int
    fixed_ms: float
    prefill_tokens_per_s: float
    max_ratio: float
    within: bool
    figures: tuple[Figure, ...]


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="kvbus bench prefix-stability",
        description="Measure what a change at the beginning of a long prompt costs, and that stripping makes up for it.",
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures there")
    parser.add_argument("--tokens", type=int, default=PUBLISHED_TOKENS, help=f"length of a prompt ({PUBLISHED_TOKENS})")
    parser.add_argument("--repetitions", type=int, default=30, help="of each request, at most (30)")
    parser.add_argument("--time-limit-s", type=float, default=180.0, help="no repetition begins later than this (180)")
    parser.add_argument("--workers", type=int, default=2, help="how many workers (2)")
    parser.add_argument(
        "--tokenizer",
        default=None,
        metavar="DIR",
        help=f"folder of a model whose tokenizer is used, or 'bytes'; default: {DEFAULT_MODEL} if it is prepared, else bytes",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.tokens < 2000 or arguments.repetitions < 1 or arguments.workers < 1:
        print("kvbus bench prefix-stability: --tokens must be at least 2000, the others at least 1", file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory(prefix="kvbus-bench-") as folder:
            figures = run_with_services(
                measure(
                    Path(folder),
                    _tokenizer_folder(arguments.tokenizer),
                    tokens=arguments.tokens,
                    repetitions=arguments.repetitions,
                    time_limit_s=arguments.time_limit_s,
                    workers=arguments.workers,
                )
            )
    except (ChildProcessError, NatsServerNotFound, TimeoutError, AnswerFailed, TokenizerError, OSError) as error:
        print(f"kvbus bench prefix-stability: {error}", file=sys.stderr)
        return 1
    _print(figures)
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")
    return 0 if figures.within else 1


def _tokenizer_folder(given: str | None) -> Path | None:
    if given is None:
        return prepared_folder(DEFAULT_MODEL)
    return None if given == "bytes" else Path(given)


async def measure(
    state_dir: Path, tokenizer: Path | None, *, tokens: int, repetitions: int, time_limit_s: float, workers: int
) -> StabilityFigures:
    """Raise ChildProcessError or TimeoutError when a service does not get ready, AnswerFailed when one answers badly."""
    (state_dir / "logs").mkdir()
    model = agent_model.write(state_dir / MODEL, tokenizer)
    processes = ProcessSet(state_dir / "logs", lambda child: None)
    free_port = free_port_picker(random.Random())
    ports = free_port(), free_port()
    try:
        _, nats_url = await start_nats(processes, state_dir)
        await start_in_order(processes, _specs(str(model), workers, ports, nats_url, free_port))
        stripping, plain = (Client(f"http://127.0.0.1:{port}", MODEL) for port in ports)
        answers = await asyncio.to_thread(lambda: _Bench(stripping, plain, tokens).run(repetitions, time_limit_s))
    finally:
        await processes.stop(STOP_ORDER, grace_s=10.0)
    figures = _figures(answers)
    return StabilityFigures(
        kvbus_version=version("kvbus"),
        python=platform.python_version(),
        cores=os.cpu_count() or 1,
        workers=workers,
        tokenizer=tokenizer.name if tokenizer is not None else "bytes",
        repetitions=len(figures[0].samples_ms),
        fixed_ms=FIXED_S * 1000,
        prefill_tokens_per_s=round(PREFILL_TOKENS_PER_S),
        max_ratio=MAX_RATIO,
        within=_is_within(figures),
        figures=figures,
    )


def _specs(
    model: str, workers: int, ports: tuple[int, int], nats_url: str, free_port: Callable[[], int]
) -> list[ProcessSpec]:
    """The system, and a second frontend that strips nothing."""

    def planned(port: int, *more: tuple[str, str, str]) -> list[ProcessSpec]:
        engine = {
            "mock_prefill_tokens_per_s": str(PREFILL_TOKENS_PER_S),
            "mock_step_base_s": str(FIXED_S),
            "mock_attention_s_per_pair": "0",
            "max_batched_tokens": str(KV_BLOCKS),  # a prompt is one step
            "kv_blocks": str(KV_BLOCKS),
            "tool_call_parser": agent_model.TOOL_CALL_PARSER,
            "reasoning_parser": agent_model.REASONING_PARSER,
        }
        options = UpOptions(
            engine="mock",
            model=model,
            workers=workers,
            http_port=port,
            drain_timeout_s=2.0,
            overrides=(*(("worker", name, value) for name, value in engine.items()), *more),
        )
        return plan(options, nats_url=nats_url, python=sys.executable, free_port=free_port)

    name = "frontend-unstripped"
    second = planned(ports[1], ("frontend", "strip_anthropic_preamble", "false"), ("frontend", "instance_id", name))
    return [*planned(ports[0]), msgspec.structs.replace(second[-1], name=name)]


# The requests


class _Bench:
    """Asks, one request after the other. Its first answers fill the caches and do not count."""

    def __init__(self, stripping: Client, plain: Client, tokens: int) -> None:
        self._stripping = stripping
        self._plain = plain
        self._session = make_session(plain, tokens, int(tokens * BEHIND_THOUGHT))
        self._number = 0
        self._arms: Mapping[str, Callable[[], Answer]] = {
            "stable prefix": lambda: self._ask(self._plain, varies=False),
            "varying header": lambda: self._ask(self._plain, varies=True),
            "header stripped": lambda: self._ask(self._stripping, varies=True),
            "thinking kept": lambda: self._next_turn(changed=False),
            "thinking changed": lambda: self._next_turn(changed=True),
        }

    def run(self, repetitions: int, time_limit_s: float) -> dict[str, list[Answer]]:
        """Raise AnswerFailed."""
        end = time.monotonic() + time_limit_s
        order = random.Random(15)
        answers: dict[str, list[Answer]] = {name: [] for name in self._arms}
        for repetition in count():
            if repetition > repetitions or (repetition > 1 and time.monotonic() > end):
                break
            # What one request leaves to be done in the background must not always fall on the same other one.
            for name in order.sample(list(self._arms), len(self._arms)):
                time.sleep(PAUSE_S)
                answer = self._arms[name]()
                if repetition:
                    answers[name].append(answer)
        return answers

    def _question(self) -> str:
        self._number += 1
        return f"Question {self._number}: {prose(random.Random(self._number), QUESTION_WORDS)}"

    def _ask(self, client: Client, *, varies: bool) -> Answer:
        header = billing_block(self._number + 1 if varies else 0)
        return client.ask(self._session.question(self._question(), header), "It does.")

    def _next_turn(self, *, changed: bool) -> Answer:
        """The third request of a conversation. The first two are as they were in all conversations, but for the question."""
        session, client, header = self._session, self._stripping, billing_block(0)
        messages: list[dict[str, Any]] = [{"role": "user", "content": self._question()}]
        for number, result in enumerate((session.file, f"Result {self._number}: {prose(random.Random(0), 20)}")):
            content = client.ask(session.turn(messages, header), session.turn_output(number)).content
            messages += [{"role": "assistant", "content": content}, session.result(content, result)]
        if changed:
            thought = messages[1]["content"][0]
            messages[1]["content"][0] = {**thought, "thinking": f"In short: {thought['thinking']}"}
        time.sleep(PAUSE_S)
        return client.ask(session.turn(messages, header), "It does.")


# The figures


def _figures(answers: Mapping[str, Sequence[Answer]]) -> tuple[Figure, ...]:
    medians = {name: statistics.median(answer.first_token_s for answer in found) for name, found in answers.items()}
    base, published_base = medians["stable prefix"], PUBLISHED_MS["stable prefix"]
    return tuple(
        Figure(
            name=name,
            ttft_ms=round(medians[name] * 1000, 2),
            ratio=round(medians[name] / base, 4),
            input_tokens=found[-1].input_tokens,
            cached_tokens=found[-1].cached_tokens,
            engine_ms=round(1000 * _engine_s(found[-1]), 1),
            published_ms=PUBLISHED_MS[name],
            published_ratio=round(PUBLISHED_MS[name] / published_base, 4),
            samples_ms=tuple(round(answer.first_token_s * 1000, 2) for answer in found),
        )
        for name, found in answers.items()
    )


def _is_within(figures: Sequence[Figure]) -> bool:
    return all(figure.ratio <= MAX_RATIO for figure in figures if figure.name in ("header stripped", "thinking kept"))


def _engine_s(answer: Answer) -> float:
    return FIXED_S + (answer.input_tokens - answer.cached_tokens) / PREFILL_TOKENS_PER_S


def _print(figures: StabilityFigures) -> None:
    titles = {0: "a prompt of one question", 3: "the next turn of a conversation"}
    for number, figure in enumerate(figures.figures):
        if number in titles:
            print(
                f"{titles[number]:<33}{'TTFT ms':>9}{'ratio':>7}{'engine ms':>11}{'tokens':>8}{'cached':>8}"
                f"   published: {'ms':>5}{'ratio':>7}"
            )
        print(
            f"  {figure.name:<31}{figure.ttft_ms:>9.1f}{figure.ratio:>7.2f}{figure.engine_ms:>11.1f}{figure.input_tokens:>8}"
            f"{figure.cached_tokens:>8}{figure.published_ms:>19.0f}{figure.published_ratio:>7.2f}"
        )
    verdict = "within" if figures.within else "NOT WITHIN"
    print(
        f"medians of {figures.repetitions}, ratios to the stable prefix; header stripped and thinking kept are {verdict} "
        f"{figures.max_ratio:g} (tokenizer {figures.tokenizer}, {figures.workers} workers, {figures.cores} cores)"
    )
