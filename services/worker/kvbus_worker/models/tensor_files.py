"""Writing safetensors files from numpy arrays, bfloat16 (which numpy does not have) included.

Format: u64 length of the header, the header (JSON: name -> dtype, shape, data_offsets), then the tensors' bytes, all little-endian
(https://github.com/huggingface/safetensors#format). Written here because the package's own writer knows neither bfloat16 from numpy
nor one call that all its supported versions share.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvbus_worker.models.dtypes import StoredDtype

_NAMES = {"float32": "F32", "bfloat16": "BF16"}
_ALIGNMENT = 8


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of the floats, rounded to nearest even. Values must be finite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def write(path: Path, tensors: Iterable[tuple[str, NDArray[np.float32]]], dtype: StoredDtype) -> None:
    """Write all tensors in the given order, stored as ``dtype``."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    pieces: list[NDArray[np.uint16] | NDArray[np.float32]] = []
    offset = 0
    for name, values in tensors:
        piece = to_bfloat16(values) if dtype == "bfloat16" else np.ascontiguousarray(values, dtype="<f4")
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(values.shape),
            "data_offsets": [offset, offset + piece.nbytes],
        }
        pieces.append(piece)
        offset += piece.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for piece in pieces:
            file.write(piece.astype(piece.dtype.newbyteorder("<"), copy=False).data)
