"""POST /v1/kv/prefetch: bring the blocks of a session, or of a prompt, back into G1 now."""

import secrets
import time
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from kvbus_frontend.adapters.session_keeper import SessionKeeper
from kvbus_frontend.core.dispatch import Job
from kvbus_frontend.handlers.api import Api, Ticket, json_response
from kvbus_frontend.handlers.completions import CompletionsHandler
from kvbus_frontend.handlers.prompt import AskedReader
from kvbus_frontend.handlers.sessions import SessionsHandler, unknown_session
from kvbus_protocols.decoding import RequestDecoder
from kvbus_protocols.errors import ApiError, InvalidRequest
from kvbus_protocols.prompt_view import PromptApi
from kvbus_protocols.sessions import PrefetchRequest, PrefetchResult
from kvbus_runtime.bus import RequestFailed
from kvbus_wire.errors import ErrorCode
from kvbus_wire.frontend import PrefetchSession, SessionPrefetched, SessionScope


class PrefetchHandler:
    def __init__(
        self,
        api: Api,
        keeper: SessionKeeper,
        sessions: SessionsHandler,
        readers: Mapping[PromptApi, AskedReader],
        completions: CompletionsHandler | None,
    ) -> None:
        self._api = api
        self._keeper = keeper
        self._sessions = sessions
        self._readers = readers
        self._completions = completions
        self._asked = RequestDecoder(PrefetchRequest)
        self._members = RequestDecoder(dict[str, Any])

    async def post(self, http_request: web.Request) -> web.Response:
        async with self._api.admitted("prefetch", f"pre-{secrets.token_hex(12)}", http_request) as ticket:
            body = await self._api.read(http_request)
            asked = self._asked.decode(body)
            most_s = self._api.settings.prefetch_s
            deadline_s = time.time() + min(most_s, asked.timeout_s or most_s)
            if asked.session_id is not None:
                self._check_alone(body)
                scope = self._sessions.scope(http_request)
                done = await self._session(scope, asked.session_id, deadline_s)
            else:
                job = await self._job(http_request, ticket, body)
                done = await self._keeper.bring_back(job, "prompt", deadline_s=deadline_s)
            ticket.model = done.model
            return json_response(
                PrefetchResult(
                    model=done.model,
                    worker_id=done.worker_id,
                    prompt_tokens=done.prompt_tokens,
                    cached_tokens=done.cached_tokens,
                    onboarded_tokens=done.onboarded_tokens,
                )
            )

    def _check_alone(self, body: bytes) -> None:
        """Of a session there is nothing more to say, so what else is said is a mistake. Raise InvalidRequest."""
        for name in self._members.decode(body):
            if name not in PrefetchRequest.__struct_fields__:
                raise InvalidRequest(
                    f"Unknown field '{name}': with a 'session_id' there is only 'timeout_s'.",
                    param=name,
                    code="unknown_field",
                )

    async def of_session(self, asked: PrefetchSession) -> SessionPrefetched:
        """For another frontend. Raise RequestFailed."""
        job = self._keeper.prompts.find((asked.scope, asked.session_id))
        if job is None:
            raise RequestFailed.of(ErrorCode.GONE, "this frontend has no prompt of that session")
        try:
            return await self._keeper.bring_back(job, "session", deadline_s=asked.deadline_ms / 1000)
        except ApiError as failure:
            raise RequestFailed.of(ErrorCode.UNAVAILABLE, failure.message) from failure

    async def _session(self, scope: SessionScope, session_id: str, deadline_s: float) -> SessionPrefetched:
        """Here, or by the frontend that knows its last prompt. Raise ApiError."""
        job = self._keeper.prompts.find((scope, session_id))
        if job is not None:
            return await self._keeper.bring_back(job, "session", deadline_s=deadline_s)
        asked = PrefetchSession(scope=scope, session_id=session_id, deadline_ms=int(deadline_s * 1000))
        found: list[SessionPrefetched] = await self._keeper.blocks.ask_others(
            asked, SessionPrefetched, timeout_s=max(0.1, deadline_s - time.time())
        )
        if not found:
            raise unknown_session(session_id)
        return max(found, key=lambda done: done.prompt_tokens)

    async def _job(self, http_request: web.Request, ticket: Ticket, body: bytes) -> Job:
        """Of a request of any API. Raise ApiError."""
        members = self._members.decode(body)
        given = {name: value for name, value in members.items() if name != "timeout_s"}
        name = http_request.query.get("api") or _api_of(given, http_request)
        if name == "completions" and self._completions is not None:
            return await self._completions.job(ticket, body, http_request.headers)
        reader = next((reader for known, reader in self._readers.items() if known == name), None)
        if reader is None:
            raise InvalidRequest(
                "Give a 'session_id', or a 'model' with 'messages', 'input' or 'prompt'.", param="session_id"
            )
        asked = await reader.read(ticket, body, http_request.headers)
        begun = await asked.begin(ticket, asked.conversation(asked.document))
        return begun.choices[0].job


def _api_of(members: Mapping[str, Any], http_request: web.Request) -> str:
    if "input" in members:
        return "responses"
    if "messages" not in members:
        return "completions" if "prompt" in members else ""
    return "messages" if "system" in members or "anthropic-version" in http_request.headers else "chat"
