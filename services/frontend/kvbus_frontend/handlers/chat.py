"""POST /v1/chat/completions"""

import time

from aiohttp import web

from kvbus_frontend.adapters.models import ServedModel
from kvbus_frontend.adapters.request_run import Choice
from kvbus_frontend.core.chat_output import ChatOutput, Envelope
from kvbus_frontend.core.jobs import JobTemplate
from kvbus_frontend.core.prompt import Prompt, prompt_of
from kvbus_frontend.core.requests import chat_tokens, check_count, check_vocabulary
from kvbus_frontend.core.sampling import salt_of, token_budget
from kvbus_frontend.handlers.api import MAX_NAME_IN_LOG, Api, Ticket
from kvbus_frontend.handlers.ids import new_id
from kvbus_protocols.chat import ChatRequest
from kvbus_protocols.decoding import RequestDecoder


class ChatHandler:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._decoder = RequestDecoder(ChatRequest)

    async def post(self, http_request: web.Request) -> web.StreamResponse:
        async with self._api.admitted("chat", new_id("chatcmpl")) as ticket:
            body = await self._api.read(http_request)
            request = self._decoder.decode(body)
            ticket.model = request.model[:MAX_NAME_IN_LOG]
            self._check(request)
            model = self._api.model(request.model)
            check_vocabulary(request, model.text.tokenizer.vocab_size)
            prompt, max_tokens = await self._api.prepare(len(body), lambda: _prepare(request, model))
            choices = self._choices(request, model, prompt, max_tokens, ticket)
            envelope = Envelope(
                id=ticket.request_id,
                created=int(time.time()),
                model=request.model,
                fingerprint=model.system_fingerprint,
                token_bytes=model.text.tokenizer.token_bytes,
                logprobs=bool(request.logprobs),
                stream_usage=request.wants_stream_usage,
            )
            return await self._api.respond(http_request, request, ticket, choices, ChatOutput(envelope))

    def _check(self, request: ChatRequest) -> None:
        settings = self._api.settings
        check_count(len(request.messages), settings.max_messages, "messages", "messages")
        check_count(len(request.tools or ()), settings.max_tools, "tools", "tools")
        check_count(request.n or 1, settings.max_choices, "choices", "n")
        request.check()

    def _choices(
        self, request: ChatRequest, model: ServedModel, prompt: Prompt, max_tokens: int, ticket: Ticket
    ) -> list[Choice]:
        template = JobTemplate(
            request,
            model.text.generation,
            model=model.name,
            end_token_ids=model.text.end_token_ids,
            allowed=model.offer.allowed,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            deadline_ms=int((time.time() + self._api.settings.request_timeout_s) * 1000),
        )
        n = request.n or 1
        return [
            Choice(
                template.job(ticket.request_id if n == 1 else f"{ticket.request_id}-{i}", prompt, max_tokens, choice=i),
                model.choice_text(request, prompt),
                leader=0,
                stop_token_ids=tuple(request.stop_token_ids or ()),
            )
            for i in range(n)
        ]


def _prepare(request: ChatRequest, model: ServedModel) -> tuple[Prompt, int]:
    """The prompt, and how many tokens may follow: checked before the work of hashing a prompt that is too long."""
    tokens = chat_tokens(request, model.text.tokenizer, model.text.template)
    max_tokens = token_budget(
        request.token_limit,
        model.text.generation.max_new_tokens,
        prompt_tokens=len(tokens),
        context_length=model.card.context_length,
        param="messages",
    )
    return prompt_of(tokens, model.card, salt=salt_of(request)), max_tokens
