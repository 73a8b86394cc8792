"""A response from its request to its end, whatever carries it: an HTTP answer, a stream, a WebSocket, or nobody (background)."""

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from kvbus_frontend.adapters.event_stream import EventSink
from kvbus_frontend.adapters.request_run import RequestRun
from kvbus_frontend.adapters.response_store import ResponseStore
from kvbus_frontend.core.compaction import PURPOSE as COMPACTION
from kvbus_frontend.core.response_echo import blank_response
from kvbus_frontend.core.response_ids import id_root, is_response_id, response_of
from kvbus_frontend.core.responses_output import ResponsesOutput, ResponseStyle
from kvbus_frontend.core.sampling import salt_of, session_of
from kvbus_frontend.core.sealing import Sealer
from kvbus_frontend.core.session_tools import SessionKey, SessionTools
from kvbus_frontend.core.stored_responses import Item, StoredResponse, references, resolved, with_ids
from kvbus_frontend.core.truncation import Droppable, prompt_room
from kvbus_frontend.handlers.api import Api, Ticket
from kvbus_frontend.handlers.chat_flow import Begun, ChatFlow
from kvbus_frontend.handlers.nvext import report_for
from kvbus_protocols.conversation import Conversation
from kvbus_protocols.errors import ContextOverflow, InvalidRequest
from kvbus_protocols.headers import HeaderExtensions, condenses
from kvbus_protocols.responses.request import ConversationRequest, ResponsesRequest
from kvbus_protocols.responses.response import Response, Status
from kvbus_protocols.responses_turns import ResponsesConversation, Unseal, responses_conversation
from kvbus_runtime.metrics import Metrics

REASONING = "reasoning"

C = TypeVar("C", bound=ConversationRequest)
Recall = Callable[[str], StoredResponse | None]


def nothing_recalled(_response_id: str) -> StoredResponse | None:
    return None


class Items(msgspec.Struct, frozen=True):
    """``earlier``: of the previous response; ``input``: of the request. References are resolved, everything has an id."""

    earlier: list[Item]
    input: list[Item]


class Creation(msgspec.Struct, frozen=True):
    """A response that may run."""

    request: ResponsesRequest
    items: Items
    begun: Begun
    output: ResponsesOutput

    @property
    def id(self) -> str:
        return self.output.response.id

    @property
    def is_streamed_in_background(self) -> bool:
        return bool(self.request.background and self.request.stream)

    def stored(self, status: Status | None = None, *, owner: str = "", incarnation: int = 0) -> StoredResponse:
        """As it is to be kept now. ``owner``, ``incarnation``: of the frontend that runs it in the background."""
        response = self.output.response
        if status is not None:
            response = msgspec.structs.replace(response, status=status)
        return StoredResponse(
            response=msgspec.json.decode(msgspec.json.encode(response)),
            input=self.items.input,
            earlier=self.items.earlier,
            owner=owner,
            incarnation=incarnation,
            streamed=self.is_streamed_in_background,
        )


class ResponsesFlow:
    def __init__(self, api: Api, flow: ChatFlow, store: ResponseStore, sealer: Sealer, metrics: Metrics) -> None:
        self._api = api
        self._flow = flow
        self._sealer = sealer
        self._unseal = Unseal(
            reasoning=lambda sealed: sealer.open(REASONING, sealed),
            compaction=lambda sealed: sealer.open(COMPACTION, sealed),
        )
        self.store = store
        self._tools = SessionTools(api.settings.session_tools_bytes)
        self._tools_bytes = metrics.gauge("session_tools_bytes", "memory of the tools kept per session")
        self._restored = metrics.counter(
            "compactions_without_tools", "requests that condense a history, by where their tools come from", ("tools",)
        )

    async def create(
        self,
        ticket: Ticket,
        request: ResponsesRequest,
        *,
        size_bytes: int,
        headers: HeaderExtensions,
        recall: Recall = nothing_recalled,
    ) -> Creation:
        """All that comes before the first step. ``recall``: looks for responses that are not stored. Raise ApiError."""
        request.check()
        items = await self.items(ticket.request_id, request, recall)
        made = self.prompted(self.with_session_tools(request, headers), items, headers)
        truncate = request.truncation == "auto"
        begun = await self.begin(ticket, made.conversation, size_bytes=size_bytes, truncate=truncate)
        return Creation(request, items, begun, self._output(ticket, request, made, begun))

    async def count(self, ticket: Ticket, request: ResponsesRequest, *, size_bytes: int) -> int:
        """Tokens of the prompt. Raise ApiError."""
        request.check()
        made = self.conversation(request, await self.items(ticket.request_id, request))
        return await self._flow.count(made.conversation, size_bytes=size_bytes)

    # items

    async def items(self, response_id: str, request: ConversationRequest, recall: Recall = nothing_recalled) -> Items:
        """Raise ApiError."""
        earlier: list[Item] = []
        if request.previous_response_id is not None:
            previous = await self._previous(request.previous_response_id, recall)
            earlier = previous.history
        given = request.items
        if wanted := references(given):
            given = resolved(given, await self._find(wanted, earlier))
        return Items(earlier, with_ids(given, id_root(response_id)))

    async def _previous(self, response_id: str, recall: Recall) -> StoredResponse:
        found = recall(response_id)
        if found is None and is_response_id(response_id):
            found = await self.store.load(response_id)
        if found is None:
            raise InvalidRequest(
                f"Previous response with id '{response_id}' not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        if not found.is_ended:
            raise InvalidRequest(
                f"Previous response with id '{response_id}' is still in progress.",
                param="previous_response_id",
                code="previous_response_in_progress",
            )
        return found

    async def _find(self, item_ids: Iterable[str], earlier: Sequence[Item]) -> dict[str, Item]:
        """The items that can be found, by id."""
        found = {item["id"]: item for item in earlier}
        for item_id in item_ids:
            response_id = response_of(item_id)
            if item_id not in found and response_id is not None:
                stored = await self.store.load(response_id)
                found.update({item["id"]: item for item in (stored.history if stored is not None else ())})
        return found

    def conversation(self, request: ConversationRequest, items: Items) -> ResponsesConversation:
        """Raise InvalidRequest."""
        request = msgspec.structs.replace(request, input=items.input)
        return responses_conversation(request, items.earlier, self._unseal)

    def prompted(self, request: ResponsesRequest, items: Items, headers: HeaderExtensions) -> ResponsesConversation:
        """What a response's prompt is made of. Raise InvalidRequest."""
        made = self.conversation(request, items)
        stated = condenses(request.turn_metadata)
        conversation = msgspec.structs.replace(
            made.conversation,
            harness=headers.harness,
            condensing=bool(headers.compaction if stated is None else stated),
        )
        if request.generate is False:
            # What follows begins like this prompt, so that is what a worker is to have computed.
            only_prompt = msgspec.structs.replace(request, max_output_tokens=1)
            conversation = msgspec.structs.replace(conversation, generation=only_prompt, add_generation_prompt=False)
        return msgspec.structs.replace(made, conversation=conversation)

    def with_session_tools(self, request: C, headers: HeaderExtensions, *, keep: bool = True) -> C:
        """A request that condenses a session's history and brings no tools gets those of the request before it, so that its prompt
        begins as that one's; none of them may be called. Of clients that say when they condense, the tools are kept
        (unless not ``keep``)."""
        stated = condenses(request.turn_metadata)
        condensing = headers.compaction if stated is None else stated
        session = session_of(request)
        if condensing is None or session is None:
            return request
        key = SessionKey(salt_of(request), request.model, session.id)
        if request.tools and keep:
            self._tools.note(key, request.tools)
            self._tools_bytes.set(self._tools.size_bytes)
        if request.tools or not condensing:
            return request
        found = self._tools.find(key)
        if keep:
            self._restored.labels("missing" if found is None else "restored").inc()
        if found is None:
            return request
        kept = msgspec.structs.replace(request, tools=found)
        return msgspec.structs.replace(kept, tool_choice="none") if isinstance(kept, ResponsesRequest) else kept

    # beginning

    async def begin(self, ticket: Ticket, conversation: Conversation, *, size_bytes: int, truncate: bool) -> Begun:
        """``truncate``: without the fewest of the oldest turns with which the prompt fits. Raise ApiError."""
        try:
            try:
                return await self._flow.begin(ticket, conversation, size_bytes=size_bytes)
            except ContextOverflow as overflow:
                if not truncate:
                    raise
                room = prompt_room(overflow.limit, conversation.generation.token_limit)
                shorter = await self._shortened(conversation, room, size_bytes)
                return await self._flow.begin(ticket, shorter, size_bytes=size_bytes)
        except InvalidRequest as refusal:
            refusal.param = "input" if refusal.param == "messages" else refusal.param
            raise

    async def _shortened(self, conversation: Conversation, room: int, size_bytes: int) -> Conversation:
        """With as little as possible left out; with all that may go left out if even that does not fit."""
        droppable = Droppable(conversation)
        low, high = min(1, droppable.most), droppable.most
        while low < high:
            middle = (low + high) // 2
            if await self._fits(droppable.without(middle), room, size_bytes):
                high = middle
            else:
                low = middle + 1
        return droppable.without(high)

    async def _fits(self, conversation: Conversation, room: int, size_bytes: int) -> bool:
        try:
            return await self._flow.count(conversation, size_bytes=size_bytes) <= room
        except ContextOverflow:
            return False

    def _output(
        self, ticket: Ticket, request: ResponsesRequest, made: ResponsesConversation, begun: Begun
    ) -> ResponsesOutput:
        text = begun.model.text
        now = time.time
        blank = blank_response(request, ticket.request_id, text.generation, created_at=int(now()))
        style = ResponseStyle(
            callees=made.callees,
            summary=request.wants_summary,
            seal=self.seal_reasoning if request.wants_encrypted_reasoning else None,
            token_bytes=text.tokenizer.token_bytes,
            now=now,
            leases=begun.leases,
            report=report_for(begun.conversation.generation, ticket, begun.model, begun.choices),
        )
        return ResponsesOutput(blank, style)

    def seal_reasoning(self, text: str) -> str:
        return self._sealer.seal(REASONING, text)

    def seal_compaction(self, text: str) -> str:
        return self._sealer.seal(COMPACTION, text)

    def resealed(self, sealed: str, item: Mapping[str, Any], change: Callable[[str], str]) -> str:
        """The sealed text of an item, changed; what cannot be opened stays as it is."""
        purpose = COMPACTION if item.get("type") == "compaction" else REASONING
        text = self._sealer.open(purpose, sealed)
        return sealed if text is None else self._sealer.seal(purpose, change(text))

    # running

    async def whole(self, ticket: Ticket, creation: Creation) -> Response:
        """The response in one piece, stored if it is to be. Raise ApiError."""
        async with self._api.running(ticket, creation.begun.choices) as run:
            if creation.request.generate is False:
                await _warm_up(run)
                creation.output.warmed(run.usage)
            else:
                await self._api.collect(run, creation.output)
        await self.keep(creation)
        return creation.output.response

    async def stream(self, ticket: Ticket, creation: Creation, sink: EventSink) -> None:
        """All events into the sink, stored before the last one if it is to be. Raise ApiError before the sink is opened."""
        ticket.stream = True
        output, keeper = creation.output, KeepingSink(sink, creation.output, lambda: self.keep(creation))
        async with self._api.running(ticket, creation.begun.choices) as run:
            if creation.request.generate is False:
                await _warm_up(run)
                await keeper.open()
                await keeper.send([*output.opening(run.usage), *output.warmed(run.usage)])
                await keeper.close()
            else:
                await run.wait_begun(self._api.settings.keep_alive_s)
                await self._api.stream(ticket, run, output, keeper)

    async def keep(self, creation: Creation) -> None:
        if creation.request.wants_store:
            await self.store.save(creation.stored())


async def _warm_up(run: RequestRun) -> None:
    """Until the prompt is computed: what comes out of it is of no interest. Raise ApiError."""
    while not run.is_done:
        await run.take(1.0)


class KeepingSink:
    """Stores a response before the client hears of its end: what comes next may ask for it at once."""

    def __init__(self, sink: EventSink, output: ResponsesOutput, keep: Callable[[], Awaitable[None]]) -> None:
        self._sink = sink
        self._output = output
        self._keep = keep
        self._kept = False

    async def open(self) -> None:
        await self._sink.open()

    async def send(self, events: Iterable[bytes]) -> None:
        ready = list(events)
        if self._output.is_ended and not self._kept:
            self._kept = True
            await self._keep()
        await self._sink.send(ready)

    async def close(self) -> None:
        await self._sink.close()
