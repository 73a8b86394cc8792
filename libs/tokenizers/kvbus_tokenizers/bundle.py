"""Model bundle: everything but the weights that serving a model's text needs, in one deterministic tar named by its SHA-256.

Equal files give equal bytes and so the same name on every machine: members are sorted by name, and carry no time, owner or mode
of their own. Unpacking takes plain files with the known names only and stays within the limits below, whatever the tar says.
"""

import hashlib
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvbus_tokenizers.errors import BundleInvalid

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"
CONFIG = "config.json"

BUNDLE_FILES = (CHAT_TEMPLATE, CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG)
MAX_FILE_BYTES = 64 << 20
MAX_BUNDLE_BYTES = 96 << 20


@dataclass(frozen=True, slots=True)
class ModelBundle:
    """The files of a bundle by name. Only `TOKENIZER` is always there."""

    files: Mapping[str, bytes]

    def __post_init__(self) -> None:
        unknown = sorted(set(self.files) - set(BUNDLE_FILES))
        if unknown:
            raise BundleInvalid(f"a bundle holds no file named {unknown[0]!r}")
        if TOKENIZER not in self.files:
            raise BundleInvalid(f"a bundle without {TOKENIZER}")
        for name, data in self.files.items():
            if len(data) > MAX_FILE_BYTES:
                raise BundleInvalid(f"{name} has {len(data)} bytes, more than {MAX_FILE_BYTES}")
        object.__setattr__(self, "files", MappingProxyType(dict(self.files)))

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelBundle":
        """The bundle of a model directory in the Hugging Face layout. Raise BundleInvalid; OSError when it cannot be read."""
        files: dict[str, bytes] = {}
        for name in BUNDLE_FILES:
            path = directory / name
            if not path.is_file():
                continue
            size = path.stat().st_size
            if size > MAX_FILE_BYTES:
                raise BundleInvalid(f"{name} has {size} bytes, more than {MAX_FILE_BYTES}")
            files[name] = path.read_bytes()
        return cls(files)


def pack_bundle(bundle: ModelBundle) -> bytes:
    """The tar of a bundle: the same bytes for the same files, always. Raise BundleInvalid when it grows too large."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in sorted(bundle.files):
            member = tarfile.TarInfo(name)
            member.size = len(bundle.files[name])
            member.mode = 0o644
            archive.addfile(member, io.BytesIO(bundle.files[name]))
    data = buffer.getvalue()
    if len(data) > MAX_BUNDLE_BYTES:
        raise BundleInvalid(f"the bundle has {len(data)} bytes, more than {MAX_BUNDLE_BYTES}")
    return data


def bundle_name(data: bytes) -> str:
    """Name of a packed bundle: its SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def unpack_bundle(data: bytes, *, name: str | None = None) -> ModelBundle:
    """Read a packed bundle; ``name`` (when given) must be its SHA-256. Nothing is written to disk. Raise BundleInvalid."""
    if len(data) > MAX_BUNDLE_BYTES:
        raise BundleInvalid(f"the bundle has {len(data)} bytes, more than {MAX_BUNDLE_BYTES}")
    if name is not None and bundle_name(data) != name:
        raise BundleInvalid(f"the bundle's SHA-256 is {bundle_name(data)}, not {name}")
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            while (member := archive.next()) is not None:
                name_in_tar = _checked_name(member, files)
                files[name_in_tar] = _content(archive, member)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise BundleInvalid(f"no readable tar: {error}") from error
    return ModelBundle(files)


def _checked_name(member: tarfile.TarInfo, files: Mapping[str, bytes]) -> str:
    if not member.isreg() or member.issparse():
        raise BundleInvalid(f"{member.name!r} is no plain file")
    if member.name not in BUNDLE_FILES:
        raise BundleInvalid(f"a bundle holds no file named {member.name!r}")
    if member.name in files:
        raise BundleInvalid(f"{member.name!r} is there twice")
    if member.size > MAX_FILE_BYTES:
        raise BundleInvalid(f"{member.name} has {member.size} bytes, more than {MAX_FILE_BYTES}")
    return member.name


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    source = archive.extractfile(member)
    data = source.read() if source is not None else b""
    if len(data) != member.size:
        raise BundleInvalid(f"{member.name} is cut off")
    return data
