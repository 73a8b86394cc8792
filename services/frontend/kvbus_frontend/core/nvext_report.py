"""What ``nvext`` asks to be told besides the answer: annotations ahead of a stream, extra fields at its end."""

from collections.abc import Callable, Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from kvbus_frontend.core.choice_stream import ChoiceStream
from kvbus_protocols import sse
from kvbus_protocols.extensions import (
    ROUTING_FIELD,
    LlmMetrics,
    NvExt,
    NvExtAnswer,
    Routing,
    RoutingTerms,
    ServedBy,
    Timing,
)
from kvbus_protocols.generation import Usage
from kvbus_wire.router import RouteExplanation, WorkerTerms


class Served(msgspec.Struct, frozen=True):
    """A choice as it is now: the worker that it runs on, what it has said, and why it went there, where that was asked for.
    ``prefill_worker_id``: who computed its prompt (empty: that worker)."""

    worker_id: str
    stream: ChoiceStream
    explanation: RouteExplanation | None = None
    prefill_worker_id: str = ""


class NvExtReport:
    """``prompt_ids``, ``prompt_text``: asked only when an annotation wants them; ``served``: the choices of the request."""

    def __init__(
        self,
        asked: NvExt | None,
        *,
        request_id: str,
        received_s: float,
        clock: Callable[[], float],
        first_token_s: Callable[[], float | None],
        prompt_ids: Callable[[], list[int]],
        prompt_text: Callable[[], str],
        served: Callable[[], Sequence[Served]],
    ) -> None:
        """``received_s``: by ``clock``, in seconds since the epoch; ``first_token_s``: after that."""
        self._annotations = frozenset(asked.annotations or () if asked is not None else ())
        self._fields = frozenset(asked.extra_fields or () if asked is not None else ())
        self._request_id = request_id
        self._received_s = received_s
        self._clock = clock
        self._first_token_s = first_token_s
        self._prompt_ids = prompt_ids
        self._prompt_text = prompt_text
        self._served = served

    def opening(self) -> Iterator[bytes]:
        if "request_id" in self._annotations:
            yield sse.event(self._request_id, "request_id")
        if "formatted_prompt" in self._annotations:
            yield sse.event(self._prompt_text(), "formatted_prompt")
        if "token_ids" in self._annotations:
            yield sse.event(self._prompt_ids(), "token_ids")

    def closing(self, usage: Usage) -> Iterator[bytes]:
        if "llm_metrics" in self._annotations:
            cached = usage.prompt_tokens_details.cached_tokens
            yield sse.event(LlmMetrics(usage.prompt_tokens, cached, usage.completion_tokens), "llm_metrics")

    def answer(self, usage: Usage) -> NvExtAnswer | None:
        """At the end; None when no field was asked for."""
        if not self._fields & {"worker_id", "timing", "completion_token_ids", ROUTING_FIELD}:
            return None
        served = self._served()
        worker_id = served[0].worker_id if served else ""
        prefilled_by = (served[0].prefill_worker_id if served else "") or worker_id
        explanation = served[0].explanation if served else None
        return NvExtAnswer(
            worker_id=ServedBy(prefilled_by, worker_id) if "worker_id" in self._fields else None,
            timing=self._timing(usage) if "timing" in self._fields else None,
            completion_token_ids=list(served[0].stream.token_ids) if "completion_token_ids" in self._fields else None,
            routing=routing_of(explanation) if explanation is not None else None,
        )

    def _timing(self, usage: Usage) -> Timing:
        first_s = self._first_token_s()
        return Timing(
            request_received_ms=round(self._received_s * 1000, 3),
            ttft_ms=None if first_s is None else round(first_s * 1000, 3),
            total_time_ms=round((self._clock() - self._received_s) * 1000, 3),
            kv_hit_rate=round(usage.prompt_tokens_details.cached_tokens / max(1, usage.prompt_tokens), 4),
        )


def extra_fields(report: NvExtReport | None, usage: Usage) -> NvExtAnswer | UnsetType:
    """What an answer says as ``nvext``."""
    return (report.answer(usage) if report is not None else None) or UNSET


def routing_of(explanation: RouteExplanation) -> Routing:
    return Routing(
        worker_id=explanation.worker_id,
        policy=explanation.policy,
        queued_ms=_ms(explanation.queued_s),
        session_worker_id=explanation.session_worker_id,
        workers=[_terms(terms) for terms in explanation.workers],
        left_out=explanation.left_out,
    )


def _terms(terms: WorkerTerms) -> RoutingTerms:
    return RoutingTerms(
        worker_id=terms.worker_id,
        verdict=terms.verdict,
        cost_ms=_ms(terms.cost_s),
        ttft_ms=_ms(terms.ttft_s),
        wait_ms=_ms(terms.wait_s),
        onboard_ms=_ms(sum(part.seconds for part in terms.onboard)),
        prefill_ms=_ms(terms.prefill_s),
        work_ms=_ms(terms.work_s),
        decode_ms=_ms(terms.decode_s),
        affinity_ms=_ms(terms.affinity_s),
        taint_factor=terms.taint_factor,
        cached_tokens=terms.cached_tokens,
        inflight_tokens=terms.inflight_tokens,
        onboard_tokens={part.source: part.tokens for part in terms.onboard},
        uncached_tokens=terms.uncached_tokens,
        waiting_tokens=terms.waiting_tokens,
        active=terms.active,
        running=terms.running,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
