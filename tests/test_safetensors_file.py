"""Safetensors files: what is written the library reads, what is damaged gives one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from strop.errors import UserError
from strop.model import tensor_bytes
from strop.safetensors_file import INDEX, WEIGHTS, Piece, locate, write_tensors

TENSORS = {
    "b.weight": torch.arange(21, dtype=torch.float32).reshape(3, 7),
    "a.weight_shape": torch.tensor([3, 7]),
    "c.scale": torch.tensor([[0.5], [-2.0]], dtype=torch.bfloat16),
    "a.packed": torch.tensor([[-1, 5]], dtype=torch.int32),
}
KINDS = {torch.float32: "F32", torch.int64: "I64", torch.bfloat16: "BF16", torch.int32: "I32"}


def pieces() -> dict[str, Piece]:
    def piece(tensor: torch.Tensor) -> Piece:
        kind = KINDS[tensor.dtype]
        return Piece(kind, tuple(tensor.shape), lambda: tensor_bytes(tensor, kind))

    return {name: piece(tensor) for name, tensor in TENSORS.items()}


@pytest.mark.parametrize("shard_bytes", [10**6, 30, 1])
def test_the_library_reads_what_is_written(shard_bytes: int, tmp_path: Path) -> None:
    write_tensors(tmp_path, pieces(), shard_bytes)
    found = {}
    for file in tmp_path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118 (not a mapping)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize(("shard_bytes", "files"), [(10**6, 1), (84 + 4, 2), (1, 4)])
def test_shards_stay_below_the_limit_unless_one_tensor_alone_is_larger(
    shard_bytes: int, files: int, tmp_path: Path
) -> None:
    write_tensors(tmp_path, pieces(), shard_bytes)
    sizes = [
        sum(x.size_bytes for x in locate(tmp_path).values() if x.file == f) for f in tmp_path.glob("*.safetensors")
    ]
    assert len(sizes) == files
    assert all(size <= max(shard_bytes, 84) for size in sizes)
    assert (tmp_path / INDEX).is_file() == (files > 1)


def test_headers_and_places_are_read_back(tmp_path: Path) -> None:
    write_tensors(tmp_path, pieces(), 30)
    stored = locate(tmp_path)
    assert list(stored) == sorted(TENSORS)
    assert {k: (x.dtype, x.shape, x.read()) for k, x in stored.items()} == {
        k: (x.dtype, x.shape, bytes(x.read())) for k, x in pieces().items()
    }


def test_the_order_of_pieces_does_not_change_a_byte(tmp_path: Path) -> None:
    for name, given in (("one", pieces()), ("two", dict(reversed(pieces().items())))):
        (tmp_path / name).mkdir()
        write_tensors(tmp_path / name, given)
    assert (tmp_path / "one" / WEIGHTS).read_bytes() == (tmp_path / "two" / WEIGHTS).read_bytes()


def rewrite(path: Path, change: Callable[[dict[str, dict[str, object]]], object]) -> None:
    """Change the JSON header of a safetensors file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def damage_file(how: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        path = folder / WEIGHTS
        content = path.read_bytes()
        if how == "cut in the values":
            path.write_bytes(content[:-5])
        elif how == "cut in the header":
            path.write_bytes(content[:40])
        elif how == "cut in the length":
            path.write_bytes(content[:3])
        elif how == "foreign":
            path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
        elif how == "no JSON":
            path.write_bytes(content[:8] + b"x" + content[9:])
        elif how == "wrong shape":
            rewrite(path, lambda header: header["b.weight"].update(shape=[4, 7]))
        elif how == "unknown dtype":
            rewrite(path, lambda header: header["b.weight"].update(dtype="F12"))
        elif how == "no offsets":
            rewrite(path, lambda header: header["b.weight"].pop("data_offsets"))

    return damage


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut in the values", "truncated, its tensors end at byte"),
        ("cut in the header", "truncated, its header takes"),
        ("cut in the length", "not a safetensors file"),
        ("foreign", "not a safetensors file"),
        ("no JSON", "damaged"),
        ("wrong shape", "do not match its shape"),
        ("unknown dtype", "damaged"),
        ("no offsets", "damaged"),
    ],
)
def test_damaged_files_give_one_line(how: str, message: str, tmp_path: Path) -> None:
    write_tensors(tmp_path, pieces())
    damage_file(how)(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        locate(tmp_path)
    assert "\n" not in str(caught.value)
    assert WEIGHTS in str(caught.value)


def index_that_names(folder: Path, file: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["b.weight"] = file
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: index_that_names(f, "model-00009-of-00009.safetensors"), "which is missing"),
        (lambda f: index_that_names(f, "../model.safetensors"), "must name a file of this folder"),
        (lambda f: (f / INDEX).write_text("[]"), "must name a file of this folder"),
        (lambda f: (f / INDEX).write_text("{"), "not JSON"),
        (lambda f: next(f.glob("*-00001-*")).unlink(), "which is missing"),
        (lambda f: [x.unlink() for x in f.iterdir()], "has no weights"),
        (lambda f: [x.rename(f / "pytorch_model.bin") for x in f.iterdir()], "only pickle files"),
    ],
)  # fmt: skip
def test_incomplete_folders_give_one_line(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    write_tensors(tmp_path, pieces(), 30)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        locate(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tensor_that_only_the_index_knows_is_missed(tmp_path: Path) -> None:
    write_tensors(tmp_path, pieces(), 30)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["d.weight"] = index["weight_map"]["b.weight"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"d\.weight, which no shard holds"):
        locate(tmp_path)
