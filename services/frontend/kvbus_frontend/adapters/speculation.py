"""Speculative prefills: the beginning of the next prompt is computed while a tool runs or a person thinks.

On the worker that served the turn, behind everything else, bounded in number, tokens and time, and given up when the real request
comes first. Nothing waits for one, and nothing fails because of one.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from typing import Any

import msgspec

from kvbus_frontend.adapters.generation import Begun, Generator, Spawn
from kvbus_frontend.adapters.session_keeper import SessionKeeper
from kvbus_frontend.core.dispatch import Job
from kvbus_frontend.core.prompt import Prompt
from kvbus_frontend.core.speculation import Base, speculative_job, worth_computing
from kvbus_frontend.settings import FrontendSettings
from kvbus_protocols.errors import ApiError
from kvbus_runtime.metrics import Metrics

Predict = Callable[[], Prompt | None]


class _Running(msgspec.Struct):
    base: Base
    task: asyncio.Task[None]


class Speculator:
    def __init__(
        self,
        generator: Generator,
        executor: Executor,
        settings: FrontendSettings,
        metrics: Metrics,
        log: Any,
        spawn: Spawn,
        keeper: SessionKeeper,
    ) -> None:
        self._generator = generator
        self._keeper = keeper
        self._executor = executor
        self._settings = settings
        self._log = log
        self._spawn = spawn
        self._running: dict[str, _Running] = {}
        self._stopped = False
        self._outcomes = metrics.counter(
            "speculative_prefills", "predicted prompts by what became of them", ("outcome",)
        )
        self._tokens = metrics.counter("speculative_prefill_tokens", "tokens of predicted prompts that were computed")
        metrics.gauge("speculative_prefills_running", "predicted prompts that are being computed").set_function(
            lambda: float(len(self._running))
        )

    def begin(self, job: Job, worker_id: str, output: Sequence[int], predict: Predict) -> None:
        """``job`` has ended on the worker with ``output``. ``predict``: called in a thread; None when nothing can be told."""
        if self._stopped or job.request_id in self._running:
            return
        if len(self._running) >= self._settings.max_speculative_prefills:
            self._outcomes.labels("too_many").inc()
            return
        try:
            task = self._spawn(self._run(job, worker_id, output, predict), name=f"speculative {job.request_id}")
        except RuntimeError:  # the service has crashed and takes no more tasks; the answer is whole all the same
            return
        self._running[job.request_id] = _Running(Base.of(job), task)
        task.add_done_callback(lambda _task: self._running.pop(job.request_id, None))

    def give_way(self, job: Job) -> None:
        """A real request comes: what was to be there before it is given up. What is computed so far stays."""
        for request_id, running in list(self._running.items()):
            if running.base.is_continued_by(job):
                self._end(request_id, "overtaken")

    def stop(self) -> None:
        """No more of it, here and now."""
        self._stopped = True
        for request_id in list(self._running):
            self._end(request_id, "stopped")

    def _end(self, request_id: str, outcome: str) -> None:
        if self._running.pop(request_id).task.cancel():  # else it has just come to an end of its own
            self._outcomes.labels(outcome).inc()

    async def _run(self, job: Job, worker_id: str, output: Sequence[int], predict: Predict) -> None:
        """Never raises but by cancellation."""
        try:
            async with asyncio.timeout(self._settings.speculative_prefill_s):
                outcome = await self._compute(job, worker_id, output, predict)
        except TimeoutError:
            outcome = "late"
        except ApiError as refusal:
            outcome = "refused" if refusal.code in ("overloaded", "no_workers") else "failed"
            self._log.debug("speculative_prefill", request=job.request_id, outcome=outcome, reason=refusal.message)
        except Exception:  # a guess that goes wrong harms nobody
            outcome = "failed"
            self._log.warning("speculative_prefill_failed", request=job.request_id, exc_info=True)
        self._outcomes.labels(outcome).inc()

    async def _compute(self, job: Job, worker_id: str, output: Sequence[int], predict: Predict) -> str:
        """What became of it. Raise ApiError."""
        prompt = await asyncio.get_running_loop().run_in_executor(
            self._executor, lambda: self._worth(job, output, predict)
        )
        if isinstance(prompt, str):
            return prompt
        deadline_ms = int((time.time() + self._settings.speculative_prefill_s) * 1000)
        guess = speculative_job(job, prompt, worker_id=worker_id, deadline_ms=deadline_ms)
        if not self._keeper.foresees(guess):
            return "session_over"
        cached = 0
        try:
            async with aclosing(self._generator.run(guess, lambda: "speculation_over")) as events:
                async for event in events:
                    if isinstance(event, Begun):
                        cached = event.cached_tokens
        finally:
            self._keeper.has_foreseen(guess)
        self._tokens.inc(prompt.count - cached)
        return "computed"

    def _worth(self, job: Job, output: Sequence[int], predict: Predict) -> Prompt | str:
        """The prompt to compute, or why there is none."""
        predicted = predict()
        if predicted is None:
            return "unpredictable"
        # The last token that was said has not been computed on.
        known = job.prompt.extended(output[:-1])
        prompt = worth_computing(
            predicted,
            known,
            least_tokens=self._settings.speculative_prefill_min_tokens,
            most_tokens=self._settings.speculative_prefill_tokens,
        )
        return "nothing_new" if prompt is None else prompt
