"""`kvbus bench frontend`: what it costs to turn a coding agent's prompts into tokens and block keys, and to parse its output.

Without a system: the frontend's own code in this process, against plain HF tokenizing of the same rendered text with the same
tokenizer, in turns. Both sides give equal ids; that is checked. Prompts have --tokens tokens: a system prompt of code-like text and
40 messages. The figures are medians of --repetitions.

    first seen          text that neither side has seen, in common words
    made-up words       the same with names that no earlier text had
    repeated            the same prompt again
    new tail            the same system prompt and messages, and a new last message of 200 tokens
    grown               one conversation that grows by 300 tokens per turn, up to a sixth more
    other conversation  the same system prompt under other messages

The chat template is the same for both and stands by itself (render_ms).

Fields of the JSON file:
    kvbus_version, python, cores, tokenizer, repetitions, prompt_tokens
    render_ms               the chat template, for the whole prompt
    prompts[]               name
        hf_ms               HF tokenizers: text to ids
        hf_keys_ms          the same, and the keys of all blocks
        tokens_ms           through the prompt cache: packed ids
        keys_ms             the same, and the keys of all blocks
        ratio, keys_ratio   hf_ms / tokens_ms, hf_keys_ms / keys_ms
        cached_tokens       of the last prompt: not tokenized
    parsers[]               format, us_per_token: of an output with a thought, text and calls, fed token by token
"""

import argparse
import importlib
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from kvbus_cli.bench.agent_session import prose
from kvbus_cli.bench.prompt_scenes import SCENES, Scene, Texts
from kvbus_cli.model_command import DEFAULT_MODEL, prepared_folder
from kvbus_parsers import open_parser
from kvbus_runtime.arguments import ArgumentParser
from kvbus_tokenizers import (
    ModelBundle,
    PromptCache,
    Segment,
    Tokenizer,
    TokenizerError,
    load_template,
    load_tokenizer,
)
from kvbus_wire.packing import unpack_tokens
from kvbus_wire.records import ModelCard

BLOCK_SIZE = 16
CACHE_BYTES = 128 << 20
THOUGHT_WORDS = 300
CARD = ModelCard(
    name="m", fingerprint="f" * 64, block_size=BLOCK_SIZE, context_length=1 << 30, bundle="b" * 64, kv_layout="l" * 64
)

_CALLS = {
    ("hermes", "qwen3"): (
        "<think>\n{thought}\n</think>\n\n{text}\n<tool_call>\n"
        '{{"name": "edit", "arguments": {{"path": "a", "text": "{code}"}}}}\n</tool_call>'
    ),
    ("qwen3_coder", "qwen3"): (
        "<think>\n{thought}\n</think>\n\n{text}\n<tool_call>\n<function=edit>\n<parameter=path>\na\n</parameter>\n"
        "<parameter=text>\n{code}\n</parameter>\n</function>\n</tool_call>"
    ),
    ("glm47", "glm45"): (
        "<think>{thought}</think>{text}<tool_call>edit<arg_key>path</arg_key><arg_value>a</arg_value>"
        "<arg_key>text</arg_key><arg_value>{code}</arg_value></tool_call>"
    ),
    ("minimax_m2", "minimax_m2"): (
        '<think>\n{thought}\n</think>\n\n{text}\n<minimax:tool_call>\n<invoke name="edit">\n<parameter name="path">a</parameter>\n'
        '<parameter name="text">{code}</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    ("deepseek_v3_2", "deepseek_v4"): (
        '<think>{thought}</think>{text}\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="edit">\n'
        '<｜DSML｜parameter name="text" string="true">{code}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    ),
    ("kimi_k2", "kimi_k2"): (
        "<think>{thought}</think>{text}<|tool_calls_section_begin|><|tool_call_begin|>functions.edit:0<|tool_call_argument_begin|>"
        '{{"path": "a", "text": "{code}"}}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    ("mistral", "mistral"): '[THINK]{thought}[/THINK]{text}[TOOL_CALLS]edit[ARGS]{{"path": "a", "text": "{code}"}}',
    ("harmony", "gpt_oss"): (
        "<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>commentary to=functions.edit "
        '<|constrain|>json<|message|>{{"path": "a", "text": "{code}"}}<|call|>'
    ),
}  # fmt: skip
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
        },
    }
]


class PromptFigures(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    hf_ms: float
    hf_keys_ms: float
    tokens_ms: float
    keys_ms: float
    ratio: float
    keys_ratio: float
    cached_tokens: int


class ParserFigures(msgspec.Struct, frozen=True, kw_only=True):
    format: str
    us_per_token: float


class FrontendFigures(msgspec.Struct, frozen=True, kw_only=True):
    kvbus_version: str
    python: str
    cores: int
    tokenizer: str
    repetitions: int
    prompt_tokens: int
    render_ms: float
    prompts: tuple[PromptFigures, ...]
    parsers: tuple[ParserFigures, ...]


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="kvbus bench frontend",
        description="Measure tokenizing and keying of prompts against plain HF tokenizing, and parsing of output.",
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures there")
    parser.add_argument("--tokens", type=int, default=52_000, help="length of a prompt (52000)")
    parser.add_argument("--repetitions", type=int, default=15, help="of each measurement (15)")
    parser.add_argument("--model", default="", help=f"folder with the model's tokenizer; default: {DEFAULT_MODEL}")
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    try:
        folder = Path(arguments.model) if arguments.model else prepared_folder(DEFAULT_MODEL)
        if folder is None:
            raise ValueError(f"name a --model folder, or let `kvbus model get {DEFAULT_MODEL}` prepare one")
        figures = measure(folder, arguments.tokens, arguments.repetitions)
    except (OSError, TokenizerError, ValueError) as error:
        print(f"kvbus bench frontend: {error}", file=sys.stderr)
        return 1
    _print(figures)
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")
    return 0


def measure(folder: Path, tokens: int, repetitions: int) -> FrontendFigures:
    """Raise TokenizerError, or ValueError when the two sides differ."""
    bundle = ModelBundle.from_directory(folder)
    tokenizer = load_tokenizer(bundle)
    template = load_template(bundle, tokenizer)
    if template is None:
        raise ValueError(f"{folder} has no chat template")
    sides = _Sides(bundle, tokenizer)
    texts = Texts(template, tokenizer, tokens)
    prompts = tuple(_prompt_figures(name, make(texts), sides, repetitions) for name, make in SCENES.items())
    render_ms, rendered = _rendering(texts, repetitions)
    return FrontendFigures(
        kvbus_version=version("kvbus"),
        python=platform.python_version(),
        cores=os.cpu_count() or 1,
        tokenizer=tokenizer.backend_name,
        repetitions=repetitions,
        prompt_tokens=len(tokenizer.encode_segments(rendered)),
        render_ms=render_ms,
        prompts=prompts,
        parsers=tuple(
            ParserFigures(format=tool, us_per_token=_parse_us(tokenizer, tool, reasoning, text, repetitions))
            for (tool, reasoning), text in _CALLS.items()
        ),
    )


# prompts


class _Sides:
    """The two ways from rendered segments to tokens and keys."""

    def __init__(self, bundle: ModelBundle, tokenizer: Tokenizer) -> None:
        # Named, not imported: the command knows services by their names only.
        prompts, keys = (importlib.import_module(name) for name in ("kvbus_frontend.core.prompt", "kvbus_blocks.keys"))
        native = importlib.import_module("tokenizers").Tokenizer.from_str(bundle.files["tokenizer.json"].decode())
        native.no_truncation()
        native.no_padding()
        self._native, self._prompts, self._keys = native, prompts, keys
        self._tokenizer = tokenizer
        self.cache = PromptCache(CACHE_BYTES)

    def hf(self, text: str, *, with_keys: bool) -> Any:
        ids = self._native.encode(text, add_special_tokens=False).ids
        if with_keys:
            self._prompts.prompt_of(self._prompts.given_prompt(ids), PromptCache(0), CARD)
        return ids

    def cached(self, segments: Sequence[Segment], *, with_keys: bool) -> Any:
        encoded = self.cache.encode(self._tokenizer, segments)
        if with_keys:
            self._prompts.prompt_of(encoded, self.cache, CARD)
        return encoded


def _prompt_figures(name: str, scene: Scene, sides: _Sides, repetitions: int) -> PromptFigures:
    """Each side gets a new prompt for each figure: a text that one measurement has shown it is not new in the next."""
    prompts = iter(scene)
    sides.cached(next(prompts), with_keys=True)  # what comes before the first measured prompt
    samples: dict[str, list[float]] = {"hf": [], "hf keys": [], "tokens": [], "keys": []}
    cached_tokens = 0
    for _ in range(repetitions):
        for with_keys in (False, True):
            segments = next(prompts)
            text = "".join(segment.text for segment in segments)
            ours_s, encoded = _timed(lambda: sides.cached(segments, with_keys=with_keys))  # noqa: B023
            theirs_s, ids = _timed(lambda: sides.hf(text, with_keys=with_keys))  # noqa: B023
            if unpack_tokens(encoded.tokens) != ids:
                raise ValueError(f"the token ids differ ({name})")
            samples["keys" if with_keys else "tokens"].append(ours_s)
            samples["hf keys" if with_keys else "hf"].append(theirs_s)
            cached_tokens = encoded.cached_tokens
    hf, hf_keys, tokens, keys = (statistics.median(values) * 1000 for values in samples.values())
    return PromptFigures(
        name=name,
        hf_ms=round(hf, 3),
        hf_keys_ms=round(hf_keys, 3),
        tokens_ms=round(tokens, 3),
        keys_ms=round(keys, 3),
        ratio=round(hf / tokens, 1),
        keys_ratio=round(hf_keys / keys, 1),
        cached_tokens=cached_tokens,
    )


def _rendering(texts: Texts, repetitions: int) -> tuple[float, list[Segment]]:
    messages = texts.conversation()
    times = [_timed(lambda: texts.render(messages))[0] for _ in range(repetitions)]
    return round(statistics.median(times) * 1000, 3), texts.render(messages)


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    result = work()
    return time.perf_counter() - begun, result


# parsers


def _parse_us(tokenizer: Tokenizer, tool: str, reasoning: str, text: str, repetitions: int) -> float:
    """Processor time of one token, the parser's alone."""
    rng = random.Random(3)
    output = text.format(
        thought=prose(rng, THOUGHT_WORDS), text=prose(rng, 50), code=prose(rng, THOUGHT_WORDS).replace("\n", " ")
    )
    pieces = [tokenizer.decode([token], keep_special=True) for token in tokenizer.encode(output)]
    costs: list[float] = []
    for _ in range(repetitions):
        parser = open_parser(tool=tool, reasoning=reasoning, tools=_TOOLS, reasoning_open=False)
        begun = time.process_time()
        for piece in pieces:
            parser.feed(piece)
        parser.finish("stop")
        costs.append((time.process_time() - begun) / len(pieces))
    return round(statistics.median(costs) * 1e6, 2)


def _print(figures: FrontendFigures) -> None:
    print(
        f"prompts of {figures.prompt_tokens} tokens, {figures.tokenizer}; the chat template takes {figures.render_ms:.1f} ms"
    )
    print(f"{'':<20}{'HF':>9}{'here':>9}{'ratio':>8}   {'HF + keys':>11}{'here':>9}{'ratio':>8}   {'cached':>8}")
    for row in figures.prompts:
        print(
            f"{row.name:<20}{row.hf_ms:>9.2f}{row.tokens_ms:>9.2f}{row.ratio:>7.0f}x   "
            f"{row.hf_keys_ms:>11.2f}{row.keys_ms:>9.2f}{row.keys_ratio:>7.0f}x   {row.cached_tokens:>8}"
        )
    print("(ms, medians; cached: tokens of the last prompt that were not tokenized)\n")
    print("parsing, us per token: " + ", ".join(f"{row.format} {row.us_per_token:.1f}" for row in figures.parsers))
