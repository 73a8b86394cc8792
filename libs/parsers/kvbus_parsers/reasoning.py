"""The reasoning formats whose block stands between markers. Formats that own the whole output lie in `formats`.

Whether marker-free output is reasoning is a question of the prompt (`choose.reasoning_open`). ``starts_open`` is what a family's
templates do when nobody looked at the prompt.
"""

from kvbus_parsers.grammar import ReasoningFormat

REASONING_FORMATS = (
    # <think>, and a call ends an open block
    ReasoningFormat("qwen3", ends_on_tool_opener=True),
    ReasoningFormat("qwen3_thinking", starts_open=True, ends_on_tool_opener=True),
    ReasoningFormat("glm45", ends_on_tool_opener=True),
    ReasoningFormat("kimi_k2", ends_on_tool_opener=True),
    ReasoningFormat("kimi_k25", starts_open=True, ends_on_tool_opener=True),
    ReasoningFormat("minimax_m2", starts_open=True, ends_on_tool_opener=True),
    ReasoningFormat("deepseek_v4", starts_open=True, ends_on_tool_opener=True),
    ReasoningFormat("nemotron_nano", starts_open=True, ends_on_tool_opener=True),
    ReasoningFormat("step3p5", starts_open=True, ends_on_tool_opener=True),
    # <think>, and calls come only behind the block
    ReasoningFormat("basic"),
    ReasoningFormat("deepseek_r1", starts_open=True),
    ReasoningFormat("deepseek_v3"),
    ReasoningFormat("nemotron_deci"),
    ReasoningFormat("hunyuan_a13b", framing=("<answer>", "</answer>")),
    ReasoningFormat("ernie45", framing=("<response>", "</response>")),
    # other markers
    ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",), ends_on_tool_opener=True),
    ReasoningFormat("longcat", ("<longcat_think>",), ("</longcat_think>",), ends_on_tool_opener=True),
    ReasoningFormat("minimax_m3", ("<mm:think>",), ("</mm:think>",), ends_on_tool_opener=True),
    ReasoningFormat("mistral", ("[THINK]", "<think>"), ("[/THINK]", "</think>"), ends_on_tool_opener=True),
    ReasoningFormat("kimi", ("◁think▷",), ("◁/think▷",)),
    ReasoningFormat("gemma4", ("<|channel>",), ("<channel|>",), label="thought", ends_on_tool_opener=True),
    ReasoningFormat(
        "granite",
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        phrases=True,
    ),
    ReasoningFormat(
        "solar_open2", ("<|think:start|>",), ("<|think:end|>",), starts_open=True, ends_on_tool_opener=True
    ),
    # not split: the marker that the prompt holds is put back in front, all is text
    ReasoningFormat("minimax_append_think", (), (), prefix="<think>"),
)

REASONING_ALIASES = {
    "deepseek_v31": "deepseek_v3",
    "deepseek_v3_1": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "deepseek_v3_2": "deepseek_v3",
    "deepseek_v41": "deepseek_v4",
    "glm": "glm45",
    "glm47": "glm45",
    "granite_thinking": "basic",
    "holo2": "deepseek_r1",
    "hunyuan": "hunyuan_a13b",
    "hy_v3": "qwen3",
    "interns1": "qwen3",
    "ling3": "qwen3",
    "mimo": "qwen3",
    "minimax": "minimax_m2",
    "minimax_m2_append_think": "minimax_append_think",
    "nemotron3": "nemotron_nano",
    "nemotron_3": "nemotron_nano",
    "nemotron_ultra": "nemotron_deci",
    "nemotron_v3": "nemotron_nano",
    "olmo3": "basic",
    "poolside_v1": "qwen3",
    "qwen35": "qwen3",
    "qwen3_5": "qwen3",
    "spark25": "qwen3",
    "step3": "deepseek_r1",
    "telechat4": "basic",
}
