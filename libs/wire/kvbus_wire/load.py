"""What workers tell the routers about themselves."""

from kvbus_wire.message import Message


class LoadReport(Message, frozen=True):
    """``waiting_tokens``: prompt tokens that still have to be computed, of waiting and running requests.

    ``kv_seq``: the last KV event emitted, so that a lost last event is noticed. Rates are measured (EWMA) or the engine's prior.
    ``output_tokens``: packed u32, how much each of ``request_ids`` has said so far; empty: not told.
    ``onboard_tokens_per_s``: measured, by where from (``g2`` .. ``g4``, ``remote``); what was never done is not in it.
    ``seq``: grows with each report of an incarnation, so that an older one that comes later is noticed (0: not told).
    ``ids_cut``: there was no room for all ``request_ids``; of what is missing nothing can be concluded.
    ``prefill_ids``: requests of other workers whose prompts are computed here; they are in the numbers.
    ``handover_s``: measured, what having a prompt computed elsewhere takes besides computing and moving it (0: never done).
    """

    instance_id: str
    incarnation: int
    model: str
    running: int
    waiting: int
    waiting_tokens: int
    used_blocks: int
    total_blocks: int
    kv_seq: int
    prefill_tokens_per_s: float
    decode_step_s: float
    draining: bool = False
    request_ids: tuple[str, ...] = ()
    onboard_tokens_per_s: dict[str, float] = {}
    output_tokens: bytes = b""
    seq: int = 0
    ids_cut: bool = False
    prefill_ids: tuple[str, ...] = ()
    handover_s: float = 0.0
