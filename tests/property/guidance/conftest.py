"""A tiny model with random weights that follows guidance, step by step and without a thread."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from kvbus_tokenizers import Tokenizer
from kvbus_wire.frontend import Ended
from kvbus_wire.guidance import Guidance
from kvbus_wire.packing import unpack_tokens
from kvbus_wire.request import Sampling, Stopping
from kvbus_worker.engines.base import EngineRequest
from kvbus_worker.engines.torch import config as model_config
from kvbus_worker.engines.torch.compute import Compute
from kvbus_worker.engines.torch.grammars import Vocabulary, compile_grammar
from kvbus_worker.engines.torch.guide import Guide
from kvbus_worker.engines.torch.settings import TorchSettings
from kvbus_worker.models import tiny

Generate = Callable[[Guidance, int], tuple[str, Ended]]
Follows = Callable[[Guidance, str], bool]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def vocabulary(folder: Path) -> Vocabulary:
    config = model_config.read(folder)
    return Vocabulary(folder / "tokenizer.json", config.vocab_size, config.eos_token_ids)


@pytest.fixture(scope="session")
def follows(vocabulary: Vocabulary) -> Follows:
    """Whether a text is a whole output under guidance."""

    def run(guidance: Guidance, text: str) -> bool:
        guide = compile_grammar(guidance, vocabulary).deep_copy()
        tokens = vocabulary.tokenizer.tokenize_str(text, parse_special=True)
        return guide.consume_tokens(tokens) and guide.is_accepting()

    return run


@pytest.fixture(scope="session")
def generate(folder: Path, vocabulary: Vocabulary) -> Generate:
    """Text and end of an output under guidance, drawn with a seed. The model likes to come to an end."""
    config = model_config.read(folder)
    compute = Compute(TorchSettings(model_dir=str(folder), total_blocks=128), config)
    tokenizer = Tokenizer((folder / "tokenizer.json").read_bytes())
    bias = {tokenizer.encode(char)[0]: 8.0 for char in '"}]<'} | {
        tokenizer.encode(char)[0]: -8.0 for char in " \n\r\t\\0123456789,["
    }
    ends = dict.fromkeys((*config.eos_token_ids, tiny.SPECIAL.index("</tool_call>")), 8.0)

    domains = count()

    def run(guidance: Guidance, seed: int) -> tuple[str, Ended]:
        guide = Guide(compile_grammar(guidance, vocabulary).deep_copy(), vocabulary.eos_ids)
        request = EngineRequest(
            request_id="r",
            tokens=list(range(40, 60)),
            domain_key=next(domains).to_bytes(
                32, "little"
            ),  # nothing is reused, so that a seed gives the same every time
            sampling=Sampling(temperature=0.7, seed=seed, logit_bias=bias | ends),
            stopping=Stopping(max_tokens=400),
            guidance=guidance,
        )
        tokens: list[int] = []
        output = compute.submit(request, 0.0, guide)
        while not output.ended:
            output = compute.step()
            tokens += [token for delta in output.deltas for token in unpack_tokens(delta.tokens)]
        return tokenizer.decode(tokens, keep_special=True), output.ended[0]

    return run


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}
