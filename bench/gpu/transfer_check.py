"""Two processes on one GPU: do blocks in device memory arrive, and how fast? Needs torch with CUDA, takes under a minute.

    python bench/gpu/transfer_check.py [--json FILE] [--device cuda|cpu]

Owner and reader hold tensors on the device. The reader reads block lists by each backend that both have: `ucx` and `nixl` directly
(cuda_ipc on one host), `tcp` staged through host memory, which is what is left when the others cannot. `limit_gbps` is a copy on
the device of the same sizes; `ipc_gbps` a copy from the owner's tensor mapped by torch's own IPC. `--device cpu` checks the script
where there is no GPU. The exit status is 1 when any byte was wrong or when no direct backend worked on a GPU.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from kvbus_transfer import TransferAgent, TransferError

BLOCK_BYTES = 2 << 20
BLOCKS = 64
LISTS = (1, 8, 64)
ROUNDS = 10
BACKENDS = ("ucx", "nixl", "tcp")
# Before UCX is loaded: what copies between devices and processes of one host.
os.environ.setdefault(
    "UCX_TLS", "cuda_copy,cuda_ipc,cma,sm,tcp,self" if torch.cuda.is_available() else "cma,sm,tcp,self"
)


def content(device: str) -> torch.Tensor:
    values = torch.arange(BLOCKS * BLOCK_BYTES, dtype=torch.int64, device=device)
    return (values * 2_654_435_761 >> 7).to(torch.uint8)


def memory_of(tensor: torch.Tensor) -> Any:
    """CPU tensors are registered and filled as buffers."""
    return tensor if tensor.is_cuda else tensor.numpy().data


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def own(device: str, pipe: Any) -> None:
    async def serve() -> None:
        tensor = content(device)
        torch.Tensor.share_memory_(tensor)  # type: ignore[no-untyped-call]  # on a CPU it moves when it is sent otherwise, after it was registered
        synchronize(device)
        async with TransferAgent("gpu-owner", backends=BACKENDS) as agent:
            region = agent.register(memory_of(tensor))
            blocks = [(at * BLOCK_BYTES, BLOCK_BYTES) for at in range(BLOCKS)]
            pipe.send((agent.grant(region, blocks, 600.0).sealed, tensor, agent.unavailable))
            await asyncio.to_thread(pipe.recv)

    asyncio.run(serve())


async def read_all(device: str, grant: bytes, theirs: torch.Tensor) -> dict[str, Any]:
    expected = content(device)
    target = torch.zeros_like(expected)
    blocks = [target[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES] for at in range(BLOCKS)]
    results: dict[str, Any] = {}
    async with TransferAgent("gpu-reader", backends=BACKENDS) as agent:
        agent.register(memory_of(target))
        for backend in BACKENDS:
            results[backend] = {}
            for count in LISTS:
                target.zero_()
                synchronize(device)
                wanted, numbers = [memory_of(block) for block in blocks[:count]], list(range(count))
                try:
                    await agent.read(grant, numbers, wanted, backend=backend, deadline_s=30.0)
                    synchronize(device)
                    right = bool(torch.equal(target[: count * BLOCK_BYTES], expected[: count * BLOCK_BYTES]))
                    start = time.perf_counter()
                    for _ in range(ROUNDS):
                        await agent.read(grant, numbers, wanted, backend=backend, deadline_s=30.0)
                    synchronize(device)
                except TransferError as error:
                    results[backend] = {"error": f"{error.code}: {error}"}
                    break
                gbps = ROUNDS * count * BLOCK_BYTES / (time.perf_counter() - start) / 1e9
                results[backend][count * BLOCK_BYTES] = {"gbps": gbps, "correct": right}
    for name, source in (("limit_gbps", expected), ("ipc_gbps", theirs)):
        results[name] = {}
        for count in LISTS:
            size = count * BLOCK_BYTES
            target[:size].copy_(source[:size])
            synchronize(device)
            start = time.perf_counter()
            for _ in range(ROUNDS):
                target[:size].copy_(source[:size])
                synchronize(device)
            results[name][size] = ROUNDS * size / (time.perf_counter() - start) / 1e9
        right = bool(torch.equal(target, source)) if count == BLOCKS else True
        results[f"{name}_correct"] = right
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here (try --device cpu to check the script itself)", file=sys.stderr)
        return 2
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    owner = context.Process(target=own, args=(arguments.device, there))
    owner.start()
    grant, theirs, unavailable = here.recv()
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "unavailable": unavailable,
        "results": asyncio.run(read_all(arguments.device, grant, theirs)),
    }
    del theirs
    here.send("done")
    owner.join(20)
    if owner.is_alive():
        owner.kill()
    text = json.dumps(figures, indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    told = [figures["results"][name] for name in BACKENDS]
    wrong = any(not entry["correct"] for sizes in told if "error" not in sizes for entry in sizes.values())
    direct = any("error" not in figures["results"][name] for name in ("ucx", "nixl"))
    return 1 if wrong or (arguments.device == "cuda" and not direct) else 0


if __name__ == "__main__":
    raise SystemExit(main())
