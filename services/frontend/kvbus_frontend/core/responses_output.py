"""Outputs of a choice as a response: its events, or the whole object. Both come out of the same steps, so they cannot differ."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec import UnsetType

from kvbus_frontend.core.choice_text import TokenText, token_text
from kvbus_frontend.core.nvext_report import NvExtReport, extra_fields
from kvbus_frontend.core.openai_stream import LOWEST_LOGPROB
from kvbus_frontend.core.outputs import ChoiceOutput
from kvbus_frontend.core.response_items import (
    EventWriter,
    OpenCall,
    OpenItem,
    OpenMessage,
    OpenReasoning,
    Place,
    Seal,
    open_call,
)
from kvbus_frontend.core.retention import Lease, created
from kvbus_parsers import CallArguments, CallEnded, CallStarted, Event, Reasoning, ReasoningEnded, Text
from kvbus_protocols import generation, sse
from kvbus_protocols.errors import ApiError
from kvbus_protocols.responses.events import ResponseEvent
from kvbus_protocols.responses.response import (
    ENDED,
    IncompleteDetails,
    ItemStatus,
    Logprob,
    OutputItem,
    Response,
    ResponseError,
    Status,
    TopLogprob,
    Usage,
)
from kvbus_protocols.responses.tools import Callee


class ResponseStyle(msgspec.Struct, frozen=True, kw_only=True):
    """``summary``: thoughts are shown as summaries too. ``seal``: they come sealed as well, to be sent back. ``leases``: what of
    the prompt is to stay. ``report``: what is to be told besides the answer."""

    callees: Mapping[str, Callee] = {}
    summary: bool = False
    seal: Seal | None = None
    token_bytes: Callable[[int], bytes] | None = None
    now: Callable[[], float]
    leases: tuple[Lease, ...] = ()
    report: NvExtReport | None = None


class ResponsesOutput:
    """``blank``: the response as it begins, with everything that the request says."""

    def __init__(self, blank: Response, style: ResponseStyle) -> None:
        self._blank = blank
        self._style = style
        self._writer = EventWriter()
        self._items: list[OutputItem] = []
        self._open: OpenItem | None = None
        self._call: OpenCall | None = None
        self._created = False
        self._cut = False
        self._logprobs: list[Logprob] = []
        self.response = blank
        """As it is now; final once `is_ended`."""

    @property
    def is_ended(self) -> bool:
        """Whether the terminal event has been made."""
        return self.response.status in ENDED

    # the stream

    def queued(self) -> Iterator[bytes]:
        """Before the opening, of a response that runs in the background."""
        self._created = True
        queued = msgspec.structs.replace(self._blank, status="queued")
        yield self._event("response.created", queued)
        yield self._event("response.queued", queued)

    def opening(self, usage: generation.Usage) -> Iterator[bytes]:
        if not self._created:
            yield self._event("response.created", self._blank)
        yield self._event("response.in_progress", self._blank)

    def chunks(self, outputs: Iterable[ChoiceOutput]) -> Iterator[bytes]:
        for output in outputs:
            self._logprobs += self._logprobs_of(output.tokens)
            for event in output.events:
                yield from self._take(event)
            if output.finish is not None:
                yield from self._finish(cut=output.finish.reason == "length")

    def closing(self, usage: generation.Usage) -> Iterator[bytes]:
        """``[DONE]`` is the sentinel of the Open Responses specification; clients of OpenAI's stop at it or skip it."""
        self._end("incomplete" if self._cut else "completed", usage)
        yield self._event("response.incomplete" if self._cut else "response.completed", self.response)
        yield sse.DONE

    def warmed(self, usage: generation.Usage) -> list[bytes]:
        """The last events of a response that has only computed its prompt."""
        prompt_only = generation.Usage.of(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=0,
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
        )
        return list(self.closing(prompt_only))

    def failure(self, error: ApiError) -> Iterator[bytes]:
        self._stop("failed", ResponseError(failure_code(error), error.message))
        yield self._event("response.failed", self.response)
        yield sse.DONE

    def cancelled(self) -> Iterator[bytes]:
        self._stop("cancelled", None)
        yield self._event("response.cancelled", self.response)
        yield sse.DONE

    def keep_alive(self) -> bytes:
        """An event, since Codex does not count comments; this one says nothing new to anybody."""
        return self._event("response.in_progress", self._blank)

    def body(self, outputs: Sequence[ChoiceOutput], usage: generation.Usage) -> Response:
        for _ in self.chunks(outputs):
            pass
        self._end("incomplete" if self._cut else "completed", usage)
        return self.response

    # events of the parser

    def _take(self, event: Event) -> Iterator[bytes]:
        match event:
            case Text(text):
                message = self._open if isinstance(self._open, OpenMessage) else None
                if message is None:
                    message = OpenMessage(self._place())
                    yield from self._begin(message)
                logprobs, self._logprobs = self._logprobs, []
                yield from message.add(text, logprobs)
                return
            case Reasoning(text):
                thought = self._open if isinstance(self._open, OpenReasoning) else None
                if thought is None:
                    thought = OpenReasoning(self._place(), summary=self._style.summary, seal=self._style.seal)
                    yield from self._begin(thought)
                yield from thought.add(text)
            case ReasoningEnded():
                if isinstance(self._open, OpenReasoning):
                    yield from self._close("completed")
            case CallStarted(_, call_id, name):
                call = open_call(self._place(), call_id, self._style.callees.get(name) or Callee(name))
                yield from self._begin(call)
                self._call = call
            case CallArguments(_, text):
                if self._call is not None:
                    yield from self._call.add(text)
            case CallEnded():
                if self._call is not None:
                    yield from self._call.finish(event.arguments)
                    self._call = None
                    yield from self._close("completed")
        self._logprobs.clear()  # this API has them for text only

    def _place(self) -> Place:
        index = len(self._items) + (self._open is not None)
        return Place(self._writer, index, self._blank.id.partition("_")[2])

    def _begin(self, item: OpenItem) -> Iterator[bytes]:
        yield from self._close("completed")
        self._open = item
        yield from item.opening()

    def _close(self, status: ItemStatus) -> Iterator[bytes]:
        if self._open is not None:
            if self._call is not None:  # it has not ended, so it is cut off
                status, self._call = "incomplete", None
            closed, self._open = self._open, None
            item = closed.item(status)
            self._items.append(item)
            yield from closed.closing(item)

    def _finish(self, *, cut: bool) -> Iterator[bytes]:
        """The choice has ended. An answer that says nothing is an empty message."""
        self._cut = cut
        if not self._items and self._open is None:
            yield from self._begin(OpenMessage(self._place()))
        yield from self._close("incomplete" if cut else "completed")

    # the response

    def _end(self, status: Status, usage: generation.Usage) -> None:
        details = IncompleteDetails("max_output_tokens") if status == "incomplete" else None
        self.response = msgspec.structs.replace(
            self._blank,
            status=status,
            output=tuple(self._items),
            usage=Usage.of(usage, written=self._written(usage)),
            incomplete_details=details,
            completed_at=int(self._style.now()) if status == "completed" else None,
            nvext=extra_fields(self._style.report, usage),
        )

    def _written(self, usage: generation.Usage) -> int:
        details = usage.prompt_tokens_details
        unpinned = 0 if isinstance(details.unpinned_tokens, UnsetType) else details.unpinned_tokens
        return sum(
            created(self._style.leases, cached=details.cached_tokens, prompt=usage.prompt_tokens, unpinned=unpinned)
        )

    def _stop(self, status: Status, error: ResponseError | None) -> None:
        """Before its end: what was being written stays as it is."""
        partial = [self._open.item("incomplete")] if self._open is not None else []
        self.response = msgspec.structs.replace(
            self._blank, status=status, output=(*self._items, *partial), error=error
        )

    def _event(self, kind: str, response: Response) -> bytes:
        return self._writer.write(ResponseEvent, type=kind, response=response)

    def _logprobs_of(self, tokens: Sequence[TokenText]) -> list[Logprob]:
        token_bytes = self._style.token_bytes
        if token_bytes is None:
            return []
        made = []
        for token in tokens:
            entry = token.logprob
            top = [TopLogprob(*_shown(token_bytes, token_id, logprob)) for token_id, logprob in entry.top]
            made.append(Logprob(*_shown(token_bytes, entry.token_id, entry.logprob), top))
        return made


def _shown(token_bytes: Callable[[int], bytes], token_id: int, logprob: float) -> tuple[str, float, list[int]]:
    text, data = token_text(token_bytes, token_id)
    return text, max(logprob, LOWEST_LOGPROB), data


def failure_code(error: ApiError) -> str:
    """OpenAI's codes, by which clients decide whether to try again; Codex compacts upon the first one."""
    if error.code == "context_length_exceeded":
        return error.code
    if error.status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.status < 499 else "server_error"
