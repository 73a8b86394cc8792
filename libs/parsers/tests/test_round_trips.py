"""Thoughts as the families write them, read back however they are cut; and that every format has such a round trip."""

import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_parsers import open_parser
from kvbus_parsers.collect import ReasoningSegment, collect
from kvbus_parsers.names import reasoning_format, reasoning_formats, tool_format, tool_formats

THOUGHTS = {
    "qwen3": ("<think>\n", "\n</think>\n\n"),
    "qwen3_thinking": ("<think>\n", "\n</think>\n\n"),
    "glm45": ("<think>", "</think>\n"),
    "kimi_k2": ("<think>", "</think>"),
    "kimi_k25": ("<think>", "</think>"),
    "minimax_m2": ("<think>\n", "\n</think>\n\n"),
    "deepseek_v4": ("<think>", "</think>"),
    "nemotron_nano": ("<think>\n", "\n</think>\n"),
    "step3p5": ("<think>\n", "\n</think>\n"),
    "basic": ("<think>", "</think>"),
    "deepseek_r1": ("<think>\n", "\n</think>\n\n"),
    "deepseek_v3": ("<think>", "</think>"),
    "nemotron_deci": ("<think>\n", "\n</think>\n\n"),
    "hunyuan_a13b": ("<think>\n", "\n</think>\n<answer>\n"),
    "ernie45": ("<think>\n", "\n</think>\n\n<response>\n"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "longcat": ("<longcat_think>\n", "\n</longcat_think>\n"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "solar_open2": ("<|think:start|>", "<|think:end|>"),
    "k2_horizon": ("<ifm|think>", "</ifm|think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "kimi": ("◁think▷", "◁/think▷"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "cohere_command": ("<|START_THINKING|>", "<|END_THINKING|><|START_RESPONSE|>"),
    "granite": ("Here is my thought process: ", " Here is my response: "),
}
"""What stands before the thoughts, and between them and the answer."""

NOT_SPLIT = {"minimax_append_think"}
PIECES = ["<", "</", "<|", "◁", "◁/", "[", "think", "<thin", "Here is", "|>", "\n", " ", "{", "é", "😀", "a", "b"]


def _texts(name: str) -> st.SearchStrategy[str]:
    known = reasoning_format(name)
    marks = (*known.openers, *known.closers, *known.framing)
    texts = st.lists(st.sampled_from(PIECES) | st.text("ab <>|/\n", max_size=4), min_size=1, max_size=8).map("".join)
    # a text that ends in half a marker could make a whole one with what follows it
    return texts.map(str.strip).filter(lambda text: text and not any(mark in f"{text}{mark}"[:-1] for mark in marks))


def _read(name: str, text: str, sizes: list[int], *, opened: bool | None) -> list[tuple[str, str]]:
    parser = open_parser(reasoning=name, reasoning_open=opened)
    events = []
    for size in [*sizes, len(text)]:
        events += parser.feed(text[:size])
        text = text[size:]
    segments = collect(events + parser.finish("stop")).segments
    return [("thoughts" if isinstance(one, ReasoningSegment) else "text", getattr(one, "text", "")) for one in segments]


SIZES = st.lists(st.integers(1, 7), max_size=40)


@pytest.mark.parametrize("name", THOUGHTS)
@given(data=st.data())
def test_thoughts_and_the_answer_are_read_back_however_they_are_cut(name: str, data: st.DataObject) -> None:
    before, between = THOUGHTS[name]
    thoughts, answer = data.draw(_texts(name)), data.draw(_texts(name))
    # phrases are markers only where the model writes both
    opened = not reasoning_format(name).phrases and data.draw(st.booleans())
    text = ("" if opened else before) + thoughts + between + answer
    assert _read(name, text, data.draw(SIZES), opened=opened) == [("thoughts", thoughts), ("text", answer)]
    if not reasoning_format(name).phrases:
        assert _read(name, answer, data.draw(SIZES), opened=False) == [("text", answer)]
        assert _read(name, thoughts, data.draw(SIZES), opened=True) == [("thoughts", thoughts)]


@pytest.mark.parametrize("name", sorted(NOT_SPLIT))
@given(data=st.data())
def test_thoughts_that_are_not_split_are_read_back_as_text(name: str, data: st.DataObject) -> None:
    text = f"{data.draw(_texts(name))}\n</think>\n\n{data.draw(_texts(name))}"
    assert _read(name, text, data.draw(SIZES), opened=None) == [("text", f"<think>{text}")]


def test_every_format_has_a_round_trip() -> None:
    tools, thoughts = set(), {*THOUGHTS, *NOT_SPLIT}
    for module in ("test_json_forms.py", "test_xml_forms.py"):
        forms = runpy.run_path(str(Path(__file__).with_name(module)))["FORMS"]
        tools |= {tool_format(getattr(form, "tool", name)).name for name, form in forms.items()}
        thoughts |= {reasoning_format(form.reasoning).name for form in forms.values() if form.reasoning}
    assert {known.name for known in tool_formats().values()} - tools == set()
    assert {known.name for known in reasoning_formats().values()} - thoughts == set()
