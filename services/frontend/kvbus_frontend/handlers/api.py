"""What the endpoints share: admission, the model of a request, preparing prompts, and answering by stream or in one piece."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from kvbus_frontend.adapters.body import read_body
from kvbus_frontend.adapters.event_stream import EventSink, EventStream, id_headers
from kvbus_frontend.adapters.generation import Generator
from kvbus_frontend.adapters.models import Models, ServedModel
from kvbus_frontend.adapters.request_run import Choice, RequestRun
from kvbus_frontend.adapters.session_keeper import SessionKeeper
from kvbus_frontend.adapters.speculation import Speculator
from kvbus_frontend.core.admission import Admission
from kvbus_frontend.core.conversation import FindWritten
from kvbus_frontend.core.failures import told
from kvbus_frontend.core.jobs import JobTemplate, check_pins
from kvbus_frontend.core.outputs import Output, OutputBuffer
from kvbus_frontend.core.sampling import salt_of
from kvbus_frontend.core.tenants import given_key, key_name, tenant_of
from kvbus_frontend.core.written_calls import WrittenCall, WrittenCalls
from kvbus_frontend.settings import FrontendSettings
from kvbus_parsers import CallEnded
from kvbus_protocols.errors import ApiError, InvalidRequest, anthropic_status, model_not_found
from kvbus_protocols.generation import GenerationRequest, Usage
from kvbus_runtime.metrics import Metrics
from kvbus_tokenizers import CacheStats, PromptCache, TextNotEncodable
from kvbus_wire.guidance import Guidance
from kvbus_wire.request import Retention

T = TypeVar("T")

MAX_NAME_IN_LOG = 200
LOADING_RETRY_S = 5.0
CLIENT_CLOSED = 499
"""Status in logs and metrics when the client has gone; it is never sent."""


class Ticket(msgspec.Struct):
    """One request on its way, for its log line and metrics. ``client``: the name of its API key."""

    api: str
    request_id: str
    started: float
    client: str = ""
    model: str = ""
    stream: bool = False
    first_token_s: float | None = None
    fields: dict[str, Any] = msgspec.field(default_factory=dict)


class Meters:
    def __init__(self, metrics: Metrics) -> None:
        self.requests = metrics.counter("http_requests", "requests by endpoint and status", ("api", "status"))
        self.in_flight = metrics.gauge("requests_in_flight", "generation requests being served")
        self.refused = metrics.counter("requests_refused", "requests over a limit", ("limit",))
        self.first_token = metrics.histogram("time_to_first_token_seconds", "from the request to its first token")
        self.duration = metrics.histogram("request_seconds", "from the request to the end of the response", ("api",))
        self.prepare = metrics.histogram("prompt_prepare_seconds", "rendering, tokenizing and hashing a prompt")
        self.tokens = metrics.counter("tokens", "tokens of finished requests", ("kind",))
        self.cache_steps = metrics.counter("prompt_cache_steps", "steps of prompts looked up", ("outcome",))
        self.cache_tokens = metrics.counter("prompt_cache_tokens", "tokens of prompts, by where from", ("source",))
        self.cache_evictions = metrics.counter("prompt_cache_evictions", "entries that had to make room")
        self.cache_bytes = metrics.gauge("prompt_cache_bytes", "memory of the prompt cache")
        self._cache = CacheStats()
        self.replayed = metrics.counter("calls_replayed", "tool calls in prompts, by how they are written", ("text",))
        self.written_bytes = metrics.gauge("written_calls_bytes", "memory of the tool calls kept as models wrote them")

    def note_cache(self, now: CacheStats) -> None:
        before, self._cache = self._cache, now
        self.cache_steps.labels("hit").inc(now.hits - before.hits)
        self.cache_steps.labels("miss").inc(now.misses - before.misses)
        self.cache_tokens.labels("cache").inc(now.cached_tokens - before.cached_tokens)
        self.cache_tokens.labels("tokenizer").inc(now.encoded_tokens - before.encoded_tokens)
        self.cache_evictions.inc(now.evictions - before.evictions)
        self.cache_bytes.set(now.size_bytes)


class Api:
    def __init__(
        self,
        settings: FrontendSettings,
        models: Models,
        generator: Generator,
        speculator: Speculator,
        keeper: SessionKeeper,
        executor: Executor,
        metrics: Metrics,
        log: Any,
    ) -> None:
        self.settings = settings
        self.models = models
        self.speculator = speculator
        self._keeper = keeper
        self.meters = Meters(metrics)
        self.prompt_cache = PromptCache(settings.prompt_cache_bytes)
        self._written_calls = WrittenCalls(
            limit_bytes=settings.written_calls_bytes,
            limit_calls=settings.max_written_calls,
            ttl_s=settings.written_calls_ttl_s,
        )
        self.admission = Admission(settings.max_concurrent_requests)
        self._generator = generator
        self._executor = executor
        self._log = log
        self._runs: set[RequestRun] = set()
        self._left = asyncio.Event()
        self._end: ApiError | None = None

    # one request

    @asynccontextmanager
    async def admitted(self, api: str, request_id: str, http_request: web.Request) -> AsyncIterator[Ticket]:
        """Counts, times and logs a generation request. Raise ApiError when there is no room for it."""
        client = key_name(given_key(http_request.headers)) if self.settings.api_keys else ""
        ticket = Ticket(api, request_id, time.perf_counter(), client)
        status = CLIENT_CLOSED
        try:
            self._enter()
            try:
                yield ticket
                status = 200
            finally:
                self.admission.leave()
                self._left.set()
                self.meters.in_flight.set(self.admission.in_flight)
        except ApiError as error:
            status = anthropic_status(error) if api == "messages" else error.status
            raise
        except Exception as error:
            status = CLIENT_CLOSED if isinstance(error, ConnectionError) else 500
            raise
        finally:
            self._record(ticket, status)

    def _enter(self) -> None:
        try:
            self.admission.enter()
        except ApiError as refusal:
            self.meters.refused.labels(refusal.code).inc()
            raise
        self.meters.in_flight.set(self.admission.in_flight)

    def _record(self, ticket: Ticket, status: int) -> None:
        status = ticket.fields.pop("status", status)
        total_s = time.perf_counter() - ticket.started
        self.meters.requests.labels(ticket.api, status).inc()
        self.meters.duration.labels(ticket.api).observe(total_s)
        self._log.info(
            "request",
            request=ticket.request_id,
            api=ticket.api,
            model=ticket.model,
            status=status,
            stream=ticket.stream,
            first_token_s=ticket.first_token_s,
            total_s=round(total_s, 4),
            **ticket.fields,
        )

    async def read(self, request: web.Request) -> bytes:
        """Raise ApiError."""
        try:
            return await read_body(
                request,
                limit=self.settings.max_body_bytes,
                timeout_s=self.settings.body_timeout_s,
                total_timeout_s=self.settings.body_total_timeout_s,
                executor=self._executor,
            )
        except ApiError as error:
            if error.status == 413:
                self.meters.refused.labels("body_bytes").inc()
            raise

    def model(self, name: str) -> ServedModel:
        """Raise ApiError."""
        model = self.models.get(name)
        if model is None and self.models.is_loading(name):
            raise ApiError(
                503,
                f"The model `{name}` is still loading; try again in a few seconds.",
                code="model_loading",
                retry_after_s=LOADING_RETRY_S,
            )
        if model is None and self.models.is_expected(name):
            raise ApiError(503, f"No worker serves the model `{name}` now.", code="no_workers")
        if model is None:
            raise model_not_found(name)
        return model

    def job_template(
        self,
        request: GenerationRequest,
        model: ServedModel,
        *,
        client: str,
        input_trigger: str = "",
        guidance: Guidance | None = None,
        retention: tuple[Retention, ...] = (),
    ) -> JobTemplate:
        """``client``: the name of the API key; ``input_trigger``: what the request answers. Raise ApiError."""
        if request.nvext is not None:
            check_pins(request.nvext, model.offer)
        return JobTemplate(
            request,
            model.text.generation,
            model=model.name,
            end_token_ids=model.text.end_token_ids,
            allowed=model.offer.allowed,
            deadline_ms=int((time.time() + self.settings.request_timeout_s) * 1000),
            tenant=tenant_of(salt_of(request), client, self.settings.tenant_source),
            client=client,
            input_trigger=input_trigger,
            guidance=guidance,
            retention=retention,
        )

    async def prepare(self, size_bytes: int, work: Callable[[], T]) -> T:
        """Rendering, tokenizing and hashing: on the loop when that is short, else in a thread. Raise ApiError."""
        started = time.perf_counter()
        try:
            if size_bytes <= self.settings.inline_prompt_bytes:
                return work()
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except TextNotEncodable as failure:
            raise InvalidRequest(
                f"The model's tokenizer cannot encode this text: {failure}.", code=failure.code
            ) from failure
        finally:
            self.meters.prepare.observe(time.perf_counter() - started)
            self.meters.note_cache(self.prompt_cache.stats)

    def find_written(self, tenant: str) -> FindWritten:
        """How models wrote the tool calls of one tenant."""

        def find(call_id: str, name: str, arguments: str) -> WrittenCall | None:
            found = self._written_calls.find(call_id, name, arguments, scope=tenant, now=time.monotonic())
            self.meters.replayed.labels("as written" if found is not None else "canonical").inc()
            return found

        return find

    def note_call(self, tenant: str, call: CallEnded) -> None:
        """A model has written a tool call, which will come back in the next request."""
        written = WrittenCall(call.id, call.name, call.arguments, call.written)
        self._written_calls.add(written, scope=tenant, now=time.monotonic())
        self.meters.written_bytes.set(self._written_calls.size_bytes)

    # answering

    @asynccontextmanager
    async def running(self, ticket: Ticket, choices: Sequence[Choice]) -> AsyncIterator[RequestRun]:
        """All choices of a request, running until the context is left."""

        def first_token() -> None:
            ticket.first_token_s = round(time.perf_counter() - ticket.started, 4)
            self.meters.first_token.observe(ticket.first_token_s)

        if self._end is not None:
            raise self._end
        leaders = {i: [c for c in choices if c.leader == i] for i in dict.fromkeys(choice.leader for choice in choices)}
        for leader in leaders:
            self.speculator.give_way(choices[leader].job)
        visits = [(self._keeper.arrive(choices[leader]), group) for leader, group in leaders.items()]
        run = RequestRun(
            self._generator,
            choices,
            buffer_chars=self.settings.stream_buffer_chars,
            timeout_s=self.settings.request_timeout_s,
            on_first_token=first_token,
        )
        self._runs.add(run)
        try:
            async with run:
                yield run
        finally:
            self._runs.discard(run)
            for visit, group in visits:
                self._keeper.leave(visit, group)
            ticket.fields.update(run.log_fields)
            self._count_tokens(run.usage)

    async def respond(
        self, http_request: web.Request, ticket: Ticket, choices: Sequence[Choice], output: Output, *, stream: bool
    ) -> web.StreamResponse:
        """Run all choices and answer. Raise ApiError before the response has begun; later errors become an event."""
        ticket.stream = stream
        async with self.running(ticket, choices) as run:
            if not stream:
                return json_response(await self.collect(run, output), headers=id_headers(ticket.request_id))
            events = EventStream(
                http_request, request_id=ticket.request_id, write_timeout_s=self.settings.write_timeout_s
            )
            await run.wait_begun(self.settings.keep_alive_s)
            await self.stream(ticket, run, output, events)
            return events.response

    async def collect(self, run: RequestRun, output: Output) -> msgspec.Struct:
        """The whole answer in one piece. Raise ApiError."""
        whole = OutputBuffer(limit_chars=1 << 62)
        while not run.is_done:
            for part in await run.take(self.settings.keep_alive_s):
                whole.put(part.index, part.events, part.tokens)
                if part.finish is not None:
                    whole.finish(part.index, part.finish)
        return output.body(sorted(whole.take(), key=lambda part: part.index), run.usage)

    async def stream(self, ticket: Ticket, run: RequestRun, output: Output, sink: EventSink) -> None:
        """All events of a run, the terminal one included, into a sink."""
        await sink.open()
        try:
            await sink.send(output.opening(run.usage))
            while not run.is_done:
                outputs = await run.take(self.settings.keep_alive_s)
                if outputs:
                    await sink.send(output.chunks(outputs))
                elif not run.is_done:
                    await sink.send([output.keep_alive()])
            await sink.send(output.closing(run.usage))
        except ConnectionError:
            raise
        except Exception as failure:  # whatever it is, a stream that has begun gets its end
            error = told(failure)
            ticket.fields["status"] = error.status
            self.log_failure(error, ticket.request_id)
            await sink.send(output.failure(error))
        await sink.close()

    def log_failure(self, error: ApiError, request_id: str) -> None:
        if error.status >= 500 or error.status == CLIENT_CLOSED:
            unexpected = error.__cause__ if error.code == "internal" else None
            self._log.warning(
                "request_failed", request=request_id, status=error.status, code=error.code, error=error.message,
                exc_info=unexpected,
            )  # fmt: skip

    def _count_tokens(self, usage: Usage) -> None:
        self.meters.tokens.labels("prompt").inc(usage.prompt_tokens)
        self.meters.tokens.labels("cached").inc(usage.prompt_tokens_details.cached_tokens)
        self.meters.tokens.labels("output").inc(usage.completion_tokens)

    # the end

    async def wait_idle(self) -> None:
        """Return when no generation request is in flight."""
        while self.admission.in_flight:
            self._left.clear()
            await self._left.wait()

    def end_all(self, reason: str) -> None:
        """Every request in flight gets its terminal error; so does what is still being prepared, before it runs."""
        self._end = ApiError(503, f"The server is shutting down: {reason}.", code="draining")
        for run in self._runs:
            run.end(self._end)


def json_response(body: msgspec.Struct, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, headers={"Content-Type": "application/json", **(headers or {})}
    )
