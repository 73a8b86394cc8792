"""Device memory without importing torch: who has a tensor has imported it."""

import sys
from typing import Any

DIRECT = ("ucx", "nixl")
"""Backends that read and write device memory themselves; for the others it is staged in host memory."""


def is_device_memory(memory: Any) -> bool:
    return hasattr(memory, "__cuda_array_interface__")


def flat(tensor: Any) -> Any:
    """The tensor's memory as bytes on the device, sliced like a memoryview. Raise ValueError when it is not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError("device memory must be contiguous")
    return tensor.reshape(-1).view(sys.modules["torch"].uint8)


def to_host(device: Any) -> memoryview:
    """A copy. It blocks until the device is done."""
    return memoryview(device.cpu().numpy()).cast("B")


def to_device(host: memoryview, device: Any) -> None:
    """It blocks until the device is done."""
    torch = sys.modules["torch"]
    device.copy_(torch.frombuffer(host, dtype=torch.uint8))
    if device.is_cuda:
        torch.cuda.synchronize(device.device)
