"""Sampling, budgets, dispatch, migration state, catalog, admission."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvbus_blocks.keys import CacheDomain, chain_keys
from kvbus_frontend.core.admission import Admission
from kvbus_frontend.core.attempts import GapInOutput, Progression
from kvbus_frontend.core.catalog import Offer, offers_of
from kvbus_frontend.core.dispatch import Job, generate_message, known_blocks, route_request
from kvbus_frontend.core.failures import api_error
from kvbus_frontend.core.jobs import JobTemplate
from kvbus_frontend.core.prompt import Prompt, given_prompt, prompt_of
from kvbus_frontend.core.sampling import sampling_of, stopping_of, token_budget
from kvbus_protocols import ApiError, InvalidRequest
from kvbus_protocols.chat import ChatRequest
from kvbus_tokenizers import GenerationConfig, PromptCache
from kvbus_wire.errors import ErrorCode, ErrorReply
from kvbus_wire.frontend import Delta
from kvbus_wire.packing import pack_keys, pack_tokens, unpack_keys, unpack_tokens
from kvbus_wire.records import InstanceRecord, ModelCard, WorkerRecord
from kvbus_wire.request import Sampling, Stopping
from kvbus_wire.router import Placement

CARD = ModelCard(name="m", fingerprint="f", block_size=4, context_length=100, bundle="b", kv_layout="l")


def chat(**fields: Any) -> ChatRequest:
    return msgspec.convert({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}, ChatRequest)


def prompt_with(token_ids: Sequence[int], *, salt: str = "") -> Prompt:
    return prompt_of(given_prompt(token_ids), PromptCache(0), CARD, salt=salt)


def job(tokens: int = 10, **fields: Any) -> Job:
    values: dict[str, Any] = {
        "request_id": "r",
        "model": "m",
        "prompt": prompt_with(range(tokens)),
        "sampling": Sampling(),
        "stopping": Stopping(max_tokens=50),
        "deadline_ms": 1,
    }
    return Job(**{**values, **fields})


def placement(cached: int, worker: str = "w") -> Placement:
    return Placement(
        request_id="r", worker_id=worker, incarnation=1, cached_tokens=cached, onboard_tokens=0, policy="kv"
    )


# sampling


def test_what_a_request_leaves_open_comes_from_the_model() -> None:
    defaults = GenerationConfig(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.1)
    assert sampling_of(chat(), defaults, logprobs=None) == Sampling(
        temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.1
    )
    asked = chat(temperature=0, top_p=0.5, top_k=-1, min_p=0, repetition_penalty=1)
    assert sampling_of(asked, defaults, logprobs=3) == Sampling(temperature=0.0, top_p=0.5, logprobs=3)


def test_without_defaults_sampling_is_plain() -> None:
    assert sampling_of(chat(), GenerationConfig(), logprobs=None) == Sampling()


def test_greed_sampling_is_greedy() -> None:
    assert (
        sampling_of(chat(temperature=1, nvext={"greed_sampling": True}), GenerationConfig(), logprobs=None).temperature
        == 0
    )


def test_the_tokenizers_end_of_turn_stops_too_unless_ends_are_ignored() -> None:
    assert stopping_of(chat(stop_token_ids=[7]), max_tokens=5, end_token_ids=(2, 7)).stop_token_ids == (7, 2)
    ignoring = stopping_of(chat(ignore_eos=True, min_tokens=9), max_tokens=5, end_token_ids=(2,))
    assert (ignoring.stop_token_ids, ignoring.ignore_eos, ignoring.min_tokens) == ((), True, 5)


@pytest.mark.parametrize(
    ("asked", "default", "budget"), [(None, None, 90), (None, 20, 20), (5, 20, 5), (1000, None, 90), (None, 1000, 90)]
)
def test_the_token_limit_is_clamped_to_what_is_left(asked: int | None, default: int | None, budget: int) -> None:
    assert token_budget(asked, default, prompt_tokens=10, context_length=100, param="messages") == budget


@pytest.mark.parametrize(
    ("asked", "default", "budget"), [(None, None, 30), (None, 20, 20), (1000, 20, 30), (5, None, 5)]
)
def test_no_answer_is_longer_than_the_server_allows(asked: int | None, default: int | None, budget: int) -> None:
    assert token_budget(asked, default, prompt_tokens=10, context_length=100, longest=30, param="messages") == budget
    assert token_budget(None, None, prompt_tokens=80, context_length=100, longest=30, param="messages") == 20


def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers() -> None:
    assert token_budget(5, None, prompt_tokens=99, context_length=100, param="messages") == 1
    with pytest.raises(InvalidRequest, match=r"100 tokens.*105 tokens \(100 in the messages, 5 in") as refusal:
        token_budget(5, None, prompt_tokens=100, context_length=100, param="messages")
    assert (refusal.value.code, refusal.value.param) == ("context_length_exceeded", "messages")


def test_each_choice_has_a_seed_of_its_own() -> None:
    template = JobTemplate(chat(seed=5), GenerationConfig(), model="m", end_token_ids=(), allowed=(), deadline_ms=1)
    seeds = [template.job("r", prompt_with([1]), 5, choice=i).sampling.seed for i in range(8)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 8
    assert all(seed is not None and -(2**63) <= seed < 2**63 for seed in seeds)


# prompt and dispatch


def test_keys_are_those_of_the_cache_domain() -> None:
    prompt = prompt_with(range(10), salt="s")
    domain = CacheDomain(model_fingerprint="f", block_size=4, kv_layout="l", salt="s").key()
    assert prompt.keys == pack_keys(chain_keys(domain, pack_tokens(range(10)), 4))
    assert prompt.count == 10


@pytest.mark.parametrize("cut", range(13))
def test_an_extended_prompt_equals_a_new_one(cut: int) -> None:
    tokens = list(range(12))
    assert prompt_with(tokens[:cut]).extended(tokens[cut:]) == prompt_with(tokens)


@pytest.mark.parametrize(("cached", "prefix"), [(0, 0), (3, 0), (4, 4), (8, 8), (10, 8), (100, 8)])
def test_the_suffix_is_what_the_worker_is_not_known_to_hold(cached: int, prefix: int) -> None:
    work = job(10)
    blocks = known_blocks(placement(cached), work.prompt)
    message = generate_message(work, work.prompt, "f", resumed=0, prefix_blocks=blocks)
    assert message.prefix_tokens == prefix
    assert message.prefix_key == (unpack_keys(work.prompt.keys)[prefix // 4 - 1] if prefix else b"")
    assert unpack_tokens(message.tokens) == list(range(prefix, 10))


def test_the_last_prompt_token_always_travels() -> None:
    work = job(8)
    message = generate_message(work, work.prompt, "f", resumed=0, prefix_blocks=2)
    assert (message.prefix_tokens, unpack_tokens(message.tokens)) == (4, [4, 5, 6, 7])


def test_the_router_sees_keys_and_counts_only() -> None:
    work = job(10, pinned="w")
    message = route_request(work, work.prompt, ())
    assert (message.keys, message.prompt_tokens, message.pinned) == (work.prompt.keys, 10, "w")
    assert route_request(work, work.prompt, ("w",)).pinned is None


# migration


def test_output_so_far_becomes_prompt_of_the_next_attempt() -> None:
    state = Progression(job(10), 3)
    assert state.accept(Delta("r", 0, pack_tokens([20, 21]))) == ([20, 21], 0)
    state.move_on("w", ErrorReply(code=ErrorCode.UNAVAILABLE, message="", retryable=True))
    assert unpack_tokens(state.prompt().tokens) == [*range(10), 20, 21]
    assert (state.request_id, state.excluded) == ("r~1", ("w",))
    assert state.accept(Delta("r~1", 2, pack_tokens([22]))) == ([22], 0)


def test_tokens_that_came_already_are_skipped_and_a_gap_is_an_error() -> None:
    state = Progression(job(), 3)
    state.accept(Delta("r", 0, pack_tokens([1, 2, 3])))
    assert state.accept(Delta("r", 2, pack_tokens([3, 4]))) == ([4], 1)
    assert state.accept(Delta("r", 0, pack_tokens([1]))) == ([], 1)
    with pytest.raises(GapInOutput):
        state.accept(Delta("r", 6, pack_tokens([7])))


def test_a_choice_moves_on_for_retryable_failures_up_to_the_limit() -> None:
    state = Progression(job(), 2)
    lost = ErrorReply(code=ErrorCode.UNAVAILABLE, message="", retryable=True)
    assert not state.can_move_on(ErrorReply(code=ErrorCode.INVALID_REQUEST, message=""))
    for worker in ("a", "b"):
        assert state.can_move_on(lost)
        state.move_on(worker, lost)
    assert not state.can_move_on(lost)
    assert state.excluded == ("a", "b")


def test_workers_that_failed_are_tried_again_when_there_are_no_others() -> None:
    state = Progression(job(), 3)
    state.move_on("a", ErrorReply(code=ErrorCode.UNAVAILABLE, message="", retryable=True))
    state.move_on("", ErrorReply(code=ErrorCode.NO_WORKERS, message="", retryable=True))
    assert state.excluded == ()


def test_a_choice_is_complete_when_only_the_news_of_its_end_was_lost() -> None:
    state = Progression(job(stopping=Stopping(max_tokens=2)), 3)
    assert not state.is_complete
    state.accept(Delta("r", 0, pack_tokens([1, 2])))
    assert state.is_complete


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_internal_error_has_a_status(code: ErrorCode) -> None:
    error = api_error(ErrorReply(code=code, message="m", param="p", retryable=True))
    assert 400 <= error.status < 600
    assert (error.code, error.param) == (str(code), "p")
    assert ("Retry-After" in error.headers) == (error.status in (429, 503))


def test_what_cannot_succeed_again_does_not_ask_for_it() -> None:
    gone = api_error(ErrorReply(code=ErrorCode.NO_WORKERS, message="the pinned worker is not there", retryable=False))
    assert (gone.status, gone.headers) == (503, {"x-should-retry": "false"})
    assert "x-should-retry" not in api_error(ErrorReply(code=ErrorCode.INTERNAL, message="m")).headers


def test_a_field_is_named_as_the_client_knows_it() -> None:
    assert api_error(ErrorReply(code=ErrorCode.UNSUPPORTED, message="m", param="mock")).param == "kvbus.mock"


# catalog


def worker(instance: str, *, started: int = 0, draining: bool = False, **card: Any) -> InstanceRecord:
    record = WorkerRecord(
        model=msgspec.structs.replace(CARD, **card), engine="mock", total_blocks=1, max_num_seqs=1,
        max_batched_tokens=1, prefill_tokens_per_s=1.0, decode_step_s=1.0,
    )  # fmt: skip
    return InstanceRecord(
        service="worker", instance_id=instance, incarnation=1, host_id="h", version="0", started_ms=started,
        draining=draining, worker=record,
    )  # fmt: skip


def test_workers_of_one_card_serve_one_model() -> None:
    offers = offers_of([worker("b"), worker("a", created_s=9)], {})
    assert offers["m"].workers == ("a", "b")
    assert offers["m"].allowed == ()


def test_a_draining_worker_does_not_count() -> None:
    assert offers_of([worker("a", draining=True)], {}) == {}


def test_of_differing_cards_the_first_wins_and_keeps_winning_until_its_workers_are_gone() -> None:
    first, second = worker("z", started=1), worker("a", started=2, fingerprint="other")
    offers = offers_of([second, first], {})
    assert (offers["m"].card.fingerprint, offers["m"].allowed, offers["m"].others) == ("f", ("z",), ("a",))
    earlier = worker("b", started=0, fingerprint="other")
    assert offers_of([earlier, second, first], offers)["m"].allowed == ("z",)
    gone = offers_of([earlier, second], offers)
    assert (gone["m"].card.fingerprint, gone["m"].allowed) == ("other", ())


def test_models_are_listed_by_name() -> None:
    offers: dict[str, Offer] = offers_of([worker("a", name="m2"), worker("b", name="m1")], {})
    assert list(offers) == ["m1", "m2"]


# admission


def test_admission_ends_at_the_limit_and_while_draining() -> None:
    admission = Admission(2)
    admission.enter()
    admission.enter()
    with pytest.raises(ApiError) as refusal:
        admission.enter()
    assert (refusal.value.status, refusal.value.code, refusal.value.headers) == (
        503,
        "overloaded",
        {"Retry-After": "1"},
    )
    admission.leave()
    admission.enter()
    admission.draining = True
    admission.leave()
    with pytest.raises(ApiError) as refusal:
        admission.enter()
    assert refusal.value.code == "draining"
