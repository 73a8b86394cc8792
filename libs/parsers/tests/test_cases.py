"""The case file, each case in every way to cut its output into pieces.

A case says what has to come out. ``strength`` is ``must`` or ``should``; a ``should`` that does not pass has its reason here.
"""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbus_parsers import Reasoning, Text
from kvbus_parsers.cases import case_parser, result, run_case
from kvbus_parsers.grammar import ReasoningFormat, ToolFormat
from kvbus_parsers.names import reasoning_format, tool_format

Case = dict[str, Any]
Result = dict[str, Any]

CASES: list[Case] = [
    json.loads(line) for line in (Path(__file__).parent / "cases.jsonl").read_text("utf-8").splitlines()
]

NOT_PASSED: dict[str, str] = {}
"""``should`` cases that do not pass, and why."""

LONGEST_FOR_EVERY_SPLIT = 1500

# Not those whose whole output is a format, or whose calls begin like text: there the first characters are nothing yet.
WITH_MARKERS = [
    case
    for case in CASES
    if "segments" in case["expected"]
    and len(case["model_output"]) < LONGEST_FOR_EVERY_SPLIT
    and not any(word in str(case["parser"]) for word in ("harmony", "gpt_oss", "pythonic", "xlam", "llama3"))
]


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_the_output_of_a_case_gives_what_it_expects_however_it_is_cut(case: Case) -> None:
    if case["id"] in NOT_PASSED:
        assert case["strength"] == "should"
        pytest.skip(NOT_PASSED[case["id"]])
    whole = _run(case, [case["model_output"]])
    assert _difference(case, whole) is None
    for label, chunks in _chunkings(case):
        assert _without_ids(_run(case, chunks)) == _without_ids(whole), label


def test_a_delta_holds_reasoning_or_text_and_both_come_in_order() -> None:
    for case in CASES:
        if case.get("one_kind_per_chunk"):
            kinds = [type(event) for event in case_parser(case).feed(case["model_output"])]
            assert kinds.index(Reasoning) < kinds.index(Text)


@pytest.mark.parametrize("case", WITH_MARKERS, ids=[case["id"] for case in WITH_MARKERS])
def test_an_output_cut_anywhere_gives_the_beginning_of_what_the_whole_one_gives(case: Case) -> None:
    """Text may end in what could have become a marker. Calls that look complete are those of the whole output."""
    text = case["model_output"]
    whole = run_case({**case, "finish": "stop"}, [text])
    marks = _marks(case)
    for end in range(1, len(text)):
        cut = run_case({**case, "finish": "length"}, [text[:end]])
        for given, full in ((cut.content, whole.content), (cut.reasoning, whole.reasoning)):
            assert _begins(full or "", given or "", marks), (end, given)
        complete = [(call.name, call.arguments) for call in cut.tool_calls if call.complete]
        assert complete == [(call.name, call.arguments) for call in whole.tool_calls[: len(complete)]], end
        assert [call.name for call in cut.tool_calls] == [
            call.name for call in whole.tool_calls[: len(cut.tool_calls)]
        ], end


def _begins(full: str, given: str, marks: set[str]) -> bool:
    """Whether the text is a beginning of the full one, but for the beginning of a marker at its end."""
    ends = [at for at in range(len(given)) if any(mark.startswith(given[at:]) for mark in marks)]
    return any(full.startswith(given[:at].rstrip()) for at in (*ends, len(given)))


def _formats(case: Case) -> list[ToolFormat | ReasoningFormat]:
    named = case["parser"]
    if isinstance(named, str):
        named = {"reasoning" if case["kind"] == "reasoning" else "tool": named}
    tool = tool_format(named["tool"]) if named.get("tool") else None
    reasoning = reasoning_format(named["reasoning"]) if named.get("reasoning") else tool.reasoning if tool else None
    return [known for known in (tool, reasoning) if known]


def _marks(case: Case) -> set[str]:
    found: set[str] = set()
    for known in _formats(case):
        found |= {*known.openers, *known.framing, *(known.strays if isinstance(known, ToolFormat) else known.closers)}
    return found


def _run(case: Case, chunks: list[str]) -> Result:
    return result(run_case(case, chunks))


def _without_ids(outcome: Result) -> str:
    return json.dumps([_plain(segment) for segment in outcome["segments"]] + [outcome["finish_reason"]])


def _plain(segment: Result) -> Result:
    return {key: value for key, value in segment.items() if key != "id"}


def _chunkings(case: Case) -> Iterator[tuple[str, list[str]]]:
    text: str = case["model_output"]
    yield "characters", list(text)
    for size in (2, 3, 5, 7, 11):
        yield f"pieces of {size}", [text[at : at + size] for at in range(0, len(text), size)]
    for size in (1, 2, 3, 5):
        yield f"pieces of {size} bytes", _byte_pieces(text, size)
    if len(text) <= LONGEST_FOR_EVERY_SPLIT:
        for at in range(1, len(text)):
            yield f"two pieces, cut at {at}", [text[:at], text[at:]]
    for number, chunks in enumerate(case.get("extra_chunkings", [])):
        yield f"extra chunking {number}", chunks


def _byte_pieces(text: str, size: int) -> list[str]:
    """What a detokenizer gives for tokens that end inside a character: nothing until the character is whole."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    encoded = text.encode()
    return [decoder.decode(encoded[at : at + size]) for at in range(0, len(encoded), size)]


def _difference(case: Case, got: Result) -> object:
    """What differs from the case, None if nothing does: one of its accepted results is enough."""
    found = _difference_from_expected(case, got)
    if found is None:
        return _forbidden(case, got)
    for accepted in case.get("accept", []):
        shown = got["content"] or ""
        if _compare(accepted, got, case["ws"]) is None and not any(
            word in shown for word in accepted.get("forbid", [])
        ):
            return None
    return found


def _forbidden(case: Case, got: Result) -> object:
    shown = f"{got['content'] or ''}\0{got['reasoning'] or ''}"
    for marker in case.get("forbid_in_text", []):
        if marker in shown:
            return "a marker leaked", marker, shown
    ids = [call["id"] for call in got["tool_calls"]]
    if len(set(ids)) != len(ids):
        return "ids are not unique", ids
    for digits in case["expected"].get("raw_arguments_contain", []):
        if digits not in got["tool_calls"][0]["raw"]:
            return "the raw arguments lack", digits
    return None


def _difference_from_expected(case: Case, got: Result) -> object:
    expected = case["expected"]
    if "malformed_call" in expected and (found := _malformed(expected["malformed_call"], got)):
        return found
    if "tool_calls_include" in expected:
        missing = [
            call for call in expected["tool_calls_include"] if not any(_same(call, have) for have in _calls(got))
        ]
        return ("calls are missing", missing) if missing else None
    if "malformed_call" in expected:
        return None if got["finish_reason"] in expected["finish_reason_in"] else ("finish", got["finish_reason"])
    if "truncated_call" in expected:
        return _truncated(expected, got, case["ws"])
    return _compare(expected, got, case["ws"]) or _lost_text(expected, got)


def _malformed(call: Result, got: Result) -> object:
    raw = [have["arguments"] for have in got["tool_calls"] if isinstance(have["arguments"], str)]
    kept = (got["content"] or "") + "".join(raw)
    for text in call["raw_contains"]:
        if text not in kept:
            return "text is lost", text, got
    invented = [
        have for have in got["tool_calls"] if have["name"] == call["name"] and not isinstance(have["arguments"], str)
    ]
    return ("arguments are invented", invented) if invented else None


def _truncated(expected: Result, got: Result, ws: str) -> object:
    cut, whole, have = expected["truncated_call"], expected.get("tool_calls", []), _calls(got)
    if not _same(have[: len(whole)], _plain_calls(whole)):
        return "calls before the cut", have
    rest = have[len(whole) :]
    if len(rest) > 1 or any(call["name"] != cut["name"] for call in rest):
        return "calls after the cut", rest
    for call in rest:
        if not isinstance(call["arguments"], str):
            known = all(call["arguments"].get(key) == value for key, value in cut["known_arguments"].items())
            if "completed_as_is" not in cut["allowed"] or not known:
                return "a cut call looks whole", call
        elif "partial_arguments" not in cut["allowed"]:
            return "a cut call is shown", call
    if not rest and "dropped" not in cut["allowed"]:
        return "the cut call is gone", cut
    return _compare(
        {key: expected[key] for key in ("content", "reasoning", "finish_reason") if key in expected}, got, ws
    )


def _compare(expected: Result, got: Result, ws: str) -> object:
    for key in ("content", "reasoning"):
        want, have = _trimmed(expected.get(key), ws), _trimmed(got[key], ws)
        # with framing trimmed per segment, the joined text may lack white space between segments
        if (
            key in expected
            and want != have
            and (ws == "exact" or "".join((want or "").split()) != "".join((have or "").split()))
        ):
            return key, want, have
    if "tool_calls" in expected and not _same(_plain_calls(expected["tool_calls"]), _calls(got)):
        return "tool_calls", expected["tool_calls"], got["tool_calls"]
    if "segments" in expected and not _same(_segments(expected["segments"], ws), _segments(got["segments"], ws)):
        return "segments", expected["segments"], got["segments"]
    if expected.get("finish_reason", got["finish_reason"]) != got["finish_reason"]:
        return "finish_reason", expected["finish_reason"], got["finish_reason"]
    return None


def _lost_text(expected: Result, got: Result) -> object:
    kept = "\0".join(got[key] or "" for key in expected.get("must_contain_where", []))
    lost = [text for text in expected.get("must_contain", []) if text not in kept]
    return ("text is lost", lost) if lost else None


def _segments(segments: list[Result], ws: str) -> list[Result]:
    joined: list[Result] = []
    for segment in segments:
        if segment["type"] == "tool_call":
            joined.append({key: segment[key] for key in ("type", "name", "arguments")})
        elif joined and joined[-1]["type"] == segment["type"]:
            joined[-1] = {**joined[-1], "text": joined[-1]["text"] + segment["text"]}
        else:
            joined.append(dict(segment))
    trimmed = [
        {**segment, "text": _trimmed(segment["text"], ws)} if "text" in segment else segment for segment in joined
    ]
    return [segment for segment in trimmed if segment.get("text", "") is not None]


def _trimmed(text: str | None, ws: str) -> str | None:
    return (text if ws == "exact" else (text or "").strip()) or None


def _calls(got: Result) -> list[Result]:
    return _plain_calls(got["tool_calls"])


def _plain_calls(calls: list[Result]) -> list[Result]:
    return [{key: call[key] for key in ("name", "arguments")} for call in calls]


def _same(one: object, other: object) -> bool:
    """With types: 1 is neither true nor 1.0."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
