"""Questions of tools about this one indexer."""

import asyncio
from collections.abc import Callable

from kvbus_indexer.core.catalog import Catalog
from kvbus_indexer.core.digest import combined, feed_digests
from kvbus_indexer.core.instance import Phase
from kvbus_indexer.core.usage import Usage
from kvbus_runtime.bus import RequestContext
from kvbus_runtime.errors import RequestFailed
from kvbus_wire.errors import ErrorCode
from kvbus_wire.indexer import (
    DescribeIndex,
    DigestIndex,
    IndexDescription,
    IndexDigest,
    IndexUse,
    ModelUse,
    RankPrefixes,
    SilentWorker,
    UsedPrefix,
)
from kvbus_wire.message import Message

CONTROL_MESSAGES = (DescribeIndex, DigestIndex, RankPrefixes)
MAX_NAMED = 4096
"""Workers, feeds or prefixes in one answer: it has to fit into a bus message."""


class ControlHandler:
    """``stream``: which event stream is read. ``checkpoint_age_s``: None when there is none."""

    def __init__(
        self,
        catalog: Catalog,
        usage: Usage,
        *,
        indexer_id: str,
        stream: Callable[[], str],
        checkpoint_age_s: Callable[[], float | None],
        clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._usage = usage
        self._indexer_id = indexer_id
        self._stream = stream
        self._checkpoint_age_s = checkpoint_age_s
        self._clock = clock

    async def __call__(self, question: DescribeIndex | DigestIndex | RankPrefixes, context: RequestContext) -> Message:
        match question:
            case DescribeIndex():
                return self._describe()
            case DigestIndex():
                return await self._digest(question)
            case RankPrefixes():
                return self._rank(question)

    def _describe(self) -> IndexDescription:
        catalog = self._catalog
        silent = sorted(catalog.silent_workers(self._clock()).items())[:MAX_NAMED]
        return IndexDescription(
            indexer_id=self._indexer_id,
            caught_up=catalog.caught_up,
            stream=self._stream(),
            position=catalog.repairs.position,
            entries=catalog.content.entries,
            blocks=sum(index.sizes().blocks for index in catalog.content.indexes.values()),
            instances=catalog.instances,
            in_repair=catalog.instances - catalog.repairs.in_phase(Phase.LIVE),
            partial=catalog.partial_instances,
            predicted_entries=catalog.predictions.entries,
            checkpoint_age_s=self._checkpoint_age_s(),
            silent=tuple(SilentWorker(instance_id=worker, why=why.value) for worker, why in silent),
        )

    async def _digest(self, question: DigestIndex) -> IndexDigest:
        feeds = []
        for feed in feed_digests(self._catalog):
            feeds.append(feed)
            await asyncio.sleep(0)
        if question.feeds and len(feeds) > MAX_NAMED:
            message = f"{len(feeds)} feeds are more than the {MAX_NAMED} of one answer"
            raise RequestFailed.of(ErrorCode.PAYLOAD_TOO_LARGE, message, limit=MAX_NAMED)
        return IndexDigest(
            indexer_id=self._indexer_id,
            position=self._catalog.repairs.position,
            entries=sum(feed.entries for feed in feeds),
            digest=combined(feeds),
            feeds=tuple(feeds) if question.feeds else (),
        )

    def _rank(self, question: RankPrefixes) -> IndexUse:
        content = self._catalog.content
        models = []
        for model, index in sorted(content.indexes.items()):
            if question.model in ("", model):
                sizes, written, read = index.sizes(), content.written(model), self._usage.of(model)
                models.append(
                    ModelUse(
                        model=model,
                        asked=read.asked,
                        found=read.found,
                        stored=written.stored,
                        removed=written.removed,
                        blocks=sizes.blocks,
                        entries=sizes.entries,
                    )
                )
        used = self._usage.top(question.model, min(max(question.limit, 0), MAX_NAMED))
        return IndexUse(
            indexer_id=self._indexer_id,
            models=tuple(models[:MAX_NAMED]),
            prefixes=tuple(
                UsedPrefix(
                    model=u.model,
                    key=u.key,
                    depth=u.depth,
                    reads=round(u.reads, 2),
                    owners=self._owners(u.model, u.key),
                )
                for u in used
            ),
        )

    def _owners(self, model: str, key: int) -> int:
        """Instances that hold the prefix now. It may be read often before anybody has stored it: a burst of equal prompts is."""
        index = self._catalog.content.indexes.get(model)
        return 0 if index is None else len({owner.instance_id for owner in index.match([key])})
