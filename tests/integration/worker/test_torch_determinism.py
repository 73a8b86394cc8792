"""Greedy output is that of a plain full recomputation, token by token, however the engine batches, splits, reuses or moves work."""

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kvbus_blocks.keys import ROOT, chain_keys
from kvbus_wire.frontend import Ended, Started
from kvbus_wire.packing import pack_tokens, unpack_tokens
from kvbus_wire.request import Sampling, Stopping
from kvbus_worker.engines.base import BlockEvent, EngineRequest, StepOutput
from kvbus_worker.engines.torch import config as model_config
from kvbus_worker.engines.torch.compute import Compute
from kvbus_worker.engines.torch.settings import TorchSettings

pytestmark = pytest.mark.timeout(600)

SIZE = 16
DOMAIN = b"d" * 32
GREEDY = Sampling(temperature=0.0)

ModelFolder = Callable[[str], Path]


class Reference:
    """A transformer as its paper's formulas read: one sequence, no cache, each head on its own."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {name: value.to(dtype) for name, value in load_file(folder / "model.safetensors").items()}
        self.dtype = dtype
        self.output_length = 14 if self.config["hidden_size"] > 500 else 24  # of the tests: real models take their time

    def logits(self, tokens: Sequence[int]) -> Tensor:
        c = self.config
        x = self.weights["model.embed_tokens.weight"][list(tokens)]
        for layer in range(c["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            x = x + self._attention(prefix + "self_attn.", self._norm(x, prefix + "input_layernorm.weight"))
            y = self._norm(x, prefix + "post_attention_layernorm.weight")
            gate, up = self._linear(y, prefix + "mlp.gate_proj"), self._linear(y, prefix + "mlp.up_proj")
            x = x + self._linear(gate * torch.sigmoid(gate) * up, prefix + "mlp.down_proj")
        x = self._norm(x, "model.norm.weight")
        head = "model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"
        return x @ self.weights[head].T

    def _attention(self, prefix: str, x: Tensor) -> Tensor:
        c = self.config
        dim, heads, kv_heads = c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
        q, k, v = (torch.split(self._linear(x, f"{prefix}{part}_proj"), dim, dim=-1) for part in "qkv")
        allowed = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        outputs = []
        for head in range(heads):
            shared = head * kv_heads // heads
            query = self._rotate(self._head_norm(q[head], prefix + "q_norm.weight"))
            key = self._rotate(self._head_norm(k[shared], prefix + "k_norm.weight"))
            scores = (query @ key.T / math.sqrt(dim)).masked_fill(~allowed, float("-inf"))
            outputs.append(scores.softmax(dim=-1) @ v[shared])
        return self._linear(torch.cat(outputs, dim=-1), prefix + "o_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights.get(f"{name}.bias")
        product = x @ self.weights[f"{name}.weight"].T
        return product if bias is None else product + bias

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * self.weights[name]

    def _head_norm(self, x: Tensor, name: str) -> Tensor:
        return self._norm(x, name) if name in self.weights else x

    def _rotate(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        frequencies = torch.tensor([self._frequency(i) for i in range(half)], dtype=torch.float64)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
        turned = torch.complex(x[:, :half].double(), x[:, half:].double()) * torch.polar(
            torch.ones_like(angles), angles
        )
        return torch.cat((turned.real, turned.imag), dim=-1).to(self.dtype)

    def _frequency(self, index: int) -> float:
        c = self.config
        frequency: float = math.pow(c["rope_theta"], -2.0 * index / c["head_dim"])
        scaling: dict[str, Any] = c.get("rope_scaling") or {}
        factor = float(scaling.get("factor", 1.0))
        if (scaling.get("rope_type") or scaling.get("type")) != "llama3":
            return frequency / factor
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        share: float = min(max((turns - low) / (high - low), 0.0), 1.0)
        return (1 - share) * frequency / factor + share * frequency


class Driver:
    """Runs a Compute step by step and collects what comes out."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        base: dict[str, Any] = {"total_blocks": 96, "max_num_seqs": 8, "max_batched_tokens": 128}
        chosen = TorchSettings(model_dir=str(folder), **(base | settings))
        self.compute = Compute(chosen, model_config.read(folder))
        self.output: dict[str, list[int]] = {}
        self.started: dict[str, Started] = {}
        self.ended: dict[str, Ended] = {}
        self.blocks: list[BlockEvent] = []

    def submit(self, request_id: str, tokens: Sequence[int], max_tokens: int, **fields: Any) -> None:
        request = EngineRequest(
            request_id=request_id,
            tokens=tokens,
            domain_key=DOMAIN,
            sampling=fields.pop("sampling", GREEDY),
            stopping=Stopping(max_tokens=max_tokens, ignore_eos=True),
            **fields,
        )
        self._collect(self.compute.submit(request, 0.0))

    def step(self) -> None:
        self._collect(self.compute.step())
        self.compute.scheduler.check_integrity()

    def run(self) -> None:
        while self.compute.has_work:
            self.step()

    def _collect(self, step: StepOutput) -> None:
        self.started |= {event.request_id: event for event in step.started}
        self.ended |= {event.request_id: event for event in step.ended}
        self.blocks += step.blocks
        for delta in step.deltas:
            self.output.setdefault(delta.request_id, []).extend(unpack_tokens(delta.tokens))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "smollm2"])
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def folder(name: str, model_folder: ModelFolder) -> Path:
    return model_folder(name)


@pytest.fixture(scope="module")
def reference(name: str, folder: Path) -> Reference:
    return Reference(folder, torch.float32 if name == "smollm2" else torch.float64)


def prompt(reference: Reference, seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(17, reference.config["vocab_size"]), k=length)


def assert_greedy(reference: Reference, prompt_tokens: Sequence[int], output: Sequence[int], length: int) -> None:
    """Each output token is the reference's choice after all tokens before it, which is what full recomputation gives."""
    assert len(output) == length
    with torch.inference_mode():
        logits = reference.logits([*prompt_tokens, *output])
    chosen = logits[len(prompt_tokens) - 1 : -1].argmax(dim=-1).tolist()
    assert list(output) == chosen


@pytest.mark.parametrize(
    "kind", ["llama-tied", "llama3-rope", "linear-rope", "llama-bias", "qwen2", "qwen3", "qwen3-bias"]
)
def test_every_supported_shape_computes_what_the_reference_does(kind: str, model_folder: ModelFolder) -> None:
    reference = Reference(model_folder(kind), torch.float64)
    driver = Driver(model_folder(kind))
    tokens = prompt(reference, 1, 150)
    driver.submit("a", tokens, 30, sampling=Sampling(temperature=0.0, logprobs=5))
    driver.run()
    assert_greedy(reference, tokens, driver.output["a"], 30)


def test_batching_with_others_changes_nothing(reference: Reference, folder: Path) -> None:
    driver = Driver(folder, max_num_seqs=4)
    prompts = {f"{i}": prompt(reference, i, length) for i, length in enumerate((3, 50, 17, 16, 33, 1))}
    for i, (request_id, tokens) in enumerate(prompts.items()):
        driver.submit(request_id, tokens, reference.output_length)
        for _ in range(i):
            driver.step()
    driver.run()
    for request_id, tokens in prompts.items():
        assert_greedy(reference, tokens, driver.output[request_id], reference.output_length)


def test_a_prefill_in_chunks_beside_decoding_requests_changes_nothing(reference: Reference, folder: Path) -> None:
    driver = Driver(folder, max_batched_tokens=11)
    prompts = {f"{i}": prompt(reference, 10 + i, length) for i, length in enumerate((90, 5, 47))}
    for request_id, tokens in prompts.items():
        driver.submit(request_id, tokens, reference.output_length // 2)
    driver.run()
    for request_id, tokens in prompts.items():
        assert_greedy(reference, tokens, driver.output[request_id], reference.output_length // 2)


def test_a_reused_prefix_changes_nothing(reference: Reference, folder: Path) -> None:
    driver = Driver(folder)
    first = prompt(reference, 20, 45)
    driver.submit("first", first, 24)
    driver.run()
    second = first + driver.output["first"] + prompt(reference, 21, 10)
    driver.submit("second", second, reference.output_length)
    driver.submit("branch", second[:40] + prompt(reference, 22, 20), reference.output_length)
    driver.run()
    assert driver.started["second"].cached_tokens == 64
    assert driver.started["branch"].cached_tokens == 32
    assert_greedy(reference, second, driver.output["second"], reference.output_length)
    assert_greedy(reference, second[:40] + prompt(reference, 22, 20), driver.output["branch"], reference.output_length)


def test_a_prefix_imported_from_another_engine_changes_nothing(reference: Reference, folder: Path) -> None:
    source, target = Driver(folder), Driver(folder)
    tokens = prompt(reference, 30, 70)
    source.submit("a", tokens, 1)
    source.run()
    target.submit("other", prompt(reference, 31, 20), 5)  # so that the blocks lie elsewhere
    target.run()
    keys = chain_keys(DOMAIN, pack_tokens(tokens), SIZE)
    packed = [pack_tokens(tokens[i * SIZE : (i + 1) * SIZE]) for i in range(4)]
    data = [memoryview(bytearray(source.compute.info.block_bytes)) for _ in keys]
    assert source.compute.export_blocks(keys, data) == [True] * 4
    assert target.compute.import_blocks(ROOT, keys, packed, data)[0] == 4
    target.compute.scheduler.check_integrity()
    target.submit("a", tokens, reference.output_length)
    target.run()
    assert target.started["a"].cached_tokens == 64
    assert_greedy(reference, tokens, target.output["a"], reference.output_length)


def test_preemption_and_resumption_change_nothing(reference: Reference, folder: Path) -> None:
    driver, length = Driver(folder, total_blocks=9), reference.output_length + 6
    prompts = {f"{i}": prompt(reference, 40 + i, 30 + 7 * i) for i in range(4)}
    for request_id, tokens in prompts.items():
        driver.submit(request_id, tokens, length)
    driver.run()
    assert driver.compute.scheduler.preemptions > 0
    for request_id, tokens in prompts.items():
        assert_greedy(reference, tokens, driver.output[request_id], length)


def test_a_request_that_moved_to_another_engine_changes_nothing(reference: Reference, folder: Path) -> None:
    source, target = Driver(folder), Driver(folder)
    tokens = prompt(reference, 50, 40)
    source.submit("a", tokens, reference.output_length)
    while len(source.output.get("a", ())) < 9:
        source.step()
    target.submit("a", tokens + source.output["a"], reference.output_length, resumed=9)
    target.run()
    assert_greedy(reference, tokens, source.output["a"][:9] + target.output["a"], reference.output_length)


def test_attention_padded_over_the_batch_changes_nothing(reference: Reference, folder: Path) -> None:
    """What GPUs use, run here on the CPU."""
    driver = Driver(folder)
    driver.compute.model._padded = True
    prompts = {f"{i}": prompt(reference, 60 + i, 5 + 20 * i) for i in range(4)}
    for request_id, tokens in prompts.items():
        driver.submit(request_id, tokens, reference.output_length // 2)
    driver.run()
    for request_id, tokens in prompts.items():
        assert_greedy(reference, tokens, driver.output[request_id], reference.output_length // 2)


def test_seeded_draws_depend_neither_on_the_batch_nor_on_the_worker(reference: Reference, folder: Path) -> None:
    sampling = Sampling(temperature=0.9, top_p=0.95, seed=1234)
    tokens = prompt(reference, 70, 21)
    alone, busy, moved = Driver(folder), Driver(folder), Driver(folder)
    alone.submit("a", tokens, reference.output_length, sampling=sampling)
    alone.run()
    for i in range(3):
        busy.submit(
            f"{i}",
            prompt(reference, 71 + i, 30),
            reference.output_length,
            sampling=msgspec.structs.replace(sampling, seed=i),
        )
    busy.submit("a", tokens, reference.output_length, sampling=sampling)
    busy.run()
    moved.submit("a", tokens + alone.output["a"][:10], reference.output_length, sampling=sampling, resumed=10)
    moved.run()
    assert busy.output["a"] == alone.output["a"]
    assert moved.output["a"] == alone.output["a"][10:]


def test_bfloat16_runs_and_stays_close_to_float32(folder: Path, reference: Reference) -> None:
    driver = Driver(folder, dtype="bfloat16")
    tokens = prompt(reference, 80, 40)
    driver.submit("a", tokens, 2, sampling=Sampling(temperature=0.0, logprobs=0))
    driver.run()
    with torch.inference_mode():
        probabilities = reference.logits(tokens)[-1].softmax(dim=-1)
    # the choice may differ where two tokens are close; it is a likely one all the same
    assert probabilities[driver.output["a"][0]] > 0.3 * probabilities.max()
