"""Explanations and limits for people. Pure: rich's texts and tables."""

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from kvbus_cli.tables import right_aligned
from kvbus_wire.router import PrefillTerms, RouteExplanation, RouterLimits, WorkerLimits, WorkerTerms

_TERMS = (
    *("cost", "TTFT", "wait", "onboard", "prefill", "work", "decode", "affinity", "taints"),
    *("G1", "in flight", "onboarded", "to compute", "waiting", "requests"),
)
_NOTHING = ("-", "0", "0/0")
"""What a term shows that says nothing."""


def explanation_lines(told: RouteExplanation) -> Iterator[Text]:
    """What holds for the request as a whole."""
    if told.worker_id:
        where = f"{told.request_id} went to {told.worker_id}"
    elif any(not terms.verdict for terms in told.workers):
        where = "nothing was placed; cheapest first"
    else:
        where = "nothing was placed: no worker can take it"
    yield Text(where, style="bold")
    facts = [f"{told.model} · {told.prompt_tokens} tokens · policy {told.policy} · by {told.router_id}"]
    if told.policy_class:
        facts.append(f"class {told.policy_class}" + (f", tenant {told.tenant}" if told.tenant else ""))
    if told.queued_s:
        facts.append(f"waited {seconds(told.queued_s)} in the queue")
    if told.session_worker_id:
        facts.append(f"the session was last on {told.session_worker_id}")
    if told.ttft_s is not None:
        predicted = next((terms.ttft_s for terms in told.workers if terms.worker_id == told.worker_id), None)
        against = f", predicted {seconds(predicted)}" if predicted is not None else ""
        facts.append(f"first token after {seconds(told.ttft_s)}{against}")
    facts += [_prefill_fact(terms, told.prefill_worker_id) for terms in told.prefill]
    for fact in facts:
        yield Text(fact)


def _prefill_fact(terms: PrefillTerms, chosen: str) -> str:
    if terms.verdict:
        return f"prefill by {terms.worker_id}: {terms.verdict.replace('_', ' ')}"
    who = "prefilled" if terms.worker_id == chosen else "not prefilled"
    return (
        f"{who} by {terms.worker_id}: {terms.tokens} tokens ready after {seconds(terms.ready_s)}, here {seconds(terms.local_s)}"
        f" (cost {seconds(terms.cost_s)}, here {seconds(terms.local_cost_s)})"
    )


def explanation_table(told: RouteExplanation) -> Table:
    """One row per worker; times in seconds, sizes in tokens. A term that is nothing for all of them has no column."""
    able = [terms for terms in told.workers if not terms.verdict]
    rows = [_row(terms) for terms in able]
    shown = [at for at in range(len(_TERMS)) if any(row[at] not in _NOTHING for row in rows)]
    table = right_aligned("worker", *(_TERMS[at] for at in shown))
    if len(able) < len(told.workers):
        table.add_column("why not")
    for terms, row in zip(able, rows, strict=True):
        style = "green" if terms.worker_id == told.worker_id else None
        table.add_row(terms.worker_id, *(row[at] for at in shown), style=style)
    for terms in told.workers:
        if terms.verdict:
            verdict = Text(terms.verdict.replace("_", " "), style="yellow")
            table.add_row(terms.worker_id, *("" for _ in shown), verdict, style="dim")
    if told.left_out:
        table.caption, table.caption_justify = f"and {told.left_out} more workers", "left"
    return table


def _row(terms: WorkerTerms) -> list[str]:
    """In the order of `_TERMS`."""
    onboarded = " ".join(f"{part.source}:{part.tokens}" for part in terms.onboard)
    return [
        seconds(terms.cost_s),
        seconds(terms.ttft_s),
        seconds(terms.wait_s),
        seconds(sum(part.seconds for part in terms.onboard)),
        seconds(terms.prefill_s),
        seconds(terms.work_s),
        seconds(terms.decode_s),
        seconds(-terms.affinity_s),
        f"x{terms.taint_factor:g}" if terms.taint_factor != 1 else "-",
        str(terms.cached_tokens),
        str(terms.inflight_tokens),
        onboarded or "0",
        str(terms.uncached_tokens),
        str(terms.waiting_tokens),
        f"{terms.running}/{terms.active}",
    ]


def seconds(value: float) -> str:
    return "-" if value == 0 else f"{value:.4f}" if abs(value) < 1 else f"{value:.2f}"


def limits_table(told: Sequence[RouterLimits]) -> Table:
    """One column per router; a star marks what was changed at run time."""
    table = right_aligned("limit", *(f"{limits.router_id} (revision {limits.revision})" for limits in told))
    for name in WorkerLimits.__struct_fields__:
        table.add_row(name, *(_limit(limits, name) for limits in told))
    return table


def _limit(limits: RouterLimits, name: str) -> str:
    value = getattr(limits.in_force, name)
    shown = (", ".join(value) or "-") if isinstance(value, tuple) else str(value)
    return f"{shown} *" if getattr(limits.stored, name) is not None else shown


def limits_lines(told: Sequence[RouterLimits]) -> Iterator[Text]:
    if any(limits.stored != WorkerLimits() for limits in told):
        yield Text("* changed at run time, for all routers", style="dim")
    if len({limits.in_force for limits in told}) > 1:
        yield Text("The routers do not agree: their settings differ, or a change is on its way.", style="red")
