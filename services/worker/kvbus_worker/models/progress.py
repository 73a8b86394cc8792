"""How long steps report themselves."""

from typing import Protocol


class Progress(Protocol):
    def __call__(self, step: str, done: int, total: int) -> None:
        """``done`` of ``total`` units (bytes or tensors) of ``step``; called often, from the calling thread only."""


def silent(step: str, done: int, total: int) -> None:
    pass
