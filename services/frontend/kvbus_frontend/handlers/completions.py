"""POST /v1/completions"""

import time
from collections.abc import Mapping, Sequence

import msgspec
from aiohttp import web

from kvbus_frontend.adapters.models import ServedModel
from kvbus_frontend.adapters.request_run import Choice
from kvbus_frontend.core.choice_stream import ChoiceStream
from kvbus_frontend.core.completion_output import CompletionOutput
from kvbus_frontend.core.dispatch import Job
from kvbus_frontend.core.openai_stream import Envelope
from kvbus_frontend.core.prompt import Prompt, prompt_of
from kvbus_frontend.core.requests import check_count, check_vocabulary, completion_prompt
from kvbus_frontend.core.retention import retention_plan
from kvbus_frontend.core.sampling import salt_of, token_budget
from kvbus_frontend.handlers.api import MAX_NAME_IN_LOG, Api, Ticket
from kvbus_frontend.handlers.ids import new_id
from kvbus_frontend.handlers.nvext import report_for
from kvbus_protocols.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from kvbus_protocols.decoding import RequestDecoder
from kvbus_protocols.errors import InvalidRequest
from kvbus_protocols.headers import read_headers, with_headers
from kvbus_wire.request import Retention


class _Prepared(msgspec.Struct, frozen=True):
    """A prompt, and its text when the request wants it back."""

    prompt: Prompt
    max_tokens: int
    echo: str | None


class CompletionsHandler:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._decoder = RequestDecoder(CompletionRequest)

    async def post(self, http_request: web.Request) -> web.StreamResponse:
        async with self._api.admitted("completions", new_id("cmpl"), http_request) as ticket:
            body = await self._api.read(http_request)
            request, model, choices, echoes = await self._begin(ticket, body, http_request.headers)
            envelope = Envelope(
                id=ticket.request_id,
                created=int(time.time()),
                model=request.model,
                fingerprint=model.system_fingerprint,
                token_bytes=model.text.tokenizer.token_bytes,
                logprobs=request.logprobs is not None,
                stream_usage=request.wants_stream_usage,
                report=report_for(request, ticket, model, choices),
            )
            output = CompletionOutput(envelope, echoes)
            return await self._api.respond(http_request, ticket, choices, output, stream=request.wants_stream)

    async def job(self, ticket: Ticket, body: bytes, headers: Mapping[str, str]) -> Job:
        """Of a request with one prompt, as it would be run. Raise ApiError."""
        _, _, choices, _ = await self._begin(ticket, body, headers)
        if any(choice.leader for choice in choices):
            raise InvalidRequest("Give one prompt.", param="prompt", code="too_many")
        return choices[0].job

    async def _begin(
        self, ticket: Ticket, body: bytes, headers: Mapping[str, str]
    ) -> tuple[CompletionRequest, ServedModel, list[Choice], dict[int, str]]:
        request = with_headers(self._decoder.decode(body), read_headers(headers))
        ticket.model = request.model[:MAX_NAME_IN_LOG]
        request.check()
        if request.echo and request.logprobs is not None:
            raise InvalidRequest("'echo' with 'logprobs' is not supported.", param="logprobs", code="unsupported")
        prompts = request.prompts
        check_count(len(prompts) * (request.n or 1), self._api.settings.max_choices, "choices", "n")
        model = self._api.model(request.model)
        check_vocabulary(request, model.text.tokenizer.vocab_size)
        prepared = await self._api.prepare(len(body), lambda: _prepare(request, prompts, model, self._api))
        return request, model, *self._choices(request, model, prepared, ticket)

    def _choices(
        self, request: CompletionRequest, model: ServedModel, prepared: Sequence[_Prepared], ticket: Ticket
    ) -> tuple[list[Choice], dict[int, str]]:
        """All choices of the first prompt, then those of the second, and so on, as OpenAI numbers them."""
        template = self._api.job_template(request, model, client=ticket.client)
        n, choices, echoes = request.n or 1, list[Choice](), dict[int, str]()
        for item in prepared:
            leader = len(choices)
            for choice in range(n):
                index = len(choices)
                request_id = ticket.request_id if n * len(prepared) == 1 else f"{ticket.request_id}-{index}"
                job = template.job(request_id, item.prompt, item.max_tokens, choice=choice)
                job = msgspec.structs.replace(job, retention=_retention(request, item.prompt))
                stream = ChoiceStream(model.choice_text(request, item.prompt))
                choices.append(Choice(job, stream, leader, stop_token_ids=tuple(request.stop_token_ids or ())))
                if item.echo is not None:
                    echoes[index] = item.echo
        return choices, echoes


def _retention(request: CompletionRequest, prompt: Prompt) -> tuple[Retention, ...]:
    return retention_plan(request, block_size=prompt.block_size, prompt_tokens=prompt.count).ranges


def _prepare(
    request: CompletionRequest, prompts: Sequence[str | Sequence[int]], model: ServedModel, api: Api
) -> list[_Prepared]:
    tokenizer, context_length, cache = model.text.tokenizer, model.card.context_length, api.prompt_cache
    prepared = []
    for index, text in enumerate(prompts):
        encoded = completion_prompt(request, text, tokenizer, cache, index=index, context_length=context_length)
        max_tokens = token_budget(
            request.max_tokens if request.max_tokens is not None else DEFAULT_MAX_TOKENS,
            None,
            prompt_tokens=encoded.count,
            context_length=context_length,
            longest=api.settings.max_output_tokens,
            param="prompt",
        )
        prompt = prompt_of(encoded, cache, model.card, salt=salt_of(request))
        echo = (text if isinstance(text, str) else tokenizer.decode(prompt.token_ids)) if request.echo else None
        prepared.append(_Prepared(prompt, max_tokens, echo))
    return prepared
