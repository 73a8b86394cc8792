"""Policy classes: which requests share a weight, limits and priorities. Read from a TOML file:

    [[class]]
    name = "people"                 # the first class that fits a request takes it; what fits none is in the class "default"
    input = "user"                  # what the request answers: user or tool
    weight = 4                      # its share of turns while there are not enough for all
    priority = 5                    # comes on top of a request's own

    [[class]]
    name = "batch"
    tenants = ["batch-*"]           # patterns with * and ?
    min_uncached_tokens = 20000
    max_strict_priority = 0
    max_running = 8                 # further ones wait
    max_waiting_per_tenant = 20     # further ones are refused

Every field is explained at `PolicyClass`. Limits of 0 are none.
"""

import tomllib
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_CLASSES = 64
MAX_FILE_BYTES = 256 << 10

Count = Annotated[int, Meta(ge=0, le=2**40)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class BadClasses(ValueError):
    """The file cannot be used; the text says why, and is for the person who wrote it."""


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a request before it is placed. ``uncached_tokens``: at least so many have to be computed for it."""

    model: str = ""
    tenant: str = ""
    input_trigger: str = ""
    is_sub_agent: bool = False
    uncached_tokens: int = 0


class PolicyClass(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"input_trigger": "input"}
):
    """Who is in it: ``tenants``, ``models`` (patterns; none: all), ``input`` (user, tool), ``sub_agents`` (only those, or none of
    them), ``min_uncached_tokens``, ``max_uncached_tokens``.

    What holds for it: ``weight`` in the round robin of tenants; ``priority`` comes on top of the request's own, after that was cut
    to ``max_priority``, as the tier is to ``max_strict_priority``. ``max_running`` placed requests (of one tenant:
    ``max_running_per_tenant``): others wait. ``max_waiting`` requests and ``max_waiting_tokens`` uncached tokens wait: others are
    told to come back (overloaded), and beyond ``max_waiting_per_tenant`` that they send too many (rate limited). ``max_wait_s``:
    who waits longer is told to come back.
    """

    name: Name
    tenants: list[str] = []
    models: list[str] = []
    input_trigger: Literal["user", "tool"] | None = None
    sub_agents: bool | None = None
    min_uncached_tokens: Count = 0
    max_uncached_tokens: Count | None = None

    weight: Annotated[float, Meta(ge=0.01, le=1000)] = 1.0
    priority: Priority = 0
    max_priority: Priority | None = None
    max_strict_priority: Annotated[int, Meta(ge=0, le=2**32 - 1)] | None = None
    max_running: Count = 0
    max_running_per_tenant: Count = 0
    max_waiting: Count = 0
    max_waiting_tokens: Count = 0
    max_waiting_per_tenant: Count = 0
    max_wait_s: Annotated[float, Meta(ge=0, le=86400)] = 0.0

    def fits(self, traits: Traits) -> bool:
        return (
            (not self.tenants or any(fnmatchcase(traits.tenant, pattern) for pattern in self.tenants))
            and (not self.models or any(fnmatchcase(traits.model, pattern) for pattern in self.models))
            and self.input_trigger in (None, traits.input_trigger)
            and self.sub_agents in (None, traits.is_sub_agent)
            and traits.uncached_tokens >= self.min_uncached_tokens
            and (self.max_uncached_tokens is None or traits.uncached_tokens <= self.max_uncached_tokens)
        )

    def priority_of(self, asked: float) -> float:
        return (asked if self.max_priority is None else min(asked, self.max_priority)) + self.priority

    def strict_priority_of(self, asked: int) -> int:
        return asked if self.max_strict_priority is None else min(asked, self.max_strict_priority)


DEFAULT = PolicyClass(name="default")


class PolicyClasses(msgspec.Struct, frozen=True):
    """In the order of the file; the class ``default`` takes what fits no other, whether the file says how or not."""

    classes: tuple[PolicyClass, ...] = (DEFAULT,)

    def of(self, traits: Traits) -> PolicyClass:
        return next(found for found in self.classes if found.fits(traits))

    def named(self, name: str) -> PolicyClass:
        """One that is not there (any more) has no limits."""
        return next((found for found in self.classes if found.name == name), DEFAULT)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"classes": "class"}):
    classes: list[PolicyClass] = []


def read_classes(data: bytes) -> PolicyClasses:
    """Of the text of a file. Raise BadClasses."""
    if len(data) > MAX_FILE_BYTES:
        raise BadClasses(f"it has {len(data)} bytes; at most {MAX_FILE_BYTES} are read")
    try:
        file = msgspec.convert(tomllib.loads(data.decode()), _File)
    except RecursionError as problem:
        raise BadClasses("it is nested too deeply") from problem
    except (ValueError, msgspec.ValidationError) as problem:  # no UTF-8, no TOML, an endless number, no such fields
        raise BadClasses(str(problem)) from problem
    classes = file.classes
    if len(classes) > MAX_CLASSES:
        raise BadClasses(f"it has {len(classes)} classes; at most {MAX_CLASSES} are allowed")
    names = [found.name for found in classes]
    for name in names:
        if names.count(name) > 1:
            raise BadClasses(f"the class {name!r} is there twice")
    for found in classes:
        if found.max_uncached_tokens is not None and found.max_uncached_tokens < found.min_uncached_tokens:
            raise BadClasses(f"class {found.name!r}: max_uncached_tokens is below min_uncached_tokens")
    rest = next((found for found in classes if found.name == DEFAULT.name), DEFAULT)
    if not _takes_all(rest):
        raise BadClasses(f"class {rest.name!r} takes what fits no other: it cannot say whom it is for")
    return PolicyClasses((*(found for found in classes if found is not rest), rest))


def _takes_all(found: PolicyClass) -> bool:
    bare = PolicyClass(name=found.name)
    who = ("tenants", "models", "input_trigger", "sub_agents", "min_uncached_tokens", "max_uncached_tokens")
    return all(getattr(found, field) == getattr(bare, field) for field in who)
