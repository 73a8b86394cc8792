"""The HTTP server: routes, keys, and errors in the API's own shape."""

import hmac
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvbus_frontend.core.failures import internal_error
from kvbus_frontend.core.tenants import given_key
from kvbus_protocols.errors import ApiError, anthropic_body, anthropic_status, openai_body
from kvbus_runtime.metrics import Metrics

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SHUTDOWN_S = 1.0
"""For handlers to finish, and again for cancelled ones. Generation requests are over by then, or have had their time."""

_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def error_response(request: web.Request, error: ApiError) -> web.Response:
    """In the shape of the API that was asked."""
    anthropic = speaks_anthropic(request)
    body = anthropic_body(error) if anthropic else openai_body(error)
    return web.Response(
        body=msgspec.json.encode(body),
        status=anthropic_status(error) if anthropic else error.status,
        headers={"Content-Type": "application/json", **error.headers},
    )


def speaks_anthropic(request: web.Request) -> bool:
    """Whether the client is one of the Messages API: by the path, or, where that tells nothing, by its version header."""
    return request.path.startswith("/v1/messages") or "anthropic-version" in request.headers


class _BadHttp(logging.Filter):
    """Bytes that are no HTTP are the client's doing, and may hold a prompt: one line without them instead of a traceback."""

    def __init__(self, rejected: Any, log: Any) -> None:
        super().__init__()
        self._rejected = rejected
        self._log = log

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        self._rejected.labels(error.code).inc()
        self._log.info("bad_http", status=error.code, kind=type(error).__name__)
        return False


def _server_logger(quieted: logging.Filter) -> logging.Logger:
    """One of this server's own, since the filter counts in its metrics."""
    logger = logging.Logger("aiohttp.server")
    logger.parent = logging.getLogger()
    logger.addFilter(quieted)
    return logger


class HttpServer:
    """Serves until `stop`. ``public`` routes need no key."""

    def __init__(
        self,
        routes: Sequence[web.RouteDef],
        public: Sequence[web.RouteDef],
        *,
        host: str,
        port: int,
        api_keys: Sequence[str],
        metrics: Metrics,
        log: Any,
    ) -> None:
        self._log = log
        self._host, self._port = host, port
        self._keys = [key.encode() for key in api_keys]
        self._public = frozenset(route.path for route in public)
        self._rejected = metrics.counter("http_rejected", "requests refused before an endpoint took them", ("status",))

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._guard(request, handler)

        self._app = web.Application(middlewares=[guard])
        self._app.add_routes([*public, *routes])
        # Bodies are unpacked by the handlers, within their limits; a client that leaves cancels its handler.
        self._runner = web.AppRunner(
            self._app,
            logger=_server_logger(_BadHttp(self._rejected, log)),
            access_log=None,
            handler_cancellation=True,
            auto_decompress=False,
            shutdown_timeout=SHUTDOWN_S,
        )
        self.url = ""

    async def start(self) -> None:
        """Raise OSError when the port is taken."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=1024)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._check_key(request)
            return await handler(request)
        except ApiError as error:
            return self._refused(request, error)
        except web.HTTPException as refusal:
            if refusal.status < 400:
                raise
            message = f"{refusal.reason}: {request.method} {request.path}"
            return self._refused(request, ApiError(refusal.status, message, code=_CODES.get(refusal.status)))
        except ConnectionError:
            return web.Response(status=499)  # the client has gone; nobody sees this
        except Exception as failure:
            self._log.exception("request_crashed", method=request.method, path=request.path)
            return error_response(request, internal_error(failure))

    def _refused(self, request: web.Request, error: ApiError) -> web.Response:
        self._rejected.labels(error.status).inc()
        if error.code == "internal" and error.__cause__ is not None:
            self._log.error("request_failed", message=error.message, exc_info=error.__cause__)
        return error_response(request, error)

    def _check_key(self, request: web.Request) -> None:
        if not self._keys or request.path in self._public:
            return
        key = given_key(request.headers)
        if not key:
            raise ApiError(
                401, "You did not provide an API key. Send it as 'Authorization: Bearer KEY'.", code="missing_api_key"
            )
        matches = [hmac.compare_digest(key, known) for known in self._keys]  # all of them: no early way out
        if not any(matches):
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
