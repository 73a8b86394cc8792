"""POST /v1/responses, and everything under /v1/responses/{id}"""

import time
from contextlib import AsyncExitStack, aclosing

import msgspec
from aiohttp import web

from kvbus_frontend.adapters.event_stream import EventStream
from kvbus_frontend.core.response_ids import is_response_id, new_response_id
from kvbus_frontend.core.stored_responses import StoredResponse, item_page
from kvbus_frontend.handlers.api import MAX_NAME_IN_LOG, Api, Ticket, json_response
from kvbus_frontend.handlers.responses_background import BackgroundResponses
from kvbus_frontend.handlers.responses_flow import ResponsesFlow
from kvbus_protocols.decoding import RequestDecoder
from kvbus_protocols.errors import ApiError, InvalidRequest
from kvbus_protocols.headers import read_headers, with_headers
from kvbus_protocols.responses.request import ResponsesRequest
from kvbus_protocols.responses.response import DeletedResponse, InputTokens


class ResponsesHandler:
    def __init__(self, api: Api, flow: ResponsesFlow, background: BackgroundResponses) -> None:
        self._api = api
        self._flow = flow
        self._background = background
        self._decoder = RequestDecoder(ResponsesRequest)

    async def post(self, http_request: web.Request) -> web.StreamResponse:
        async with AsyncExitStack() as admission:
            ticket = await admission.enter_async_context(
                self._api.admitted("responses", new_response_id(), http_request)
            )
            body = await self._api.read(http_request)
            headers = read_headers(http_request.headers)
            request = with_headers(self._decoder.decode(body), headers)
            ticket.model = request.model[:MAX_NAME_IN_LOG]
            creation = await self._flow.create(ticket, request, size_bytes=len(body), headers=headers)
            if request.background:
                queued = await self._background.begin(ticket, creation, admission)
                return await self._followed(http_request, queued) if request.stream else _json(queued, ticket)
            if not request.stream:
                response = await self._flow.whole(ticket, creation)
                return json_response(response, headers={"X-Request-Id": ticket.request_id})
            stream = self._event_stream(http_request, ticket.request_id)
            await self._flow.stream(ticket, creation, stream)
            return stream.response

    async def input_tokens(self, http_request: web.Request) -> web.Response:
        body = await self._api.read(http_request)
        request = self._decoder.decode(body)
        ticket = Ticket("responses", new_response_id(), time.perf_counter())
        return json_response(InputTokens(input_tokens=await self._flow.count(ticket, request, size_bytes=len(body))))

    async def get(self, http_request: web.Request) -> web.StreamResponse:
        stored = await self._stored(http_request)
        if http_request.query.get("stream") not in ("true", "1"):
            return _json(stored)
        if not stored.streamed:
            raise InvalidRequest(
                "Only responses that were created with 'background' and 'stream' can be streamed again.", param="stream"
            )
        return await self._followed(http_request, stored, after=_starting_after(http_request))

    async def delete(self, http_request: web.Request) -> web.Response:
        stored = await self._background.cancel(await self._stored(http_request))
        await self._flow.store.delete(stored.id)
        return json_response(DeletedResponse(id=stored.id))

    async def cancel(self, http_request: web.Request) -> web.Response:
        stored = await self._stored(http_request)
        if not stored.response["background"]:
            raise InvalidRequest("Cannot cancel a synchronous response.", param="response_id")
        return _json(await self._background.cancel(stored))

    async def input_items(self, http_request: web.Request) -> web.Response:
        """All that the model was given, what came from previous responses included."""
        stored = await self._stored(http_request)
        return json_response(item_page([*stored.earlier, *stored.input], http_request.query))

    async def _stored(self, http_request: web.Request) -> StoredResponse:
        response_id = http_request.match_info["id"]
        stored = await self._flow.store.load(response_id) if is_response_id(response_id) else None
        if stored is None:
            raise ApiError(
                404, f"Response with id '{response_id}' not found.", param="response_id", code="response_not_found"
            )
        return await self._background.current(stored)

    async def _followed(
        self, http_request: web.Request, stored: StoredResponse, *, after: int = -1
    ) -> web.StreamResponse:
        stream = self._event_stream(http_request, stored.id)
        await stream.open()
        async with aclosing(self._background.follow(stored, after=after)) as events:
            async for event in events:
                await stream.send([event])
        await stream.close()
        return stream.response

    def _event_stream(self, http_request: web.Request, request_id: str) -> EventStream:
        return EventStream(http_request, request_id=request_id, write_timeout_s=self._api.settings.write_timeout_s)


def _json(stored: StoredResponse, ticket: Ticket | None = None) -> web.Response:
    headers = {"X-Request-Id": ticket.request_id} if ticket is not None else {}
    body = msgspec.json.encode(stored.response)
    return web.Response(body=body, headers={"Content-Type": "application/json", **headers})


def _starting_after(http_request: web.Request) -> int:
    given = http_request.query.get("starting_after", "-1")
    if given.removeprefix("-").isdecimal() and given.isascii() and len(given) < 16:
        return int(given)
    raise InvalidRequest("'starting_after' must be a sequence number.", param="starting_after", code="invalid_value")
