"""Blocks that have left G2 before a lower tier had them, out of the tier above it."""

from collections.abc import Sequence

import msgspec

from kvbus_blocks.keys import ROOT
from kvbus_kvbm.core.lower import BlockMeta
from kvbus_kvbm.core.tier_index import TierIndex


class Relay(msgspec.Struct, frozen=True):
    """A chain that has to be read above, parents first."""

    keys: tuple[bytes, ...]


def relays(keys: Sequence[bytes], above: TierIndex, below: TierIndex, limit: int) -> list[Relay]:
    """What ``below`` lacks of these blocks and their ancestors and ``above`` has, at most ``limit`` blocks, as chains."""
    chains: list[Relay] = []
    taken: set[bytes] = set()
    for key in keys:
        path: list[bytes] = []
        at: bytes | None = key
        while at is not None and at != ROOT and at in above and at not in below and at not in taken:
            path.append(at)
            at = above.parent(at)
        if not path or at is None or len(taken) + len(path) > limit:
            continue
        taken.update(path)
        if chains and chains[-1].keys[-1] == at:
            chains[-1] = Relay((*chains[-1].keys, *reversed(path)))
        else:
            chains.append(Relay(tuple(reversed(path))))
    return chains


def storable(metas: Sequence[BlockMeta]) -> list[BlockMeta]:
    """Up to the first that is not to leave G2 any more."""
    kept: list[BlockMeta] = []
    for meta in metas:
        if meta.directive.kind == "ephemeral":
            break
        kept.append(meta)
    return kept
