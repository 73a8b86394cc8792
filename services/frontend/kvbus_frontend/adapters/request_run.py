"""All choices of one HTTP request, running side by side into one bounded buffer."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Protocol

import msgspec

from kvbus_frontend.adapters.generation import Begun, Event, Finished, Generator, Placed, Tokens
from kvbus_frontend.core.choice_stream import ChoiceStream, Said
from kvbus_frontend.core.dispatch import Job, asked_pins
from kvbus_frontend.core.failures import internal_error
from kvbus_frontend.core.outputs import BufferFull, ChoiceOutput, Finish, OutputBuffer
from kvbus_frontend.core.retention import Lease
from kvbus_parsers import CallEnded
from kvbus_parsers import Event as ParserEvent
from kvbus_protocols.errors import ApiError
from kvbus_protocols.generation import Usage
from kvbus_wire.router import RouteExplanation


class Listener(Protocol):
    """Hears what a choice says."""

    def hear(self, events: Iterable[ParserEvent]) -> None: ...

    def end(self, choice: "Choice", finish: Finish) -> None:
        """The choice has ended by itself."""


class Choice(msgspec.Struct):
    """One choice. ``leader``: the choice with the same prompt that is placed first; the others go to its worker.

    ``stop_token_ids``: those that the request named, and that the response names when one ended the choice. ``listener``: hears
    what it says, before the client does. ``leases``: what of the prompt is to stay; ``question``: tokens up to the end of the last
    thing a person said; ``calls``: names of the tools it has called; ``has_ended``: by itself.
    ``prefill_worker_id``: who computed the prompt, where that was another worker.
    """

    job: Job
    stream: ChoiceStream
    leader: int
    stop_token_ids: tuple[int, ...] = ()
    listener: Listener | None = None
    leases: tuple[Lease, ...] = ()
    question: int = 0
    calls: list[str] = []
    has_ended: bool = False
    cached_tokens: int = 0
    unpinned_tokens: int = 0
    worker_id: str = ""
    prefill_worker_id: str = ""
    explanation: RouteExplanation | None = None


class RequestRun:
    """An async context manager; leaving it ends whatever still runs, and tells the workers why."""

    def __init__(
        self,
        generator: Generator,
        choices: Sequence[Choice],
        *,
        buffer_chars: int,
        timeout_s: float,
        on_first_token: Callable[[], None],
    ) -> None:
        self._generator = generator
        self._choices = choices
        self._buffer = OutputBuffer(buffer_chars)
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._on_first_token = on_first_token
        self._placed: dict[int, asyncio.Event] = {choice.leader: asyncio.Event() for choice in choices}
        self._news = asyncio.Event()
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []
        self._open = len(choices)
        self._error: ApiError | None = None
        self._has_token = False
        self._reason = "abandoned"
        self.begun = False

    async def __aenter__(self) -> "RequestRun":
        await self._group.__aenter__()
        self._tasks = [self._group.create_task(self._run(i, c), name="choice") for i, c in enumerate(self._choices)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, asyncio.CancelledError | ConnectionError):
            self._reason = "client_disconnected"
        for task in self._tasks:
            task.cancel()
        await self._group.__aexit__(None, None, None)

    async def take(self, timeout_s: float) -> list[ChoiceOutput]:
        """What has come since the last call; waits for something. Empty: nothing came in time, or all is done (`is_done`).

        Raise ApiError when a choice has failed and all that came before is taken.
        """
        await self._wait(lambda: bool(self._buffer), timeout_s)
        if self._error is not None and not self._buffer:
            raise self._error
        return self._buffer.take()

    async def wait_begun(self, timeout_s: float) -> None:
        """Wait until an engine has begun, or something has come or failed. Raise ApiError as `take` does."""
        await self._wait(lambda: self.begun or bool(self._buffer), timeout_s)
        if self._error is not None and not self._buffer:
            raise self._error

    async def _wait(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Until it is ready, all is over, or the time is up. News alone mean nothing: tokens may bring no text yet."""
        end = asyncio.get_running_loop().time() + timeout_s
        with suppress(TimeoutError):
            async with asyncio.timeout_at(end):
                while not (ready() or self._error is not None or self.is_over):
                    self._news.clear()
                    await self._news.wait()

    @property
    def is_over(self) -> bool:
        """Whether nothing runs any more."""
        return self._open == 0

    @property
    def is_done(self) -> bool:
        """Whether nothing runs any more, and everything has been taken."""
        return self.is_over and not self._buffer and self._error is None

    def end(self, error: ApiError) -> None:
        """End the request from outside: `take` raises ``error``."""
        self._fail(error)
        self._reason = error.code or self._reason
        self._news.set()

    @property
    def usage(self) -> Usage:
        """A prompt counts once, however many choices it has."""
        leaders = [choice for i, choice in enumerate(self._choices) if choice.leader == i]
        return Usage.of(
            prompt_tokens=sum(choice.job.prompt.count for choice in leaders),
            completion_tokens=sum(choice.stream.output_tokens for choice in self._choices),
            reasoning_tokens=sum(choice.stream.reasoning_tokens for choice in self._choices),
            cached_tokens=sum(choice.cached_tokens for choice in leaders),
            unpinned_tokens=sum(choice.unpinned_tokens for choice in leaders),
        )

    async def _run(self, index: int, choice: Choice) -> None:
        """Never raises but by cancellation: a failure is the request's, and `take` reports it."""
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._generate(index, choice)
        except TimeoutError:
            if not choice.has_ended:  # else it has only waited to hear of the pins
                self._fail(ApiError(504, "The request took longer than this server allows.", code="deadline_exceeded"))
        except BufferFull as problem:
            self._fail(ApiError(499, f"The client reads too slowly: {problem}.", code="slow_client"))
        except ApiError as problem:
            self._fail(problem)
        except Exception as problem:
            self._fail(internal_error(problem))
        finally:
            self._open -= 1
            self._news.set()

    async def _generate(self, index: int, choice: Choice) -> None:
        job = choice.job
        if choice.leader != index:
            await self._placed[choice.leader].wait()
            job = msgspec.structs.replace(job, pinned=self._choices[choice.leader].worker_id)
        unpinned = asked = asked_pins(job)
        run = self._generator.run(job, self._cancel_reason, lambda: choice.has_ended)
        try:
            async with aclosing(run) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        unpinned = event.unpinned_tokens
                        if not choice.has_ended:
                            self._apply(index, choice, event)
                        return
                    if self._apply(index, choice, event) and not asked:
                        return
        finally:
            choice.unpinned_tokens = unpinned  # what no worker has told counts as not kept

    def _apply(self, index: int, choice: Choice, event: Event) -> bool:
        """Whether the choice has ended."""
        match event:
            case Placed(worker_id, explanation):
                choice.worker_id, choice.explanation = worker_id, explanation
                if choice.leader == index:
                    self._placed[index].set()
            case Begun(cached_tokens, prefill_worker_id):
                choice.cached_tokens = cached_tokens
                choice.prefill_worker_id = prefill_worker_id
                self.begun = True
            case Tokens(ids, logprobs):
                if not self._has_token:
                    self._has_token = True
                    self._on_first_token()
                return self._put(index, choice, choice.stream.push(ids, logprobs))
            case Finished(reason, stop_token_id):
                stop = stop_token_id if stop_token_id in choice.stop_token_ids else None
                return self._put(index, choice, choice.stream.finish(Finish(reason, stop)))
        self._news.set()
        return False

    def _put(self, index: int, choice: Choice, said: Said) -> bool:
        choice.calls += [event.name for event in said.events if isinstance(event, CallEnded)]
        choice.has_ended = said.finish is not None
        if choice.listener is not None:
            choice.listener.hear(said.events)
            if said.finish is not None:
                choice.listener.end(choice, said.finish)
        try:
            self._buffer.put(index, said.events, said.tokens)
        except BufferFull:
            self._reason = "slow_client"
            raise
        if said.finish is not None:
            self._reason = "stop_string"
            self._buffer.finish(index, said.finish)
        self._news.set()
        return said.finish is not None

    def _fail(self, error: ApiError) -> None:
        """One failure ends all choices; the first one is told."""
        if self._error is not None:
            return
        self._error = error
        self._reason = "failed" if self._reason == "abandoned" else self._reason
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    def _cancel_reason(self) -> str:
        """Asked while the generation is torn down, so before the reason has come out as an exception."""
        return "deadline" if asyncio.get_running_loop().time() >= self._deadline else self._reason

    @property
    def log_fields(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "workers": sorted({choice.worker_id for choice in self._choices if choice.worker_id}),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }
