import msgspec
import pytest

from kvbus_router.core.busy import output_left, share_left, steps_until_free
from kvbus_router.core.cost import Cached, estimate
from kvbus_router.core.estimate import Bias
from kvbus_router.core.limits import Limits, Weights
from kvbus_router.core.state import RouterState
from kvbus_router.core.workers import Reservation
from kvbus_testkit.routing import report, worker_record
from kvbus_wire.load import LoadReport
from kvbus_wire.packing import pack_tokens


@pytest.mark.parametrize(
    ("expected", "said", "left"),
    [(100, 0, 100), (100, 99, 1), (100, 100, 100), (100, 199, 1), (100, 200, 200), (1, 0, 1), (0, 0, 1), (1, 5, 3)],
)
def test_what_goes_on_beyond_what_was_expected_is_expected_to_say_as_much_again(
    expected: int, said: int, left: int
) -> None:
    assert output_left(expected, said) == left
    assert share_left(expected, said) == left / (left + said)


def test_a_slot_is_free_when_the_one_that_is_next_to_end_has_said_all() -> None:
    assert steps_until_free([10, 20, 30, 40], active=3, slots=4, expected=256) == 0
    assert steps_until_free([10, 20, 30, 40], active=4, slots=4, expected=256) == 10
    assert steps_until_free([10, 20, 30, 40], active=5, slots=4, expected=256) == 20
    # Five wait: four of them for what runs, the fifth for those four.
    assert steps_until_free([10, 20, 30, 40, 100, 100, 100, 100], active=8, slots=4, expected=256) == 10 + 62.5


def test_requests_of_whom_nothing_is_known_are_taken_for_usual_ones() -> None:
    assert steps_until_free([300], active=2, slots=2, expected=256) == 256
    assert steps_until_free([], active=2, slots=2, expected=256) == 256


@pytest.fixture
def state() -> RouterState:
    found = RouterState(Limits())
    found.joined(worker_record("w"))
    return found


def _reserve(state: RouterState, name: str, expected: int) -> None:
    reservation = Reservation(
        request_id=name,
        worker_id="w",
        incarnation=1,
        prompt_tokens=10,
        uncached_tokens=10,
        expected_output=expected,
        placed_at=0.0,
    )
    state.reserve(reservation, b"")


def _report(said: dict[str, int], *, told: bool = True) -> LoadReport:
    outputs = pack_tokens(said.values()) if told else b""
    return msgspec.structs.replace(report("w", running=len(said), ids=list(said)), output_tokens=outputs)


def _decode_s(state: RouterState, bias: Bias | None = None) -> float:
    worker = state.worker("w")
    assert worker is not None
    state.check_integrity()
    return estimate(worker, 100, Cached(), Weights(decode_weight=1.0), bias or Bias()).decode_s


def test_a_running_request_weighs_less_the_more_of_its_output_it_has_said(state: RouterState) -> None:
    _reserve(state, "short", 100)
    _reserve(state, "long", 1000)
    for name in ("short", "long"):
        state.first_token(name, 1.0)
    step_s = 0.01
    state.load_report(_report({"short": 0, "long": 0}), 1.0)
    assert _decode_s(state) == pytest.approx(2 * step_s)
    state.load_report(_report({"short": 50, "long": 100}), 2.0)
    assert _decode_s(state) == pytest.approx((0.5 + 0.9) * step_s)
    state.load_report(_report({"short": 99, "long": 500}), 3.0)
    assert _decode_s(state) == pytest.approx((0.01 + 0.5) * step_s)
    worker = state.worker("w")
    assert worker is not None
    assert worker.occupancy.output_left == (1, 500)


def test_a_worker_that_does_not_tell_takes_nothing_back(state: RouterState) -> None:
    _reserve(state, "r", 100)
    state.first_token("r", 1.0)
    state.load_report(_report({"r": 40}), 1.0)
    state.load_report(_report({"r": 0}, told=False), 2.0)
    assert _decode_s(state) == pytest.approx(0.6 * 0.01)


def test_numbers_that_belong_to_other_requests_are_not_read(state: RouterState) -> None:
    _reserve(state, "r", 100)
    state.first_token("r", 1.0)
    wrong = msgspec.structs.replace(_report({"r": 40}), output_tokens=pack_tokens([1, 2]))
    state.load_report(wrong, 1.0)
    assert _decode_s(state) == pytest.approx(0.01)


def test_latency_sensitivity_makes_others_count_less_and_a_long_request_makes_them_count_more(
    state: RouterState,
) -> None:
    _reserve(state, "r", 100)
    state.first_token("r", 1.0)
    usual = _decode_s(state)
    assert _decode_s(state, Bias(others=0.5)) == pytest.approx(usual / 2)
    assert _decode_s(state, Bias(length=4.0)) == pytest.approx(usual * 4)
