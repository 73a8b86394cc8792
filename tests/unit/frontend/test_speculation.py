import msgspec
import pytest

from kvbus_blocks.keys import chain_keys
from kvbus_frontend.core.dispatch import Job
from kvbus_frontend.core.prompt import Prompt
from kvbus_frontend.core.speculation import (
    LOWEST_PRIORITY,
    PLACEHOLDER,
    Base,
    SaidParts,
    known_beginning,
    next_conversation,
    speculative_job,
    worth_computing,
)
from kvbus_parsers import CallArguments, CallEnded, CallStarted, Reasoning, ReasoningEnded, Text
from kvbus_protocols.conversation import (
    Conversation,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    Turn,
)
from kvbus_protocols.extensions import NvExt
from kvbus_protocols.generation import GenerationRequest
from kvbus_testkit.wire_samples import GUIDANCE
from kvbus_tokenizers import Segment
from kvbus_wire.packing import pack_tokens
from kvbus_wire.request import AgentHints, MockOutput, Sampling, SessionRef, Stopping

BLOCK = 4
USER = Turn("user", (TextPart("hello"),))
UNKNOWN = (TextPart(PLACEHOLDER),)


def _prompt(tokens: list[int]) -> Prompt:
    packed = pack_tokens(tokens)
    return Prompt(packed, b"".join(chain_keys(b"d" * 32, packed, BLOCK)), b"d" * 32, BLOCK)


def _job(tokens: list[int], **fields: object) -> Job:
    job = Job(
        request_id="r",
        model="m",
        prompt=_prompt(tokens),
        sampling=Sampling(seed=1, logprobs=3),
        stopping=Stopping(max_tokens=100, stop_token_ids=(7,)),
        deadline_ms=1,
    )
    return msgspec.structs.replace(job, **fields)


def _conversation(**fields: object) -> Conversation:
    fields = {"generation": GenerationRequest(model="m"), "turns": (USER,), **fields}
    return Conversation(**fields)  # type: ignore[arg-type]


def test_an_answer_is_put_together_in_the_order_in_which_it_was_said() -> None:
    said = SaidParts()
    said.hear([Reasoning("let me "), Reasoning("see"), ReasoningEnded(), Text("I "), Text("look")])
    said.hear([CallStarted(0, "c0", "look"), CallArguments(0, '{"at":'), CallArguments(0, ' "it"}')])
    said.hear([CallEnded(0, "c0", "look", '{"at": "it"}'), Reasoning("and"), ReasoningEnded(), Reasoning("then")])
    assert said.parts() == (
        ReasoningPart("let me see"),
        TextPart("I look"),
        ToolCallPart("c0", "look", '{"at": "it"}'),
        ReasoningPart("and"),
        ReasoningPart("then"),
    )
    assert SaidParts().parts() == ()


def test_a_call_is_followed_by_its_result_and_words_by_those_of_a_person() -> None:
    call, other = ToolCallPart("c0", "look", "{}"), ToolCallPart("c1", "look", "{}")
    follows = next_conversation(_conversation(), [TextPart("I look"), call, other])
    assert follows is not None
    assert follows.turns[1:] == (
        Turn("assistant", (TextPart("I look"), call, other)),
        Turn("tool", (ToolResultPart("c0", UNKNOWN),)),
        Turn("tool", (ToolResultPart("c1", UNKNOWN),)),
    )
    follows = next_conversation(_conversation(), [TextPart("done")])
    assert follows is not None
    assert follows.turns[1:] == (Turn("assistant", (TextPart("done"),)), Turn("user", UNKNOWN))


@pytest.mark.parametrize(
    ("conversation", "said"),
    [
        (_conversation(), ()),
        (_conversation(continue_final=True), (TextPart("x"),)),
        (_conversation(add_generation_prompt=False), (TextPart("x"),)),
        (_conversation(generation=GenerationRequest(model="m", nvext=NvExt(use_raw_prompt=True))), (TextPart("x"),)),
        (_conversation(generation=GenerationRequest(model="m", nvext=NvExt(token_data=[1]))), (TextPart("x"),)),
    ],
)
def test_what_cannot_be_foreseen_is_not(conversation: Conversation, said: tuple[Part, ...]) -> None:
    assert next_conversation(conversation, said) is None


def test_what_is_known_ends_with_the_segment_before_the_placeholder() -> None:
    segments = [
        Segment("<user>", True),
        Segment("hi", False),
        Segment("<tool>", True),
        Segment(f"\n{PLACEHOLDER}", False),
    ]
    assert known_beginning([*segments, Segment("<end>", True), Segment(PLACEHOLDER, False)]) == segments[:3]
    assert known_beginning(segments[:3]) == ()


def test_only_whole_blocks_that_are_new_are_worth_computing() -> None:
    known = _prompt(list(range(10)))
    predicted = _prompt([*range(8), *range(100, 111)])
    found = worth_computing(predicted, known, least_tokens=8, most_tokens=100)
    assert found is not None
    assert found.token_ids == [*range(8), *range(100, 108)]
    assert found.keys == predicted.keys[: 4 * 16]
    assert worth_computing(predicted, known, least_tokens=9, most_tokens=100) is None


def test_no_more_is_computed_than_the_limit_allows() -> None:
    found = worth_computing(_prompt(list(range(100))), _prompt(list(range(8))), least_tokens=1, most_tokens=11)
    assert found is not None
    assert found.count == 8 + 8
    assert worth_computing(_prompt(list(range(100))), _prompt([]), least_tokens=1, most_tokens=3) is None


def test_what_the_worker_has_is_not_computed_again() -> None:
    assert worth_computing(_prompt(list(range(18))), _prompt(list(range(17))), least_tokens=1, most_tokens=100) is None


def test_a_speculative_job_is_the_same_but_for_what_is_said() -> None:
    job = _job(
        list(range(8)),
        cache_salt="salt",
        tenant="acme",
        session=SessionRef(id="s", parent="p"),
        hints=AgentHints(priority=5, strict_priority=2, osl=900, speculative_prefill=True),
        mock=MockOutput(output="x"),
        guidance=GUIDANCE,
        allowed=("w1", "w2"),
        required_taints=("h200",),
        explain=True,
    )
    guess = speculative_job(job, _prompt(list(range(16))), worker_id="w2", deadline_ms=99)
    assert guess == msgspec.structs.replace(
        job,
        request_id="r-next",
        prompt=_prompt(list(range(16))),
        sampling=Sampling(temperature=0.0),
        stopping=Stopping(max_tokens=1, ignore_eos=True),
        deadline_ms=99,
        hints=AgentHints(priority=LOWEST_PRIORITY, osl=1),
        mock=None,
        guidance=None,
        pinned="w2",
        explain=False,
        speculative=True,
    )


@pytest.mark.parametrize(
    ("tokens", "fields", "continued"),
    [
        (list(range(20)), {}, True),
        (list(range(9)), {}, True),
        ([*range(7), 99], {}, False),
        (list(range(7)), {}, False),
        (list(range(20)), {"model": "other"}, False),
        ([99] * 9, {"session": SessionRef(id="s")}, True),
        ([99] * 9, {"session": SessionRef(id="s"), "tenant": "other"}, False),
        ([99] * 9, {"session": SessionRef(id="other")}, False),
    ],
)
def test_a_request_that_begins_with_the_same_prompt_or_is_of_the_session_ends_the_guess(
    tokens: list[int], fields: dict[str, object], continued: bool
) -> None:
    base = Base.of(_job(list(range(9)), session=SessionRef(id="s")))
    assert base.is_continued_by(_job(tokens, **fields)) == continued


def test_a_prompt_of_less_than_a_block_tells_nothing() -> None:
    assert not Base.of(_job([1, 2])).is_continued_by(_job([1, 2, 3, 4, 5]))
