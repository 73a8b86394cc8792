"""Device memory where there is no device: a tensor of the CPU that says it were on one. Staging is all that can be checked so;
`bench/gpu/transfer_check.py` is for machines with a GPU."""

from typing import Any

import pytest

from kvbus_transfer import TransferAgent

torch = pytest.importorskip("torch")


class OnDevice:
    """What `is_device_memory` takes for device memory."""

    __cuda_array_interface__ = {"version": 3}

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


async def test_device_memory_is_staged_for_backends_that_cannot_reach_it() -> None:
    source = OnDevice(torch.arange(4000, dtype=torch.int32))
    target = OnDevice(torch.zeros(1000, dtype=torch.int32))
    async with TransferAgent("owner", backends=[]) as owner, TransferAgent("reader", backends=[]) as reader:
        region = owner.register(source)
        assert region.kind == "cuda"
        assert region.size_bytes == 16_000
        granted = owner.grant(region, [(4000, 4000)], 10.0)
        assert await reader.read(granted.sealed, [0], [target], checksum=True) == "tcp"
        assert target.tensor.tolist() == list(range(1000, 2000))


async def test_memory_that_is_not_contiguous_is_refused() -> None:
    async with TransferAgent("owner", backends=[]) as owner:
        with pytest.raises(ValueError, match="contiguous"):
            owner.register(OnDevice(torch.zeros(8, 8)[:, ::2]))
