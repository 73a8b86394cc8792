"""Guidance as a grammar of llguidance (its dialect of Lark). Pure text; compiling is `grammars`.

Special tokens are no text to a grammar: a marker that is spelled like one becomes that token. Free text holds none of them, unless
they are let in by name; so a special marker is always seen. Where a marker is text, free text is matched lazily up to it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import llguidance
import msgspec

from kvbus_wire.guidance import CallSection, FreeBlock, Guidance, GuidedArgument, GuidedCall

JSON_SPACE = r"\x20|\x0D?\x0A[\x20\x09]{0,32}"
"""White space between the tokens of JSON: a space, or a line end and indentation, which is how JSON is written. What else the
standard allows is what models fall into that do not know how to go on."""

_ANY = "/(?s:.*)/"
_SPACE_AFTER_BLOCK = r"/[ \t\r\n]{1,16}/"


class Source(msgspec.Struct, frozen=True):
    """A part that the request wrote. ``param``: the field it came from."""

    kind: Literal["json", "regex", "lark"]
    text: str
    strict: bool = False
    param: str = ""


class BadGrammar(Exception):
    """A part of the request is no grammar that can be followed. ``param``: the field that it came from."""

    def __init__(self, problem: str, param: str) -> None:
        super().__init__(problem)
        self.param = param


def sources(guidance: Guidance) -> list[Source]:
    """What the request wrote, part by part."""
    found = []
    if guidance.form == "json_schema":
        found.append(Source("json", guidance.text, guidance.strict, guidance.param))
    elif guidance.form == "regex" or guidance.form == "lark":
        found.append(Source(guidance.form, guidance.text, guidance.strict, guidance.param))
    for call in guidance.section.calls if guidance.section is not None else ():
        if call.schema:
            found.append(Source("json", call.schema, call.strict, call.param))
        found.extend(_source(argument, call) for argument in call.arguments if argument.kind != "text")
    return found


def _source(argument: GuidedArgument, call: GuidedCall) -> Source:
    kind = "json" if argument.kind == "text" else argument.kind
    return Source(kind, argument.text, call.strict, call.param)


def alone(source: Source) -> str:
    """The grammar of one part by itself. Raise BadGrammar."""
    if source.kind == "lark":
        return llguidance.LLMatcher.grammar_from_lark(source.text)
    if source.kind == "regex":
        return f"start: {_regex(source.text)}"
    return json.dumps({"grammars": [{"json_schema": _schema(source)}]})


def parser_limits() -> llguidance.LLParserLimits:
    """How complex a grammar may become while it is followed. Objects with many optional properties make rows of many items."""
    return llguidance.LLParserLimits(max_items_in_row=20_000, max_lexer_states=50_000, verbose_errors=False)


def compose(guidance: Guidance, specials: Mapping[str, int], ends: Sequence[int] = ()) -> str:
    """The whole grammar. ``specials``: special tokens by their spelling; ``ends``: those of them that end an output.

    Raise BadGrammar.
    """
    return _Composer(specials, ends).grammar(guidance)


class _Composer:
    def __init__(self, specials: Mapping[str, int], ends: Sequence[int]) -> None:
        self._specials = specials
        self._ends = frozenset(ends)
        longest_first = sorted(filter(None, specials), key=len, reverse=True)
        self._find = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
        self._rules: list[str] = []
        self._larks: list[str] = []
        self._contents: dict[GuidedCall, str] = {}

    def grammar(self, guidance: Guidance) -> str:
        if guidance.form == "free" and guidance.section is not None:
            self._free(guidance.section)
        else:
            self._rules.append(f"start: {self._blocks(guidance)} answer")
            self._rules.append(f"answer: {' | '.join(self._answers(guidance))}")
        parts: list[dict[str, Any]] = [{"lark_grammar": "\n".join(self._rules)}]
        parts += [{"name": f"u{i}", "lark_grammar": text} for i, text in enumerate(self._larks)]
        return json.dumps({"grammars": parts}, ensure_ascii=False)

    # the answer

    def _answers(self, guidance: Guidance) -> list[str]:
        answers = []
        if guidance.form == "json_object":
            answers.append(self._json(Source("json", '{"type":"object"}', param=guidance.param)))
        elif guidance.form not in ("none", "free"):
            answers.append(self._value(sources(guidance)[0]))
        elif guidance.form == "free":
            answers.append(self._rule("text", _ANY))
        answers = [f"{self._spell(guidance.lead)} {answer} {self._spell(guidance.tail)}" for answer in answers]
        if guidance.section is not None:
            answers.append(self._section(guidance.section))
        return answers

    def _section(self, section: CallSection) -> str:
        call = self._rule("call", " | ".join(self._call(call, call.begin) for call in section.calls))
        more = f" ({self._spell(section.separator)} {call})*" if section.parallel else ""
        return f"{self._spell(section.begin)} {call}{more} {self._spell(section.end)}"

    def _call(self, call: GuidedCall, begin: str) -> str:
        if call not in self._contents:
            self._contents[call] = self._rule("content", self._content(call))
        return f"{self._spell(begin)} {self._contents[call]}"

    def _content(self, call: GuidedCall) -> str:
        if call.schema:
            source = Source("json", call.schema, call.strict, call.param)
            return f"{self._json(source)} {self._spell(call.end)}"
        if call.any_content:
            return self._up_to(call.end)
        arguments = " ".join(self._argument(argument, call) for argument in call.arguments)
        return f"{arguments} {self._spell(call.end)}"

    def _argument(self, argument: GuidedArgument, call: GuidedCall) -> str:
        begin = self._spell(argument.begin)
        if argument.kind == "text":
            content = self._up_to(argument.end, without=argument.end.strip())
        elif argument.kind == "regex":
            content = self._up_to(argument.end, pattern=_regex(argument.text))
        else:
            content = f"{self._value(_source(argument, call))} {self._spell(argument.end)}"
        return f"({begin} {content})" if argument.required else f"({begin} {content})?"

    def _value(self, source: Source) -> str:
        if source.kind == "json":
            return self._json(source)
        if source.kind == "regex":
            return self._rule("pattern", _regex(source.text))
        self._larks.append(source.text)
        return f"@u{len(self._larks) - 1}"

    def _json(self, source: Source) -> str:
        return self._rule("json", f"%json {json.dumps(_schema(source), ensure_ascii=False)}")

    # free text

    def _free(self, section: CallSection) -> None:
        """Text, in which whatever begins like a call goes on as one."""
        pieces = self._pieces(section.trigger)
        triggers = {piece for piece in pieces if isinstance(piece, int)}
        others = sorted(set(self._specials.values()) - triggers - self._ends)
        chunks = [f"<[{','.join(map(str, others))}]>"] if others else []
        single = msgspec.structs.replace(section, parallel=section.parallel and bool(section.begin))
        if triggers:
            self._rules.append("FREE: /(?s:.+)/")
            chunks.append(self._section(single))
        else:
            trigger = section.trigger
            self._rules.append(f"FREE: /(?s:.+)/ & {_without(trigger)}")
            chunks.append(f"{self._up_to(trigger)} ({self._continued(single, len(trigger))})")
        self._rules.append(f"start: (FREE | {' | '.join(chunks)})*")

    def _continued(self, section: CallSection, done: int) -> str:
        """A section whose first ``done`` characters are written: they lie in its own marker or in that of the first call."""
        begin = section.begin[done:]
        left = max(0, done - len(section.begin))
        first = self._rule("first", " | ".join(self._call(call, call.begin[left:]) for call in section.calls))
        more = ""
        if section.parallel:
            call = self._rule("call", " | ".join(self._call(call, call.begin) for call in section.calls))
            more = f"({self._spell(section.separator)} {call})*"
        return f"{self._spell(begin)} {first} {more} {self._spell(section.end)}"

    def _blocks(self, guidance: Guidance) -> str:
        if not guidance.blocks:
            return ""
        whole = self._rule(
            "block", " | ".join(f"{self._spell(b.begin)} {self._block_rest(b)}" for b in guidance.blocks)
        )
        opened = self._block_rest(guidance.blocks[0]) if guidance.open_block else ""
        return f"{opened} {whole}*"

    def _block_rest(self, block: FreeBlock) -> str:
        return f"{self._up_to(block.end)} ({_SPACE_AFTER_BLOCK})?"

    def _up_to(self, marker: str, *, pattern: str = _ANY, without: str = "") -> str:
        """Text by ``pattern``, nowhere holding ``without``, and the marker behind it."""
        pieces = self._pieces(marker)
        special = next((i for i, piece in enumerate(pieces) if isinstance(piece, int)), None)
        if special is not None:  # text before the special token is not told from the text in front of the marker
            optional = "?" if pattern == _ANY else ""
            return f"({self._rule('text', pattern)}){optional} {self._join(pieces[special:])}"
        if not marker:
            return self._rule("text", pattern)
        inside = f"({pattern} & {_without(without)})" if without else pattern
        name = f"UP{len(self._rules)}"
        self._rules.append(f"{name}: {inside} {_quoted(marker)}")
        lazy = f"up{len(self._rules)}"
        self._rules.append(f"{lazy}[lazy]: {name}")
        return lazy

    # spelling

    def _rule(self, kind: str, body: str) -> str:
        name = f"{kind}{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _spell(self, text: str) -> str:
        return self._join(self._pieces(text))

    def _pieces(self, text: str) -> list[str | int]:
        if self._find is None:
            return [text] if text else []
        return [self._specials.get(piece, piece) for piece in self._find.split(text) if piece]

    @staticmethod
    def _join(pieces: Sequence[str | int]) -> str:
        return " ".join(f"<[{piece}]>" if isinstance(piece, int) else _quoted(piece) for piece in pieces)


def _schema(source: Source) -> dict[str, Any]:
    """A schema with the options of ours; those that a request brings along do not count. Raise BadGrammar."""
    try:
        schema = json.loads(source.text)
    except (ValueError, RecursionError) as error:
        raise BadGrammar(f"the schema is no JSON: {error}", source.param) from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise BadGrammar("the schema is not an object, or allows nothing", source.param)
    options = {"whitespace_pattern": JSON_SPACE, "lenient": not source.strict}
    return {**schema, "x-guidance": options}


def _regex(pattern: str) -> str:
    """Line ends have to be spelled out in Lark."""
    plain = llguidance.regex_to_lark(pattern).replace("\n", r"\n").replace("\r", r"\r")
    return f"/{plain}/"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _without(text: str) -> str:
    spelled = "".join(f"\\x{{{ord(char):x}}}" for char in text)
    return f"~/(?s:.*){spelled}(?s:.*)/"
