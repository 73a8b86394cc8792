"""What requests ask to be told besides the answer, from the choices that run."""

import time
from collections.abc import Sequence

from kvbus_frontend.adapters.models import ServedModel
from kvbus_frontend.adapters.request_run import Choice
from kvbus_frontend.core.nvext_report import NvExtReport, Served
from kvbus_frontend.handlers.api import Ticket
from kvbus_protocols.generation import GenerationRequest


def report_for(
    request: GenerationRequest, ticket: Ticket, model: ServedModel, choices: Sequence[Choice]
) -> NvExtReport | None:
    """None when nothing was asked for."""
    asked = request.nvext
    if asked is None or not (asked.annotations or asked.extra_fields):
        return None
    prompt = choices[0].job.prompt
    return NvExtReport(
        asked,
        request_id=ticket.request_id,
        received_s=time.time() - (time.perf_counter() - ticket.started),
        clock=time.time,
        first_token_s=lambda: ticket.first_token_s,
        prompt_ids=lambda: prompt.token_ids,
        prompt_text=lambda: model.text.tokenizer.decode(prompt.token_ids, keep_special=True),
        served=lambda: [
            Served(choice.worker_id, choice.stream, choice.explanation, choice.prefill_worker_id) for choice in choices
        ],
    )
