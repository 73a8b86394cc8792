"""POST /v1/chat/completions"""

import time
from collections.abc import Mapping

from aiohttp import web

from kvbus_frontend.core.chat_output import ChatOutput, ChatStyle
from kvbus_frontend.core.openai_stream import Envelope
from kvbus_frontend.handlers.api import MAX_NAME_IN_LOG, Api, Ticket
from kvbus_frontend.handlers.chat_flow import Begun, ChatFlow
from kvbus_frontend.handlers.ids import new_id
from kvbus_frontend.handlers.nvext import report_for
from kvbus_protocols.chat import ChatRequest
from kvbus_protocols.chat_turns import chat_conversation
from kvbus_protocols.conversation import Conversation
from kvbus_protocols.decoding import RequestDecoder
from kvbus_protocols.headers import read_headers, with_headers

OFFICIAL_SDK = "x-stainless-lang"
"""A header of OpenAI's own SDKs. They take every event of a stream for a chunk and stumble over one without choices."""


class ChatHandler:
    def __init__(self, api: Api, flow: ChatFlow) -> None:
        self._api = api
        self._flow = flow
        self._decoder = RequestDecoder(ChatRequest)

    async def post(self, http_request: web.Request) -> web.StreamResponse:
        async with self._api.admitted("chat", new_id("chatcmpl"), http_request) as ticket:
            body = await self._api.read(http_request)
            request = self._request(body, http_request.headers)
            ticket.model = request.model[:MAX_NAME_IN_LOG]
            request.check()
            return await self._flow.answer(
                http_request,
                ticket,
                chat_conversation(request),
                lambda begun: self._output(request, begun, ticket, http_request.headers),
                size_bytes=len(body),
            )

    def conversation(self, body: bytes, headers: Mapping[str, str]) -> Conversation:
        """What `post` answers. Raise ApiError."""
        request = self._request(body, headers)
        request.check()
        return chat_conversation(request)

    def _request(self, body: bytes, headers: Mapping[str, str]) -> ChatRequest:
        return with_headers(self._decoder.decode(body), read_headers(headers))

    def _output(self, request: ChatRequest, begun: Begun, ticket: Ticket, headers: Mapping[str, str]) -> ChatOutput:
        settings = self._api.settings
        envelope = Envelope(
            id=ticket.request_id,
            created=int(time.time()),
            model=request.model,
            fingerprint=begun.model.system_fingerprint,
            token_bytes=begun.model.text.tokenizer.token_bytes,
            logprobs=bool(request.logprobs),
            stream_usage=request.wants_stream_usage,
            report=report_for(request, ticket, begun.model, begun.choices),
        )
        style = ChatStyle(
            reasoning_content=settings.reasoning_field != "reasoning",
            reasoning=settings.reasoning_field != "reasoning_content",
            dispatch_tools=settings.enable_streaming_tool_dispatch,
            dispatch_reasoning=settings.enable_streaming_reasoning_dispatch,
            events_are_chunks=OFFICIAL_SDK in headers,
            named_choice=begun.conversation.tool_choice.named,
            custom_tools=frozenset(tool.name for tool in begun.conversation.tools if tool.custom),
        )
        return ChatOutput(envelope, style)
