"""What differs per session or request and means nothing to the model never reaches its tokens."""

from typing import Any

import msgspec
import pytest

from kvbus_frontend.core.stability import Stability
from kvbus_frontend.settings import FrontendSettings
from kvbus_protocols.conversation import CacheBreakpoint, Conversation, ImagePart, Part, TextPart, ToolResultPart, Turn
from kvbus_protocols.generation import GenerationRequest

BILLING_BLOCKS = [
    "x-anthropic-billing-header: " + fields
    for fields in (
        # as Claude Code writes them, from 2.1.42 to 2.1.332
        "cc_version=2.1.332.db5; cc_entrypoint=sdk-cli;",
        "cc_version=2.1.332.7c2; cc_entrypoint=sdk-cli;",
        "cc_version=2.1.332.54f; cc_entrypoint=sdk-cli;",
        "cc_version=2.1.332.54e; cc_entrypoint=sdk-cli;",
        "cc_version=2.1.332.b11; cc_entrypoint=sdk-cli;",
        "cc_version=2.1.332.f7d; cc_entrypoint=sdk-cli;",
        "cc_version=2.1.332.34c; cc_entrypoint=sdk-cli;",
        "cc_version=2.1.332.a4c; cc_entrypoint=sdk-cli;",
        "cc_version=2.1.332.e8f; cc_entrypoint=sdk-cli;",
        "cc_version=2.1.332.be0; cc_entrypoint=sdk-cli;",
        "cc_version=2.1.332.179; cc_entrypoint=sdk-cli; cc_is_subagent=true;",
        "cc_version=2.1.332.db5; cc_entrypoint=cli;",
        "cc_version=2.1.332.cf6; cc_entrypoint=cli;",
        "cc_version=2.1.332.74e; cc_entrypoint=cli;",
        "cc_version=2.1.197.4c0; cc_entrypoint=sdk-cli;",
        "cc_version=2.1.197.e66; cc_entrypoint=sdk-cli;",
        "cc_version=2.1.140.9ea; cc_entrypoint=sdk-cli; cch=0865d;",
        "cc_version=2.1.140.9ea; cc_entrypoint=sdk-cli; cch=bfdf1;",
        "cc_version=2.1.140.a61; cc_entrypoint=sdk-cli; cch=9c91b;",
        "cc_version=2.1.140.a61; cc_entrypoint=sdk-cli; cch=2296c;",
        "cc_version=2.1.140.a61; cc_entrypoint=sdk-cli; cch=b084b;",
        "cc_version=2.1.140.a61; cc_entrypoint=sdk-cli; cch=209f6;",
        "cc_version=2.1.104.98d; cc_entrypoint=sdk-cli; cch=00000;",
        "cc_version=2.1.104.f91; cc_entrypoint=sdk-cli; cch=00000;",
        "cc_version=2.1.76.b57; cc_entrypoint=sdk-cli; cch=00000;",
        "cc_version=2.1.42.1d2; cc_entrypoint=sdk-cli; cch=00000;",
        "cc_version=2.1.42.834; cc_entrypoint=sdk-cli; cch=00000;",
        "cc_version=2.1.42.ddc; cc_entrypoint=sdk-cli; cch=00000;",
        # fields that it may add
        "cc_version=2.1.332.db5; cc_entrypoint=cli; cc_workload=cron; cc_prev_req=req_0; cc_prompt_index=2; cc_turn_index=3;",
        "cc_version=2.1.332.db5; cc_entrypoint=cli; cc_prompt_id=1; cc_turn_origin=user; cc_gateway=1; cc_project=p; "
        "cc_project_src=git; cc_prev_msg=m; cc_prev_prompt_index=1; cc_prev_turn_index=2; cc_dispatch_entrypoint=cli;",
        "cc_version=3.0.0.abc",
        "",
    )
]
AGENT = "You are Claude Code, Anthropic's official CLI for Claude."
RUNTIME = "Runtime: agent=main | session={session} | sessionId={id} | host=build-host | model=m"
USER = Turn("user", (TextPart("Rename the function."),))


def conversation(*turns: Turn) -> Conversation:
    return Conversation(generation=GenerationRequest(model="m"), turns=turns)


def system(*texts: str) -> Turn:
    return Turn("system", tuple(map(TextPart, texts)))


def user(*texts: str) -> Turn:
    return Turn("user", tuple(map(TextPart, texts)))


def stabilised(*turns: Turn, **settings: Any) -> tuple[Turn, ...]:
    return Stability.of(FrontendSettings(**settings)).stabilised(conversation(*turns)).turns


@pytest.mark.parametrize("block", BILLING_BLOCKS)
def test_a_billing_block_goes(block: str) -> None:
    assert stabilised(system(block, AGENT), USER) == (system(AGENT), USER)


@pytest.mark.parametrize(
    ("texts", "left"),
    [
        (("a", "{}"), ("a",)),
        (("a", "{}", "b"), ("a", "b")),
        (("{}", "a", "{}"), ("a",)),
        (("a", "\n{}\nb", "{}"), ("a", "b")),
    ],
)
def test_billing_blocks_go_wherever_they_stand_among_the_blocks(texts: tuple[str, ...], left: tuple[str, ...]) -> None:
    assert stabilised(system(*(text.format(BILLING_BLOCKS[0]) for text in texts)), USER) == (system(*left), USER)


@pytest.mark.parametrize("block", BILLING_BLOCKS)
@pytest.mark.parametrize("gap", ["\n", "\n\n", "\r\n", "\n  "])
def test_a_billing_line_goes_with_the_space_after_it(block: str, gap: str) -> None:
    assert stabilised(system(f"{block}{gap}{AGENT}"), USER) == (system(AGENT), USER)


def test_a_system_turn_of_which_nothing_is_left_goes() -> None:
    assert stabilised(system(BILLING_BLOCKS[0]), USER) == (USER,)
    assert stabilised(system(f"\n{BILLING_BLOCKS[0]}\n\n"), USER) == (USER,)


def test_what_else_a_turn_holds_stays_in_its_order() -> None:
    image = ImagePart("https://example.com/a.png")
    parts: tuple[Part, ...] = (TextPart(BILLING_BLOCKS[0]), TextPart("a"), image, TextPart("b"))
    assert stabilised(Turn("system", parts, "n")) == (Turn("system", parts[1:], "n"),)


@pytest.mark.parametrize(
    "turns",
    [
        (system(AGENT), USER),
        (system(f"{AGENT}\n{BILLING_BLOCKS[0]}"), USER),
        (system(f"Explain the line '{BILLING_BLOCKS[0]}'."), USER),
        (system(AGENT), user(BILLING_BLOCKS[0])),
        (system(AGENT), USER, system(BILLING_BLOCKS[0])),
        (USER,),
        (),
    ],
)
def test_a_billing_line_elsewhere_is_content(turns: tuple[Turn, ...]) -> None:
    given = conversation(*turns)
    assert Stability.of(FrontendSettings()).stabilised(given) is given


@pytest.mark.parametrize("settings", [{"strip_anthropic_preamble": False}, {"keep_volatile": "anthropic-preamble"}])
def test_stripping_can_be_switched_off(settings: dict[str, Any]) -> None:
    turns = (system(BILLING_BLOCKS[0], AGENT), USER)
    assert stabilised(*turns, **settings) == turns


def test_openclaw_sessions_have_one_prompt() -> None:
    def turns(session: str, session_id: str) -> tuple[Turn, ...]:
        runtime = RUNTIME.format(session=session, id=session_id)
        return (system(AGENT), user(f"[Sun 2026-11-29 22:02 UTC] Hello\n\n{runtime}\nThinking: off"), user("More"))

    first, second = (stabilised(*turns(*ids)) for ids in (("agent:main:a", "0b1c"), ("agent:main:b", "ffff-0000")))
    assert first == second
    assert first[1] == user(
        "[Sun 2026-11-29 22:02 UTC] Hello\n\nRuntime: agent=main | host=build-host | model=m\nThinking: off"
    )


def test_openclaw_sessions_have_one_prompt_whose_instructions_end_in_the_ids() -> None:
    """As over Messages and Responses."""
    first, second = (
        stabilised(system(AGENT, f"## Runtime\n{RUNTIME.format(session=name, id=name)}"), USER) for name in ("a:b", "c")
    )
    assert first == second
    assert first[0] == system(AGENT, "## Runtime\nRuntime: agent=main | host=build-host | model=m")


def test_only_the_first_user_turn_is_searched_for_a_runtime_line() -> None:
    turns = (USER, user(RUNTIME.format(session="s", id="i")))
    assert stabilised(*turns) == turns


ENVIRONMENT = system("# Environment", "Today's date is 2026-11-29.")
NOTED = user(
    "<system-reminder>", "# Environment", "Today's date is 2026-11-29.", "</system-reminder>", "Rename the function."
)


def from_claude(*turns: Turn, harness: str = "claude-code", points: tuple[CacheBreakpoint, ...] = ()) -> Conversation:
    return msgspec.structs.replace(conversation(*turns), harness=harness, breakpoints=points)


def test_the_environment_comes_before_the_question_that_only_one_session_has() -> None:
    points = tuple(CacheBreakpoint(turn, 300.0) for turn in (0, 2, 4))
    given = from_claude(system(AGENT), USER, ENVIRONMENT, Turn("assistant", ()), user("more"), points=points)
    found = Stability.of(FrontendSettings()).stabilised(given)
    assert found.turns == (system(AGENT), NOTED, Turn("assistant", ()), user("more"))
    assert [point.turn for point in found.breakpoints] == [0, 1, 3]
    alone = from_claude(USER, ENVIRONMENT)
    assert Stability.of(FrontendSettings()).stabilised(alone).turns == (NOTED,)


@pytest.mark.parametrize(
    "given",
    [
        from_claude(system(AGENT), USER, ENVIRONMENT, harness="openclaw"),
        from_claude(system(AGENT), USER, Turn("assistant", ()), ENVIRONMENT),
        from_claude(system(AGENT), USER, Turn("assistant", ()), user("more"), ENVIRONMENT),
        from_claude(system(AGENT)),
        from_claude(),
    ],
    ids=["another client", "behind an answer", "behind a later question", "no question", "nothing"],
)
def test_other_system_messages_stay_where_they_are(given: Conversation) -> None:
    assert Stability.of(FrontendSettings()).stabilised(given) is given


def test_the_environment_stays_in_its_place_when_asked_to() -> None:
    given = from_claude(system(AGENT), USER, ENVIRONMENT)
    kept = FrontendSettings(keep_volatile="claude-environment")
    assert Stability.of(kept).stabilised(given) is given


QUESTION = user("How deep is the water?")
CONTEXT = user("<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nThe time is noon.\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>")
LOOP = (Turn("assistant", (TextPart("I measure."),)), Turn("tool", (ToolResultPart("call_1", (TextPart("9 m"),)),)))


def test_the_context_that_openclaw_puts_behind_a_question_comes_behind_the_tools_results() -> None:
    points = tuple(CacheBreakpoint(turn, 300.0) for turn in (0, 1, 2, 4))
    given = msgspec.structs.replace(conversation(system(AGENT), QUESTION, CONTEXT, *LOOP), breakpoints=points)
    found = Stability.of(FrontendSettings()).stabilised(given)
    assert found.turns == (system(AGENT), QUESTION, *LOOP, CONTEXT)
    assert [point.turn for point in found.breakpoints] == [0, 1, 1, 3]


@pytest.mark.parametrize(
    "turns",
    [
        (QUESTION, *LOOP, CONTEXT),
        (QUESTION, CONTEXT),
        (CONTEXT, QUESTION, *LOOP),
        (
            QUESTION,
            user(*(part.text for part in (*CONTEXT.parts, *QUESTION.parts) if isinstance(part, TextPart))),
            *LOOP,
        ),
        (QUESTION, Turn("user", ()), *LOOP),
        LOOP,
        (),
    ],
    ids=["last", "no tools yet", "of an earlier question", "with a question", "no text", "no question", "nothing"],
)
def test_what_is_no_context_of_the_newest_question_stays_where_it_is(turns: tuple[Turn, ...]) -> None:
    given = conversation(*turns)
    assert Stability.of(FrontendSettings()).stabilised(given) is given


def test_each_rule_can_be_switched_off_by_its_name() -> None:
    given = conversation(QUESTION, CONTEXT, *LOOP)
    assert Stability.of(FrontendSettings(keep_volatile="openclaw-context")).stabilised(given) is given
    turns = (system(BILLING_BLOCKS[0], AGENT), user(RUNTIME.format(session="s", id="i")))
    assert stabilised(*turns, keep_volatile="anthropic-preamble, openclaw-session") == turns
    assert stabilised(*turns, keep_volatile="openclaw-session") == (system(AGENT), turns[1])


def test_the_name_of_no_rule_is_a_bad_setting() -> None:
    with pytest.raises(ValueError, match=r"keep_volatile.*'no-such-rule'.*anthropic-preamble"):
        FrontendSettings(keep_volatile="no-such-rule")


def test_breakpoints_move_up_with_a_system_message_that_goes_as_a_whole() -> None:
    points = tuple(CacheBreakpoint(turn, 300.0) for turn in (-1, 0, 1, 3))
    given = msgspec.structs.replace(
        conversation(system(BILLING_BLOCKS[0]), USER, Turn("assistant", (TextPart("yes"),)), user("more")),
        breakpoints=points,
    )
    found = Stability.of(FrontendSettings()).stabilised(given)
    assert [turn.role for turn in found.turns] == ["user", "assistant", "user"]
    assert [point.turn for point in found.breakpoints] == [-1, -1, 0, 2]
