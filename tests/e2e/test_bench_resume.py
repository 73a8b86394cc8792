"""`kvbus bench resume`: where the blocks of a waiting session are found, and what the figures say about it."""

import json
from pathlib import Path
from typing import Any

from kvbus_testkit.up import run_kvbus

FIELDS = {
    "kvbus_version", "python", "cores", "tokenizer", "repetitions", "tokens", "tool_s", "block_bytes", "max_ratio", "within",
    "figures",
}  # fmt: skip
FIGURE_FIELDS = {"name", "ttft_ms", "ratio", "input_tokens", "cached_tokens", "samples_ms"}
TOKENS = 4000


def test_a_session_that_has_waited_is_computed_again_in_no_case(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = (
        "--tokens",
        str(TOKENS),
        "--repetitions",
        "1",
        "--tool-s",
        "1",
        "--tokenizer",
        "bytes",
        "--json",
        str(file),
    )
    result = run_kvbus("bench", "resume", *options, timeout_s=100)
    assert file.exists(), result.stderr
    figures = json.loads(file.read_text())
    assert set(figures) == FIELDS
    assert all(set(figure) == FIGURE_FIELDS for figure in figures["figures"])
    by_name: dict[str, dict[str, Any]] = {figure["name"]: figure for figure in figures["figures"]}
    assert list(by_name) == ["stayed", "prefetched", "from a tier", "recomputed"]
    new = {name: figure["input_tokens"] - figure["cached_tokens"] for name, figure in by_name.items()}
    assert new["recomputed"] > 0.8 * TOKENS
    assert max(new["stayed"], new["prefetched"], new["from a tier"]) < 0.1 * TOKENS
    assert result.returncode == (0 if figures["within"] else 1), result.stderr
    assert f"{by_name['stayed']['ttft_ms']:.1f}" in result.stdout


def test_a_session_that_is_too_short_is_a_bad_argument() -> None:
    assert run_kvbus("bench", "resume", "--tokens", "10").returncode == 2
