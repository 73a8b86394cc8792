"""The names under which vLLM, SGLang and Dynamo know the formats."""

import re
from pathlib import Path

import pytest

from kvbus_parsers.grammar import ToolFormat
from kvbus_parsers.names import reasoning_format, reasoning_formats, tool_format, tool_formats

TOOL = """
    apertus apertus2509 cohere_command3 cohere_command4 deepseek-v4 deepseek_v3 deepseek_v31 deepseek_v32
    deepseek_v3_1 deepseek_v3_2 deepseek_v4 deepseekv3 deepseekv31 deepseekv32 deepseekv4 default dots ernie45
    functiongemma gemma-4 gemma4 gigachat3 gigachat35 glm glm45 glm47 gpt-oss granite granite-20b-fc granite4
    harmony hermes hunyuan hunyuan_a13b hy_v3 inkling internlm interns1 jamba k2_horizon kimi_k2 kimi_k3 lfm2
    ling3 llama3 llama3_json llama4_json llama4_pythonic longcat mimo minicpm5 minimax-m2 minimax-m3 minimax_m2
    minimax_m3 mistral muse nemotron_deci nemotron_nano olmo3 openai phi4 phi4_mini_json poolside_v1 pythonic
    qwen qwen25 qwen3_coder qwen3_xml seed_oss solar_open2 spark25 step3 step3p5 trinity xlam
"""
REASONING = """
    apertus2509 basic cohere_command3 cohere_command4 deepseek-r1 deepseek-v3 deepseek-v4 deepseek_r1
    deepseek_v3 deepseek_v4 ernie45 gemma4 glm45 glm47 gpt-oss gpt_oss granite holo2 hunyuan hunyuan_a13b hy_v3
    inkling interns1 kimi kimi_k2 kimi_k25 kimi_k3 mimo minimax minimax-append-think minimax-m3
    minimax_append_think minimax_m2 minimax_m2_append_think minimax_m3 mistral nemotron3 nemotron_3
    nemotron_deci nemotron_nano nemotron_v3 olmo3 openai_gptoss poolside_v1 qwen3 qwen3-thinking seed_oss
    solar_open2 step3 step3p5 telechat4
"""


@pytest.mark.parametrize("name", TOOL.split())
def test_a_tool_call_format_is_known_by_its_name_in_other_engines(name: str) -> None:
    assert isinstance(tool_format(name), ToolFormat)


@pytest.mark.parametrize("name", REASONING.split())
def test_a_reasoning_format_is_known_by_its_name_in_other_engines(name: str) -> None:
    known = reasoning_format(name)
    assert known.whole or known.prefix or (known.openers and known.closers)


def test_each_format_is_known_by_its_own_name() -> None:
    for tool in tool_formats().values():
        assert tool_format(tool.name) is tool
        assert tool.whole or tool.leading or (tool.openers and tool.read)
    for reasoning in reasoning_formats().values():
        assert reasoning_format(reasoning.name) is reasoning


def test_the_readme_lists_every_format_with_its_names() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    listed = [set(re.findall(r"`(\w+)`", " ".join(row[:2]))) for row in rows]
    for formats in (tool_formats(), reasoning_formats()):
        for known in formats.values():
            assert {name for name, other in formats.items() if other is known} in listed
