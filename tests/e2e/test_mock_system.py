"""The whole system with the mock engine, seen from outside."""

import json
from collections.abc import Iterator
from pathlib import Path

import anthropic
import pytest

from kvbus_testkit.timing import eventually_sync
from kvbus_testkit.up import KvbusUp, Sse, run_curl_line, run_kvbus

LONG_QUESTION = "Tell me about the tides, and why there are two of them on most days. " * 4


@pytest.fixture(scope="module")
def system(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvbusUp]:
    folder = tmp_path_factory.mktemp("up")
    with KvbusUp(folder, "--engine", "mock", "--model", str(tiny_model), "--mock-speedup", "20") as system:
        yield system.wait_ready(60)


def test_the_printed_curl_line_streams_text(system: KvbusUp) -> None:
    answer = Sse(run_curl_line(system.curl_line()))
    assert answer.done
    assert answer.text
    assert len(answer.chunks) > 2


def test_the_second_turn_reuses_every_full_block_of_the_first(system: KvbusUp) -> None:
    first_turn = [{"role": "user", "content": LONG_QUESTION}]
    first = system.chat(first_turn, max_tokens=24)
    answer = first["choices"][0]["message"]["content"]
    second = system.chat(
        [*first_turn, {"role": "assistant", "content": answer}, {"role": "user", "content": "Shorter, please."}],
        max_tokens=8,
    )
    first_prompt = first["usage"]["prompt_tokens"]
    assert first_prompt >= 32
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first_prompt // 16 * 16


def test_the_official_anthropic_client_is_answered_and_its_second_turn_reads_the_cache(system: KvbusUp) -> None:
    mock = {"kvbus": {"mock": {"output": "Twice a day ☃, " * 8}}}
    asked: anthropic.types.MessageParam = {"role": "user", "content": "Messages: " + LONG_QUESTION}
    with anthropic.Anthropic(base_url=system.url, api_key="any", max_retries=0) as client:
        counted = client.messages.count_tokens(model=system.model, messages=[asked])
        first = client.messages.create(model=system.model, max_tokens=200, messages=[asked], extra_body=mock)
        answered: anthropic.types.MessageParam = {"role": "assistant", "content": first.content}
        more: anthropic.types.MessageParam = {"role": "user", "content": "Shorter, please."}
        with client.messages.stream(
            model=system.model, max_tokens=200, messages=[asked, answered, more], extra_body=mock
        ) as stream:
            second = stream.get_final_message()
    texts = [block.text for block in (*first.content, *second.content) if block.type == "text"]
    assert texts == ["Twice a day ☃, " * 8] * 2
    assert counted.input_tokens == first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0)
    assert (second.usage.cache_read_input_tokens or 0) >= counted.input_tokens // 16 * 16


def test_the_event_stream_shows_the_blocks_that_a_request_stored(system: KvbusUp) -> None:
    system.chat([{"role": "user", "content": "Blocks of this prompt appear on the stream. " * 3}], max_tokens=4)
    arguments = ("events", "--nats", system.status.nats_url, "--from", "all", "--no-follow")

    def stored() -> list[dict[str, object]]:
        result = run_kvbus(*arguments, "--json", "--kind", "stored", "--tier", "g1")
        assert result.returncode == 0, result.stderr
        return [json.loads(line) for line in result.stdout.splitlines()]

    events = eventually_sync(stored, what="stored events on the stream")
    assert {event["kind"] for event in events} == {"stored"}
    workers = {str(event["instance_id"]) for event in events}
    assert workers <= {"worker-0", "worker-1"}
    text = run_kvbus(*arguments, "--worker", workers.pop()).stdout
    assert " stored " in text


def test_a_piped_chat_answers_each_line_and_shows_its_figures(system: KvbusUp) -> None:
    lines = f"{LONG_QUESTION}\nAnd shorter?\n"
    result = run_kvbus("chat", "--url", system.url, "--max-tokens", "16", stdin=lines)
    assert result.returncode == 0, result.stderr
    figures = [line for line in result.stdout.splitlines() if "TTFT" in line or "no output" in line]
    assert len(figures) == 2
    assert "tokens/s" in figures[0]
    assert " 0 cached" not in figures[1]


def test_a_piped_chat_that_fails_says_so_and_ends_with_status_1(system: KvbusUp) -> None:
    result = run_kvbus("chat", "--url", system.url, "--model", "absent", stdin="hello\n")
    assert result.returncode == 1
    assert "404" in result.stderr


def test_the_list_of_models_holds_the_served_one(system: KvbusUp) -> None:
    assert system.status.models == ("tiny",)
