"""`kvbus bench prefix-stability`: which requests find their prompt in the cache, and what the figures say about it."""

import json
from pathlib import Path
from typing import Any

from kvbus_testkit.up import run_kvbus

FIELDS = {
    "kvbus_version", "python", "cores", "workers", "tokenizer", "repetitions", "fixed_ms", "prefill_tokens_per_s", "max_ratio",
    "within", "figures",
}  # fmt: skip
FIGURE_FIELDS = {
    "name", "ttft_ms", "ratio", "input_tokens", "cached_tokens", "engine_ms", "published_ms", "published_ratio", "samples_ms",
}  # fmt: skip
TOKENS = 40_000
TAIL = 3000
"""Of the newest question, or the model's newest turn and the result of its call: a token is a byte here."""


def test_only_what_changes_is_computed_again(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ("--tokens", str(TOKENS), "--repetitions", "1", "--tokenizer", "bytes", "--json", str(file))
    result = run_kvbus("bench", "prefix-stability", *options, timeout_s=100)
    assert file.exists(), result.stderr
    figures = json.loads(file.read_text())
    assert set(figures) == FIELDS
    assert all(set(figure) == FIGURE_FIELDS for figure in figures["figures"])
    by_name: dict[str, dict[str, Any]] = {figure["name"]: figure for figure in figures["figures"]}
    assert list(by_name) == ["stable prefix", "varying header", "header stripped", "thinking kept", "thinking changed"]
    new = {name: figure["input_tokens"] - figure["cached_tokens"] for name, figure in by_name.items()}
    assert all(figure["input_tokens"] > TOKENS for figure in by_name.values())
    assert new["stable prefix"] < TAIL
    assert new["header stripped"] < TAIL
    assert new["thinking kept"] < TAIL
    assert by_name["varying header"]["cached_tokens"] <= 64
    assert by_name["thinking changed"]["cached_tokens"] > TOKENS / 2
    assert new["thinking changed"] > new["thinking kept"] + 0.1 * TOKENS
    assert result.returncode == (0 if figures["within"] else 1), result.stderr
    assert f"{by_name['stable prefix']['ttft_ms']:.1f}" in result.stdout


def test_a_prompt_that_is_too_short_is_a_bad_argument() -> None:
    assert run_kvbus("bench", "prefix-stability", "--tokens", "10").returncode == 2
