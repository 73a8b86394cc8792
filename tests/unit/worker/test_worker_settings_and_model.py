import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec
import pytest

from kvbus_runtime.settings import parse_settings
from kvbus_tokenizers import byte_level_bundle
from kvbus_worker.adapters import engines
from kvbus_worker.adapters.engines import create_engine
from kvbus_worker.adapters.model_folder import load_model_folder, weights_fingerprint
from kvbus_worker.engines.base import Engine, EngineError
from kvbus_worker.engines.config import ENTRY_POINT_GROUP, EngineConfig
from kvbus_worker.engines.mock import MockEngine
from kvbus_worker.settings import WorkerSettings


def _settings(*argv: str, env: dict[str, str] | None = None) -> WorkerSettings:
    return parse_settings(WorkerSettings, service="worker", description="", argv=argv, env=env or {})


def _folder(path: Path, weights: bytes = b"w" * 40) -> Path:
    path.mkdir()
    for name, data in byte_level_bundle().files.items():
        (path / name).write_bytes(data)
    header = json.dumps({"a": {"dtype": "F32", "shape": [10], "data_offsets": [0, 40]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weights)
    return path


def test_flags_and_variables_reach_the_settings() -> None:
    settings = _settings("--engine", "mock", "--mock-speedup", "inf", env={"KVBUS_WORKER_KV_BLOCKS": "77"})
    assert (settings.engine, settings.mock_speedup, settings.kv_blocks) == ("mock", float("inf"), 77)
    assert settings.model_name == "mock"
    assert _settings("--model", "/models/tiny/").model_name == "tiny"
    assert _settings("--model", "/models/tiny", "--served-model-name", "org/Tiny.1").model_name == "org/Tiny.1"


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])  # noqa: S104
def test_who_listens_everywhere_says_where_others_find_it(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _settings("--engine", "mock", f"--transfer-host={host}")
    assert "transfer_advertise is needed" in capsys.readouterr().err
    assert (
        _settings("--engine", "mock", f"--transfer-host={host}", "--transfer-advertise", "host-1").transfer_host == host
    )
    assert _settings("--engine", "mock", f"--transfer-host={host}", "--no-transfer").transfer_host == host


@pytest.mark.parametrize("prefix", ["--", "--dyn-"])
def test_parsers_are_chosen_by_the_flags_that_other_servers_have(prefix: str) -> None:
    mock = ("--engine", "mock")
    flags = (f"{prefix}reasoning-parser", "nemotron_deci", f"{prefix}tool-call-parser", "qwen3_coder")
    settings = _settings(*mock, *flags)
    assert (settings.tool_call_parser, settings.reasoning_parser) == ("qwen3_coder", "nemotron_deci")
    assert _settings(*mock, f"{prefix}tool-call-parser", "MiniMax-M2").tool_call_parser == "MiniMax-M2"
    assert _settings(*mock, f"{prefix}tool-call-parser=none").tool_call_parser == "none"
    assert (_settings(*mock).tool_call_parser, _settings(*mock).reasoning_parser) == ("auto", "auto")


@pytest.mark.parametrize(
    ("flag", "name", "hint"),
    [
        ("--tool-call-parser", "qwen3_codr", "did you mean qwen3_coder"),
        ("--dyn-reasoning-parser", "deepseek-r1x", "did you mean deepseek_r1"),
        ("--reasoning-parser", "hermes", "there are "),
        ("--tool-call-parser", "", "there are "),
    ],
)
def test_an_unknown_parser_is_a_bad_setting_that_names_others(
    flag: str, name: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        _settings("--engine", "mock", flag, name)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert hint in error
    assert f"{flag.removeprefix('--').removeprefix('dyn-').replace('-', '_')}: there is no parser {name!r}" in error


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("--engine", "mock", "--block-size", "0"),
        ("--engine", "mock", "--mock-speedup", "0"),
        ("--engine", "mock", "--mock-speedup", "nan"),
        ("--engine", "mock", "--frontend-grace-s", "-1"),
        ("--model", "x", "--script", "y"),
        ("--engine", "mock", "--role", "cook"),
    ],
)
def test_bad_settings_end_with_status_2(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        _settings(*argv)
    assert caught.value.code == 2
    assert "error" in capsys.readouterr().err


def test_a_model_folder_gives_bundle_sizes_and_end_tokens(tmp_path: Path) -> None:
    model = load_model_folder(_folder(tmp_path / "m"))
    assert (model.vocab_size, model.context_length, model.eos_token_ids) == (259, 32_768, (258, 256))
    assert model.bundle == byte_level_bundle()


def test_the_fingerprint_is_of_the_content_and_not_of_the_place(tmp_path: Path) -> None:
    first, copy = load_model_folder(_folder(tmp_path / "m")), load_model_folder(_folder(tmp_path / "copy"))
    other = load_model_folder(_folder(tmp_path / "other", weights=b"w" * 39 + b"v"))
    assert first.fingerprint == copy.fingerprint
    assert first.fingerprint != other.fingerprint
    assert first.fingerprint != weights_fingerprint(None, first.bundle)


def test_a_folder_that_is_no_model_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError):
        load_model_folder(tmp_path / "missing")
    (folder := _folder(tmp_path / "m")).joinpath("model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(EngineError, match="safetensors"):
        load_model_folder(folder)


def test_the_mock_is_made_with_the_settings_and_the_models_tokenizer() -> None:
    settings = _settings("--engine", "mock", "--kv-blocks", "100", "--max-num-seqs", "3", "--block-size", "8")
    engine = create_engine(settings, load_model_folder(None))
    info = engine.info
    assert (info.total_blocks, info.max_num_seqs, info.block_size, info.context_length) == (100, 3, 8, 800)


def test_an_unknown_engine_names_those_there_are() -> None:
    settings = msgspec.structs.replace(_settings("--engine", "mock"), engine="steam")
    with pytest.raises(EngineError, match="mock, torch"):
        create_engine(settings, load_model_folder(None))


def test_an_engine_of_a_third_party_is_made_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("mine", f"{__name__}:_engine_of_a_third_party", ENTRY_POINT_GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: _engine_of_a_third_party)
    monkeypatch.setattr(engines, "entry_points", lambda group: [point] if group == ENTRY_POINT_GROUP else [])
    settings = _settings("--engine", "mine", "--kv-blocks", "7")
    made = create_engine(settings, load_model_folder(None))
    assert isinstance(made, MockEngine)
    assert made.info.total_blocks == 7


def _engine_of_a_third_party(config: EngineConfig) -> Engine:
    return create_engine(_settings("--engine", "mock", "--kv-blocks", str(config.kv_blocks)), load_model_folder(None))


def test_the_torch_engine_without_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("kvbus_worker.engines.torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(EngineError, match="extra torch") as refused:
        create_engine(_settings("--engine", "torch", "--model", "anywhere"), load_model_folder(None))
    assert refused.value.reply.param == "engine"


def test_a_worker_without_the_torch_engine_does_not_import_torch() -> None:
    code = (
        "import sys; import kvbus_worker.cli as c; from kvbus_worker.settings import WorkerSettings;"
        "from kvbus_worker.adapters.engines import create_engine;"
        "from kvbus_worker.adapters.model_folder import load_model_folder;"
        "create_engine(WorkerSettings(engine='mock'), load_model_folder(None));"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_taints_are_names_between_commas_each_once() -> None:
    assert WorkerSettings(engine="mock", taints=" rack-1,h200 ,,h200").taint_names == ("h200", "rack-1")
    assert WorkerSettings(engine="mock").taint_names == ()
