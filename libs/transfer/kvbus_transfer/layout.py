"""What the bytes of a block mean, and how blocks of one layout become those of another.

A block is [layer][K or V][token][kv head][dim] in one dtype. A worker of a tensor-parallel group has the heads of its rank alone.
Two layouts of one model may differ in the number of tokens per block and in the split of heads; all else must be equal. Whether
blocks can be moved is known from the two texts, so it is decided where requests are placed and never while they run.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec

from kvbus_transfer.copying import address_of, copy_pieces
from kvbus_transfer.errors import TransferError

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}
_FORM = re.compile(
    r"lkthd1-(?P<dtype>\w+)-l(?P<layers>\d+)-h(?P<heads>\d+)-d(?P<dim>\d+)-b(?P<block>\d+)(?:-r(?P<rank>\d+)of(?P<ranks>\d+))?"
)


class LayoutMismatch(TransferError):
    """Blocks of these layouts cannot become each other; ``detail`` says why."""

    code = "layout_mismatch"


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """``heads``: KV heads of the whole model, ``ranks`` of which have an equal share each, ``rank`` this one."""

    dtype: str
    layers: int
    heads: int
    dim: int
    block_size: int
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPE_BYTES:
            raise LayoutMismatch(f"unknown dtype {self.dtype!r}")
        if min(self.layers, self.heads, self.dim, self.block_size, self.ranks) < 1:
            raise LayoutMismatch("a size below 1")
        if self.heads % self.ranks or not 0 <= self.rank < self.ranks:
            raise LayoutMismatch(f"rank {self.rank} of {self.ranks} with {self.heads} heads")

    @classmethod
    def parse(cls, text: str) -> "KvLayout":
        """Of a model card's ``kv_layout``. Raise LayoutMismatch for what is not of this family."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise LayoutMismatch(f"{text!r} is no layout that is known here")
        numbers = {name: int(value) for name, value in found.groupdict().items() if name != "dtype" and value}
        return cls(
            dtype=found["dtype"],
            layers=numbers["layers"],
            heads=numbers["heads"],
            dim=numbers["dim"],
            block_size=numbers["block"],
            rank=numbers.get("rank", 0),
            ranks=numbers.get("ranks", 1),
        )

    @property
    def text(self) -> str:
        split = f"-r{self.rank}of{self.ranks}" if self.ranks > 1 else ""
        return f"lkthd1-{self.dtype}-l{self.layers}-h{self.heads}-d{self.dim}-b{self.block_size}{split}"

    @property
    def own_heads(self) -> range:
        share = self.heads // self.ranks
        return range(self.rank * share, (self.rank + 1) * share)

    @property
    def head_bytes(self) -> int:
        return self.dim * _DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Of K or V of one layer."""
        return len(self.own_heads) * self.head_bytes

    @property
    def block_bytes(self) -> int:
        return self.layers * 2 * self.block_size * self.token_bytes


def fingerprint(model_fingerprint: str, kv_layout: str) -> str:
    """What a region says about its blocks: the weights, too, because blocks of other weights have the same shape."""
    return f"{model_fingerprint}/{kv_layout}"


def why_not(source: str, target: str) -> str:
    """Why blocks of ``source`` cannot become blocks of ``target`` (texts of layouts); empty when they can. Equal texts always can,
    unknown ones, too."""
    if source == target:
        return ""
    try:
        Relayout(KvLayout.parse(source), KvLayout.parse(target))
    except LayoutMismatch as mismatch:
        return mismatch.detail
    return ""


class Relayout:
    """From the blocks of all ranks of ``source`` to those of the one rank of ``target``. Raise LayoutMismatch."""

    def __init__(self, source: KvLayout, target: KvLayout) -> None:
        for name in ("dtype", "layers", "heads", "dim"):
            if getattr(source, name) != getattr(target, name):
                raise LayoutMismatch(f"{name}: {getattr(source, name)} there, {getattr(target, name)} here")
        small, large = sorted((source.block_size, target.block_size))
        if large % small:
            raise LayoutMismatch(f"blocks of {source.block_size} tokens there, of {target.block_size} here")
        self.source = source
        self.target = target
        wanted, share = target.own_heads, source.heads // source.ranks
        self.ranks = range(wanted.start // share, (wanted.stop - 1) // share + 1)
        """Ranks of the source that have heads of the target's rank."""

    @property
    def is_copy(self) -> bool:
        return self.source == self.target

    def source_blocks(self, block: int) -> range:
        """Which blocks of the source (of each of `ranks`) hold the tokens of block ``block`` of the target."""
        first = block * self.target.block_size
        last = first + self.target.block_size - 1
        return range(first // self.source.block_size, last // self.source.block_size + 1)

    def whole_blocks(self, source_blocks: int) -> int:
        """How many blocks of the target so many blocks of the source fill."""
        return source_blocks * self.source.block_size // self.target.block_size

    def copy(self, block: int, sources: Mapping[tuple[int, int], memoryview], target: memoryview) -> None:
        """Fill block ``block`` of the target from ``sources[rank, source block]``. Raise ValueError for wrong sizes."""
        if target.nbytes != self.target.block_bytes or target.readonly:
            raise ValueError(f"a target of {target.nbytes} bytes, not of {self.target.block_bytes}")
        needed = [(rank, number) for rank in self.ranks for number in self.source_blocks(block)]
        for key in needed:
            if sources[key].nbytes != self.source.block_bytes:
                raise ValueError(f"a block of {sources[key].nbytes} bytes, not of {self.source.block_bytes}")
        bases = {key: address_of(sources[key]) for key in needed}
        to = address_of(target)
        copy_pieces([(to + at, bases[key] + start, length) for key, start, at, length in self.runs(block)])

    def runs(self, block: int) -> Iterator[tuple[tuple[int, int], int, int, int]]:
        """((rank, source block), offset there, offset in the target, length): each byte of the target once."""
        source, target = self.source, self.target
        for rank, heads in self._shares():
            theirs = (heads.start - rank * (source.heads // source.ranks)) * source.head_bytes
            ours = (heads.start - target.own_heads.start) * target.head_bytes
            length = len(heads) * target.head_bytes
            whole_tokens = length == source.token_bytes == target.token_bytes
            for number, first, tokens, at in self._token_runs(block):
                for plane in range(source.layers * 2):
                    start = (plane * source.block_size + first) * source.token_bytes + theirs
                    to = (plane * target.block_size + at) * target.token_bytes + ours
                    if whole_tokens:
                        yield (rank, number), start, to, tokens * length
                        continue
                    for token in range(tokens):
                        yield (
                            (rank, number),
                            start + token * source.token_bytes,
                            to + token * target.token_bytes,
                            length,
                        )

    def _shares(self) -> Iterator[tuple[int, range]]:
        """Which heads of the target come from which rank."""
        share, wanted = self.source.heads // self.source.ranks, self.target.own_heads
        edges: Sequence[int] = sorted(
            {wanted.start, wanted.stop, *(rank * share for rank in self.ranks if rank * share in wanted)}
        )
        for start, stop in pairwise(edges):
            yield start // share, range(start, stop)

    def _token_runs(self, block: int) -> Iterator[tuple[int, int, int, int]]:
        """(source block, first token in it, how many, first token in the target)."""
        begin = block * self.target.block_size
        end = begin + self.target.block_size
        for number in self.source_blocks(block):
            first = max(begin, number * self.source.block_size)
            stop = min(end, (number + 1) * self.source.block_size)
            yield number, first - number * self.source.block_size, stop - first, first - begin
