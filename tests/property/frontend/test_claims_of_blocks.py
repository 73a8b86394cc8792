"""Blocks come free exactly when the last claim on them goes, whatever chains share whatever beginnings."""

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvbus_blocks.keys import KEY_BYTES, chain_keys
from kvbus_frontend.core.claims import BlockClaims, Run

CHAINS = st.lists(st.integers(0, 2), max_size=12)


def keys_of(tokens: list[int]) -> bytes:
    return b"".join(chain_keys(b"k" * 32, b"".join(token.to_bytes(4, "little") for token in tokens), 1))


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


class Claims(RuleBasedStateMachine):
    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.tree = BlockClaims()
        self.model: Counter[bytes] = Counter()

    @rule(target=claims, tokens=CHAINS)
    def claim(self, tokens: list[int]) -> tuple[Run, bytes]:
        keys = keys_of(tokens)
        self.model.update(split(keys))
        return self.tree.claim(keys), keys

    @rule(claim=consumes(claims))
    def release(self, claim: tuple[Run, bytes]) -> None:
        run, keys = claim
        assert self.tree.chain(run) == keys
        self.model.subtract(split(keys))
        freed = [key for part in self.tree.release(run) for key in split(part)]
        assert sorted(freed) == sorted(key for key in split(keys) if not self.model[key])

    @rule(tokens=CHAINS)
    def look(self, tokens: list[int]) -> None:
        keys = keys_of(tokens)
        held = self.tree.held(keys)
        assert held == sum(self.model[key] > 0 for key in split(keys))

    @invariant()
    def is_sound(self) -> None:
        self.tree.check_integrity()


TestClaims = Claims.TestCase
