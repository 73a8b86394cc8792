"""Which formats a model speaks, read off what its chat template writes; and whether a rendered prompt leaves reasoning open."""

import re
from dataclasses import dataclass

from kvbus_parsers.names import reasoning_format


@dataclass(frozen=True, slots=True)
class Choice:
    """Names of the formats; ``None``: the model is not known to write any."""

    tool: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class _Rule:
    """Holds if all the texts stand in the template. The first rule that holds decides."""

    name: str
    texts: tuple[str, ...]


def _rule(name: str, *texts: str) -> _Rule:
    return _Rule(name, texts)


# From the peculiar to the common: markers that only one family writes come first.
_TOOL_RULES = (
    _rule("muse", "<atem:function_calls>"),
    _rule("harmony", "<|channel|>", "<|message|>", "commentary"),
    _rule("cohere_command", "<|START_ACTION|>"),
    _rule("inkling", "<|content_invoke_tool_json|>"),
    _rule("apertus", "<|tools_prefix|>"),
    _rule("kimi_k3", "<|open|>", "<|sep|>"),
    _rule("kimi_k2", "<|tool_calls_section_begin|>"),
    _rule("minimax_m3", "]<]minimax[>["),
    _rule("minimax_m2", "<minimax:tool_call>"),
    _rule("dots", "<dots_function_call>"),
    _rule("gigachat35", "｜GCML｜"),
    _rule("deepseek_v3_2", "｜DSML｜", "function_calls"),
    _rule("deepseek_v4_1", "｜DSML｜ calls"),
    _rule("deepseek_v4", "｜DSML｜"),
    _rule("deepseek_v3", "<｜tool▁calls▁begin｜>", "```json"),
    _rule("deepseek_v3_1", "<｜tool▁calls▁begin｜>"),
    _rule("step3", "<｜tool_calls_begin｜>"),
    _rule("seed_oss", "<seed:tool_call>"),
    _rule("longcat", "<longcat_tool_call>"),
    _rule("k2_horizon", "<ifm|tool_call>"),
    _rule("hy_v3", "<arg_key>", "<tool_sep>"),
    _rule("glm47", "<arg_key>"),
    _rule("minicpm5", "<function name=", "<param name="),
    _rule("qwen3_coder", "<function="),
    _rule("gemma4", "<|tool_call>"),
    _rule("functiongemma", "<start_function_call>"),
    _rule("nemotron_deci", "<TOOLCALL>"),
    _rule("mistral", "[TOOL_CALLS]"),
    _rule("lfm2", "<|tool_call_start|>"),
    _rule("olmo3", "<function_calls>"),
    _rule("internlm2", "<|action_start|>"),
    _rule("solar_open2", "<|tool_call:start|>"),
    _rule("gigachat3", "role_sep", "function call"),
    _rule("gigachat3", "<|function_call|>"),
    _rule("granite_20b_fc", "<function_call>"),
    _rule("jamba", "<tool_calls>"),
    _rule("phi4", "functools"),
    _rule("granite", "<|tool_call|>"),
    _rule("ernie45", "<tool_call>", "<response>"),
    _rule("hermes", "<tool_call>"),
    _rule("llama4_pythonic", "<|python_start|>"),
    _rule("llama4_pythonic", "<|header_start|>", "[func_name1("),
    _rule("pythonic", "[func_name1("),
    _rule("llama3_json", "<|python_tag|>"),
    _rule("llama3_json", '"parameters"', "function", "ipython"),
)

_REASONING_RULES = (
    _rule("muse", "<atem:function_calls>"),
    _rule("gpt_oss", "<|channel|>", "<|message|>", "analysis"),
    _rule("cohere_command", "<|START_THINKING|>"),
    _rule("inkling", "<|content_thinking|>"),
    _rule("apertus", "<|inner_prefix|>"),
    _rule("kimi_k3", "<|open|>", "<|sep|>", "think"),
    _rule("minimax_m3", "<mm:think>"),
    _rule("seed_oss", "<seed:think>"),
    _rule("longcat", "<longcat_think>"),
    _rule("solar_open2", "<|think:start|>"),
    _rule("gemma4", "<|channel>"),
    _rule("mistral", "[THINK]"),
    _rule("kimi", "◁think▷"),
    _rule("granite", "Here is my thought process"),
    _rule("k2_horizon", "<ifm|think"),
    _rule("hunyuan_a13b", "<think>", "<answer>"),
    _rule("hunyuan_a13b", "<think>", "<|extra_4|>"),  # writes <answer> although its template does not
    _rule("minimax_m2", "<think>", "<minimax:tool_call>"),  # whose tool results stand in <response>
    _rule("ernie45", "<think>", "<response>"),
    _rule("kimi_k2", "<think>", "<|tool_calls_section_begin|>"),
    _rule("glm45", "</think>", "<arg_key>"),
    _rule("deepseek_v4", "</think>", "｜DSML｜", "tool_calls"),
    _rule("deepseek_v3", "</think>", "<｜Assistant｜></think>"),
    _rule("deepseek_r1", "</think>", "<｜Assistant｜>"),
    _rule("nemotron_deci", "</think>", "<TOOLCALL>"),
    _rule("nemotron_nano", "</think>", "truncate_history_thinking"),
    _rule("qwen3", "</think>", "<tool_call>"),
    _rule("mistral", "</think>", "[TOOL_CALLS]"),
    _rule("basic", "</think>"),
)

# Families whose prompts are written by code: there is no template to read.
_BY_MODEL = (
    ("deepseek_v41", Choice("deepseek_v4_1", "deepseek_v4")),
    ("deepseek_v4", Choice("deepseek_v4", "deepseek_v4")),
    ("deepseek_v32", Choice("deepseek_v3_2", "deepseek_v3")),
    ("deepseek_v3_2", Choice("deepseek_v3_2", "deepseek_v3")),
    ("gpt_oss", Choice("harmony", "gpt_oss")),
    ("kimi_k3", Choice("kimi_k3", "kimi_k3")),
    ("magistral", Choice("mistral", "mistral")),
    ("ministral", Choice("mistral", "mistral")),
    ("mistral", Choice("mistral", "mistral")),
    ("devstral", Choice("mistral", "mistral")),
)

# What stands between two turns, and the name of a role behind it.
_TURN = re.compile(r"<[|｜][^<>\n]{1,40}[|｜]>|\[/?INST\]|<(?:start|end)_of_turn>|<\|?turn\|?>|\]~b\]|\[e~\[|</s>|<s>")
_ROLE = re.compile(r"\s*\w*\s*")


def choose(template_source: str, model_type: str = "", name: str = "") -> Choice:
    """The formats for a model, from the source of its chat template; ``model_type`` and ``name`` only where it has none."""
    if template_source.strip():
        return Choice(_first(_TOOL_RULES, template_source), _first(_REASONING_RULES, template_source))
    for known in (model_type, name):
        spelled = re.sub(r"[-.\s]", "_", known.lower())
        for family, choice in _BY_MODEL:
            if family in spelled:
                return choice
    return Choice()


def reasoning_open(prompt_tail: str, reasoning_name: str) -> bool | None:
    """Whether a rendered prompt ends inside a block of reasoning (True), behind one (False), or does not tell (None).

    ``prompt_tail``: the end of the prompt, at least the generation prompt and what was prefilled behind it. Blocks of earlier turns
    do not count. Raises `names.UnknownFormatError`.
    """
    reasoning = reasoning_format(reasoning_name)
    if reasoning.phrases or not reasoning.openers:
        return None
    found = [(prompt_tail.rfind(marker), marker) for marker in (*reasoning.openers, *reasoning.closers)]
    at, last = max(found)
    if at < 0:
        return None
    opened = last in reasoning.openers
    if not prompt_tail[at + len(last) :].strip():
        return opened
    # Text behind the marker is prefilled if the marker stands in the last turn, and begins it.
    turns = [turn.end() for turn in _TURN.finditer(prompt_tail) if turn.group() != last]
    if not turns or turns[-1] > at or (opened and not _ROLE.fullmatch(prompt_tail, turns[-1], at)):
        return None
    return opened


def _first(rules: tuple[_Rule, ...], template: str) -> str | None:
    return next((rule.name for rule in rules if all(text in template for text in rule.texts)), None)
