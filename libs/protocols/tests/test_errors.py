"""One error, in the shape of each API."""

import msgspec
import pytest

from kvbus_protocols import (
    ApiError,
    InvalidRequest,
    anthropic_body,
    anthropic_status,
    context_length_exceeded,
    model_not_found,
    openai_body,
)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (408, "timeout_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (499, "api_error"),
        (500, "api_error"),
        (501, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
        (529, "overloaded_error"),
    ],
)
def test_every_status_has_its_anthropic_type(status: int, kind: str) -> None:
    body = anthropic_body(ApiError(status, "what happened"), "req_1")
    assert (body.error.type, body.request_id) == (kind, "req_1")
    assert body.error.message.endswith("what happened")


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "what happened"),
        (500, "Internal server error: what happened"),
        (501, "what happened"),
        (503, "Overloaded: what happened"),
        (504, "Request timed out: what happened"),
        (529, "Overloaded: what happened"),
    ],
)
def test_what_may_be_tried_again_is_said_in_anthropics_words(status: int, message: str) -> None:
    assert anthropic_body(ApiError(status, "what happened")).error.message == message


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "what happened"),
        (429, "what happened"),
        (500, "Internal server error: what happened"),
        (501, "what happened"),
        (503, "Service unavailable: what happened"),
        (504, "Request timed out: what happened"),
    ],
)
def test_what_may_be_tried_again_is_told_by_its_words_from_what_may_not(status: int, message: str) -> None:
    assert openai_body(ApiError(status, "what happened")).error.message == message


def test_the_request_id_is_left_out_where_there_is_none() -> None:
    assert msgspec.to_builtins(anthropic_body(ApiError(400, "x"))) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "x"},
    }


@pytest.mark.parametrize(("prompt_tokens", "said"), [(250_000, 250_000), (200_000, 200_001)])
def test_an_overflow_is_worded_for_each_client(prompt_tokens: int, said: int) -> None:
    error = context_length_exceeded(
        limit=200_000, prompt_tokens=prompt_tokens, completion_tokens=32_000, param="messages"
    )
    assert anthropic_body(error).error.message == f"prompt is too long: {said} tokens > 200000 maximum"
    assert openai_body(error).error.code == "context_length_exceeded"
    assert "maximum context length is 200000 tokens" in openai_body(error).error.message


def test_a_message_without_the_field_at_fault_gets_it_where_the_api_has_no_param() -> None:
    error = InvalidRequest("The value is out of range.", param="tools[0].name")
    assert anthropic_body(error).error.message == "tools[0].name: The value is out of range."
    assert openai_body(error).error.param == "tools[0].name"
    assert anthropic_body(model_not_found("x")).error.message == "The model `x` does not exist."


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [(503, "overloaded", 529), (503, "no_workers", 503), (503, "draining", 503), (429, "rate_limit_exceeded", 429)],
)
def test_a_server_with_too_much_to_do_has_a_status_of_its_own_in_the_messages_api(
    status: int, code: str, told: int
) -> None:
    error = ApiError(status, "what happened", code=code, retry_after_s=2.1)
    assert anthropic_status(error) == told
    assert error.headers["Retry-After"] == "3"
