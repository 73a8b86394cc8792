"""POST /v1/prompt: the prompt that a request of any chat-like API becomes, with the fields that its text comes from.

The request goes the way that it goes to a worker, so tokens and block keys are those that a worker would be sent. What comes from
which field is found by rendering it again with marks in it (`core.prompt_sources`).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from aiohttp import web

from kvbus_frontend.core.field_marks import Marking, Reseal
from kvbus_frontend.core.prompt_rules import changed_texts, conversation_rules, stability_rules
from kvbus_frontend.core.prompt_sources import Sources, marked_finder, sources_of
from kvbus_frontend.core.prompt_view import blocks_of, segments_of
from kvbus_frontend.core.response_ids import id_root, new_response_id
from kvbus_frontend.core.sampling import salt_of
from kvbus_frontend.core.stability import Stability
from kvbus_frontend.core.stored_responses import references, with_ids
from kvbus_frontend.core.written_calls import WrittenCall
from kvbus_frontend.handlers.api import Api, Ticket
from kvbus_frontend.handlers.chat_flow import Begun, ChatFlow, rendered
from kvbus_frontend.handlers.responses_flow import Items, ResponsesFlow
from kvbus_protocols.conversation import Conversation
from kvbus_protocols.decoding import RequestDecoder
from kvbus_protocols.errors import InvalidRequest
from kvbus_protocols.headers import read_headers, with_headers
from kvbus_protocols.messages_echo import sign_thought, signed_thought
from kvbus_protocols.prompt_view import PromptApi, PromptRule, PromptSegment, PromptView
from kvbus_protocols.responses.request import ResponsesRequest

Begin = Callable[[Ticket, Conversation], Awaitable[Begun]]
ReadConversation = Callable[[bytes, Mapping[str, str]], Conversation]


class Asked(msgspec.Struct, frozen=True):
    """``document``: what the prompt is made of, by its path in the request; ``conversation``: of such a document (raises ApiError).

    ``begin``: prepares the conversation as a request of its API.
    """

    document: Mapping[str, Any]
    conversation: Callable[[Mapping[str, Any]], Conversation]
    begin: Begin
    reseal: Reseal
    rules: tuple[PromptRule, ...] = ()


class AskedReader(Protocol):
    """Reads the requests of one API."""

    async def read(self, ticket: Ticket, body: bytes, headers: Mapping[str, str]) -> Asked:
        """Raise ApiError."""


class BodyReader:
    """Of an API whose requests hold all that they are about. ``members``: those of the body that its prompts are made of."""

    def __init__(self, flow: ChatFlow, conversation: ReadConversation, members: Sequence[str]) -> None:
        self._flow = flow
        self._conversation = conversation
        self._members = members
        self._decoder = RequestDecoder(dict[str, Any])

    async def read(self, ticket: Ticket, body: bytes, headers: Mapping[str, str]) -> Asked:
        fields = self._decoder.decode(body)

        def conversation(document: Mapping[str, Any]) -> Conversation:
            return self._conversation(msgspec.json.encode({**fields, **document}), headers)

        def begin(ticket: Ticket, conversation: Conversation) -> Awaitable[Begun]:
            return self._flow.begin(ticket, conversation, size_bytes=len(body))

        document = {name: fields[name] for name in self._members if fields.get(name) is not None}
        return Asked(document, conversation, begin, _signed_again)


class ResponsesReader:
    """Items may stand in earlier responses, and tools in the session's earlier requests."""

    def __init__(self, flow: ResponsesFlow) -> None:
        self._flow = flow
        self._decoder = RequestDecoder(ResponsesRequest)

    async def read(self, ticket: Ticket, body: bytes, headers: Mapping[str, str]) -> Asked:
        said = read_headers(headers)
        given = with_headers(self._decoder.decode(body), said)
        given.check()
        items = await self._flow.items(ticket.request_id, given)
        request = self._flow.with_session_tools(given, said, keep=False)
        tools = "tools" if request.tools == given.tools else "session.tools"
        members = {
            "instructions": request.instructions,
            "previous_response_id": items.earlier,
            "input": self._input(given, items),
            tools: request.tools,
            "tool_choice": request.tool_choice,
        }

        def conversation(document: Mapping[str, Any]) -> Conversation:
            asked = msgspec.structs.replace(
                request,
                instructions=document.get("instructions"),
                input=document.get("input"),
                tools=document.get(tools),
                tool_choice=document.get("tool_choice"),
            )
            marked = Items(document.get("previous_response_id", []), with_ids(asked.items, id_root(ticket.request_id)))
            return self._flow.prompted(asked, marked, said).conversation

        def begin(ticket: Ticket, conversation: Conversation) -> Awaitable[Begun]:
            truncate = request.truncation == "auto"
            return self._flow.begin(ticket, conversation, size_bytes=len(body), truncate=truncate)

        document = {name: value for name, value in members.items() if value is not None}
        restored = (PromptRule(rule="session-tools", text="a compaction without tools has those of its session"),)
        return Asked(document, conversation, begin, self._flow.resealed, restored if tools != "tools" else ())

    @staticmethod
    def _input(request: ResponsesRequest, items: Items) -> str | list[dict[str, Any]] | None:
        """As the body has it, so that paths are the body's; what it refers to stands in place of the references."""
        if not isinstance(request.input, list):
            return request.input
        return [found if references([item]) else item for item, found in zip(request.input, items.input, strict=True)]


class PromptHandler:
    def __init__(self, api: Api, readers: Mapping[PromptApi, AskedReader]) -> None:
        self._api = api
        self._readers = readers
        self._stability = Stability.of(api.settings)
        self._one_at_a_time = asyncio.Lock()

    async def post(self, http_request: web.Request) -> web.Response:
        name, reader = self._reader(http_request.query.get("api"))
        body = await self._api.read(http_request)
        ticket = Ticket(name, new_response_id(), time.perf_counter())
        asked = await reader.read(ticket, body, http_request.headers)
        given = asked.conversation(asked.document)
        begun = await asked.begin(ticket, given)
        # Marking renders a prompt several times, which is no work for the loop, however small the body is. Nor may it take the
        # threads from the requests that wait to be tokenised.
        size_bytes = self._api.settings.inline_prompt_bytes + 1
        async with self._one_at_a_time:
            data = await self._api.prepare(
                size_bytes, lambda: msgspec.json.encode(self._view(name, asked, given, begun))
            )
        return web.Response(body=data, content_type="application/json")

    def _reader(self, name: str | None) -> tuple[PromptApi, AskedReader]:
        """Raise InvalidRequest."""
        for known, reader in self._readers.items():
            if name == known:
                return known, reader
        names = ", ".join(f"'{known}'" for known in self._readers)
        raise InvalidRequest(f"'api' in the query must be one of {names}.", param="api", code="invalid_value")

    def _view(self, name: PromptApi, asked: Asked, given: Conversation, begun: Begun) -> PromptView:
        model, prompt, request = begun.model, begun.prompt, given.generation
        changes = self._stability.changes(given)
        called: dict[str, WrittenCall] = {}
        if request.nvext is not None and request.nvext.token_data:
            text = model.text.tokenizer.decode(request.nvext.token_data, keep_special=True)
            segments = [PromptSegment(text=text, start=0, tokens=prompt.count, source="nvext.token_data")]
            token_chars, sources = list[int | None](), Sources()
        else:
            find_written = self._api.find_written(salt_of(request))
            plain = rendered(begun.conversation, model, find_written)

            def render(document: dict[str, Any], marking: Marking) -> str:
                called.clear()
                marked = self._stability.stabilised(asked.conversation(document))
                found = rendered(marked, model, marked_finder(find_written, marking, called.__setitem__))
                return "".join(segment.text for segment in found)

            sources = sources_of(
                asked.document,
                "".join(segment.text for segment in plain),
                render,
                changed=changed_texts(changes),
                reseal=asked.reseal,
            )
            segments, token_chars = segments_of(plain, sources.spans, model.text.tokenizer)
        stable = self._stability.stabilised(given)
        rules = [
            *asked.rules,
            *stability_rules(asked.document, changes),
            *conversation_rules(asked.document, stable, begun.conversation, model.prompt_form.limits),
            *(
                PromptRule(rule="call-as-written", source=path or None, text=call.arguments)
                for path, call in called.items()
            ),
        ]
        return PromptView(
            api=name,
            model=request.model,
            served_model=model.name,
            harness=given.harness,
            count=prompt.count,
            max_model_len=model.card.context_length,
            block_size=prompt.block_size,
            domain=prompt.domain_key.hex(),
            salted=bool(salt_of(request)),
            tokens=prompt.token_ids,
            segments=segments,
            blocks=blocks_of(prompt, token_chars),
            rules=rules,
            not_shown=list(sources.not_shown or ()),
        )


def _signed_again(signature: str, _block: Mapping[str, Any], mark: Callable[[str], str]) -> str:
    thought = signed_thought(signature)
    return signature if thought is None else sign_thought(mark(thought))
