"""Stand-in until the rules of `kvbus_blocks.retention` are there."""

from kvbus_blocks.retention import Directive

_DEFAULT = Directive()


def merged(old: Directive | None, said: Directive | None) -> Directive:
    if old is None:
        return said or _DEFAULT
    if said is None:
        return _DEFAULT if old.kind == "ephemeral" else old
    if said.kind == "ephemeral" and old.kind != "ephemeral":
        return old
    return said
