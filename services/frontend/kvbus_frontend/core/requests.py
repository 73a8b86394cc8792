"""Typed requests to prompts, and the checks that need the model. All of it may run in a thread."""

from collections.abc import Iterable, Sequence

import msgspec

from kvbus_frontend.core.conversation import FindWritten, nothing_written, template_messages, template_tools
from kvbus_frontend.core.message_style import MessageStyle, template_variables
from kvbus_frontend.core.prompt import encoded_prompt, given_prompt
from kvbus_frontend.core.template_limits import TemplateLimits, fitted
from kvbus_protocols.completions import CompletionRequest
from kvbus_protocols.conversation import Conversation, TextPart
from kvbus_protocols.errors import InvalidRequest
from kvbus_protocols.generation import GenerationRequest
from kvbus_tokenizers import ChatTemplate, EncodedPrompt, PromptCache, Segment, TemplateFailed, Tokenizer


class PromptForm(msgspec.Struct, frozen=True):
    """How the prompts of one model are written."""

    template: ChatTemplate | None
    limits: TemplateLimits
    style: MessageStyle


def render_conversation(
    conversation: Conversation, form: PromptForm, find_written: FindWritten = nothing_written
) -> list[Segment]:
    """The prompt of a conversation, before tokenizing. Raise ApiError."""
    template = form.template
    if template is None:
        raise InvalidRequest("This model has no chat template; use /v1/completions.", code="no_chat_template")
    try:
        return template.render(
            template_messages(fitted(conversation.turns, form.limits), form.style, find_written),
            tools=template_tools(conversation.tools),
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final=conversation.continue_final,
            variables=template_variables(conversation, form.style.traits),
        )
    except TemplateFailed as failure:
        # Refused or not: a template fails on what the messages are, and the same request will fail again.
        words = "refuses these messages" if failure.refused else "cannot render these messages"
        raise InvalidRequest(
            f"The chat template {words}: {failure}", param="messages", code="template_error"
        ) from failure
    except RecursionError as failure:
        raise InvalidRequest(
            "The messages are nested too deeply.", param="messages", code="nesting_too_deep"
        ) from failure


def raw_segments(conversation: Conversation, tokenizer: Tokenizer) -> list[Segment]:
    """What was said as one text, without the chat template (``nvext.use_raw_prompt``). Control tokens count in it."""
    texts = (part.text for turn in conversation.turns for part in turn.parts if isinstance(part, TextPart))
    return tokenizer.control.split("".join(texts))


def completion_prompt(
    request: CompletionRequest,
    prompt: str | Sequence[int],
    tokenizer: Tokenizer,
    cache: PromptCache,
    *,
    index: int,
    context_length: int,
) -> EncodedPrompt:
    """A text prompt is written for the model itself, so control tokens count in it. Raise ApiError."""
    given = given_tokens(request, tokenizer)
    if given is not None:
        return given_prompt(given)
    if isinstance(prompt, str):
        segments = tokenizer.segments(prompt, allow_special=True, add_affixes=request.add_special_tokens is not False)
        encoded = encoded_prompt(segments, tokenizer, cache, context_length=context_length, param="prompt")
    else:
        check_token_ids(prompt, tokenizer.vocab_size, "prompt")
        encoded = given_prompt(prompt)
    if not encoded.count:
        raise InvalidRequest("The prompt is empty.", param=f"prompt[{index}]" if index else "prompt")
    return encoded


def given_tokens(request: GenerationRequest, tokenizer: Tokenizer) -> list[int] | None:
    """Tokens that the client brings along in ``nvext.token_data``."""
    tokens = request.nvext.token_data if request.nvext is not None else None
    if not tokens:
        return None
    check_token_ids(tokens, tokenizer.vocab_size, "nvext.token_data")
    return tokens


def check_token_ids(token_ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest for an id outside of the vocabulary."""
    bad = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
    if bad is not None:
        raise InvalidRequest(
            f"The token id {bad} in '{param}' is not in the vocabulary (0 to {vocab_size - 1}).", param=param
        )


def check_vocabulary(request: GenerationRequest, vocab_size: int) -> None:
    check_token_ids(request.logit_bias or (), vocab_size, "logit_bias")
    check_token_ids(request.stop_token_ids or (), vocab_size, "stop_token_ids")


def check_count(found: int, limit: int, what: str, param: str) -> None:
    """Raise InvalidRequest."""
    if found > limit:
        raise InvalidRequest(
            f"The request has {found} {what}; at most {limit} are allowed.", param=param, code="too_many"
        )
