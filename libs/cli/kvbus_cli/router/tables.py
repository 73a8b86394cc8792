"""Explanations and limits for people. Pure: rich's texts and tables."""

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from kvbus_wire.router import RouteExplanation, RouterLimits, WorkerLimits, WorkerTerms


def explanation_lines(told: RouteExplanation) -> Iterator[Text]:
    """What holds for the request as a whole."""
    where = f"{told.request_id} went to {told.worker_id}" if told.worker_id else "nothing was placed; cheapest first"
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
    for fact in facts:
        yield Text(fact)


def explanation_table(told: RouteExplanation) -> Table:
    """One row per worker; times in seconds, sizes in tokens."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("worker")
    headings = ("cost", "TTFT", "wait", "onboard", "prefill", "work", "decode", "affinity", "taints")
    for name in (*headings, "G1", "in flight", "onboarded", "to compute", "waiting", "requests"):
        table.add_column(name, justify="right")
    for terms in told.workers:
        if terms.verdict:
            table.add_row(terms.worker_id, Text(terms.verdict.replace("_", " "), style="yellow"), style="dim")
        else:
            table.add_row(*_row(terms), style="green" if terms.worker_id == told.worker_id else None)
    if told.left_out:
        table.caption, table.caption_justify = f"and {told.left_out} more workers", "left"
    return table


def _row(terms: WorkerTerms) -> list[str]:
    onboarded = " ".join(f"{part.source}:{part.tokens}" for part in terms.onboard)
    return [
        terms.worker_id,
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
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("limit")
    for limits in told:
        table.add_column(f"{limits.router_id} (revision {limits.revision})", justify="right")
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
