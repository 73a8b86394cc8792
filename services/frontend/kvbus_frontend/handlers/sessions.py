"""GET /v1/sessions, GET and DELETE /v1/sessions/{id}, over all frontends. A tenant sees and deletes its own sessions only."""

import asyncio
import re
import time
from collections.abc import Iterable

import msgspec
from aiohttp import web

from kvbus_blocks.keys import KEY_BYTES
from kvbus_frontend.adapters.session_keeper import SessionKeeper, chain_of
from kvbus_frontend.core.sessions import Session
from kvbus_frontend.core.tenants import given_key, key_name
from kvbus_frontend.handlers.api import json_response
from kvbus_frontend.settings import FrontendSettings
from kvbus_protocols.errors import ApiError, InvalidRequest
from kvbus_protocols.headers import read_headers
from kvbus_protocols.sessions import DeletedSession, SessionInfo, SessionLeaseInfo, SessionPage
from kvbus_wire.frontend import (
    ForgetSession,
    ForgottenSession,
    ListSessions,
    SessionList,
    SessionScope,
    SessionState,
)

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
_NUMBER = re.compile(r"[0-9]{1,10}(\.[0-9]{1,9})?")


class SessionsHandler:
    def __init__(self, keeper: SessionKeeper, settings: FrontendSettings) -> None:
        self._keeper = keeper
        self._settings = settings

    async def listed(self, http_request: web.Request) -> web.Response:
        limit = int(_number(http_request, "limit", DEFAULT_LIMIT))
        if not 1 <= limit <= MAX_LIMIT:
            raise InvalidRequest(f"limit: Input should be 1 to {MAX_LIMIT}", param="limit")
        asked = ListSessions(scope=self.scope(http_request), limit=limit, before_s=_number(http_request, "before", 0.0))
        pages = await self._everywhere(asked)
        found = _merged(state for page in pages for state in page.sessions)
        more = len(found) > limit or any(page.has_more for page in pages)
        return json_response(SessionPage(data=[_info(state) for state in found[:limit]], has_more=more))

    async def get(self, http_request: web.Request) -> web.Response:
        session_id = http_request.match_info["id"]
        pages = await self._everywhere(ListSessions(scope=self.scope(http_request), limit=1, session_id=session_id))
        found = _merged(state for page in pages for state in page.sessions)
        if not found:
            raise unknown_session(session_id)
        return json_response(_info(found[0]))

    async def delete(self, http_request: web.Request) -> web.Response:
        """Forget it everywhere, then free what nobody else has."""
        scope, session_id = self.scope(http_request), http_request.match_info["id"]
        asked = ForgetSession(scope=scope, session_id=session_id)
        here = self._keeper.forget(scope, session_id)
        forgotten: list[ForgottenSession] = [
            here,
            *await self._keeper.blocks.ask_others(asked, ForgottenSession),
        ]
        if not any(each.known for each in forgotten):
            raise unknown_session(session_id)
        freed = await self._keeper.blocks.drop(chain_of(chain) for each in forgotten for chain in each.chains)
        running = sum(each.running for each in forgotten)
        return json_response(DeletedSession(id=session_id, blocks=freed, running=running))

    def scope(self, http_request: web.Request) -> SessionScope:
        """Whose sessions a request may speak of."""
        client = key_name(given_key(http_request.headers)) if self._settings.api_keys else ""
        return SessionScope(client=client, salt=read_headers(http_request.headers).tenant or "")

    async def page(self, asked: ListSessions) -> SessionList:
        """Of this frontend's own sessions."""
        sessions = self._keeper.sessions
        if asked.session_id:
            session = sessions.find(asked.scope, asked.session_id)
            found, more = [session] if session is not None else [], False
        else:
            found, more = [], False
            for session in sessions.of(asked.scope):
                if asked.before_s and session.used_s >= asked.before_s:
                    continue
                if len(found) == min(asked.limit, MAX_LIMIT):
                    more = True
                    break
                found.append(session)
        states = await asyncio.gather(*(self._state(session) for session in found))
        return SessionList(sessions=tuple(states), has_more=more)

    async def _everywhere(self, asked: ListSessions) -> list[SessionList]:
        here, others = await asyncio.gather(self.page(asked), self._keeper.blocks.ask_others(asked, SessionList))
        return [here, *others]

    async def _state(self, session: Session) -> SessionState:
        keys = self._keeper.sessions.keys(session)
        state = SessionState(
            id=session.id,
            model=session.model,
            created_s=session.created_s,
            used_s=session.used_s,
            parent=session.parent,
            ephemeral=session.ephemeral,
            final=session.final,
            requests=session.requests,
            running=session.running,
            prompt_tokens=session.prompt_tokens,
            cached_tokens=session.cached_tokens,
            output_tokens=session.output_tokens,
            unpinned_tokens=session.unpinned_tokens,
            worker_id=session.worker_id,
            blocks=len(keys) // KEY_BYTES,
            leases=tuple(lease for lease in session.leases if lease.expires_s > time.time()),
            prefetch_s=self._keeper.agenda.at((session.scope, session.id)),
        )
        return msgspec.structs.replace(state, tiers=await self._keeper.blocks.tiers(session.model, keys))


def unknown_session(session_id: str) -> ApiError:
    return ApiError(404, f"No session with id '{session_id[:256]}' is known.", param="id", code="session_not_found")


def _merged(states: Iterable[SessionState]) -> list[SessionState]:
    """The newest first; what several frontends have served of one is added up, and the latest tells the rest."""
    found: dict[str, SessionState] = {}
    for state in sorted(states, key=lambda state: state.used_s, reverse=True):
        latest = found.get(state.id)
        if latest is None:
            found[state.id] = state
            continue
        found[state.id] = msgspec.structs.replace(
            latest,
            created_s=min(latest.created_s, state.created_s),
            requests=latest.requests + state.requests,
            running=latest.running + state.running,
            prompt_tokens=latest.prompt_tokens + state.prompt_tokens,
            cached_tokens=latest.cached_tokens + state.cached_tokens,
            output_tokens=latest.output_tokens + state.output_tokens,
        )
    return list(found.values())


def _info(state: SessionState) -> SessionInfo:
    return SessionInfo(
        id=state.id,
        model=state.model,
        parent=state.parent or None,
        ephemeral=state.ephemeral,
        final=state.final,
        created_at=state.created_s,
        last_used_at=state.used_s,
        requests=state.requests,
        running=state.running,
        prompt_tokens=state.prompt_tokens,
        cached_tokens=state.cached_tokens,
        output_tokens=state.output_tokens,
        unpinned_tokens=state.unpinned_tokens,
        worker_id=state.worker_id or None,
        blocks=state.blocks,
        tiers=state.tiers,
        leases=[SessionLeaseInfo(tokens=lease.tokens, expires_at=lease.expires_s) for lease in state.leases],
        prefetch_at=state.prefetch_s,
    )


def _number(http_request: web.Request, name: str, default: float) -> float:
    given = http_request.query.get(name)
    if given is None:
        return default
    if not given.isascii() or _NUMBER.fullmatch(given) is None:
        raise InvalidRequest(f"{name}: Input should be a number", param=name)
    return float(given)
