"""Model bundles: deterministic, bounded, and safe to unpack whatever the bytes are."""

import io
import tarfile
from pathlib import Path

import pytest

from kvbus_tokenizers import BundleInvalid, ModelBundle, bundle_name, byte_level_bundle, pack_bundle, unpack_bundle
from kvbus_tokenizers import bundle as bundle_module


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def test_packing_twice_gives_the_same_bytes_whatever_the_order_of_the_files() -> None:
    bundle = byte_level_bundle()
    turned = ModelBundle(dict(reversed(list(bundle.files.items()))))
    assert pack_bundle(bundle) == pack_bundle(turned)


def test_a_packed_bundle_unpacks_to_the_same_files() -> None:
    data = pack_bundle(byte_level_bundle())
    assert unpack_bundle(data, name=bundle_name(data)) == byte_level_bundle()


def test_a_directory_gives_the_known_files_only(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert dict(ModelBundle.from_directory(tmp_path).files) == {"tokenizer.json": b"{}"}


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleInvalid, match=r"without tokenizer\.json"):
        ModelBundle.from_directory(tmp_path)


def test_another_name_than_the_hash_is_refused() -> None:
    with pytest.raises(BundleInvalid, match="SHA-256"):
        unpack_bundle(pack_bundle(byte_level_bundle()), name="0" * 64)


@pytest.mark.parametrize(
    "name", ["../tokenizer.json", "/etc/passwd", "a/tokenizer.json", "./tokenizer.json", "evil.py"]
)
def test_a_member_with_any_other_name_is_refused(name: str) -> None:
    data = tar_of((tarfile.TarInfo("tokenizer.json"), b"{}"), (tarfile.TarInfo(name), b"x"))
    with pytest.raises(BundleInvalid, match="holds no file named"):
        unpack_bundle(data)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_a_member_that_is_no_plain_file_is_refused(kind: bytes) -> None:
    member = tarfile.TarInfo("tokenizer.json")
    member.type = kind
    member.linkname = "/etc/passwd"
    with pytest.raises(BundleInvalid, match="no plain file"):
        unpack_bundle(tar_of((member, b"")))


def test_a_member_that_is_there_twice_is_refused() -> None:
    data = tar_of((tarfile.TarInfo("tokenizer.json"), b"{}"), (tarfile.TarInfo("tokenizer.json"), b"[]"))
    with pytest.raises(BundleInvalid, match="twice"):
        unpack_bundle(data)


def test_a_file_over_the_limit_is_refused_packed_and_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    data = tar_of((tarfile.TarInfo("tokenizer.json"), b"x" * 101))
    monkeypatch.setattr(bundle_module, "MAX_FILE_BYTES", 100)
    with pytest.raises(BundleInvalid, match="more than 100"):
        unpack_bundle(data)
    with pytest.raises(BundleInvalid, match="more than 100"):
        ModelBundle({"tokenizer.json": b"x" * 101})
    assert ModelBundle({"tokenizer.json": b"x" * 100})


def test_a_bundle_over_the_limit_is_refused_packed_and_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pack_bundle(byte_level_bundle())
    monkeypatch.setattr(bundle_module, "MAX_BUNDLE_BYTES", len(data) - 1)
    with pytest.raises(BundleInvalid, match="more than"):
        unpack_bundle(data)
    with pytest.raises(BundleInvalid, match="more than"):
        pack_bundle(byte_level_bundle())


@pytest.mark.parametrize("cut", [1, 100, 511, 600, 3000])
def test_a_cut_off_bundle_is_refused(cut: int) -> None:
    with pytest.raises(BundleInvalid):
        unpack_bundle(pack_bundle(byte_level_bundle())[:cut])


@pytest.mark.parametrize("data", [b"", b"\x00" * 10240, b"not a tar" * 100])
def test_bytes_that_are_no_bundle_are_refused(data: bytes) -> None:
    with pytest.raises(BundleInvalid):
        unpack_bundle(data)
