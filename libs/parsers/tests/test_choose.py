"""Formats chosen by what a chat template writes, and the state that a prompt leaves reasoning in."""

import pytest

from kvbus_parsers.choose import _BY_MODEL, _REASONING_RULES, _TOOL_RULES, Choice, choose, reasoning_open
from kvbus_parsers.names import reasoning_format, tool_format

CALL = "'<tool_call>\\n{\"name\": \"' + call.name + '\", \"arguments\": ' + call.arguments + '}\\n</tool_call>'"


@pytest.mark.parametrize(
    ("template", "tool", "reasoning"),
    [
        ("{{ '<|im_start|>' + message.role + message.content }}", None, None),
        (f"{{{{ {CALL} }}}}", "hermes", None),
        (f"{{{{ {CALL} }}}}{{{{ '<think>\\n' + message.reasoning_content + '\\n</think>' }}}}", "hermes", "qwen3"),
        (
            "<tool_call>\n<function=f>\n<parameter=p>\nv\n</parameter></function></tool_call><think></think>",
            "qwen3_coder",
            "qwen3",
        ),
        ("<tool_call><function=f></function> truncate_history_thinking </think>", "qwen3_coder", "nemotron_nano"),
        ("<tool_call>{{ name }}<arg_key>{{ k }}</arg_key><arg_value> </think>", "glm47", "glm45"),
        ("<seed:tool_call><function=f></function></seed:tool_call><seed:think>", "seed_oss", "seed_oss"),
        ('<minimax:tool_call><invoke name="f"> ]~b]ai\n<think>\n</think>', "minimax_m2", "minimax_m2"),
        ("<minimax:tool_call> <think>\n</think> ]~b]tool\n<response></response>", "minimax_m2", "minimax_m2"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2", None),
        ("<|tool_calls_section_begin|><think></think>", "kimi_k2", "kimi_k2"),
        ("<｜tool▁calls▁begin｜>function<｜tool▁sep｜>\n```json\n", "deepseek_v3", None),
        ("<｜Assistant｜></think><｜tool▁calls▁begin｜><｜tool▁sep｜>", "deepseek_v3_1", "deepseek_v3"),
        ("<｜DSML｜function_calls> <｜Assistant｜></think>", "deepseek_v3_2", "deepseek_v3"),
        ("<｜DSML｜tool_calls> <｜Assistant｜></think>", "deepseek_v4", "deepseek_v4"),
        ("<｜Assistant｜><think>\n' }} content.split('</think>')", None, "deepseek_r1"),
        ("[TOOL_CALLS] [THINK][/THINK]", "mistral", "mistral"),
        ("[TOOL_CALLS] <think></think>", "mistral", "mistral"),
        ('Environment: ipython {"name": function name, "parameters": dictionary}', "llama3_json", None),
        ("<|channel|>analysis<|message|> commentary", "harmony", "gpt_oss"),
        ("<TOOLCALL>[ ]</TOOLCALL> </think>", "nemotron_deci", "nemotron_deci"),
        ("<|START_ACTION|> <|START_THINKING|>", "cohere_command", "cohere_command"),
        ("'<|tool_call>call:' + name <|channel>thought", "gemma4", "gemma4"),
        ("MUST put it in the format of [func_name1(params_name1=", "pythonic", None),
        ("<|tool_call_start|>[ ]<|tool_call_end|>", "lfm2", None),
        ("<|start_of_role|> <|tool_call|> Here is my thought process:", "granite", "granite"),
        ("format them as <tool_calls>[ ]</tool_calls> <think></think> <answer>", "jamba", "hunyuan_a13b"),
    ],
)
def test_a_template_tells_the_formats_by_its_markers(template: str, tool: str | None, reasoning: str | None) -> None:
    assert choose(template, "any", "any/model") == Choice(tool, reasoning)


def test_a_model_without_a_template_is_known_by_its_type_or_name() -> None:
    assert choose("", "deepseek_v32") == Choice("deepseek_v3_2", "deepseek_v3")
    assert choose(" ", "", "openai/gpt-oss-20b") == Choice("harmony", "gpt_oss")
    assert choose("", "llama", "some/model") == Choice()


def test_every_choice_is_a_known_format() -> None:
    for rule in _TOOL_RULES:
        tool_format(rule.name)
    for rule in _REASONING_RULES:
        reasoning_format(rule.name)
    for _, choice in _BY_MODEL:
        assert choice.tool
        assert choice.reasoning
        tool_format(choice.tool)
        reasoning_format(choice.reasoning)


@pytest.mark.parametrize(
    ("tail", "name", "opened"),
    [
        ("<|im_start|>assistant\n", "qwen3", None),
        ("<|im_start|>assistant\n<think>\n", "qwen3", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "qwen3", False),
        ("<|im_start|>assistant\n<think>\nFirst I", "qwen3", True),
        ("<|im_start|>assistant\n<think>\nHm.\n</think>\n\nThe", "qwen3", False),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", "qwen3", None),
        (
            "<|im_start|>assistant\n<think>a</think>b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n",
            "qwen3",
            None,
        ),
        ("USER: What is <think> for?\nASSISTANT:", "basic", None),
        ("<|im_start|>user\nWhat is <think> for?\nASSISTANT:", "basic", None),
        ("<｜User｜>a<｜Assistant｜></think>", "deepseek_v3", False),
        ("<｜User｜>a<｜Assistant｜><think>", "deepseek_v3", True),
        ("<|assistant|>\n<think></think>", "glm45", False),
        ("]~b]ai\n<think>\n", "minimax_m2", True),
        ("<|START_THINKING|>", "cohere_command", True),
        ("<|START_THINKING|><|END_THINKING|>", "cohere_command", False),
        ("<|turn>model\n<|channel>thought\n<channel|>", "gemma4", False),
        ("<|turn>model\n<|channel>thought\n", "gemma4", True),
        ("[/INST][THINK]", "mistral", True),
        ("<|start|>assistant", "gpt_oss", None),
        ("Here is my thought process:", "granite", None),
        ("anything", "minimax_append_think", None),
    ],
)
def test_the_tail_of_a_prompt_tells_whether_reasoning_is_open(tail: str, name: str, opened: bool | None) -> None:
    assert reasoning_open(tail, name) is opened
