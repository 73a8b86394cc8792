"""GET /v1/responses: WebSocket mode. Frames ``response.create`` come in, the events of one response after the other go out.

The newest response of a connection can be continued on it even if it is not stored; a turn that fails forgets the one it continued.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import WSMsgType, web

from kvbus_frontend.core.failures import told
from kvbus_frontend.core.response_ids import new_response_id
from kvbus_frontend.core.stored_responses import StoredResponse
from kvbus_frontend.handlers.api import MAX_NAME_IN_LOG, Api
from kvbus_frontend.handlers.responses_flow import ResponsesFlow
from kvbus_protocols.decoding import RequestDecoder
from kvbus_protocols.errors import ApiError, InvalidRequest
from kvbus_protocols.headers import HeaderExtensions, read_headers, with_headers
from kvbus_protocols.responses.events import SocketError, SocketErrorDetail
from kvbus_protocols.responses.request import ResponsesRequest
from kvbus_runtime.metrics import Metrics

CREATE = "response.create"
PING_S = 30.0
CLOSE_S = 1.0
"""For the close frame of a client that is told to go; one that says nothing is cut off."""


class _Frame(msgspec.Struct):
    type: str = ""


class SocketHandler:
    def __init__(self, api: Api, flow: ResponsesFlow, metrics: Metrics) -> None:
        self._api = api
        self._flow = flow
        self._open: set[web.WebSocketResponse] = set()
        self._gauge = metrics.gauge("websockets_open", "open WebSocket connections")

    async def get(self, http_request: web.Request) -> web.StreamResponse:
        settings = self._api.settings
        socket = web.WebSocketResponse(timeout=CLOSE_S, max_msg_size=settings.max_body_bytes, heartbeat=PING_S)
        if not socket.can_prepare(http_request):
            headers = {"Upgrade": "websocket"}
            raise ApiError(426, "GET is for WebSockets here; use POST.", code="upgrade_required", headers=headers)
        if len(self._open) >= settings.max_websockets:
            self._api.meters.refused.labels("websockets").inc()
            raise ApiError(503, "Too many WebSocket connections are open.", code="overloaded")
        self._open.add(socket)
        self._gauge.set(len(self._open))
        try:
            await socket.prepare(http_request)
            await _Connection(self._api, self._flow, http_request, socket).serve()
        finally:
            self._open.discard(socket)
            self._gauge.set(len(self._open))
        return socket

    async def close(self) -> None:
        """The server stops."""
        farewells = [socket.close(code=1001, message=b"the server is shutting down") for socket in self._open]
        await asyncio.gather(*farewells, return_exceptions=True)


class _Connection:
    """One client. ``_last``: its newest response, as long as it may be continued."""

    def __init__(self, api: Api, flow: ResponsesFlow, http_request: web.Request, socket: web.WebSocketResponse) -> None:
        self._api = api
        self._flow = flow
        self._http_request = http_request
        self._socket = socket
        self._headers: HeaderExtensions = read_headers(http_request.headers)
        self._sink = _SocketSink(http_request, socket, api.settings.write_timeout_s)
        self._frames = asyncio.Queue[str](api.settings.max_websocket_frames)
        self._kinds = RequestDecoder(_Frame)
        self._requests = RequestDecoder(ResponsesRequest)
        self._last: StoredResponse | None = None

    async def serve(self) -> None:
        """Until the client leaves, or the connection is too old."""
        async with asyncio.TaskGroup() as group:
            turns = group.create_task(self._turns(), name="websocket turns")
            try:
                async with asyncio.timeout(self._api.settings.websocket_lifetime_s):
                    async for message in self._socket:
                        await self._receive(message.type, message.data)
            except TimeoutError:
                text = "This connection has reached its limit; open a new one."
                await self._refuse(InvalidRequest(text, code="websocket_connection_limit_reached"))
            except ConnectionError:
                pass  # the client has gone while it was told something
            finally:
                turns.cancel()
        await self._socket.close()

    async def _receive(self, kind: WSMsgType, data: Any) -> None:
        if kind is not WSMsgType.TEXT:
            await self._refuse(InvalidRequest("Frames must be text.", code="invalid_frame"))
            return
        try:
            self._frames.put_nowait(data)
        except asyncio.QueueFull:
            self._api.meters.refused.labels("websocket_frames").inc()
            await self._refuse(ApiError(429, "Too many frames wait on this connection.", code="too_many_frames"))

    async def _turns(self) -> None:
        """One after the other, as the specification has it."""
        while True:
            frame = await self._frames.get()
            try:
                await self._turn(frame)
            except ConnectionError:
                return  # whoever receives sees it, too
            except Exception as failure:
                error = told(failure)
                self._api.log_failure(error, "websocket")
                await self._refuse(error)

    async def _turn(self, frame: str) -> None:
        """Raise ApiError."""
        request = with_headers(self._request(frame), self._headers)
        last = self._last
        if last is not None and last.id == request.previous_response_id:
            self._last = None  # unless this turn succeeds, it cannot be continued again
        async with self._api.admitted("responses", new_response_id(), self._http_request) as ticket:
            ticket.model = request.model[:MAX_NAME_IN_LOG]
            creation = await self._flow.create(
                ticket,
                request,
                size_bytes=len(frame),
                headers=self._headers,
                recall=lambda response_id: last if last is not None and last.id == response_id else None,
            )
            await self._flow.stream(ticket, creation, self._sink)
        if creation.output.response.status != "failed":
            self._last = creation.stored()

    def _request(self, frame: str) -> ResponsesRequest:
        data = frame.encode()
        kind = self._kinds.decode(data).type
        if kind != CREATE:
            raise InvalidRequest(
                f"Invalid value: '{kind}'. Supported values are: '{CREATE}'.", param="type", code="invalid_value"
            )
        request = self._requests.decode(data)
        if request.background:
            raise InvalidRequest("'background' is not for WebSockets.", param="background", code="unsupported")
        return msgspec.structs.replace(request, stream=True, stream_options=None)

    async def _refuse(self, error: ApiError) -> None:
        detail = SocketErrorDetail(
            type=error.error_type, code=error.code or error.error_type, message=error.message, param=error.param
        )
        refusal = SocketError(status=error.status, error=detail, headers=dict(error.headers))
        await self._sink.text(msgspec.json.encode(refusal))


class _SocketSink:
    """Events as text frames. Raise ConnectionError when the client is gone or reads nothing."""

    def __init__(self, http_request: web.Request, socket: web.WebSocketResponse, write_timeout_s: float) -> None:
        self._request = http_request
        self._socket = socket
        self._timeout_s = write_timeout_s

    async def open(self) -> None: ...

    async def send(self, events: Iterable[bytes]) -> None:
        for event in events:
            data = event.partition(b"data: ")[2].rstrip(b"\n")
            if data != b"[DONE]":
                await self.text(data)

    async def text(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._socket.send_str(data.decode())
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError(f"the client has read nothing for {self._timeout_s:g} s") from None

    async def close(self) -> None: ...
