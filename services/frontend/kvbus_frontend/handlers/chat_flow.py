"""A conversation's way from a request of any chat-like API to its answer."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec
from aiohttp import web

from kvbus_frontend.adapters.models import ServedModel
from kvbus_frontend.adapters.request_run import Choice
from kvbus_frontend.core.choice_stream import ChoiceStream
from kvbus_frontend.core.compaction import asks_for_summary
from kvbus_frontend.core.conversation import FindWritten
from kvbus_frontend.core.formats import TAIL_CHARS, parser_for, prompt_reasoning
from kvbus_frontend.core.guidance import CHAT_FIELDS, FIELDS, FieldNames, Guided, guidance_of
from kvbus_frontend.core.outputs import Finish, Output
from kvbus_frontend.core.prompt import Prompt, TokenCounts, encoded_prompt, given_prompt, prompt_of
from kvbus_frontend.core.prompt_places import Places, PromptText
from kvbus_frontend.core.requests import check_count, check_vocabulary, given_tokens, raw_segments, render_conversation
from kvbus_frontend.core.retention import Lease, RetentionPlan, retention_plan
from kvbus_frontend.core.sampling import salt_of, token_budget
from kvbus_frontend.core.schemas import SchemaLimits
from kvbus_frontend.core.speculation import SaidParts, known_beginning, next_conversation
from kvbus_frontend.core.stability import Stability
from kvbus_frontend.core.triggers import input_trigger
from kvbus_frontend.handlers.api import MAX_NAME_IN_LOG, Api, Ticket
from kvbus_parsers import Event
from kvbus_protocols.conversation import CacheBreakpoint, Conversation, Part
from kvbus_protocols.errors import ApiError
from kvbus_tokenizers import EncodedPrompt, Segment, TextNotEncodable
from kvbus_wire.request import AgentHints


class Rendered(msgspec.Struct, frozen=True):
    """``tail``: the end of the prompt as text; ``plan``: how long parts of the prompt are worth keeping;
    ``question``: tokens up to the end of the last thing a person said, where that matters."""

    prompt: Prompt
    max_tokens: int
    tail: str
    guided: Guided
    plan: RetentionPlan
    question: int


class Begun(msgspec.Struct, frozen=True):
    """A request that may run. ``conversation``: as it was rendered; ``leases``: what of the prompt is to stay."""

    conversation: Conversation
    model: ServedModel
    choices: list[Choice]
    leases: tuple[Lease, ...] = ()

    @property
    def prompt(self) -> Prompt:
        return self.choices[0].job.prompt


class ChatFlow:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._stability = Stability.of(api.settings)
        self._schema_limits = SchemaLimits(api.settings.max_schema_bytes, api.settings.max_schema_depth)

    async def answer(
        self,
        http_request: web.Request,
        ticket: Ticket,
        conversation: Conversation,
        make_output: Callable[[Begun], Output],
        *,
        size_bytes: int,
    ) -> web.StreamResponse:
        """``size_bytes``: of the request's body. Raise ApiError before the response has begun."""
        begun = await self.begin(ticket, conversation, size_bytes=size_bytes)
        stream = conversation.generation.wants_stream
        return await self._api.respond(http_request, ticket, begun.choices, make_output(begun), stream=stream)

    async def begin(self, ticket: Ticket, conversation: Conversation, *, size_bytes: int) -> Begun:
        """All that comes before the first step: checks, rendering, tokenizing. Raise ApiError."""
        request = conversation.generation
        ticket.model = request.model[:MAX_NAME_IN_LOG]
        self._check(conversation)
        model = self._api.model(request.model)
        check_vocabulary(request, model.text.tokenizer.vocab_size)
        conversation = self._stability.stabilised(conversation)
        fields, limits = FIELDS.get(ticket.api, CHAT_FIELDS), self._schema_limits
        rendered = await self._api.prepare(size_bytes, lambda: _render(conversation, model, self._api, fields, limits))
        return Begun(conversation, model, self._choices(conversation, model, rendered, ticket), rendered.plan.leases)

    async def count(self, conversation: Conversation, *, size_bytes: int) -> int:
        """Tokens of the prompt that `answer` would send. Raise ApiError."""
        self._check(conversation)
        model = self._api.model(conversation.generation.model)
        conversation = self._stability.stabilised(conversation)
        encoded, _ = await self._api.prepare(size_bytes, lambda: _encoded(conversation, model, self._api))
        return encoded.count

    def _check(self, conversation: Conversation) -> None:
        settings = self._api.settings
        check_count(len(conversation.turns), settings.max_messages, "messages", "messages")
        check_count(len(conversation.tools), settings.max_tools, "tools", "tools")
        check_count(conversation.generation.n or 1, settings.max_choices, "choices", "n")

    def _choices(
        self, conversation: Conversation, model: ServedModel, rendered: Rendered, ticket: Ticket
    ) -> list[Choice]:
        request = conversation.generation
        template = self._api.job_template(
            request,
            model,
            client=ticket.client,
            input_trigger=input_trigger(conversation.turns),
            guidance=rendered.guided.guidance,
            retention=rendered.plan.ranges,
        )
        n = request.n or 1
        listener = FollowUp(conversation, model, self._api) if n == 1 and self._speculates(template.hints) else None
        return [
            Choice(
                template.job(
                    ticket.request_id if n == 1 else f"{ticket.request_id}-{i}",
                    rendered.prompt,
                    rendered.max_tokens,
                    choice=i,
                ),
                _choice_stream(conversation, model, rendered, self._api),
                leader=0,
                stop_token_ids=tuple(request.stop_token_ids or ()),
                listener=listener,
                leases=rendered.plan.leases,
                question=rendered.question,
            )
            for i in range(n)
        ]

    def _speculates(self, hints: AgentHints) -> bool:
        mode = self._api.settings.speculative_prefill
        return mode == "always" or (mode == "asked" and hints.speculative_prefill)


class FollowUp:
    """Hears an answer, and has the beginning of the prompt that will follow it computed."""

    def __init__(self, conversation: Conversation, model: ServedModel, api: Api) -> None:
        self._conversation = conversation
        self._model = model
        self._api = api
        self._said = SaidParts()

    def hear(self, events: Iterable[Event]) -> None:
        self._said.hear(events)

    def end(self, choice: Choice, finish: Finish) -> None:
        """An answer that was cut off is not what the client will go on from, and behind the last one of a session comes nothing."""
        session = choice.job.session
        if finish.reason == "stop" and not (session is not None and session.final):
            said = self._said.parts()
            predict = partial(_predicted, self._conversation, said, self._model, self._api)
            self._api.speculator.begin(choice.job, choice.worker_id, choice.stream.token_ids, predict)


def _predicted(conversation: Conversation, said: Sequence[Part], model: ServedModel, api: Api) -> Prompt | None:
    """How the next prompt begins; None when nothing can be told."""
    follows = next_conversation(conversation, said)
    if follows is None:
        return None
    salt = salt_of(conversation.generation)
    try:
        segments = known_beginning(rendered(follows, model, api.find_written(salt)))
        encoded = encoded_prompt(
            segments,
            model.text.tokenizer,
            api.prompt_cache,
            context_length=model.card.context_length,
            param="messages",
        )
    except (ApiError, TextNotEncodable):
        return None
    return prompt_of(encoded, api.prompt_cache, model.card, salt=salt)


def _choice_stream(conversation: Conversation, model: ServedModel, rendered: Rendered, api: Api) -> ChoiceStream:
    parser = parser_for(conversation, model.formats, rendered.tail, rendered.guided.calls)
    # Markers are often special tokens, so a parser has to see those.
    text = model.choice_text(conversation.generation, rendered.prompt, keep_special=None if parser is None else True)
    one_call = bool(conversation.tools) and not conversation.parallel_tool_calls
    tenant = salt_of(conversation.generation)
    return ChoiceStream(
        text, parser, max_calls=1 if one_call else None, on_call=lambda call: api.note_call(tenant, call)
    )


def _render(
    conversation: Conversation, model: ServedModel, api: Api, fields: FieldNames, limits: SchemaLimits
) -> Rendered:
    """The prompt, and how many tokens may follow: checked before the work of hashing a prompt that is too long."""
    encoded, segments = _encoded(conversation, model, api)
    tail = "".join(segment.text[-TAIL_CHARS:] for segment in segments[-TAIL_CHARS:])[-TAIL_CHARS:]
    guided = guidance_of(
        conversation,
        tool=model.formats.tool,
        reasoning=model.formats.reasoning,
        reasoning_open=prompt_reasoning(conversation, model.formats.reasoning, tail),
        fields=fields,
        limits=limits,
    )
    request = conversation.generation
    max_tokens = token_budget(
        request.token_limit,
        model.text.generation.max_new_tokens,
        prompt_tokens=encoded.count,
        context_length=model.card.context_length,
        longest=api.settings.max_output_tokens,
        param="messages",
    )
    return Rendered(
        prompt_of(encoded, api.prompt_cache, model.card, salt=salt_of(request)),
        max_tokens,
        tail,
        guided,
        *_plan(conversation, segments, encoded, model, api),
    )


def _plan(
    conversation: Conversation, segments: Sequence[Segment], encoded: EncodedPrompt, model: ServedModel, api: Api
) -> tuple[RetentionPlan, int]:
    """How long parts of the prompt are worth keeping, and the tokens up to the end of the last thing a person said."""
    points, head, question = conversation.breakpoints, 0, 0
    ends = [0] * len(points)
    if segments:
        text = PromptText(segments)
        asked = _last_question(conversation, model)
        last_turn = max((asked, *(point.turn for point in points)))
        places = Places(text, conversation.turns, conversation.tools, last_turn=last_turn)
        tokens = TokenCounts(text, segments, encoded, model.text.tokenizer, api.prompt_cache)
        head = tokens.before(places.head)
        ends = [tokens.before(places.of(point)) for point in points]
        question = tokens.before(places.of(CacheBreakpoint(asked))) if asked >= 0 else 0
    plan = retention_plan(
        conversation.generation,
        block_size=model.card.block_size,
        prompt_tokens=encoded.count,
        head=head,
        head_priority=api.settings.head_priority,
        points=list(zip(points, ends, strict=True)),
        condensing=conversation.condensing or asks_for_summary(conversation),
    )
    return plan, question


def _last_question(conversation: Conversation, model: ServedModel) -> int:
    """The last turn of a person's in a session whose model thinks: templates may leave out its thoughts about a question when
    that is answered. -1: there is none."""
    kvbus = conversation.generation.kvbus
    if model.formats.reasoning is None or kvbus is None or kvbus.session is None:
        return -1
    return max((i for i, turn in enumerate(conversation.turns) if turn.role == "user"), default=-1)


def _encoded(conversation: Conversation, model: ServedModel, api: Api) -> tuple[EncodedPrompt, Sequence[Segment]]:
    """The prompt as tokens and as text; no text when the client has made the tokens itself."""
    given = given_tokens(conversation.generation, model.text.tokenizer)
    if given is not None:
        return given_prompt(given), ()
    tokenizer, context_length = model.text.tokenizer, model.card.context_length
    segments = rendered(conversation, model, api.find_written(salt_of(conversation.generation)))
    cache = api.prompt_cache
    return encoded_prompt(segments, tokenizer, cache, context_length=context_length, param="messages"), segments


def rendered(conversation: Conversation, model: ServedModel, find_written: FindWritten) -> Sequence[Segment]:
    """The prompt as text. Raise ApiError."""
    if conversation.generation.nvext is not None and conversation.generation.nvext.use_raw_prompt:
        return raw_segments(conversation, model.text.tokenizer)
    return render_conversation(conversation, model.prompt_form, find_written)
