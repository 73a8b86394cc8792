"""Prompts of a given length for `kvbus bench frontend`: each scene says what of a prompt was there before."""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvbus_cli.bench.agent_session import prose
from kvbus_tokenizers import ChatTemplate, Segment, Tokenizer

SYSTEM_SHARE = 0.5
TAIL_TOKENS = 200
TURN_TOKENS = 300
MESSAGES = 40


class Texts:
    """Conversations of a given length, each new."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, tokens: int) -> None:
        self._template = template
        self._rng = random.Random(7)
        self._made_up = 0
        sample = code(random.Random(1), 5000)
        self._per_token = len(sample) / len(tokenizer.encode(sample))
        self.tokens = tokens

    def text(self, tokens: float, *, made_up: bool = False) -> str:
        length = int(tokens * self._per_token)
        text = code(self._rng, length)
        if made_up:
            self._made_up += 1
            text = text.replace("value", f"value{self._made_up}q").replace("_", f"{self._made_up:x}_")
        return text[:length]

    def conversation(self, *, system: str | None = None, made_up: bool = False) -> list[dict[str, Any]]:
        share = self.tokens * SYSTEM_SHARE
        messages = [{"role": "system", "content": system or self.text(share, made_up=made_up)}]
        each = (self.tokens - share) / MESSAGES
        return messages + [
            {"role": ("user", "assistant")[i % 2], "content": self.text(each, made_up=made_up)} for i in range(MESSAGES)
        ]

    def render(self, messages: Sequence[dict[str, Any]]) -> list[Segment]:
        return self._template.render(messages)


def code(rng: random.Random, length: int) -> str:
    """Text that looks like source code with comments, at least so long."""
    parts: list[str] = []
    size = 0
    while size < length:
        words = prose(rng, rng.randint(3, 9)).lower().replace(".", "").split()
        indent = "    " * rng.randint(0, 3)
        name, value = "_".join(words[:2]), rng.randrange(10_000)
        line = rng.choice(
            (
                f"{indent}def {name}(self, {words[-1]}: int = {value}) -> None:\n",
                f"{indent}{name} = {words[-1]}.{words[0]}({value}, value={words[1]!r})\n",
                f"{indent}# {' '.join(words)}\n",
                f"{indent}if {name} is not None and {words[-1]} >= {value}:\n",
                "\n",
            )
        )
        parts.append(line)
        size += len(line)
    return "".join(parts)


Scene = Iterable[list[Segment]]


def _first_seen(texts: Texts) -> Scene:
    while True:
        yield texts.render(texts.conversation())


def _made_up(texts: Texts) -> Scene:
    while True:
        yield texts.render(texts.conversation(made_up=True))


def _repeated(texts: Texts) -> Scene:
    segments = texts.render(texts.conversation())
    while True:
        yield segments


def _new_tail(texts: Texts) -> Scene:
    messages = texts.conversation()
    while True:
        yield texts.render([*messages, {"role": "user", "content": texts.text(TAIL_TOKENS)}])


def _grown(texts: Texts) -> Scene:
    while True:
        messages = texts.conversation()
        for turn in range(max(1, texts.tokens // 6 // TURN_TOKENS)):
            messages.append({"role": ("user", "assistant")[turn % 2], "content": texts.text(TURN_TOKENS)})
            yield texts.render(messages)


def _other_conversation(texts: Texts) -> Scene:
    system = texts.text(texts.tokens * SYSTEM_SHARE)
    while True:
        yield texts.render(texts.conversation(system=system))


SCENES: dict[str, Callable[[Texts], Scene]] = {
    "first seen": _first_seen,
    "made-up words": _made_up,
    "repeated": _repeated,
    "new tail": _new_tail,
    "grown": _grown,
    "other conversation": _other_conversation,
}
