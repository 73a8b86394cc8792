"""Messages to a worker that computes prompts for others (on its transfer subject): remote prefill.

decode worker                                prefill worker
StartPrefill  ------------------------------>  computes the prompt, chunk by chunk
NextBlocks (0)  ----------------------------->  waits until a chunk is computed, copies it to where peers can read
          <----------------------------------  BlocksReady: grant
NextBlocks (16) ----------------------------->  meanwhile the decode worker reads and imports the first 16
          ...                                    blocks before ``received`` are given up by their owner
EndPrefill  -------------------------------->  everything is given up; so it is when nobody asks for ``lease_s``
"""

from kvbus_wire.message import Message
from kvbus_wire.request import AgentHints


class StartPrefill(Message, frozen=True):
    """Compute the blocks [``first_block``, ``end_block``) of a prompt, and what lies before them, for another worker.

    ``tokens`` (packed): the prompt up to at least one token behind block ``end_block``. Idempotent by ``prefill_id``, which
    nobody else can guess: it is what the other messages are believed for.
    ``reader``: the transfer agent that will read; no other may. ``handover``: what the decode worker's engine tells the prefill
    worker's, for engines that move blocks themselves (of the same ``handover_kind``); nobody else looks into it.
    """

    prefill_id: str
    request_id: str
    model: str
    fingerprint: str
    kv_layout: str
    reader: str
    tokens: bytes
    first_block: int
    end_block: int
    deadline_ms: int
    lease_s: float
    cache_salt: str = ""
    lora: str = ""
    hints: AgentHints = AgentHints()
    trace: str = ""
    handover_kind: str = ""
    handover: bytes = b""


class PrefillStarted(Message, frozen=True):
    """``cached_blocks``: leading blocks that need not be computed, since they are there. ``handover``: what the engine can say
    before anything is computed."""

    prefill_id: str
    incarnation: int
    cached_blocks: int
    handover: bytes = b""


class NextBlocks(Message, frozen=True):
    """The blocks from ``first`` on, at most ``most``, as soon as there are some; the answer comes after ``wait_s`` at the latest.
    Blocks before ``received`` have been read. Asking again is harmless."""

    prefill_id: str
    first: int
    most: int
    received: int
    wait_s: float


class BlocksReady(Message, frozen=True):
    """Blocks [``first``, ``first`` + ``count``) can be read by ``grant`` (sealed by the owner's transfer agent), its segment i
    being block ``first`` + i. None (``count`` 0) when none is ready yet. ``done``: no block comes after these. ``checksums``:
    XXH3-64 of each. ``handover``: what the engine says when it is done."""

    prefill_id: str
    first: int
    count: int
    grant: bytes = b""
    checksums: tuple[int, ...] = ()
    done: bool = False
    handover: bytes = b""


class EndPrefill(Message, frozen=True):
    """Nobody waits for these blocks any more. Idempotent; the answer is Done. ``reason``: done, cancelled, or what went wrong."""

    prefill_id: str
    reason: str
