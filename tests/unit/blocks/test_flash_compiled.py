import errno
from pathlib import Path

import pytest

from kvbus_blocks.flash import compiled
from kvbus_blocks.flash.index import FlashIndex
from kvbus_blocks.index import Owner
from kvbus_testkit.flash import kernels

A = Owner("a", "g1")


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each compilation takes what is compiled already; the list grows with their number."""
    kernels()
    code = compiled._kept(compiled.default_folder() / f"flash-{compiled._fingerprint()}.o")
    assert code is not None
    done: list[int] = []

    def compile_again() -> bytes:
        done.append(len(done))
        return code

    monkeypatch.setattr(compiled, "_compile", compile_again)
    return done


def works(loaded: compiled.Kernels) -> bool:
    index = FlashIndex(loaded, max_blocks=100)
    index.store(A, None, [1, 2])
    return index.match([1, 2, 3]) == {A: 2}


def test_what_is_compiled_is_kept(compilations: list[int], tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there" / "yet"
    assert works(compiled.load(folder))
    assert works(compiled.load(folder))
    assert len(compilations) == 1


def test_a_folder_that_cannot_be_written_costs_a_compilation_and_nothing_else(
    compilations: list[int], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert works(compiled.load(tmp_path / "file" / "below"))
    assert works(compiled.load(None))
    assert len(compilations) == 2


@pytest.mark.parametrize("left", [0, 10, 1000])
def test_code_that_was_cut_is_compiled_again(compilations: list[int], tmp_path: Path, left: int) -> None:
    compiled.load(tmp_path)
    (file,) = tmp_path.glob("*.o")
    whole = file.read_bytes()
    file.write_bytes(whole[:left])
    assert works(compiled.load(tmp_path))
    assert len(compilations) == 2
    assert file.read_bytes() == whole


def test_a_disk_that_is_full_costs_one_compilation_and_leaves_nothing(
    compilations: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert works(compiled.load(tmp_path))
    assert len(compilations) == 1
    assert [file.suffix for file in tmp_path.iterdir()] == [".lock"]


def test_a_compiler_that_fails_is_reported_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.sys, "executable", "/bin/false")  # type: ignore[attr-defined]
    with pytest.raises(compiled.CannotCompile, match="exit status 1"):
        compiled.load(None)
    monkeypatch.setattr(compiled.sys, "executable", "/not/there")  # type: ignore[attr-defined]
    with pytest.raises(compiled.CannotCompile, match="not/there"):
        compiled.load(None)


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.delenv("KVBUS_CACHE_DIR", raising=False)
    assert compiled.default_folder() == Path("/caches/kvbus/compiled")
    monkeypatch.setenv("KVBUS_CACHE_DIR", "/own")
    assert compiled.default_folder() == Path("/own/compiled")
