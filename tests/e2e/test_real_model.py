"""The whole system with the torch engine and the small real model."""

from collections.abc import Iterator

import pytest

from kvbus_testkit.up import KvbusUp, Sse, run_curl_line

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvbusUp]:
    with KvbusUp(tmp_path_factory.mktemp("up"), "--engine", "torch") as system:
        yield system.wait_ready(400)


def test_the_printed_curl_line_streams_the_right_answer(system: KvbusUp) -> None:
    answer = Sse(run_curl_line(system.curl_line()))
    assert answer.done
    assert "Paris" in answer.text


def test_the_second_turn_reuses_every_full_block_of_the_first(system: KvbusUp) -> None:
    question = (
        "Which of these cities is the capital of France: Lyon, Marseille, Paris, Nice? Answer in one short sentence."
    )
    first_turn = [{"role": "user", "content": question}]
    first = system.stream(first_turn, max_tokens=40, temperature=0)
    second = system.stream(
        [*first_turn, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Thank you!"}],
        max_tokens=8,
        temperature=0,
    )
    assert second.text
    cached = second.usage["prompt_tokens_details"]["cached_tokens"]
    # Prompt and answer; the last token of an answer that was cut off has not been computed.
    assert cached >= (first.usage["prompt_tokens"] + first.usage["completion_tokens"] - 1) // 16 * 16
