"""Follows the sessions: what their requests hold, what comes free when they end, and what is to be brought back while they wait."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Coroutine, Hashable, Iterable, Sequence
from itertools import count
from typing import Any

import msgspec

from kvbus_frontend.adapters.generation import Spawn
from kvbus_frontend.adapters.prefetcher import Prefetcher
from kvbus_frontend.adapters.request_run import Choice
from kvbus_frontend.adapters.session_blocks import SessionBlocks
from kvbus_frontend.core.dispatch import Job
from kvbus_frontend.core.prefetch import Agenda, KeptPrompts, ToolTimes, prefetch_at
from kvbus_frontend.core.prompt import Prompt
from kvbus_frontend.core.sessions import Freed, Served, Session, Sessions, Visit
from kvbus_frontend.core.triggers import TOOL, USER
from kvbus_frontend.settings import FrontendSettings
from kvbus_protocols.errors import ApiError
from kvbus_runtime.metrics import Metrics
from kvbus_wire.frontend import ForgottenSession, HeldChain, SessionLease, SessionPrefetched, SessionScope

ANSWER_BYTES = 256 << 10
"""Of keys, in an answer to another frontend."""
MOST_GONE = 1000
"""Sessions that were deleted last: what workers say of their requests after that is dropped, too."""
AT_A_TIME = 50
"""Sessions whose blocks are dropped together."""
LONGEST_PAUSE_S = 3600.0


class SessionKeeper:
    def __init__(
        self,
        sessions: Sessions,
        blocks: SessionBlocks,
        prefetcher: Prefetcher,
        settings: FrontendSettings,
        metrics: Metrics,
        log: Any,
        spawn: Spawn,
    ) -> None:
        self.sessions = sessions
        self.blocks = blocks
        self.prefetcher = prefetcher
        self.prompts = KeptPrompts(settings.session_prompt_bytes)
        self.agenda = Agenda(settings.max_planned_prefetches)
        self._tools = ToolTimes(settings.max_tool_times)
        self._settings = settings
        self._log = log
        self._spawn = spawn
        self._tasks: set[asyncio.Task[None]] = set()
        self._gone: OrderedDict[tuple[SessionScope, str], int] = OrderedDict()  # each deletion has a number of its own
        self._deletions = count(1)
        self._freed: list[Freed] = []
        self._news = asyncio.Event()
        self._stopped = False
        self._planned = metrics.counter("prefetches_planned", "by what told when", ("cause",))
        metrics.gauge("sessions", "sessions that are remembered").set_function(lambda: float(len(sessions)))
        metrics.gauge("session_bytes", "memory of their block keys").set_function(lambda: float(sessions.size_bytes))
        metrics.gauge("session_prompt_bytes", "memory of their prompts").set_function(
            lambda: float(self.prompts.size_bytes)
        )
        metrics.gauge("prefetches_due", "sessions whose blocks are to be brought back later").set_function(
            lambda: float(len(self.agenda))
        )
        metrics.gauge("sessions_forgotten", "sessions that had to make room, since the start").set_function(
            lambda: float(sessions.forgotten)
        )

    # requests

    def arrive(self, choice: Choice) -> Visit | None:
        """``choice``: the first one of a request that begins. None: it belongs to no session."""
        job = choice.job
        if job.session is None:
            return None
        scope, now = scope_of(job), time.time()
        known = self.sessions.find(scope, job.session.id)
        waited = known is not None and not known.running and job.hints.input_trigger == TOOL
        # Of several tools nobody knows which one took how long.
        if known is not None and waited and len(set(known.waits_for)) == 1:
            self._tools.note(scope, known.waits_for[0], now - known.used_s)
        self.agenda.drop((scope, job.session.id))
        visit, freed = self.sessions.begin(
            scope,
            job.session,
            job.model,
            job.prompt,
            now,
            question=choice.question // job.prompt.block_size,
            asks=job.hints.input_trigger == USER,
        )
        self._drop_later(freed)
        return visit

    def leave(self, visit: Visit | None, choices: Sequence[Choice]) -> None:
        """All choices with the prompt of this visit have ended."""
        if visit is None:
            return
        now, first = time.time(), choices[0]
        has_ended = all(choice.has_ended for choice in choices)
        calls = tuple(name for choice in choices for name in choice.calls)
        # The last token that was said has not been computed on.
        prompts = [visit.prompt.extended(choice.stream.token_ids[:-1]) for choice in choices]
        served = Served(
            worker_id=first.worker_id,
            prompts=prompts,
            output_tokens=sum(choice.stream.output_tokens for choice in choices),
            cached_tokens=first.cached_tokens,
            unpinned_tokens=first.unpinned_tokens,
            leases=_leases(first, now),
            closed=has_ended and not calls,
            calls=calls,
        )
        session = visit.session
        freed = self.sessions.end(visit, served, now)
        self._drop_later(freed)
        key = (session.scope, session.id)
        if self.sessions.find(*key) is not session:
            self._forget_prompt(key)
            if session.gone and (session.ephemeral or not session.final):
                self._note_gone(key)
            if session.final and (children := self.sessions.ephemeral_children(*key)):
                self._later(self._end(session.scope, children), f"children of {session.id}")
        elif self._settings.prefetch != "never" and first.worker_id:
            self.prompts.keep(key, _kept(first.job, prompts[0]))
            self._plan(session, first.job, calls, now)

    def hear_rest(self, job: Job, output: Sequence[int]) -> None:
        """The worker has said this by the time at which it stopped, which is more than was waited for."""
        if job.session is None:
            return
        key, prompt = (scope_of(job), job.session.id), job.prompt.extended(output[:-1])
        if not self.sessions.extend(*key, job.model, prompt) and key in self._gone:
            self._drop_later([Freed(job.model, prompt.keys)])

    def foresees(self, job: Job) -> bool:
        """The prompt of ``job`` is computed in advance: it belongs to its session from now on. False: that is over."""
        if job.session is None:
            return True
        return self.sessions.extend(scope_of(job), job.session.id, job.model, job.prompt)

    def has_foreseen(self, job: Job) -> None:
        """It is computed. When the session has gone meanwhile, nobody needs it."""
        if job.session is not None and self.sessions.find(scope_of(job), job.session.id) is None:
            self._drop_later([Freed(job.model, job.prompt.keys)])

    def _plan(self, session: Session, job: Job, calls: Sequence[str], now: float) -> None:
        """When its blocks are to be brought back."""
        settings, cause, at = self._settings, "asked", None
        if job.prefetch_after_s is not None:
            at = prefetch_at(now, job.prefetch_after_s, lead_s=settings.prefetch_lead_s, shortest_s=0.0)
        elif settings.prefetch == "learned" and calls:
            expected, cause = self._tools.expected(session.scope, calls), "learned"
            if expected is not None:
                at = prefetch_at(
                    now, expected, lead_s=settings.prefetch_lead_s, shortest_s=settings.prefetch_min_wait_s
                )
        if at is not None and not self._stopped:
            self._planned.labels(cause if self.agenda.put((session.scope, session.id), at) else "no_room").inc()
            self._news.set()

    # deleting

    def forget_for_other(self, scope: SessionScope, session_id: str) -> ForgottenSession:
        """For another frontend: an answer has to fit into one message, so what is too much for that is dropped from here."""
        forgotten = self.forget(scope, session_id)
        told, size = 0, 0
        for chain in forgotten.chains:
            size += len(chain.keys)
            if size > ANSWER_BYTES:
                break
            told += 1
        self._drop_later(map(chain_of, forgotten.chains[told:]))
        return msgspec.structs.replace(forgotten, chains=forgotten.chains[:told])

    def forget(self, scope: SessionScope, session_id: str) -> ForgottenSession:
        """The blocks that come free are the caller's to drop; the ephemeral sessions below it end, too, and theirs are dropped.
        Of a session that had to make room the last prompt may still be there: it is known by that."""
        session = self.sessions.find(scope, session_id)
        prompt = self.prompts.find((scope, session_id))
        if children := self.sessions.ephemeral_children(scope, session_id):
            self._later(self._end(scope, children), f"children of {session_id}")
        freed = self._forget(scope, session_id)
        if session is None and prompt is not None:
            freed = [Freed(prompt.model, prompt.prompt.keys)]
        return ForgottenSession(
            known=session is not None or prompt is not None,
            running=session.running if session is not None else 0,
            chains=tuple(HeldChain(model=part.model, keys=part.keys, kept=part.kept) for part in freed),
        )

    def _forget(self, scope: SessionScope, session_id: str) -> list[Freed]:
        self._forget_prompt((scope, session_id))
        self._note_gone((scope, session_id))
        return self.sessions.forget(scope, session_id)

    def _note_gone(self, key: tuple[SessionScope, str]) -> None:
        self._gone[key] = next(self._deletions)
        self._gone.move_to_end(key)
        while len(self._gone) > MOST_GONE:
            self._gone.popitem(last=False)

    async def _end(self, scope: SessionScope, session_ids: Sequence[str]) -> None:
        """There may be thousands: some at a time."""
        for at in range(0, len(session_ids), AT_A_TIME):
            freed = [part for each in session_ids[at : at + AT_A_TIME] for part in self._forget(scope, each)]
            await self.blocks.drop(freed)

    def _forget_prompt(self, key: tuple[SessionScope, str]) -> None:
        self.prompts.drop(key)
        self.agenda.drop(key)

    def _drop_later(self, freed: Iterable[Freed]) -> None:
        """Together with what else comes free meanwhile: sub-agents end by the thousand."""
        was_idle = not self._freed
        self._freed += freed
        if self._freed and was_idle:
            self._later(self._drop(), "drop blocks of sessions")

    async def _drop(self) -> None:
        await asyncio.sleep(0)
        freed, self._freed = self._freed, []
        await self.blocks.drop(freed)

    # bringing back

    async def run(self) -> None:
        """Until it is cancelled: what is due is brought back."""
        while True:
            self._news.clear()
            next_at = self.agenda.next_at()
            pause = LONGEST_PAUSE_S if next_at is None else min(LONGEST_PAUSE_S, max(0.0, next_at - time.time()))
            try:
                async with asyncio.timeout(pause):
                    await self._news.wait()
            except TimeoutError:
                for key in self.agenda.take(time.time()):
                    self._bring_back_later(key)

    def _bring_back_later(self, key: Hashable) -> None:
        job = self.prompts.find(key)
        if job is not None:
            self._later(self._bring_back_as_planned(job), f"prefetch {job.request_id}")

    async def _bring_back_as_planned(self, job: Job) -> None:
        try:
            await self.bring_back(job, "planned", deadline_s=time.time() + self._settings.prefetch_s)
        except ApiError as refusal:  # a guess that comes to nothing harms nobody
            self._log.debug("prefetch_failed", request=job.request_id, code=refusal.code, reason=refusal.message)

    async def bring_back(self, job: Job, cause: str, *, deadline_s: float) -> SessionPrefetched:
        """When its session is deleted meanwhile, what the worker has brought back goes again: calling it off would come too late.
        Raise ApiError."""
        key = None if job.session is None else (scope_of(job), job.session.id)
        before = self._deletion(key)
        try:
            return await self.prefetcher.run(job, cause, deadline_s=deadline_s)
        finally:
            if (deletion := self._deletion(key)) and deletion != before:
                self._drop_later([Freed(job.model, job.prompt.keys)])

    def _deletion(self, key: tuple[SessionScope, str] | None) -> int:
        """The number of the last one; 0: it was not deleted, or long ago."""
        return 0 if key is None else self._gone.get(key, 0)

    def stop(self) -> None:
        """Nothing is brought back any more."""
        self._stopped = True
        self.agenda = Agenda(1)

    def _later(self, work: Coroutine[Any, Any, None], name: str) -> None:
        try:
            task = self._spawn(work, name=name)
        except RuntimeError:  # the service has crashed and takes no more tasks
            return
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Wait until what was to be dropped or brought back is."""
        while self._tasks:
            await asyncio.wait(self._tasks)


def chain_of(part: HeldChain) -> Freed:
    return Freed(part.model, part.keys, part.kept)


def _leases(choice: Choice, now: float) -> tuple[SessionLease, ...]:
    """As far as the worker could pin them: where a share ends, the last blocks go without."""
    limit = max((lease.end for lease in choice.leases), default=0) - choice.unpinned_tokens
    found = {min(lease.end, limit): now + lease.ttl_s for lease in choice.leases}
    return tuple(SessionLease(tokens=tokens, expires_s=at) for tokens, at in sorted(found.items()) if tokens > 0)


def scope_of(job: Job) -> SessionScope:
    return SessionScope(client=job.client, salt=job.cache_salt)


def _kept(job: Job, prompt: Prompt) -> Job:
    """Only what it takes to have the blocks again. Leases are renewed by the next request."""
    retention = tuple(kept for kept in job.retention if kept.kind != "pinned")
    return msgspec.structs.replace(
        job,
        prompt=prompt,
        guidance=None,
        mock=None,
        pinned=None,
        explain=False,
        retention=retention,
        prefetch_after_s=None,
    )
