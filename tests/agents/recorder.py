"""A reverse proxy between a client and the frontend that keeps what passes, and can do what only one in front of a server can: cut
a connection, or answer in the server's place."""

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from kvbus_testkit.timing import eventually_sync
from tests.agents.client import RUN_TIMEOUT_S
from tests.agents.exchange import Exchange

_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "upgrade", "host", "content-length", "te", "trailer"}
)
_MAX_BODY_BYTES = 256 << 20


class _Cut(NamedTuple):
    after_chunks: int


class _Refusal(NamedTuple):
    status: int
    body: Mapping[str, Any]
    headers: Mapping[str, str]


class Recorder:
    """A context manager. ``url`` leads to ``target``; `exchanges` are in the order in which requests came."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._exchanges: list[Exchange] = []
        self._faults: list[_Cut | _Refusal] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="recorder", daemon=True)
        self._runner: web.AppRunner | None = None
        self._upstream: aiohttp.ClientSession | None = None
        self.url = ""

    @property
    def exchanges(self) -> list[Exchange]:
        return list(self._exchanges)

    @property
    def generations(self) -> list[Exchange]:
        """Of the exchanges, those that ask the model for something."""
        return [exchange for exchange in self._exchanges if exchange.is_generation]

    def cut_next(self, after_chunks: int) -> None:
        """Break the client's connection once so many pieces of its next generation's answer have passed; on a WebSocket, so
        many frames of any answer."""
        self._faults.append(_Cut(after_chunks))

    def refuse_next(self, status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        """Answer the next generation as a gateway does that is busy itself; it does not get to the server."""
        self._faults.append(_Refusal(status, body, headers or {}))

    def wait_for(
        self, condition: Callable[[list[Exchange]], bool], what: str, timeout_s: float = RUN_TIMEOUT_S
    ) -> None:
        eventually_sync(lambda: condition(self.generations), timeout_s=timeout_s, what=what)

    def __enter__(self) -> "Recorder":
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        self._upstream = aiohttp.ClientSession(auto_decompress=False, timeout=timeout)
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, auto_decompress=False, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0][:2])

    async def _stop(self) -> None:
        assert self._runner is not None
        assert self._upstream is not None
        await self._runner.cleanup()
        await self._upstream.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return await self._pass_websocket(request)
        exchange = self._record(request, request.method, await request.read())
        fault = self._faults.pop(0) if exchange.is_generation and self._faults else None
        try:
            if isinstance(fault, _Refusal):
                exchange.status = fault.status
                return web.json_response(fault.body, status=fault.status, headers=fault.headers)
            return await self._pass(request, exchange, fault.after_chunks if fault is not None else None)
        except (asyncio.CancelledError, ConnectionError):
            exchange.disconnected = True
            raise
        finally:
            exchange.over = True

    def _record(self, request: web.Request, method: str, body: bytes) -> Exchange:
        headers = {name.lower(): value for name, value in request.headers.items()}
        exchange = Exchange(method=method, path=request.path, query=request.query_string, headers=headers, body=body)
        self._exchanges.append(exchange)
        return exchange

    async def _pass(self, request: web.Request, exchange: Exchange, cut: int | None) -> web.StreamResponse:
        assert self._upstream is not None
        async with self._upstream.request(
            request.method,
            self._target + request.raw_path,
            headers=_passed_on(request.headers),
            data=exchange.body,
            allow_redirects=False,
        ) as answer:
            exchange.status = answer.status
            exchange.response_headers = {name.lower(): value for name, value in answer.headers.items()}
            response = web.StreamResponse(
                status=answer.status, reason=answer.reason, headers=_passed_on(answer.headers)
            )
            if request.method == "HEAD" or answer.content_length is not None:
                response.content_length = answer.content_length
            await response.prepare(request)
            passed = 0
            async for chunk in answer.content.iter_any():
                if cut is not None and passed >= cut:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                exchange.response += chunk
                await response.write(chunk)
                passed += 1
            await response.write_eof()
            return response

    async def _pass_websocket(self, request: web.Request) -> web.StreamResponse:
        assert self._upstream is not None
        opening = self._record(request, "GET", b"")
        headers = CIMultiDict(
            (name, value)
            for name, value in _passed_on(request.headers).items()
            if not name.lower().startswith("sec-websocket")
        )
        try:
            server = await self._upstream.ws_connect(self._target + request.raw_path, headers=headers, max_msg_size=0)
        except aiohttp.WSServerHandshakeError as refusal:
            opening.status = refusal.status
            opening.over = True
            return web.Response(status=refusal.status, text=refusal.message, headers=_passed_on(refusal.headers or {}))
        opening.status = 101
        client = web.WebSocketResponse(max_msg_size=0)
        await client.prepare(request)
        asked: list[Exchange] = []
        pumps = [
            asyncio.create_task(self._pump_requests(request, client, server, asked)),
            asyncio.create_task(self._pump_answers(request, client, server, asked)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            with suppress(ConnectionError):
                await server.close()
                await client.close()
            opening.over = True
        return client

    async def _pump_requests(
        self,
        request: web.Request,
        client: web.WebSocketResponse,
        server: "aiohttp.ClientWebSocketResponse[Any]",
        asked: list[Exchange],
    ) -> None:
        async for message in client:
            if message.type is aiohttp.WSMsgType.TEXT:
                exchange = self._record(request, "WS", message.data.encode())
                exchange.frames, exchange.status = [], 200
                asked.append(exchange)
                await server.send_str(message.data)
            elif message.type is aiohttp.WSMsgType.BINARY:
                await server.send_bytes(message.data)

    async def _pump_answers(
        self,
        request: web.Request,
        client: web.WebSocketResponse,
        server: "aiohttp.ClientWebSocketResponse[Any]",
        asked: list[Exchange],
    ) -> None:
        """Answers come one after the other: a frame belongs to the oldest request of the connection that is not over."""
        async for message in server:
            if message.type is aiohttp.WSMsgType.TEXT:
                pending = next((exchange for exchange in asked if not exchange.over), None)
                if pending is not None and self._is_cut_here(pending):
                    assert request.transport is not None
                    request.transport.abort()
                    return
                if pending is not None:
                    _keep_frame(pending, message.data)
                await client.send_str(message.data)
            elif message.type is aiohttp.WSMsgType.BINARY:
                await client.send_bytes(message.data)

    def _is_cut_here(self, pending: Exchange) -> bool:
        fault = self._faults[0] if self._faults else None
        if not isinstance(fault, _Cut) or len(pending.frames or ()) < fault.after_chunks:
            return False
        self._faults.pop(0)
        pending.over = pending.disconnected = True
        return True


def _keep_frame(exchange: Exchange, frame: str) -> None:
    assert exchange.frames is not None
    exchange.frames.append(frame)
    kind = json.loads(frame).get("type")
    exchange.over = kind in ("response.completed", "response.failed", "response.incomplete", "error")


def _passed_on(headers: Any) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _HOP_BY_HOP)
