"""How long KV blocks are worth keeping, and which of them goes next when room is needed."""

from typing import Literal

import msgspec

Kind = Literal["pinned", "normal", "ephemeral"]


class Directive(msgspec.Struct, frozen=True):
    """What is known of a block's future. ``kind``: pinned (it stays until ``expires_s``), normal, or ephemeral (the first to
    go, and never below G2). ``priority``: higher stays longer. ``expires_s``: a time of the caller's clock, None: for good.
    ``tenant``: whose share of pinned blocks it counts against."""

    kind: Kind = "normal"
    priority: int = 0
    expires_s: float | None = None
    tenant: str = ""
