"""What the streams of Chat Completions and of the legacy Completions have in common: chunks of one shape, and how they end."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import msgspec
from msgspec import UNSET, UnsetType

from kvbus_frontend.core.nvext_report import NvExtReport, extra_fields
from kvbus_frontend.core.outputs import Finish
from kvbus_protocols import sse
from kvbus_protocols.errors import ApiError
from kvbus_protocols.extensions import NvExtAnswer
from kvbus_protocols.generation import OptionalUsage, Usage

LOWEST_LOGPROB = -9999.0
"""JSON has no minus infinity; OpenAI uses this number for it."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """What all chunks of one response share. ``logprobs``: asked for; ``report``: what else is asked for."""

    id: str
    created: int
    model: str
    fingerprint: str
    token_bytes: Callable[[int], bytes]
    logprobs: bool = False
    stream_usage: bool = False
    report: NvExtReport | None = None


def stop_reason_of(finish: Finish) -> str | int | UnsetType:
    return UNSET if finish.stop is None else finish.stop


class OpenAiStream(ABC):
    """The part of `Output` that does not depend on the shape of a choice."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope

    @abstractmethod
    def _bare(self, usage: OptionalUsage, nvext: NvExtAnswer | UnsetType) -> msgspec.Struct:
        """A chunk without choices."""

    @property
    def _no_usage(self) -> OptionalUsage:
        """``usage`` of a chunk that is not the last: absent unless the request asked for it."""
        return None if self._envelope.stream_usage else UNSET

    def _nvext(self, usage: Usage) -> NvExtAnswer | UnsetType:
        return extra_fields(self._envelope.report, usage)

    def opening(self, usage: Usage) -> Iterator[bytes]:
        if self._envelope.report is not None:
            yield from self._envelope.report.opening()

    def closing(self, usage: Usage) -> Iterator[bytes]:
        if self._envelope.report is not None:
            yield from self._envelope.report.closing(usage)
        if (nvext := self._nvext(usage)) is not UNSET:
            yield sse.event(self._bare(self._no_usage, nvext))
        if self._envelope.stream_usage:
            yield sse.event(self._bare(usage, UNSET))
        yield sse.DONE

    def failure(self, error: ApiError) -> Iterator[bytes]:
        yield sse.event(error.body)

    def keep_alive(self) -> bytes:
        return sse.KEEP_ALIVE
