"""A prompt of 200,000 tokens goes through the whole system, and is found again."""

from pathlib import Path

from kvbus_testkit.up import KvbusUp
from kvbus_worker.models import tiny

TOKENS = 200_000


def test_a_prompt_of_200000_tokens_is_answered_and_reused(tmp_path: Path) -> None:
    # One token per byte; the embedded bus takes 8 MB, the packed tokens need 0.8 MB.
    model = tiny.write(tmp_path / "tiny", context_length=300_000)
    arguments = ("--engine", "mock", "--model", str(model), "--mock-speedup", "1000", "--kv-blocks", "20000")
    prompt = [{"role": "user", "content": "0123456789abcdef" * (TOKENS // 16)}]
    with KvbusUp(tmp_path, *arguments) as system:
        system.wait_ready(60)
        first = system.chat(prompt, max_tokens=4)["usage"]
        assert first["prompt_tokens"] > TOKENS
        assert first["prompt_tokens_details"]["cached_tokens"] == 0
        second = system.chat(prompt, max_tokens=4)["usage"]
        assert second["prompt_tokens_details"]["cached_tokens"] == (first["prompt_tokens"] - 1) // 16 * 16
