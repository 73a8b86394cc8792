"""The paged KV cache: one tensor [layer][K or V][block][token][kv head][dim].

Layers are outermost so that adjacent blocks of one layer are adjacent in memory: a sequence whose blocks follow each other is
attended to in place, without a copy. An exported block is [layer][K or V][token][kv head][dim], contiguous, in the cache's dtype.
"""

import torch
from torch import Tensor

from kvbus_worker.engines.torch.config import ModelConfig


class KvCache:
    def __init__(
        self, config: ModelConfig, blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.block_size = block_size
        shape = (config.layers, 2, blocks, block_size, config.kv_heads, config.head_dim)
        # zeros, not empty: a masked position must not hold NaN; on CPUs the pages are taken when they are first written
        self._tensor = torch.zeros(shape, device=device, dtype=dtype)
        slots = self._tensor.flatten(2, 3)
        self._layers = [(slots[layer, 0], slots[layer, 1]) for layer in range(config.layers)]
        self._staging = torch.empty(shape[:2] + shape[3:], dtype=dtype)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer as [slot][kv head][dim]; slot = block * block_size + offset."""
        return self._layers[index]

    def read_block(self, block: int, into: memoryview) -> None:
        self._over(into).copy_(self._tensor[:, :, block])

    def write_block(self, block: int, data: memoryview) -> None:
        if data.readonly:  # a tensor cannot lie over it
            _bytes_of(self._staging)[:] = data
            self._tensor[:, :, block].copy_(self._staging)
        else:
            self._tensor[:, :, block].copy_(self._over(data))

    def _over(self, memory: memoryview) -> Tensor:
        """One block in memory of somebody else: it is written or read once, without a copy in between."""
        return torch.frombuffer(memory, dtype=self._staging.dtype).view(self._staging.shape)


def _bytes_of(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.view(torch.uint8).flatten().numpy().data
    return data
