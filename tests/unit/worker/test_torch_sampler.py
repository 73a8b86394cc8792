"""Sampling against a naive implementation of the same definition."""

import math
from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvbus_wire.request import Sampling  # noqa: E402
from kvbus_worker.engines.torch.sampler import Drawn, Row, SamplerState, sample, uniform  # noqa: E402

VOCABULARY = 1000


def logits_of(seed: int, rows: int = 1, vocabulary: int = VOCABULARY, scale: float = 2.0) -> Any:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def draw(logits: Any, sampling: Sampling, index: int = 0, **state: Any) -> Drawn:
    made = SamplerState(
        sampling,
        sampling.seed or 0,
        state.get("prompt", ()),
        state.get("output", ()),
        state.get("stop_ids", ()),
    )
    return sample(logits, [Row(made, index, state.get("ban_stops", False))])[0]


def naive_weights(logits: list[float], s: Sampling) -> list[float]:
    """Probabilities after all cuts, by id."""
    scaled = [value / s.temperature for value in logits]
    top = max(scaled)
    weights = [math.exp(value - top) for value in scaled]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    kept = [i for i in order if weights[i] >= s.min_p * weights[order[0]]]
    kept = kept[: s.top_k] if s.top_k else kept
    mass, total = 0.0, sum(weights[i] for i in kept)
    inside: list[int] = []
    for i in kept:
        if inside and mass >= s.top_p * total:
            break
        inside.append(i)
        mass += weights[i]
    return [weights[i] if i in set(inside) else 0.0 for i in range(len(weights))]


def naive_draw(logits: list[float], s: Sampling, u: float) -> int:
    weights = naive_weights(logits, s)
    target, mass = u * sum(weights), 0.0
    for i, weight in enumerate(weights):
        mass += weight
        if mass > target:
            return i
    raise AssertionError("u is below 1")


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.7, top_p=0.9, seed=2),
        Sampling(temperature=3.0, top_p=0.99, seed=3),  # more than the usual number of candidates
        Sampling(temperature=1.5, top_k=7, seed=4),
        Sampling(temperature=1.5, top_k=400, top_p=0.8, seed=5),
        Sampling(temperature=1.0, min_p=0.05, seed=6),
        Sampling(temperature=2.5, min_p=0.002, top_p=0.97, seed=7),
        Sampling(temperature=1.0, min_p=0.1, top_k=50, top_p=0.6, seed=8),
        Sampling(temperature=1.0, top_k=1, seed=9),
        Sampling(temperature=1.0, top_p=0.0, seed=10),
    ],
    ids=str,
)
def test_draws_follow_the_definition(sampling: Sampling) -> None:
    for index in range(25):
        logits = logits_of(index)
        assert sampling.seed is not None
        expected = naive_draw(logits[0].tolist(), sampling, uniform(sampling.seed, index))
        assert draw(logits, sampling, index).token == expected


def test_many_draws_have_the_right_frequencies() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -50.0]])
    sampling = Sampling(temperature=1.0, seed=42)
    count = 3000
    found = Counter(draw(logits, sampling, index).token for index in range(count))
    weights = naive_weights([0.0, 1.0, 2.0, -50.0], sampling)
    for token, weight in enumerate(weights):
        assert abs(found[token] / count - weight / sum(weights)) < 0.03


def test_rows_of_one_batch_do_not_influence_each_other() -> None:
    kinds = [
        Sampling(temperature=0.0),
        Sampling(temperature=0.9, seed=1),
        Sampling(temperature=0.9, top_p=0.5, seed=2),
        Sampling(temperature=0.0, repetition_penalty=1.5),
        Sampling(temperature=1.2, top_k=3, seed=3, logprobs=2),
    ]
    logits = logits_of(5, rows=len(kinds))
    rows = [Row(SamplerState(kind, kind.seed or 0, (1, 2, 3), (), ()), 4, False) for kind in kinds]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert [drawn.token for drawn in together] == [drawn.token for drawn in alone]
    assert together[4].logprob is not None


def test_penalties_follow_their_formulas() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, 1.8, 0.5]])
    # 2.0 / 2 = 1.0 for the prompt's token 0; token 1: 1.9 - 2 * 0.1 - 0.2 = 1.5
    assert draw(logits, Sampling(temperature=0.0, repetition_penalty=2.0), prompt=(0,)).token == 1
    assert (
        draw(
            logits,
            Sampling(temperature=0.0, frequency_penalty=0.1, presence_penalty=0.2),
            prompt=(3,),
            output=(1, 1, 0, 0, 0),
        ).token
        == 3
    )
    negative = torch.tensor([[-1.0, -1.5]])
    assert draw(negative, Sampling(temperature=0.0, repetition_penalty=2.0), prompt=(0,)).token == 1


def test_bias_is_added_and_stop_tokens_are_banned_while_the_request_may_not_end() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    assert draw(logits, Sampling(temperature=0.0, logit_bias={2: 5.0})).token == 2
    assert draw(logits, Sampling(temperature=0.0), stop_ids=(0,), ban_stops=True).token == 1
    assert draw(logits, Sampling(temperature=0.0), stop_ids=(0,)).token == 0


def test_logprobs_are_the_models_own() -> None:
    logits = logits_of(9)
    expected = logits[0].log_softmax(dim=-1)
    drawn = draw(logits, Sampling(temperature=0.0, logit_bias={5: 100.0}, logprobs=3))
    assert drawn.token == 5
    assert drawn.logprob is not None
    assert drawn.logprob.token_id == 5
    assert drawn.logprob.logprob == pytest.approx(float(expected[5]))
    best = expected.topk(3)
    assert [token for token, _ in drawn.logprob.top] == best.indices.tolist()
    assert [value for _, value in drawn.logprob.top] == pytest.approx(best.values.tolist())
    none = draw(logits, Sampling(temperature=0.0, logprobs=0)).logprob
    assert none is not None
    assert none.top == ()
    assert draw(logits, Sampling(temperature=0.0)).logprob is None


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 1.0}, {"top_p": 5e-324, "top_k": 1}])
@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-5, 1.0, 2.0])
@pytest.mark.parametrize("penalty", [5e-324, 1e-37, 1e-30, 2.0])
def test_extreme_numbers_draw_a_token_and_harm_no_other_row(
    penalty: float, temperature: float, cut: dict[str, Any]
) -> None:
    logits = logits_of(11, rows=2)
    extreme = Sampling(temperature=temperature, repetition_penalty=penalty, logit_bias={4: 100.0, 5: -100.0}, **cut)
    seen = tuple(range(0, VOCABULARY, 2))
    ordinary = Row(SamplerState(Sampling(temperature=1.0, top_p=0.9), 1, (), (), ()), 0, False)
    alone = sample(logits[1:], [ordinary])[0].token
    for index in range(5):
        rows = [Row(SamplerState(extreme, index, seen, (), (0, 1)), index, True), ordinary]
        drawn, other = sample(logits, rows)
        assert drawn.token is not None
        assert 2 <= drawn.token < VOCABULARY, "a token of the vocabulary, and none of those that are banned"
        assert other.token == alone


def test_logits_that_are_not_finite_are_reported_for_their_row_only() -> None:
    logits = logits_of(3, rows=3)
    logits[1, 7] = float("nan")
    rows = [Row(SamplerState(Sampling(temperature=t), 0, (), (), ()), 0, False) for t in (0.0, 1.0, 1.0)]
    assert [drawn.token is None for drawn in sample(logits, rows)] == [False, True, False]


def test_uniform_numbers_are_the_same_everywhere() -> None:
    assert 0.0 <= uniform(1, 0) < 1.0
    assert uniform(1, 0) == uniform(1, 0)
    assert len({uniform(seed, index) for seed in range(-3, 30) for index in range(30)}) == 33 * 30
    assert uniform(2**80, 5) != uniform(2**80 + 1, 5)
