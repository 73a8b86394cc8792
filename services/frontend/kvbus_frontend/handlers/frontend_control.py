"""What other frontends want of this one: one subject, answered by those that it is about."""

from collections.abc import Awaitable, Callable
from typing import Any

from kvbus_frontend.adapters.session_keeper import SessionKeeper
from kvbus_frontend.handlers.prefetch import PrefetchHandler
from kvbus_frontend.handlers.sessions import SessionsHandler
from kvbus_runtime.bus import Bus
from kvbus_wire.frontend import (
    CancelResponse,
    ForgetSession,
    HeldBlocks,
    ListSessions,
    PrefetchSession,
    WhoseBlocks,
)
from kvbus_wire.message import Message
from kvbus_wire.worker import Done

CancelHere = Callable[[str], Awaitable[None]]


class FrontendControl:
    """``cancel``: ends a response that runs here."""

    def __init__(
        self, cancel: CancelHere, sessions: SessionsHandler, prefetch: PrefetchHandler, keeper: SessionKeeper
    ) -> None:
        self._cancel = cancel
        self._sessions = sessions
        self._prefetch = prefetch
        self._keeper = keeper

    async def start(self, bus: Bus, frontend_id: str) -> None:
        messages: list[type[Message]] = [CancelResponse, ListSessions, ForgetSession, WhoseBlocks, PrefetchSession]
        await bus.serve(bus.subjects.frontend_control(frontend_id), messages, self)

    async def __call__(self, message: Message, _context: Any) -> Message:
        match message:
            case CancelResponse(response_id):
                await self._cancel(response_id)
                return Done()
            case ListSessions():
                return await self._sessions.page(message)
            case ForgetSession(scope, session_id):
                return self._keeper.forget_for_other(scope, session_id)
            case WhoseBlocks(chains):
                return HeldBlocks(counts=tuple(map(self._keeper.sessions.held, chains)))
            case PrefetchSession():
                return await self._prefetch.of_session(message)
            case _:
                raise TypeError(f"nobody answers {type(message).__name__}")
