"""What guidance costs: `python tests/bench/guidance.py MODEL_DIR [--batch N]`, a folder with a tokenizer and perhaps weights.

Prints, per grammar: the check (the first one with the start of its process), compiling, a copy per sequence; then the time per
token of masking and advancing, and of a decode step with and without guidance, for batches in which every sequence is guided.
All but the checks in processor time of one thread.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvbus_wire.guidance import CallSection, Guidance, GuidedCall
from kvbus_wire.request import Sampling, Stopping
from kvbus_worker.engines.base import EngineRequest
from kvbus_worker.engines.torch import config as model_config
from kvbus_worker.engines.torch.compute import Compute
from kvbus_worker.engines.torch.grammar import sources
from kvbus_worker.engines.torch.grammar_checker import GrammarChecker
from kvbus_worker.engines.torch.grammars import Vocabulary, compile_grammar
from kvbus_worker.engines.torch.guide import Guide, GuidedRow, forbid
from kvbus_worker.engines.torch.settings import TorchSettings

_TEXT = {"type": "string"}
_LIST: dict[str, Any] = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 400}},
    "required": ["items"],
    "additionalProperties": False,
}


def _tool(name: str, count: int) -> GuidedCall:
    schema = {
        "type": "object",
        "properties": {f"{name}_{i}": _TEXT if i % 2 else {"type": "integer"} for i in range(count)},
        "required": [f"{name}_0"],
        "additionalProperties": False,
    }
    begin = f'<tool_call>\n{{"name": "{name}", "arguments": '
    return GuidedCall(begin=begin, end="}\n</tool_call>", schema=json.dumps(schema))


GRAMMARS = {
    "any object": Guidance(form="json_object"),
    "list of strings": Guidance(form="json_schema", text=json.dumps(_LIST)),
    "enum of 5000": Guidance(
        form="json_schema", text=json.dumps({"enum": [f"choice {i * 7919 % 10007}" for i in range(5000)]})
    ),
    "50 tools of 10 arguments": Guidance(
        form="none", section=CallSection(calls=tuple(_tool(f"tool{i}", 10) for i in range(50)), separator="\n")
    ),
}


def _ms(work: Callable[[], object], times: int = 1) -> float:
    spent = []
    for _ in range(times):
        begun = time.thread_time()
        work()
        spent.append(time.thread_time() - begun)
    return statistics.median(spent) * 1000


async def _checks() -> None:
    checker = GrammarChecker(limit_s=10, limit_bytes=1 << 30)
    for name, guidance in GRAMMARS.items():
        begun = time.perf_counter()
        for source in sources(guidance):
            await checker.check(source)
        print(f"{name:28} check {(time.perf_counter() - begun) * 1000:8.1f} ms")
    await checker.close()


def _walk(guidance: Guidance, vocabulary: Vocabulary, width: int) -> tuple[float, float]:
    """Median and worst time in ms of mask and advance over an output of random tokens."""
    guide = Guide(compile_grammar(guidance, vocabulary).deep_copy(), vocabulary.eos_ids)
    torch.manual_seed(1)
    logits = torch.randn(1, width)
    spent = []
    for _ in range(200):
        begun = time.thread_time()
        forbid(logits, [GuidedRow(0, guide, vocabulary.eos_ids, ban_stops=True)])
        masking_s = time.thread_time() - begun
        token = int(logits.argmax())
        begun = time.thread_time()
        guide.accept((token,))
        spent.append((masking_s + time.thread_time() - begun) * 1000)
        if guide.is_over:
            break
        logits = torch.randn(1, width)
    return statistics.median(spent), max(spent)


def _step_ms(compute: Compute, guidance: Guidance | None, vocabulary: Vocabulary, batch: int) -> float:
    """The median decode step."""
    compiled = compile_grammar(guidance, vocabulary) if guidance is not None else None
    for i in range(batch):
        guide = Guide(compiled.deep_copy(), vocabulary.eos_ids) if compiled is not None else None
        request = EngineRequest(
            request_id=f"r{i}",
            tokens=list(range(100 + i, 164 + i)),
            domain_key=b"d" * 32,
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(max_tokens=64, ignore_eos=True),
            guidance=guidance,
        )
        compute.submit(request, time.monotonic(), guide)
    for _ in range(-(-64 * batch // compute.info.max_batched_tokens) + 1):
        compute.step()
    spent = _ms(compute.step, 40)
    compute.end_all("cancelled")
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = model_config.read(arguments.model)
    begun = time.thread_time()
    vocabulary = Vocabulary(arguments.model / "tokenizer.json", config.vocab_size, config.eos_token_ids)
    print(f"vocabulary of {config.vocab_size} read in {(time.thread_time() - begun) * 1000:.0f} ms")
    asyncio.run(_checks())
    for name, guidance in GRAMMARS.items():
        compiling = _ms(lambda guidance=guidance: compile_grammar(guidance, vocabulary), 5)  # type: ignore[misc]
        compiled = compile_grammar(guidance, vocabulary)
        copying = _ms(compiled.deep_copy, 20)
        median, worst = _walk(guidance, vocabulary, config.vocab_size)
        print(
            f"{name:28} compile {compiling:7.1f} ms  copy {copying:6.3f} ms  token {median:6.3f} ms (worst {worst:.1f} ms)"
        )
    if not (arguments.model / "model.safetensors").exists():
        return
    compute = Compute(TorchSettings(model_dir=str(arguments.model), total_blocks=512), config)
    for batch in (1, arguments.batch):
        plain = _step_ms(compute, None, vocabulary, batch)
        guided = _step_ms(compute, GRAMMARS["list of strings"], vocabulary, batch)
        print(f"decode step, {batch:2} sequences: {plain:.1f} ms plain, {guided:.1f} ms guided")


if __name__ == "__main__":
    main()
