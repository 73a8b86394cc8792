"""The file of policy classes: read at the start, and again when it has changed. A bad one changes nothing."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvbus_router.core.policy_classes import MAX_FILE_BYTES, BadClasses, PolicyClasses, read_classes
from kvbus_runtime.metrics import Metrics
from kvbus_runtime.settings import BadSettings


def load_classes(path: str) -> tuple[PolicyClasses, bytes]:
    """And the text they were read from. No path: only the class ``default``. Raise BadSettings."""
    if not path:
        return PolicyClasses(), b""
    try:
        content = _content(Path(path))
        return read_classes(content), content
    except (OSError, BadClasses) as problem:
        raise BadSettings(f"policy classes in {path}: {problem}") from problem


class ClassesFile:
    """Looks at the file every ``poll_s``. ``content``: what was read of it before. ``apply`` is called with what is in force from
    now on."""

    def __init__(
        self,
        path: str,
        content: bytes,
        poll_s: float,
        *,
        apply: Callable[[PolicyClasses], None],
        metrics: Metrics,
        log: Any,
    ) -> None:
        self._path = path
        self._poll_s = poll_s
        self._apply = apply
        self._log = log
        self._seen: bytes | None = content
        self._reloads = metrics.counter("policy_class_reloads", "changes of the file of policy classes", ("outcome",))

    async def follow(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._poll_s)
            await self.look()

    async def look(self) -> None:
        """Once. A file that is gone, or cannot be used, is told once; what it said before stays in force."""
        content = await asyncio.to_thread(_content_or_none, self._path)
        if content == self._seen:
            return
        self._seen = content
        try:
            if content is None:
                raise BadClasses("it cannot be read")
            if not content.strip():  # an editor that cuts the file before it writes
                raise BadClasses("it is empty")
            classes = read_classes(content)
        except BadClasses as problem:
            self._reloads.labels("refused").inc()
            self._log.error("policy_classes_refused", file=self._path, reason=str(problem))
            return
        self._reloads.labels("applied").inc()
        self._log.info("policy_classes", file=self._path, classes=[found.name for found in classes.classes])
        self._apply(classes)


def _content(path: Path) -> bytes:
    """Little more than can be used of it. Raise OSError."""
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES + 1)


def _content_or_none(path: str) -> bytes | None:
    try:
        return _content(Path(path))
    except OSError:
        return None
