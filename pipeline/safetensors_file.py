"""Safetensors files of a model folder: headers read and checked, tensors written one at a time. Torch-free.

Written by hand rather than with the safetensors library, which wants all tensors in memory at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.errors import UserError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 2 * 10**9
"""Largest safetensors file, unless one tensor alone is larger."""
LARGEST_HEADER = 100 * 10**6
"""What the safetensors format allows a header to take."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
"""safetensors dtype -> bytes of one value."""


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies in a safetensors file.

    Attributes:
        dtype: safetensors dtype, for example `F32`.
        file: The shard.
        offset: Of its first byte in the shard.
        size_bytes: Of its values.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    size_bytes: int

    def read(self, start: int = 0, size: int | None = None) -> bytes:
        """Its values as stored, or `size` bytes of them from `start` on."""
        rest = self.size_bytes - start
        with self.file.open("rb") as file:
            file.seek(self.offset + start)
            return file.read(rest if size is None else min(size, rest))


@dataclass(frozen=True)
class Piece:
    """A tensor about to be written; its values are made or read when their turn comes.

    Attributes:
        dtype: safetensors dtype.
        read: Gives the values, little-endian and row by row.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], bytes | memoryview]

    @property
    def size_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


# Reading.


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        UserError: It is missing or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{path.parent}: not a model folder, {path.name} is missing") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: damaged, not JSON ({error})") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, sorted by name.

    Raises:
        UserError: There are none, only pickle files, or a shard that the index names is missing.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        return sorted({folder / name for name in _weight_map(folder).values()})
    pickles = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern))
    if pickles:
        raise UserError(f"{folder}: has only pickle files ({pickles[0]}), which can run code; allowed: {WEIGHTS}")
    raise UserError(f"{folder}: has no weights; allowed: {WEIGHTS}, or shards with {INDEX}")


def _weight_map(folder: Path) -> dict[str, str]:
    index = read_json(folder / INDEX)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(x, str) and Path(x).name == x for x in names.values()):
        raise UserError(f"{folder / INDEX}: damaged, weight_map must name a file of this folder for each tensor")
    for name in sorted(set(names.values())):
        if not (folder / name).is_file():
            raise UserError(f"{folder / INDEX}: names {name}, which is missing")
    return names


def locate(folder: Path) -> dict[str, Stored]:
    """Tensor name -> where it lies, for every tensor of a model folder, sorted by name.

    Raises:
        UserError: As `weight_files`, or a file is truncated or damaged.
    """
    files = weight_files(folder)
    found = {name: stored for file in files for name, stored in _read_header(file).items()}
    if files != [folder / WEIGHTS]:
        missing = sorted(set(_weight_map(folder)) - set(found))
        if missing:
            raise UserError(f"{folder / INDEX}: names tensor {missing[0]}, which no shard holds")
    return dict(sorted(found.items()))


def _read_header(path: Path) -> dict[str, Stored]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > LARGEST_HEADER:
            raise UserError(f"{path}: not a safetensors file")
        text = file.read(length)
    if len(text) < length:
        raise UserError(f"{path}: truncated, its header takes {length} bytes, the file has {size}")
    start = 8 + length
    try:
        header = json.loads(text)
        entries = {
            k: (v["dtype"], tuple(v["shape"]), *v["data_offsets"]) for k, v in header.items() if k != "__metadata__"
        }
        found = {
            name: Stored(dtype, shape, path, start + first, last - first)
            for name, (dtype, shape, first, last) in entries.items()
        }
        is_sound = all(x.size_bytes == math.prod(x.shape) * ITEM_BYTES[x.dtype] for x in found.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged, its safetensors header cannot be read") from error
    if not is_sound:
        raise UserError(f"{path}: damaged, a tensor's bytes do not match its shape")
    end = max((x.offset + x.size_bytes for x in found.values()), default=start)
    if end > size:
        raise UserError(f"{path}: truncated, its tensors end at byte {end}, the file has {size}")
    return found


# Writing.


def write_tensors(out: Path, pieces: Mapping[str, Piece], shard_bytes: int = SHARD_BYTES) -> None:
    """Write safetensors files: one, or where that would be too large numbered shards and their index.

    Args:
        out: Where.
        pieces: Tensor name -> tensor.
        shard_bytes: Largest file, headers apart.
    """
    shards: list[dict[str, Piece]] = [{}]
    for name, piece in sorted(pieces.items()):
        if shards[-1] and sum(x.size_bytes for x in shards[-1].values()) + piece.size_bytes > shard_bytes:
            shards.append({})
        shards[-1][name] = piece
    if len(shards) == 1:
        _write_file(out / WEIGHTS, shards[0])
        return
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        _write_file(out / file, shard)
    index = {
        "metadata": {"total_size": sum(x.size_bytes for x in pieces.values())},
        "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
    }
    write_json(out / INDEX, index)


def _write_file(path: Path, pieces: Mapping[str, Piece]) -> None:
    # Wide values first, as the safetensors library does: every tensor is then aligned for views of its dtype.
    order = sorted(pieces, key=lambda name: (-ITEM_BYTES[pieces[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        piece = pieces[name]
        start, end = end, end + piece.size_bytes
        header[name] = {"dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(pieces[name].read())


def write_json(path: Path, value: Any) -> None:
    """Write JSON with sorted keys: equal values give equal bytes."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
