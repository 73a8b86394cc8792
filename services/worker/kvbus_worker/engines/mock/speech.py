"""What one request says: its output tokens, in which step each comes, and how it ends. Fixed when the request is submitted."""

from collections.abc import Sequence

import msgspec

from kvbus_wire.errors import ErrorReply
from kvbus_wire.request import MockOutput, Stopping
from kvbus_worker.engines.mock.script import ScriptLine


class Speech(msgspec.Struct, frozen=True):
    """``ends[i]``: the step that emits output token i emits all tokens before ``ends[i]``.

    ``reason`` is stop, length or, with ``error``, error. ``stop_token_id``: the token that ends it; it costs a step of its own, as
    in a real engine. ``prefill_s``, ``step_s``: the least time until the first token, and from one emission to the next.
    ``even``: each step emits one token, and none has to wait.
    """

    tokens: Sequence[int]
    ends: Sequence[int]
    reason: str
    stop_token_id: int | None = None
    error: ErrorReply | None = None
    prefill_s: float = 0.0
    step_s: float = 0.0
    even: bool = False


def scripted(pieces: Sequence[Sequence[int]], line: ScriptLine, stopping: Stopping, eos: int | None) -> Speech:
    """Play a line of a script: its output, its pace, and its error unless ``stopping`` ends the output before that."""
    if line.error is None:
        speech = played(pieces, line.finish, stopping, eos)
    else:
        whole = played(pieces, "stop_sequence", stopping, None)
        cut = len(whole.tokens) < sum(len(piece) for piece in pieces)
        error = ErrorReply(**msgspec.structs.asdict(line.error))
        speech = whole if cut else msgspec.structs.replace(whole, reason="error", error=error)
    return msgspec.structs.replace(speech, prefill_s=line.prefill_s, step_s=line.step_s)


def played(pieces: Sequence[Sequence[int]], finish: str, stopping: Stopping, eos: int | None) -> Speech:
    """Play given output: each piece's tokens come in one step. ``finish`` stop ends with EOS; stop_sequence without it."""
    tokens: list[int] = []
    ends: list[int] = []
    for piece in pieces:
        tokens.extend(piece)
        ends.extend([len(tokens)] * len(piece))
    stop = finish != "length"
    return _cut(Speech(tokens, ends, "stop" if stop else "length", eos if finish == "stop" else None), stopping)


def one_by_one(tokens: list[int], stopping: Stopping, *, reason: str, eos: int | None) -> Speech:
    """A token a step."""
    ends = list(range(1, len(tokens) + 1))
    speech = _cut(Speech(tokens, ends, reason, eos if reason == "stop" else None), stopping)
    return msgspec.structs.replace(speech, even=True)


def pieces_of(output: MockOutput | ScriptLine) -> tuple[tuple[str, ...], bool]:
    """The pieces to tokenise, and whether each is emitted in one step (else token by token)."""
    return (output.chunks, True) if output.chunks else ((output.output,), False)


def _cut(speech: Speech, stopping: Stopping) -> Speech:
    """End at the first stop token (past ``min_tokens``) or at ``max_tokens``, whichever is first."""
    limit = min(len(speech.tokens), stopping.max_tokens)
    stops = set(stopping.stop_token_ids)
    if stops:
        for i in range(stopping.min_tokens, limit):
            if speech.tokens[i] in stops:
                return Speech(speech.tokens[:i], [min(end, i) for end in speech.ends[:i]], "stop", speech.tokens[i])
    if limit < len(speech.tokens) or (
        limit == stopping.max_tokens and speech.reason == "stop" and speech.stop_token_id is not None
    ):
        return Speech(speech.tokens[:limit], [min(end, limit) for end in speech.ends[:limit]], "length")
    return speech
