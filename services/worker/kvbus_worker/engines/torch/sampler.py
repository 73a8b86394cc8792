"""From logits to tokens.

Order of operations: what the guide of the sequence allows; logit bias and the ban on stop tokens below ``min_tokens``; repetition,
frequency and presence penalties; temperature; min_p; top_k; top_p over what those left. Log probabilities reported are the model's
own, before all of that.

Token i of a request is drawn by inverting the distribution function at u(seed, i), a hash, so that it depends neither on the batch
nor on the device's generator: a request that moves to another worker goes on with the same draws. The function runs over tokens by
id: ordered by probability, rounding errors would swap near-equal tokens, and with them draws, far more often.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from kvbus_wire.frontend import TokenLogprob
from kvbus_wire.request import Sampling
from kvbus_worker.engines.torch.guide import Guide, GuidedRow, forbid

_GREEDY_BELOW = 1e-5
# A repetition penalty may be anything above 0. So high an edited logit still stays finite when it is divided by _GREEDY_BELOW.
_HIGHEST = 1e30
# top_p seldom needs more than these; a full sort of a large vocabulary costs more than everything else here
_CANDIDATES = 256


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    digest = blake2b(b"%d:%d" % (seed, index), digest_size=8, person=b"kvbus.sample").digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


class SamplerState:
    """What one request's sampling depends on. ``output``: the tokens a migrated request brought along, which ``guide`` knows."""

    def __init__(
        self,
        sampling: Sampling,
        seed: int,
        prompt: Iterable[int],
        output: Sequence[int],
        stop_ids: Iterable[int],
        guide: Guide | None = None,
    ) -> None:
        self.sampling = sampling
        self.seed = seed
        self.greedy = sampling.temperature < _GREEDY_BELOW
        self.stop_ids = sorted(stop_ids)
        self.repeats = sampling.repetition_penalty != 1.0
        self.counts_output = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        self._seen: dict[int, None] = dict.fromkeys(prompt) if self.repeats else {}
        self._counts: dict[int, int] = {}
        self.guide = guide
        for token in output:
            self._count(token)

    def accept(self, token: int) -> None:
        """The token is part of the output now."""
        self._count(token)
        if self.guide is not None:
            self.guide.accept((token,))

    def _count(self, token: int) -> None:
        if self.repeats:
            self._seen[token] = None
        if self.counts_output:
            self._counts[token] = self._counts.get(token, 0) + 1

    def edits(self, *, ban_stops: bool) -> bool:
        """Whether `edit` would change anything."""
        return bool(self.sampling.logit_bias or self._seen or self._counts or (ban_stops and self.stop_ids))

    def edit(self, logits: Tensor, *, ban_stops: bool) -> None:
        """Apply bias, bans and penalties to one row, in place."""
        sampling = self.sampling
        if sampling.logit_bias:
            logits[_ids(sampling.logit_bias, logits)] += _values(sampling.logit_bias.values(), logits)
        if ban_stops and self.stop_ids:
            logits[_ids(self.stop_ids, logits)] = float("-inf")
        if self._seen:
            ids = _ids(self._seen, logits)
            seen = logits[ids]
            penalty = sampling.repetition_penalty
            logits[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
        if self._counts:
            counts = _values(self._counts.values(), logits)
            logits[_ids(self._counts, logits)] -= counts * sampling.frequency_penalty + sampling.presence_penalty
        # A banned token stays banned whatever it is multiplied with (-inf * 0 is NaN).
        logits.nan_to_num_(nan=float("-inf"), posinf=_HIGHEST, neginf=float("-inf")).clamp_(max=_HIGHEST)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of logits: draw output token ``index`` of the request; ``ban_stops``: it may not end yet."""

    state: SamplerState
    index: int
    ban_stops: bool


@dataclass(frozen=True, slots=True)
class Drawn:
    """``token`` None: the logits were not finite, so the model has failed for this row."""

    token: int | None
    logprob: TokenLogprob | None = None


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[Row]) -> list[Drawn]:
    """``logits``: float32 [row][vocabulary]."""
    guided = _guided(rows)
    edited = [i for i, row in enumerate(rows) if row.state.edits(ban_stops=_bans(row))]
    chosen_from = logits.clone() if guided or edited else logits
    if guided:
        forbid(chosen_from, guided)
    for i in edited:
        rows[i].state.edit(chosen_from[i], ban_stops=_bans(rows[i]))
    finite = (torch.isfinite(logits.amax(dim=-1)) & torch.isfinite(chosen_from.amax(dim=-1))).tolist()
    tokens = chosen_from.argmax(dim=-1).tolist()
    drawn = [i for i, row in enumerate(rows) if not row.state.greedy and finite[i]]
    if drawn:
        for i, token in zip(drawn, _draw(chosen_from[drawn], [rows[i] for i in drawn]), strict=True):
            tokens[i] = token
    return [
        Drawn(token, _logprob(logits[i], token, row.state.sampling.logprobs)) if finite[i] else Drawn(None)
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True))
    ]


def _bans(row: Row) -> bool:
    """A guide bans stop tokens itself, as it knows whether anything else may come."""
    return row.ban_stops and row.state.guide is None


def _guided(rows: Sequence[Row]) -> list[GuidedRow]:
    found = []
    for i, row in enumerate(rows):
        if row.state.guide is not None:
            found.append(GuidedRow(i, row.state.guide, row.state.stop_ids, row.ban_stops))
    return found


def _draw(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    sampling = [row.state.sampling for row in rows]
    scaled = logits / _values((s.temperature for s in sampling), logits)[:, None]
    u = torch.tensor([uniform(row.state.seed, row.index) for row in rows], dtype=torch.float64, device=logits.device)
    sorting = [i for i, s in enumerate(sampling) if s.top_k > 0 or s.top_p < 1.0]
    whole = [i for i in range(len(rows)) if i not in set(sorting)]
    tokens = [0] * len(rows)
    for indexes, draw in ((whole, _draw_unsorted), (sorting, _draw_sorted)):
        if indexes:
            picked = draw(scaled[indexes], [sampling[i] for i in indexes], u[indexes])
            for i, token in zip(indexes, picked, strict=True):
                tokens[i] = token
    return tokens


def _draw_unsorted(scaled: Tensor, sampling: Sequence[Sampling], u: Tensor) -> list[int]:
    probabilities = scaled.double().softmax(dim=-1)
    floor = probabilities.amax(dim=-1) * torch.tensor([s.min_p for s in sampling], device=u.device, dtype=u.dtype)
    probabilities = probabilities.masked_fill(probabilities < floor[:, None], 0.0)
    tokens: list[int] = _invert(probabilities, u).tolist()
    return tokens


def _draw_sorted(scaled: Tensor, sampling: Sequence[Sampling], u: Tensor) -> list[int]:
    """All three cuts keep a beginning of the tokens in falling order, so it is enough to know how long it is."""
    vocabulary = scaled.shape[-1]
    total = scaled.double().logsumexp(dim=-1)
    size = min(vocabulary, max(_CANDIDATES, *(s.top_k for s in sampling)) if sampling else vocabulary)
    values, ids = scaled.topk(size)
    kept, complete = _cut((values.double() - total[:, None]).exp(), sampling, vocabulary)
    tokens = _invert_by_id(kept, ids, u)
    for i in (i for i, is_complete in enumerate(complete) if not is_complete):
        values, ids = scaled[i].sort(descending=True)
        kept, _ = _cut((values.double() - total[i]).exp()[None], sampling[i : i + 1], vocabulary)
        tokens[i] = _invert_by_id(kept, ids[None], u[i : i + 1])[0]
    return tokens


def _invert_by_id(weights: Tensor, ids: Tensor, u: Tensor) -> list[int]:
    ids, order = ids.sort(dim=-1)
    picked = _invert(weights.gather(1, order), u)
    tokens: list[int] = ids.gather(1, picked[:, None]).flatten().tolist()
    return tokens


def _cut(probabilities: Tensor, sampling: Sequence[Sampling], vocabulary: int) -> tuple[Tensor, list[bool]]:
    """Zero what min_p, top_k and top_p exclude from falling ``probabilities``; and whether those candidates were enough to tell."""
    size = probabilities.shape[-1]

    def column(numbers: Iterable[float]) -> Tensor:
        return torch.tensor(list(numbers), device=probabilities.device, dtype=probabilities.dtype)[:, None]

    ranks = torch.arange(size, device=probabilities.device)
    floor = probabilities[:, :1] * column(s.min_p for s in sampling)
    kept = (probabilities >= floor) & (ranks < column(s.top_k or vocabulary for s in sampling))
    ends_here = ~kept[:, -1] | (size == vocabulary)  # min_p and top_k exclude everything behind the candidates
    candidates = probabilities * kept
    before = candidates.cumsum(dim=-1) - candidates
    # the mass that min_p and top_k left: known when they end here; without min_p and top_k it is 1
    uncut = torch.tensor([s.min_p == 0.0 and s.top_k == 0 for s in sampling], device=probabilities.device)
    mass = torch.where(uncut & ~ends_here, torch.ones_like(before[:, 0]), candidates.sum(dim=-1))
    inside = before < mass[:, None] * column(s.top_p for s in sampling)
    inside[:, 0] = True
    has_top_k = torch.tensor([0 < s.top_k <= size for s in sampling], device=probabilities.device)
    complete = ends_here | has_top_k | (uncut & ~inside[:, -1])
    return candidates * inside, complete.tolist()


def _invert(weights: Tensor, u: Tensor) -> Tensor:
    """The index in each row at which the sum of ``weights`` passes the fraction ``u`` of the whole."""
    sums = weights.cumsum(dim=-1)
    total = sums[:, -1]
    target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, target[:, None], right=True).squeeze(1)


def _logprob(logits: Tensor, token: int, top: int | None) -> TokenLogprob | None:
    if top is None:
        return None
    logprobs = logits.log_softmax(dim=-1)
    values, ids = logprobs.topk(top)
    return TokenLogprob(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _ids(ids: Iterable[int], like: Tensor) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.long, device=like.device)


def _values(values: Iterable[float], like: Tensor) -> Tensor:
    return torch.tensor(list(values), dtype=like.dtype, device=like.device)
