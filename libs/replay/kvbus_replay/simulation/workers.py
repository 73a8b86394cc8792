"""One worker in virtual time."""

from functools import partial
from typing import Protocol

import msgspec

from kvbus_blocks.index import Owner
from kvbus_replay.simulation.clock import VirtualClock
from kvbus_replay.simulation.host_tier import TIER, HostTier, TierClient
from kvbus_replay.simulation.texts import KeyedText
from kvbus_replay.trace.calls import Call
from kvbus_wire.errors import ErrorReply
from kvbus_wire.frontend import Ended
from kvbus_wire.load import LoadReport
from kvbus_wire.records import InstanceRecord, ModelCard, WorkerRecord
from kvbus_wire.request import Sampling, Stopping
from kvbus_worker.core.load_pacing import LoadPacing
from kvbus_worker.core.onboard_rates import OnboardRates
from kvbus_worker.engines.base import BlockEvent, BlocksStored, DirectiveRun, EngineError, EngineRequest
from kvbus_worker.engines.mock.scheduler import MockScheduler, SchedulerLimits, Step
from kvbus_worker.engines.mock.speech import Speech
from kvbus_worker.engines.mock.timing import TimingModel
from kvbus_worker.engines.said import Said

MODEL = "replayed"
_SAMPLING = Sampling()


class WorkerShape(msgspec.Struct, frozen=True, kw_only=True):
    """``kv_tokens``: what fits into its device blocks. The load intervals are the worker's settings of the same name."""

    kv_tokens: int = 524_288
    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    max_waiting: int = 1024
    load_min_interval_s: float = 0.25
    timing: TimingModel = TimingModel()


class Listener(Protocol):
    """Who hears what a worker says, at the moment it says it."""

    def blocks_changed(self, worker: "SimulatedWorker", events: tuple[BlockEvent, ...]) -> None: ...

    def first_token(self, call_id: str) -> None: ...

    def ended(self, ended: Ended) -> None: ...

    def refused(self, call_id: str, reply: ErrorReply) -> None: ...

    def step_ended(self, gap_s: float, tokens: int) -> None:
        """So many output tokens came ``gap_s`` after the one before them."""

    def load_changed(self, report: LoadReport) -> None: ...


class SimulatedWorker:
    """The mock engine's scheduler, stepped by the clock, and its load reports."""

    def __init__(
        self,
        worker_id: str,
        shape: WorkerShape,
        block_size: int,
        clock: VirtualClock,
        listener: Listener,
        *,
        max_repeats: int,
        tier: HostTier | None = None,
        lru: bool = False,
    ) -> None:
        self.worker_id = worker_id
        self.owner = Owner(worker_id, "g1")
        self.busy_s = 0.0
        self.calls = 0
        self.computed_tokens = 0
        self._clock = clock
        self._listener = listener
        self._max_repeats = max_repeats
        blocks = max(1, shape.kv_tokens // block_size)
        limits = SchedulerLimits(
            block_size=block_size,
            total_blocks=blocks,
            context_length=blocks * block_size,
            max_num_seqs=shape.max_num_seqs,
            max_batched_tokens=shape.max_batched_tokens,
            max_waiting=shape.max_waiting,
            lru=lru,
        )
        self.scheduler = MockScheduler(limits, shape.timing)
        self.record = _record(worker_id, worker_id if tier is None else tier.record.host_id, limits, shape.timing)
        self.tier = tier
        self._tier = None if tier is None else TierClient(worker_id, tier, self.scheduler.cache, clock)
        self._rates = OnboardRates()
        self._open: dict[str, None] = {}
        self._fetching = 0
        self._step: Step | None = None
        self._step_began = 0.0
        self._step_number = 0
        # Reports when nothing changes would say nothing new here, since none is ever lost.
        self._pacing = LoadPacing(min_interval_s=shape.load_min_interval_s, idle_interval_s=float("inf"))
        self._report_planned = False

    def accept(self, call: Call, keys: list[bytes], said: tuple[DirectiveRun, ...] = ()) -> None:
        """Fetch what the host has of the prompt, then run it. The listener hears when it cannot run."""
        self._open[call.call_id] = None
        if self._tier is None:
            self._submit(call, keys, said)
            return
        if said:
            self._tier.retain(keys, Said(said).of(0, len(keys)))
        reusable = keys[: (call.prompt_tokens - 1) // self.scheduler.limits.block_size]
        self._fetching += 1
        if not self._tier.fetch(reusable, partial(self._fetched, call, keys, said, self._clock.now)):
            self._fetching -= 1
            self._submit(call, keys, said)

    def drop(self, keys: list[bytes]) -> None:
        """Nobody needs these blocks any more."""
        self.scheduler.cache.drop(keys)
        self._announce(self.scheduler.cache.take_events())

    def _fetched(
        self, call: Call, keys: list[bytes], said: tuple[DirectiveRun, ...], asked_s: float, blocks: int
    ) -> None:
        self._fetching -= 1
        tokens = blocks * self.scheduler.limits.block_size
        self._rates.observe(TIER, tokens, self._clock.now - asked_s)
        if said:
            # Or what was just brought in would be the first to go until the call is admitted.
            self.scheduler.cache.touch(keys[: (call.prompt_tokens - 1) // self.scheduler.limits.block_size], Said(said))
        self._announce(self.scheduler.cache.take_events())
        self._submit(call, keys, said, onboarded_tokens=tokens)

    def _announce(self, events: tuple[BlockEvent, ...]) -> None:
        if events:
            self._listener.blocks_changed(self, events)
        if self._tier is not None:
            for event in events:
                if isinstance(event, BlocksStored):
                    self._tier.stored(event)

    def _submit(self, call: Call, keys: list[bytes], said: tuple[DirectiveRun, ...], onboarded_tokens: int = 0) -> None:
        now = self._clock.now
        request = EngineRequest(
            request_id=call.call_id,
            tokens=range(call.prompt_tokens),
            domain_key=b"",
            sampling=_SAMPLING,
            stopping=Stopping(max_tokens=call.output_tokens),
            priority=call.priority,
            strict_priority=call.strict_priority,
            onboarded_tokens=onboarded_tokens,
            directives=said,
        )
        output = range(call.output_tokens)
        speech = Speech(output, range(1, call.output_tokens + 1), "length", even=True)
        try:
            self.scheduler.submit(request, speech, now, KeyedText(call.prompt_tokens, keys))
        except EngineError as error:
            del self._open[call.call_id]
            self._listener.refused(call.call_id, error.reply)
            return
        self.calls += 1
        self._changed()
        if self._step is None:
            self._begin()
        else:
            shorter = self.scheduler.shorten(self._step, now - self._step_began)
            if shorter is not self._step:
                self._plan(shorter)

    def report(self) -> LoadReport:
        load = self.scheduler.load()
        return LoadReport(
            instance_id=self.worker_id,
            incarnation=1,
            model=MODEL,
            running=load.running,
            waiting=load.waiting + self._fetching,
            waiting_tokens=load.waiting_tokens,
            used_blocks=load.used_blocks,
            total_blocks=load.total_blocks,
            kv_seq=0,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            decode_step_s=load.decode_step_s,
            request_ids=tuple(self._open),
            onboard_tokens_per_s=self._rates.tokens_per_s,
        )

    def _begin(self) -> None:
        if not self.scheduler.has_work:
            self._step = None
            return
        self._step_began = self._clock.now
        self._plan(self.scheduler.begin(self._step_began, self._max_repeats))

    def _plan(self, step: Step) -> None:
        self._step = step
        self._step_number += 1
        self._clock.at(self._step_began + step.duration_s, partial(self._end, self._step_number))

    def _end(self, number: int) -> None:
        step = self._step
        if number != self._step_number or step is None:
            return  # the step was shortened since
        output = self.scheduler.finish(step, self._clock.now)
        self.busy_s += step.duration_s
        self.computed_tokens += step.work.prefill_tokens
        if step.work.decode_seqs:
            self._listener.step_ended(step.duration_s / step.repeats, step.work.decode_seqs * step.repeats)
        self._announce(output.blocks)
        for delta in output.deltas:
            if delta.start == 0:
                self._listener.first_token(delta.request_id)
        for ended in output.ended:
            del self._open[ended.request_id]
            self._listener.ended(ended)
        self._changed()
        self._begin()

    def _changed(self) -> None:
        self._pacing.changed()
        if not self._report_planned:
            self._report_planned = True
            self._clock.after(self._pacing.wait_s(self._clock.now), self._publish)

    def _publish(self) -> None:
        self._report_planned = False
        self._pacing.published(self._clock.now)
        self._listener.load_changed(self.report())


def _record(worker_id: str, host_id: str, limits: SchedulerLimits, timing: TimingModel) -> InstanceRecord:
    card = ModelCard(
        name=MODEL,
        fingerprint="",
        block_size=limits.block_size,
        context_length=limits.context_length,
        bundle="",
        kv_layout="",
    )
    worker = WorkerRecord(
        model=card,
        engine="mock",
        total_blocks=limits.total_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_batched_tokens=limits.max_batched_tokens,
        prefill_tokens_per_s=timing.prior_prefill_tokens_per_s(limits.max_batched_tokens),
        decode_step_s=timing.prior_decode_step_s(),
    )
    return InstanceRecord(
        service="worker",
        instance_id=worker_id,
        incarnation=1,
        host_id=host_id,
        version="",
        started_ms=0,
        worker=worker,
    )
