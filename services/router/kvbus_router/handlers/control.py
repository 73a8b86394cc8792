"""Questions about decisions, and limits that are changed while the router runs."""

import asyncio

from kvbus_router.adapters.index import IndexClient
from kvbus_router.adapters.limits import LimitsStore
from kvbus_router.core.dispatcher import Dispatcher
from kvbus_router.handlers.route import check_request
from kvbus_runtime.bus import RequestContext
from kvbus_runtime.errors import RequestFailed
from kvbus_wire.errors import ErrorCode
from kvbus_wire.message import Message
from kvbus_wire.router import ExplainPlaced, ExplainRoute, GetLimits, RouteExplanation, SetLimits

Control = ExplainRoute | ExplainPlaced | GetLimits | SetLimits


class ControlHandler:
    def __init__(self, dispatcher: Dispatcher, index: IndexClient, limits: LimitsStore) -> None:
        self._dispatcher = dispatcher
        self._index = index
        self._limits = limits
        self._loop = asyncio.get_running_loop()

    async def __call__(self, asked: Control, context: RequestContext) -> Message:
        match asked:
            case ExplainRoute():
                return await self._explain(asked)
            case ExplainPlaced(request_id=request_id):
                return self._explain_placed(request_id)
            case GetLimits():
                return self._limits.report()
            case SetLimits():
                return await self._limits.change(asked)

    async def _explain(self, asked: ExplainRoute) -> RouteExplanation:
        request = asked.request
        check_request(request)
        matches = await self._index.query(request.model, request.keys)
        return self._dispatcher.explain(request, matches, self._loop.time())

    def _explain_placed(self, request_id: str) -> RouteExplanation:
        found = self._dispatcher.explain_placed(request_id)
        if found is None:
            message = f"this router has not placed {request_id}, or has forgotten why"
            raise RequestFailed.of(ErrorCode.GONE, message, param="request_id")
        return found
