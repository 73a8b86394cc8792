"""Chat templates: messages to a prompt, as segments in which only the template's own text holds control tokens.

Templates come with models and run in jinja2's immutable sandbox, with the settings and functions that Hugging Face templates
expect (their ``apply_chat_template`` is the reference).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvbus_tokenizers.bundle import CHAT_TEMPLATE, TOKENIZER_CONFIG, ModelBundle
from kvbus_tokenizers.control import ControlTokens, Segment
from kvbus_tokenizers.errors import TemplateFailed
from kvbus_tokenizers.tokenizer import Tokenizer
from kvbus_tokenizers.written import to_json

Clock = Callable[[], datetime]


class _Refusal(jinja2.TemplateError):
    """The template called ``raise_exception``."""


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it is only its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _environment(clock: Clock) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: clock().strftime(layout)
    return environment


class ChatTemplate:
    """One model's chat template.

    Besides the special tokens, it guards the added tokens that the template itself writes (``<think>``, ``<tool_call>``, ...): in
    everything but the assistant's own messages they are plain text.
    """

    def __init__(
        self, source: str, tokenizer: Tokenizer, *, tools_source: str | None = None, clock: Clock = datetime.now
    ) -> None:
        """``tools_source``: a second template for requests with tools. Raise TemplateFailed for broken syntax."""
        environment = _environment(clock)
        try:
            self._template = environment.from_string(source)
            self._tools_template = environment.from_string(tools_source) if tools_source is not None else self._template
        except jinja2.TemplateSyntaxError as error:
            raise TemplateFailed(f"the chat template is broken in line {error.lineno}: {error.message}") from error
        self.source = source
        text = source + (tools_source or "")
        special = [token for token in tokenizer.added_tokens.values() if token.special]
        # White space and words are vocabulary, whoever writes them; a marker is something like <think> or [TOOL_CALLS].
        markers = [
            token
            for token in tokenizer.added_tokens.values()
            if not token.special and token.content in text and re.search(r"[^\w\s]", token.content)
        ]
        self._control = ControlTokens(special, markers)
        self._names = dict(tokenizer.named_tokens)
        self._fixed = frozenset({"messages", "tools", "add_generation_prompt", *environment.globals, *self._names})
        parsed = (environment.parse(each) for each in (source, tools_source or ""))
        self.variables = frozenset().union(*map(meta.find_undeclared_variables, parsed)) - self._fixed
        """Names that the template takes from the request."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[Segment]:
        """The prompt of a conversation of plain JSON values. Raise TemplateFailed.

        ``continue_final``: the prompt ends with the last message's content, to be continued.
        ``variables``: more names for the template. Those of the conversation, of functions and of tokens cannot be replaced.
        """
        more = {name: value for name, value in (variables or {}).items() if name not in self._fixed}
        request = {**more, "messages": list(messages), "tools": list(tools) if tools else None}
        guarded, mark = self._control.guard(request, own_words=_is_assistant)
        template = self._tools_template if tools else self._template
        names = {**self._names, **guarded, "add_generation_prompt": add_generation_prompt and not continue_final}
        try:
            text = template.render(names)
        except _Refusal as error:
            raise TemplateFailed(str(error).replace(mark, "") if mark else str(error), refused=True) from error
        except Exception as error:  # a template is a program: anything may come out of it
            raise TemplateFailed(f"the chat template failed: {type(error).__name__}: {error}") from error
        if continue_final:
            text = _up_to_final(text, guarded["messages"][-1].get("content"))
        return self._control.split_guarded(text, mark)


def _up_to_final(text: str, content: Any) -> str:
    words = content.strip() if isinstance(content, str) else ""
    start = text.rfind(words)
    if not words or start < 0:
        raise TemplateFailed("the final message is empty, or the template does not write it as it is", refused=True)
    return text[: start + len(words)]


def _is_assistant(value: Any) -> bool:
    return bool(value.get("role") == "assistant")


def load_template(bundle: ModelBundle, tokenizer: Tokenizer, *, clock: Clock = datetime.now) -> ChatTemplate | None:
    """The template of a bundle: its own file, else the entry in tokenizer_config.json; None when the model has none.

    Raise TemplateFailed.
    """
    if CHAT_TEMPLATE in bundle.files:
        return ChatTemplate(bundle.files[CHAT_TEMPLATE].decode(), tokenizer, clock=clock)
    if TOKENIZER_CONFIG not in bundle.files:
        return None
    entry = msgspec.json.decode(bundle.files[TOKENIZER_CONFIG]).get("chat_template")
    if isinstance(entry, list):
        named = {item["name"]: item["template"] for item in entry}
        if "default" not in named:
            return None
        return ChatTemplate(named["default"], tokenizer, tools_source=named.get("tool_use"), clock=clock)
    return ChatTemplate(entry, tokenizer, clock=clock) if isinstance(entry, str) else None
