"""Jobs of the choices of one request: the same but for prompt, id and seed."""

import msgspec

from kvbus_frontend.core.catalog import Offer
from kvbus_frontend.core.dispatch import Job
from kvbus_frontend.core.prompt import Prompt
from kvbus_frontend.core.sampling import hints_of, mock_of, salt_of, sampling_of, session_of, stopping_of
from kvbus_protocols.errors import InvalidRequest
from kvbus_protocols.extensions import ROUTING_FIELD, NvExt, RoutingConstraints
from kvbus_protocols.generation import GenerationRequest
from kvbus_tokenizers import GenerationConfig
from kvbus_wire.guidance import Guidance
from kvbus_wire.request import Retention


class JobTemplate:
    def __init__(
        self,
        request: GenerationRequest,
        defaults: GenerationConfig,
        *,
        model: str,
        end_token_ids: tuple[int, ...],
        allowed: tuple[str, ...],
        deadline_ms: int,
        tenant: str = "",
        client: str = "",
        input_trigger: str = "",
        guidance: Guidance | None = None,
        retention: tuple[Retention, ...] = (),
    ) -> None:
        self._request = request
        self._sampling = sampling_of(request, defaults, logprobs=request.logprob_count)
        self._model = model
        self._end_token_ids = end_token_ids
        self._allowed = allowed
        self._deadline_ms = deadline_ms
        self._tenant = tenant
        self._client = client
        self.hints = msgspec.structs.replace(hints_of(request), input_trigger=input_trigger)
        self._guidance = guidance
        self._retention = retention

    def job(self, request_id: str, prompt: Prompt, max_tokens: int, *, choice: int) -> Job:
        """``choice``: the number of the choice of this prompt; with a given seed, each draws from a seed of its own."""
        request, sampling = self._request, self._sampling
        if sampling.seed is not None and choice:
            sampling = msgspec.structs.replace(sampling, seed=_other_seed(sampling.seed, choice))
        nvext = request.nvext or NvExt()
        constraints = nvext.routing_constraints or RoutingConstraints()
        return Job(
            request_id=request_id,
            model=self._model,
            prompt=prompt,
            sampling=sampling,
            stopping=stopping_of(request, max_tokens=max_tokens, end_token_ids=self._end_token_ids),
            deadline_ms=self._deadline_ms,
            cache_salt=salt_of(request),
            tenant=self._tenant,
            client=self._client,
            hints=self.hints,
            session=session_of(request),
            retention=self._retention,
            mock=mock_of(request),
            guidance=self._guidance,
            allowed=self._allowed,
            pinned=nvext.pin,
            prefill_pinned=nvext.prefill_pin,
            required_taints=tuple(constraints.required_taints or ()),
            preferred_taints=constraints.preferred_taints or {},
            prefetch_after_s=_prefetch_after_s(request),
            explain=ROUTING_FIELD in (nvext.extra_fields or ()),
        )


def check_pins(nvext: NvExt, offer: Offer) -> None:
    """Raise InvalidRequest for a number that no worker of the model has as its name (Dynamo numbers its instances), and for one
    that is to compute the prompt and is not there. Other names are the router's to judge: their worker may come back."""
    for field in ("prefill_worker_id", "decode_worker_id", "backend_instance_id"):
        given = getattr(nvext, field)
        judged = isinstance(given, int) or (field == "prefill_worker_id" and given)
        if given is not None and judged and str(given) not in (workers := (*offer.workers, *offer.others)):
            raise InvalidRequest(
                f"'nvext.{field}': there is no worker {str(given)!r} of this model; there are {', '.join(sorted(workers))}.",
                param=f"nvext.{field}",
                code="unknown_worker",
            )


def _prefetch_after_s(request: GenerationRequest) -> float | None:
    prefetch = request.kvbus.prefetch if request.kvbus is not None else None
    return None if prefetch is None else prefetch.after_s


def _other_seed(seed: int, choice: int) -> int:
    """Far from the seeds that clients count through, and within 64 signed bits."""
    mixed = (seed + choice * 0x9E3779B97F4A7C15) % 2**64
    return mixed - 2**64 if mixed >= 2**63 else mixed
