"""POST /v1/responses/compact"""

import time

import msgspec
from aiohttp import web

from kvbus_frontend.core.compaction import kept_items, summarising, summary_of
from kvbus_frontend.core.response_echo import blank_response
from kvbus_frontend.core.response_ids import id_root, new_response_id
from kvbus_frontend.core.responses_output import ResponsesOutput, ResponseStyle
from kvbus_frontend.handlers.api import Api, json_response
from kvbus_frontend.handlers.responses_flow import ResponsesFlow
from kvbus_protocols.decoding import RequestDecoder
from kvbus_protocols.errors import ApiError
from kvbus_protocols.headers import read_headers, with_headers
from kvbus_protocols.responses.request import CompactRequest, ResponsesRequest
from kvbus_protocols.responses.response import CompactedResponse, CompactionItem, Usage


class CompactionHandler:
    """The answer is not stored: it is the client's to send back, as the beginning of a new conversation."""

    def __init__(self, api: Api, flow: ResponsesFlow) -> None:
        self._api = api
        self._flow = flow
        self._decoder = RequestDecoder(CompactRequest)

    async def post(self, http_request: web.Request) -> web.Response:
        response_id = new_response_id()
        async with self._api.admitted("responses", response_id, http_request) as ticket:
            body = await self._api.read(http_request)
            headers = read_headers(http_request.headers)
            request = with_headers(self._decoder.decode(body), headers)
            request.check()
            items = await self._flow.items(response_id, request)
            told = msgspec.structs.replace(headers, compaction=True)
            conversation = summarising(
                self._flow.conversation(self._flow.with_session_tools(request, told), items).conversation,
                max_tokens=self._api.settings.compaction_max_tokens,
            )
            conversation = msgspec.structs.replace(conversation, harness=headers.harness)
            # A conversation is compacted because it is too long, so it may already be longer than the context.
            begun = await self._flow.begin(ticket, conversation, size_bytes=len(body), truncate=True)
            created_at = int(time.time())
            blank = blank_response(
                ResponsesRequest(model=request.model), response_id, begun.model.text.generation, created_at=created_at
            )
            output = ResponsesOutput(blank, ResponseStyle(now=time.time))
            async with self._api.running(ticket, begun.choices) as run:
                await self._api.collect(run, output)
                usage = run.usage
            summary = summary_of(output.response.output)
            if not summary:
                raise ApiError(500, "The model has written no summary.", code="no_summary")
            item = CompactionItem(
                id=f"cmp_{id_root(response_id)}0000", encrypted_content=self._flow.seal_compaction(summary)
            )
            kept = kept_items([*items.earlier, *items.input])
            return json_response(
                CompactedResponse(id=response_id, created_at=created_at, output=[*kept, item], usage=Usage.of(usage))
            )
