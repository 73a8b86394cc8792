"""Directives that requests could bring, for property tests."""

from hypothesis import strategies as st

from kvbus_blocks.retention import KINDS, Directive
from kvbus_worker.engines.base import DirectiveRun

_directives = st.builds(
    Directive,
    st.sampled_from(KINDS),
    st.integers(-3, 3),
    st.none() | st.floats(0.1, 60.0),
    st.sampled_from(["", "a", "b"]),
)


def run_lists(blocks: int) -> st.SearchStrategy[tuple[DirectiveRun, ...]]:
    """In order and without overlaps, as `Said` takes them; the last one may have no end."""

    def made(edges: list[int], directives: list[Directive], endless: bool) -> tuple[DirectiveRun, ...]:
        spans = list(zip(edges[::2], edges[1::2], strict=False))
        runs = [DirectiveRun(s, e, d) for (s, e), d in zip(spans, directives, strict=False)]
        if endless and runs:
            runs[-1] = DirectiveRun(runs[-1].start, None, runs[-1].directive)
        return tuple(runs)

    edges = st.lists(st.integers(0, blocks), max_size=6, unique=True).map(sorted)
    return st.builds(made, edges, st.lists(_directives, min_size=3, max_size=3), st.booleans())
