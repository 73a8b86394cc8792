"""Which kvbm instances are asked, about which blocks."""

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeVar

import msgspec

from kvbus_blocks.keys import KEY_BYTES
from kvbus_cli.asking import NotAnswered, instances
from kvbus_cli.prompt.keys import PromptSettings, keyed_prompt
from kvbus_cli.prompt.request_file import BadRequestFile
from kvbus_cli.tool import ToolSettings
from kvbus_runtime.bus import Bus
from kvbus_runtime.errors import RequestFailed
from kvbus_runtime.settings import Flag
from kvbus_wire.kv_tools import DescribedTiers, DescribeTiers
from kvbus_wire.message import Message

TIERS = ("g2", "g3", "g4")

LOOK_S = 10.0
"""For an answer from memory."""

WORK_S = 120.0
"""For one that reads or writes a piece of a tier."""

T = TypeVar("T")


class KvSettings(ToolSettings, frozen=True, kw_only=True):
    """Of all kvbm instances, or of one."""

    kvbm: Annotated[str, Flag("only this instance", metavar="ID")] = ""


class ChainSettings(PromptSettings, frozen=True, kw_only=True):
    """Blocks: those of a prompt, or by their keys."""

    keys: Annotated[tuple[str, ...], Flag("keys of blocks, 32 hexadecimal digits each, instead of a prompt")] = ()
    kvbm: Annotated[str, Flag("only this instance", metavar="ID")] = ""

    def chain(self) -> "Chain":
        """Raise BadRequestFile, PromptFailed."""
        if not self.keys:
            prompt = keyed_prompt(self.url, self.request, self.headers)
            return Chain(prompt.model, prompt.keys)
        if any((self.messages, self.text, self.tokens)):
            raise BadRequestFile("give a prompt or --keys, not both")
        if not self.model:
            raise BadRequestFile("give --model")
        for key in self.keys:
            if not re.fullmatch(f"[0-9a-fA-F]{{{2 * KEY_BYTES}}}", key):
                raise BadRequestFile(f"--keys: {key!r} is no key: one has {2 * KEY_BYTES} hexadecimal digits")
        return Chain(self.model, b"".join(map(bytes.fromhex, self.keys)))


class Chain(msgspec.Struct, frozen=True):
    """``keys``: packed."""

    model: str
    keys: bytes

    @property
    def blocks(self) -> int:
        return len(self.keys) // KEY_BYTES

    def pieces(self, blocks: int) -> list[bytes]:
        size = blocks * KEY_BYTES
        return [self.keys[start : start + size] for start in range(0, len(self.keys), size)]


class Kvbm:
    """One instance that is asked."""

    def __init__(self, bus: Bus, instance_id: str) -> None:
        self._bus = bus
        self.instance_id = instance_id

    async def ask(self, question: Message, reply: type[Message], timeout_s: float = LOOK_S) -> Any:
        """Raise RequestFailed."""
        subject = self._bus.subjects.control(self.instance_id)
        return await self._bus.request(subject, question, reply, timeout_s=timeout_s)


async def of_model(bus: Bus, only: str, model: str, ask: Callable[[Kvbm], Coroutine[Any, Any, T]]) -> list[T]:
    """As `of_each`, about one model. Raise NotAnswered also when nobody knows it: a misspelt name has no blocks anywhere."""

    async def models_of(kvbm: Kvbm) -> set[str]:
        told: DescribedTiers = await kvbm.ask(DescribeTiers(), DescribedTiers)
        return {held.model for tier in told.tiers for held in tier.holdings}

    held = set[str]().union(*await of_each(bus, only, models_of))
    served = {record.worker.model.name for record in await instances(bus, "worker") if record.worker is not None}
    known = sorted(held | served)
    if model not in known:
        raise NotAnswered(f"no model {model!r} is known: there is {', '.join(known) or 'none'}")
    return await of_each(bus, only, ask)


async def of_each(bus: Bus, only: str, ask: Callable[[Kvbm], Coroutine[Any, Any, T]]) -> list[T]:
    """What each instance says, by id; they are asked at the same time. Raise NotAnswered when there is none, or one refuses."""
    names = sorted(record.instance_id for record in await instances(bus, "kvbm"))
    chosen = [name for name in names if not only or name == only]
    if not chosen:
        missing = f"no kvbm {only!r}" if only else "no kvbm"
        raise NotAnswered(f"there is {missing} in the namespace {bus.settings.namespace!r}")

    async def one(name: str) -> T:
        try:
            return await ask(Kvbm(bus, name))
        except RequestFailed as failure:
            raise NotAnswered(f"{name}: {failure}") from failure

    return list(await asyncio.gather(*map(one, chosen)))
