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
    (code,) = [file for file in compiled.default_folder().glob("flash-*.o") if compiled._fingerprint() in file.name]
    done: list[int] = []

    def compile_again() -> bytes:
        done.append(len(done))
        return code.read_bytes()

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
