"""POST /v1/messages and /v1/messages/count_tokens, and the greetings of Claude Code"""

import secrets
from collections.abc import Mapping

import msgspec
from aiohttp import web

from kvbus_frontend.core.messages_output import MessagesOutput
from kvbus_frontend.handlers.api import MAX_NAME_IN_LOG, Api, Ticket, json_response
from kvbus_frontend.handlers.chat_flow import Begun, ChatFlow
from kvbus_frontend.handlers.nvext import report_for
from kvbus_protocols.conversation import Conversation
from kvbus_protocols.decoding import RequestDecoder
from kvbus_protocols.headers import read_headers, with_headers
from kvbus_protocols.messages import CountTokensRequest, CountTokensResponse, MessagesRequest
from kvbus_protocols.messages_turns import messages_conversation


class MessagesHandler:
    def __init__(self, api: Api, flow: ChatFlow) -> None:
        self._api = api
        self._flow = flow
        self._messages = RequestDecoder(MessagesRequest)
        self._count = RequestDecoder(CountTokensRequest)

    async def post(self, http_request: web.Request) -> web.StreamResponse:
        message_id = f"msg_{secrets.token_hex(12)}"
        async with self._api.admitted("messages", message_id, http_request) as ticket:
            body = await self._api.read(http_request)
            request = self._messages.decode(body)
            ticket.model = request.model[:MAX_NAME_IN_LOG]
            return await self._flow.answer(
                http_request,
                ticket,
                _conversation(http_request.headers, request),
                lambda begun: _output(ticket, request, begun),
                size_bytes=len(body),
            )

    def conversation(self, body: bytes, headers: Mapping[str, str]) -> Conversation:
        """What `post` answers. Raise ApiError."""
        return _conversation(headers, self._messages.decode(body))

    async def count_tokens(self, http_request: web.Request) -> web.Response:
        """Exactly what the prompt would have: rendered and tokenised the same way."""
        body = await self._api.read(http_request)
        conversation = _conversation(http_request.headers, self._count.decode(body))
        return json_response(CountTokensResponse(await self._flow.count(conversation, size_bytes=len(body))))


async def hello(_http_request: web.Request) -> web.Response:
    """Claude Code looks with HEAD whether anybody is there."""
    return web.json_response({"service": "kvbus"})


def _output(ticket: Ticket, request: MessagesRequest, begun: Begun) -> MessagesOutput:
    report = report_for(begun.conversation.generation, ticket, begun.model, begun.choices)
    return MessagesOutput(ticket.request_id, request.model, leases=begun.leases, report=report)


def _conversation(headers: Mapping[str, str], request: MessagesRequest) -> Conversation:
    said = read_headers(headers)
    conversation = messages_conversation(with_headers(request, said))
    return msgspec.structs.replace(conversation, harness=said.harness or conversation.harness)
