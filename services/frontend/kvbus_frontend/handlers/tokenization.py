"""POST /v1/tokenize and POST /v1/detokenize"""

from aiohttp import web

from kvbus_frontend.adapters.models import ServedModel
from kvbus_frontend.core.requests import check_count, check_token_ids, render_conversation
from kvbus_frontend.handlers.api import Api, json_response
from kvbus_protocols.chat_turns import chat_tools, chat_turns
from kvbus_protocols.conversation import Conversation
from kvbus_protocols.decoding import RequestDecoder
from kvbus_protocols.generation import GenerationRequest
from kvbus_protocols.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)


class TokenizationHandler:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._tokenize = RequestDecoder(TokenizeRequest)
        self._detokenize = RequestDecoder(DetokenizeRequest)

    async def tokenize(self, http_request: web.Request) -> web.Response:
        body = await self._api.read(http_request)
        request = self._tokenize.decode(body)
        request.check()
        check_count(len(request.messages or ()), self._api.settings.max_messages, "messages", "messages")
        model = self._api.model(request.model)
        tokens = await self._api.prepare(len(body), lambda: _tokens(request, model, self._api))
        token_bytes = model.text.tokenizer.token_bytes
        texts = [token_bytes(i).decode(errors="replace") for i in tokens] if request.return_token_strs else None
        return json_response(
            TokenizeResponse(
                count=len(tokens), max_model_len=model.card.context_length, tokens=tokens, token_strs=texts
            )
        )

    async def detokenize(self, http_request: web.Request) -> web.Response:
        body = await self._api.read(http_request)
        request = self._detokenize.decode(body)
        tokenizer = self._api.model(request.model).text.tokenizer
        check_token_ids(request.tokens, tokenizer.vocab_size, "tokens")
        text = await self._api.prepare(len(body), lambda: tokenizer.decode(request.tokens, keep_special=True))
        return json_response(DetokenizeResponse(prompt=text))


def _tokens(request: TokenizeRequest, model: ServedModel, api: Api) -> list[int]:
    tokenizer = model.text.tokenizer
    if request.prompt is not None:
        return tokenizer.encode(request.prompt, allow_special=True, add_affixes=request.add_special_tokens is not False)
    conversation = Conversation(
        generation=GenerationRequest(model=request.model),
        turns=chat_turns(request.messages or ()),
        tools=chat_tools(request.tools),
        add_generation_prompt=request.add_generation_prompt is not False,
        template_variables=request.chat_template_kwargs or {},
    )
    return tokenizer.encode_segments(render_conversation(conversation, model.prompt_form, api.find_written("")))
