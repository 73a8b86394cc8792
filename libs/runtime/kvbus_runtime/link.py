"""The connection to NATS, which comes back for ever.

nats-py's own reconnect is off: it gives up for good on several server errors, can die silently in the middle, and buffers what
nobody can see. Here every connection is a new client; whoever is up in `on_up` puts the subscriptions back.
"""

import asyncio
import os
import random
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client

from kvbus_runtime.errors import UnsupportedServer
from kvbus_runtime.nats_server import MIN_VERSION
from kvbus_runtime.settings import BadSettings, CommonSettings

CONNECT_TIMEOUT_S = 5.0
PING_INTERVAL_S = 10
"""A connection that answers two pings in a row too late counts as lost: half-open after 30 s at most."""
BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0
PENDING_BYTES = 8 << 20
FLUSH_TIMEOUT_S = 10.0
SAME_ERROR_LOG_INTERVAL_S = 30.0


def connect_options(settings: CommonSettings) -> dict[str, Any]:
    """nats-py's options for authentication and TLS. Raise BadSettings when a file is missing or the nkeys library is."""
    options: dict[str, Any] = {}
    if settings.nats_user:
        options["user"] = settings.nats_user
        options["password"] = settings.nats_password
    if settings.nats_creds:
        options["user_credentials"] = _readable(settings.nats_creds, "nats_creds")
    if settings.nats_nkey_seed:
        options["nkeys_seed"] = _readable(settings.nats_nkey_seed, "nats_nkey_seed")
    if settings.nats_creds or settings.nats_nkey_seed:
        try:
            import nkeys  # type: ignore[import-untyped] # noqa: F401
        except ImportError:
            raise BadSettings(
                "nats_creds and nats_nkey_seed need the extra 'nkeys' (pip install 'kvbus[nkeys]')"
            ) from None
    wants_tls = settings.nats_tls_ca or settings.nats_tls_cert
    if wants_tls or any(url.startswith("tls://") for url in settings.nats_urls):
        options["tls"] = _tls_context(settings)
    return options


def _readable(path: str, setting: str) -> str:
    try:
        with Path(path).open("rb"):
            return path
    except OSError as problem:
        raise BadSettings(f"{setting}: {problem}") from None


def _tls_context(settings: CommonSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.nats_tls_ca or None)
        if settings.nats_tls_cert:
            context.load_cert_chain(settings.nats_tls_cert, settings.nats_tls_key)
    except (OSError, ssl.SSLError) as problem:
        raise BadSettings(f"TLS files for NATS: {problem}") from None
    return context


def without_secrets(url: str) -> str:
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    return f"{parts.scheme}://{parts.hostname}:{parts.port or 4222}"


class Link:
    """Keeps one connection up. All callbacks run on the event loop.

    ``on_up(client)`` is awaited before the link counts as up; when it fails, the connection is dropped and tried again.
    ``on_down(client)`` is called once for every successful ``on_up``. ``on_error`` gets nats-py's asynchronous errors.
    """

    def __init__(
        self,
        settings: CommonSettings,
        *,
        name: str,
        log: Any,
        on_up: Callable[[Client], Awaitable[None]],
        on_down: Callable[[], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._urls = settings.nats_urls
        self._discovered: list[str] = []
        self._options = connect_options(settings)
        self._name = name
        self._log = log
        self._on_up = on_up
        self._on_down = on_down
        self._on_error = on_error
        self._client: Client | None = None
        self._was_up = False
        self._closing = False
        self._random = random.Random()
        self._last_problem = ("", 0.0)

    @property
    def trouble(self) -> str:
        """Why there is no connection; empty while there is one, and before the first attempt has failed."""
        return self._last_problem[0]

    async def run(self) -> None:
        """Connect, and connect again whenever the connection is lost. Raise UnsupportedServer only before the first success."""
        backoff = BACKOFF_FIRST_S
        attempt = 0
        while not self._closing:
            urls = [*self._urls, *self._discovered]
            url = urls[attempt % len(urls)]
            attempt += 1
            client = Client()
            try:
                await self._bring_up(client, url)
            except asyncio.CancelledError:
                await self._discard(client)
                raise
            except UnsupportedServer:
                await self._discard(client)
                if not self._was_up:
                    raise
                self._report(url, "the server is too old")
            except Exception as problem:
                # Whatever went wrong with this attempt, the remedy is the next attempt.
                await self._discard(client)
                self._report(url, self._explain(problem))
            else:
                backoff, attempt = BACKOFF_FIRST_S, 0
                await self._stay_up(client)
                continue
            await asyncio.sleep(backoff * self._random.uniform(0.5, 1.0))
            backoff = min(backoff * 2, BACKOFF_MAX_S)

    async def _bring_up(self, client: Client, url: str) -> None:
        self._problem: Exception | None = None

        async def on_error(problem: Exception) -> None:
            self._problem = problem
            if self._client is client:
                self._on_error(problem)

        async with asyncio.timeout(2 * CONNECT_TIMEOUT_S):
            await client.connect(
                [url],
                name=self._name,
                error_cb=on_error,
                allow_reconnect=False,
                # One server, two quick tries: with 0 nats-py would try for ever without pausing.
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=int(CONNECT_TIMEOUT_S),
                ping_interval=PING_INTERVAL_S,
                pending_size=PENDING_BYTES,
                flush_timeout=FLUSH_TIMEOUT_S,
                **self._options,
            )
        check_version(client)
        await self._on_up(client)
        self._client = client
        self._was_up = True
        self._last_problem = ("", 0.0)
        schemes = {urlsplit(u).scheme for u in self._urls}
        scheme = "tls" if "tls" in schemes else "nats"
        self._discovered = [f"{scheme}://{found.netloc}" for found in client.discovered_servers]
        version = client.connected_server_version
        self._log.info("bus_connected", server=without_secrets(url), version=f"{version.major}.{version.minor}")

    async def _stay_up(self, client: Client) -> None:
        """Return when the connection is lost. The read loop is watched itself: nats-py skips its callbacks on some failures."""
        reader = client._reading_task
        try:
            if reader is not None:
                await asyncio.wait([reader])
        finally:
            self._client = None
            self._on_down()
            if not self._closing:
                self._log.warning("bus_disconnected", reason=self._explain(self._problem) if self._problem else "")
                await self._discard(client)

    def _explain(self, problem: Exception) -> str:
        cause = self._problem if isinstance(problem, nats.errors.NoServersError) and self._problem else problem
        if isinstance(cause, OSError) and (cause.errno or 0) > 0:  # asyncio's own text is for programmers
            return os.strerror(cause.errno or 0)
        return (cause.strerror if isinstance(cause, OSError) else None) or str(cause) or type(cause).__name__

    def _report(self, url: str, reason: str) -> None:
        """Log a failed attempt, the same failure at most each 30 s."""
        now = asyncio.get_running_loop().time()
        if (reason, now) > (self._last_problem[0], self._last_problem[1] + SAME_ERROR_LOG_INTERVAL_S) or (
            reason != self._last_problem[0]
        ):
            self._last_problem = (reason, now)
            self._log.warning("bus_unreachable", server=without_secrets(url), reason=reason)

    async def _discard(self, client: Client) -> None:
        # nats-py raises all sorts of errors when closing a broken connection; there is nothing left to lose in it.
        try:
            with suppress(Exception):
                async with asyncio.timeout(2.0):
                    await client.close()
        finally:
            # A task group that ends after a crash cancels twice, which interrupts the close; the socket must not stay.
            if client._transport is not None:
                client._transport.close()  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        """Flush and close; `run` then ends."""
        self._closing = True
        client = self._client
        if client is not None:
            with suppress(nats.errors.Error, OSError, TimeoutError):
                await barrier(client, timeout_s=2)
            await self._discard(client)


async def barrier(client: Client, *, timeout_s: int) -> None:
    """The server has handled everything that was sent before. Raise nats.errors.Error.

    Twice, because nats-py writes the PING of a flush at once, ahead of commands (a SUB, say) that still wait for its flusher.
    """
    await client.flush(timeout=timeout_s)
    await client.flush(timeout=timeout_s)


def check_version(client: Client) -> None:
    """Raise UnsupportedServer below the version with a time to live per key, which older servers silently ignore."""
    version = client.connected_server_version
    if (version.major, version.minor) < MIN_VERSION:
        raise UnsupportedServer(
            f"nats-server {version.major}.{version.minor} is too old: kvbus needs {MIN_VERSION[0]}.{MIN_VERSION[1]} or newer "
            "(leases need a time to live per key)"
        )
