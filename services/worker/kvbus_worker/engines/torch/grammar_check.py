"""Trying out a grammar in a process that may die of it.

A few characters of pattern or grammar can take a compiler minutes, gigabytes, or a stack that no process has, and nothing inside a
process bounds that. So each part of a request is compiled here first, with a vocabulary of single bytes, and followed for some
steps; what takes too long, too much memory or too deep a stack ends this process only. `grammar_checker` is the other side.

    parent -> child   one JSON line: [kind, text, strict]       kind: json, regex, lark
    child -> parent   one JSON line: the problem, "" for none
"""

import json
import math
import random
import resource
import sys
import threading
import time

import llguidance
import msgspec

from kvbus_worker.engines.torch.grammar import BadGrammar, Source, alone, parser_limits

_STACK_BYTES = 16 << 20
_STEPS = 32


class _Bytes:
    """A vocabulary of all single bytes and an end."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def problem_of(source: Source, tokenizer: llguidance.LLTokenizer) -> str:
    """Why the part cannot be followed; empty when some steps were fine."""
    try:
        matcher = llguidance.LLMatcher(tokenizer, alone(source), log_level=0, limits=parser_limits())
    except BadGrammar as problem:
        return str(problem)
    chance = random.Random(0)
    for _ in range(_STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_error() or matcher.is_stopped():
            break
        allowed = [token for token in range(256) if mask[token >> 3] >> (token & 7) & 1]
        if not allowed:
            break
        matcher.consume_token(chance.choice(allowed))
    return plain_problem(matcher.get_error()) if matcher.is_error() else ""


def plain_problem(error: str) -> str:
    """What a person needs to know of llguidance's words."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    told = next((line for line in lines if line.startswith("error:")), lines[0] if lines else "it is invalid")
    return told.removeprefix("error:").strip()[:500]


def _serve(limit_s: int) -> None:
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
    decoder = msgspec.json.Decoder(tuple[str, str, bool])
    for line in sys.stdin.buffer:
        kind, text, strict = decoder.decode(line)
        source = Source(kind, text, strict)  # type: ignore[arg-type]
        spent_s = math.ceil(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (spent_s + limit_s, resource.RLIM_INFINITY))
        sys.stdout.buffer.write(json.dumps(problem_of(source, tokenizer)).encode() + b"\n")
        sys.stdout.buffer.flush()


def main() -> None:
    limit_s, limit_bytes = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(limit_s,))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
