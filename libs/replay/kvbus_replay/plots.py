"""Pictures of results. The only module that uses matplotlib (extra ``plot``), and only when a picture is asked for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbus_replay.simulation.results import Curves, Result

TIME_BUCKETS = 60


class PlottingMissing(Exception):
    """matplotlib is not installed."""

    def __init__(self) -> None:
        super().__init__("--plot needs matplotlib: pip install 'kvbus[plot]', or leave it out and read the JSON file")


def require_plotting() -> None:
    """Raise PlottingMissing, before a long run rather than after it."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as missing:
        raise PlottingMissing from missing


def plot(path: Path, title: str, runs: Sequence[tuple[Result, Curves]]) -> None:
    """Six panels: TTFT distribution, that of resumed turns, TTFT over time; hit rates against the oracle, what resumed turns
    computed anew, load of the workers."""
    require_plotting()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(18, 8), layout="constrained")
    figure.suptitle(title)
    (ttft, resumed, timeline), (hits, anew, load) = figure.subplots(2, 3)
    for result, curves in runs:
        count = len(curves.ttft_s)
        ttft.plot(curves.ttft_s, [(rank + 1) / count for rank in range(count)], label=result.policy)
        count = len(curves.resumed_ttft_s)
        resumed.plot(curves.resumed_ttft_s, [(rank + 1) / count for rank in range(count)], label=result.policy)
        timeline.plot(*_medians(curves), label=result.policy)
        load.plot(curves.busy_share, label=f"{result.policy}, peak {result.busy_share.peak:.2f} x mean")
    ttft.set(xscale="log", xlabel="time to first token, s", ylabel="share of calls", title="TTFT")
    resumed.set(xscale="log", xlabel="time to first token, s", ylabel="share of calls", title="TTFT of resumed turns")
    timeline.set(yscale="log", xlabel="arrival, s", ylabel="median TTFT, s", title="TTFT over time")
    load.set(xlabel="worker, busiest first", ylabel="share of time it computes", title="Load", ylim=(0, None))
    _plot_hits(hits, [result for result, _ in runs])
    bars = anew.bar([result.policy for result, _ in runs], [100 * result.recomputed_share for result, _ in runs])
    anew.bar_label(bars, fmt="%.1f")
    anew.set(ylabel="tokens computed anew, %", title="Resumed turns: recomputed of what had been computed")
    for axes in (ttft, resumed, timeline, load):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)


def _plot_hits(axes: Any, results: Sequence[Result]) -> None:
    places = range(len(results))
    bars = axes.bar(places, [100 * result.hit_rate for result in results])
    axes.bar_label(bars, fmt="%.1f")
    for place, result in zip(places, results, strict=True):
        height = 100 * result.oracle_hit_rate
        axes.plot([place - 0.4, place + 0.4], [height, height], color="black", label="oracle" if not place else None)
    axes.set_xticks(list(places), [result.policy for result in results])
    axes.set(ylabel="prompt tokens found cached, %", title="Hit rate, and that of one infinite shared cache")
    axes.legend(loc="lower right")


def _medians(curves: Curves) -> tuple[list[float], list[float]]:
    """Median TTFT of the calls that arrived in each slice of time."""
    if not curves.arrived_s:
        return [], []
    width = max(curves.arrived_s) / TIME_BUCKETS or 1.0
    buckets: dict[int, list[float]] = {}
    for arrived, ttft in zip(curves.arrived_s, curves.ttft_of_arrival_s, strict=True):
        buckets.setdefault(int(arrived / width), []).append(ttft)
    times = sorted(buckets)
    return [(time + 0.5) * width for time in times], [sorted(buckets[t])[len(buckets[t]) // 2] for t in times]
