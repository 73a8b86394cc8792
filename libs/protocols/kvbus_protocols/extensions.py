"""Request extensions: ``nvext`` as Dynamo clients send it, and our own ``kvbus`` object. Unknown fields in them are ignored."""

from typing import Annotated

import msgspec
from msgspec import Meta

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
UInt32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
ShortText = Annotated[str, Meta(max_length=256)]


class AgentHints(msgspec.Struct, frozen=True):
    """``priority``: higher is sooner; ``strict_priority``: an absolute tier in the queue; ``osl``: expected output tokens."""

    priority: Int32 | None = None
    strict_priority: UInt32 | None = None
    osl: UInt32 | None = None
    latency_sensitivity: float | None = None
    speculative_prefill: bool | None = None


class NvExt(msgspec.Struct, frozen=True):
    """``annotations`` and ``extra_fields`` are accepted and do nothing yet; ``token_data`` replaces tokenizing."""

    agent_hints: AgentHints | None = None
    cache_salt: ShortText | None = None
    annotations: list[str] | None = None
    extra_fields: list[str] | None = None
    greed_sampling: bool | None = None
    token_data: list[UInt32] | None = None


class MockScript(msgspec.Struct, frozen=True):
    """Raw model output that the mock engine plays; every other engine refuses it. ``chunks``: pieces of one step each."""

    output: str | None = None
    finish: str | None = None
    chunks: list[str] | None = None


class Session(msgspec.Struct, frozen=True):
    """The agent session of a request; ``final``: nothing follows in it; ``ephemeral``: its blocks need not outlive it."""

    id: Annotated[str, Meta(min_length=1, max_length=256)]
    parent: ShortText | None = None
    final: bool = False
    ephemeral: bool = False


class KvbusExt(msgspec.Struct, frozen=True):
    mock: MockScript | None = None
    session: Session | None = None


FINISH_KINDS = ("stop", "length", "stop_sequence")
