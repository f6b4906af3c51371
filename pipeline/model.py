"""Checkpoint folders: tensor headers, weights read one at a time, checkpoints written as one stream.

Leaves out where models come from (sources.py). Torch is imported where a tensor's values are needed, so `strop check`
can read headers without it.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from strop.artifact import MANIFEST, read_manifest
from strop.errors import UserError
from strop.families import build_spec, expected_shapes
from strop.spec import DType, Linear, ModelSpec, Quantization

if TYPE_CHECKING:
    from torch import Tensor

    from strop.layers import Decoder

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 2 * 10**9
"""Largest safetensors file, unless one tensor alone is larger."""
LARGEST_HEADER = 100 * 10**6
"""What the safetensors format allows a header to take."""
COMPANIONS = (
    "tokenizer*.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "COPYING*",
)
"""Files that go wherever a model goes. Never code, never weights."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""A model folder holds at least one of these."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
"""safetensors dtype -> bytes of one value."""
FLOATS: Mapping[str, DType] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
STORED_AS: Mapping[DType, str] = {dtype: name for name, dtype in FLOATS.items()}
TORCH_NAMES: Mapping[str, str] = {**FLOATS, "F64": "float64", "I64": "int64", "I32": "int32"}


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

    def read(self) -> bytes:
        """Its values, as stored."""
        with self.file.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size_bytes)


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


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder.

    Raises:
        UserError: There is none, or it is not a JSON object.
    """
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise UserError(f"{folder / CONFIG}: must be a JSON object, found a {type(config).__name__}")
    return config


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


def read_headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensor name -> (safetensors dtype, shape), without reading any weight.

    Raises:
        UserError: As `locate`.
    """
    return {name: (x.dtype, x.shape) for name, x in locate(folder).items()}


def read_spec(folder: Path, dtype: DType | None = None) -> ModelSpec:
    """The table of a checkpoint folder: from strop.json where that has one, else from config.json and headers.

    Args:
        folder: A model folder or an artifact.
        dtype: What the unquantized tensors are taken to be; None: what most of them are.

    Raises:
        UserError: No such folder, or not a model that strop knows.
    """
    if (folder / MANIFEST).is_file() and (data := read_manifest(folder).spec) is not None:
        try:
            return ModelSpec.from_json(data if dtype is None else {**data, "dtype": dtype})
        except (KeyError, TypeError) as error:
            raise UserError(f"{folder / MANIFEST}: damaged, its spec cannot be read ({error})") from error
    config, headers = read_config(folder), read_headers(folder)
    try:
        return build_spec(config, headers, dtype or _main_dtype(folder, headers))
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error


def _main_dtype(folder: Path, headers: Mapping[str, tuple[str, tuple[int, ...]]]) -> DType:
    counts = dict.fromkeys(FLOATS, 0)
    for name, (dtype, shape) in headers.items():
        if dtype in counts and not name.endswith(".weight_scale"):
            counts[dtype] += math.prod(shape)
    most = max(counts, key=lambda x: counts[x])
    if counts[most] == 0:
        found = ", ".join(sorted({dtype for dtype, _ in headers.values()}))
        raise UserError(f"{folder}: its weights are {found or 'empty'}; allowed: {', '.join(FLOATS)}")
    return FLOATS[most]


class Weights:
    """The tensors of a checkpoint folder, mapped into memory and read one at a time.

    Attributes:
        folder: The checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        """Open a checkpoint.

        Raises:
            UserError: As `locate`.
        """
        self.folder = folder
        self._stored = locate(folder)
        self._files: dict[Path, Any] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.clear()
        self._stack.close()

    def names(self) -> list[str]:
        """Every tensor, sorted."""
        return list(self._stored)

    def load(self, name: str) -> Tensor:
        """One tensor as stored, on the CPU. It may share memory with the file: do not change it in place."""
        from safetensors import safe_open

        file = self._stored[name].file
        if file not in self._files:
            self._files[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        return cast("Tensor", self._files[file].get_tensor(name))


def load_linear(weights: Weights, linear: Linear) -> Tensor:
    """The dense weight of a linear, whatever its form in the checkpoint.

    Args:
        weights: The checkpoint.
        linear: As the checkpoint's table has it. A tied head without a tensor of its own is the embedding.

    Returns:
        W (out, in), float32.
    """
    if linear.quantization is not None:
        from strop.numerics import dequantize

        return dequantize(*load_packed(weights, linear))
    name = f"{linear.name}.weight"
    if name not in weights.names():
        name = f"{read_spec(weights.folder).embedding}.weight"
    weight = weights.load(name).float()
    return weight.T.contiguous() if linear.is_transposed else weight


def load_packed(weights: Weights, linear: Linear) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zero points of a quantized linear.

    Args:
        weights: The checkpoint.
        linear: A linear with a quantization.

    Returns:
        Codes (out, in) int8, scale (out, groups) float32, zero (out, groups) int8; zeros where it is symmetric.
    """
    import torch

    from strop.numerics import unpack

    q = _quantization(linear)
    rows, columns, groups = linear.out_features, linear.in_features, linear.num_groups()
    codes = unpack(weights.load(f"{linear.name}.weight_packed"), q.bits, (rows, columns))
    scale = weights.load(f"{linear.name}.weight_scale").float()
    if q.symmetric:
        return codes, scale, torch.zeros((rows, groups), dtype=torch.int8)
    zero = unpack(weights.load(f"{linear.name}.weight_zero_point"), q.bits, (rows, groups), axis=0)
    return codes, scale, zero.contiguous()


def _quantization(linear: Linear) -> Quantization:
    if linear.quantization is None:
        raise ValueError(f"{linear.name} is not quantized")
    return linear.quantization


# Writing.


def packed_tensors(linear: Linear, codes: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
    """A quantized linear as compressed-tensors stores it.

    Also for linears that transformers keeps transposed (gpt2's Conv1D): they are stored (out, in) all the same, which
    strop opens and transformers does not, having no packed form for them.

    Args:
        linear: With the quantization that the codes are of.
        codes: Q (out, in), int8.
        scale: s (out, groups), float32 holding bfloat16 values.
        zero: z (out, groups), int8; not stored where the format is symmetric.

    Returns:
        Tensor name -> tensor: `weight_packed` int32, `weight_scale` bfloat16, `weight_shape` int64, and where it is
        asymmetric `weight_zero_point` int32, packed along the rows.

    Raises:
        ValueError: A scale is not a bfloat16 value: the codes were computed with another one.
    """
    import torch

    from strop.numerics import pack

    q = _quantization(linear)
    rounded = scale.to(torch.bfloat16)
    if not torch.equal(rounded.float(), scale.float()):
        raise ValueError(f"{linear.name}: round scales with numerics.round_scales before codes are computed")
    tensors = {
        f"{linear.name}.weight_packed": pack(codes, q.bits),
        f"{linear.name}.weight_scale": rounded,
        f"{linear.name}.weight_shape": torch.tensor([linear.out_features, linear.in_features], dtype=torch.int64),
    }
    if not q.symmetric:
        tensors[f"{linear.name}.weight_zero_point"] = pack(zero, q.bits, axis=0)
    return tensors


def stored_tensors(spec: ModelSpec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensor name -> (safetensors dtype, shape) of a checkpoint that holds just what its table describes."""
    packed = {"weight_packed": "I32", "weight_zero_point": "I32", "weight_scale": "BF16", "weight_shape": "I64"}
    main = STORED_AS[spec.dtype]
    return {
        name: (packed.get(name.rsplit(".", 1)[1], main), shape) for name, shape in sorted(expected_shapes(spec).items())
    }


def save_checkpoint(out: Path, spec: ModelSpec, source: Path, changed: Iterable[tuple[str, Tensor | None]]) -> None:
    """Write a checkpoint folder that strop, transformers and vLLM open: the source's tensors but for the changed ones.

    transformers reads symmetric codes to the very same weights, asymmetric ones of one format rounded to bfloat16.
    One tensor is in memory at a time, and equal tensors give equal bytes. What the table does not describe is left
    out. Where the head is quantized and tied, the embedding becomes the dequantized head, so that runtimes that look
    tokens up in the codes and those that read the embedding compute the same.

    Args:
        out: An empty folder.
        spec: The table of the result; tensors are cast to its dtype.
        source: The checkpoint folder that the rest is taken from.
        changed: (name, tensor) in any order, a generator where they are large; None where a tensor goes away.

    Raises:
        UserError: The source is damaged, or holds scales that bfloat16 cannot hold.
        ValueError: The table describes a tensor that is neither changed nor in the source, or not one that changed.
    """
    expected = stored_tensors(spec)
    spool = out / ".changed"
    try:
        with spool.open("wb") as file:
            pieces = _spool(file, spool, expected, _with_tied_embedding(spec, changed))
        stored = locate(source)
        for name in expected.keys() - pieces.keys():
            if name not in stored:
                raise ValueError(f"{source}: no tensor {name}")
            pieces[name] = _recast(name, stored[name], *expected[name])
        write_tensors(out, pieces)
    finally:
        spool.unlink(missing_ok=True)
    write_config(out, spec, read_config(source))
    copy_companions(source, out)


def _with_tied_embedding(
    spec: ModelSpec, changed: Iterable[tuple[str, Tensor | None]]
) -> Iterator[tuple[str, Tensor | None]]:
    """`changed`, and after it the embedding that follows from a tied head's new codes."""
    from strop.numerics import dequantize, unpack

    head, kept = spec.head, dict[str, "Tensor"]()
    for name, tensor in changed:
        if spec.is_tied and head.quantization is not None and name.startswith(f"{head.name}.weight_"):
            kept[name.rsplit(".", 1)[1]] = tensor
        yield name, tensor
    if not kept:
        return
    q = _quantization(head)
    scale = kept["weight_scale"].float()
    codes = unpack(kept["weight_packed"], q.bits, (head.out_features, head.in_features))
    zero = scale.new_zeros(scale.shape)
    if not q.symmetric:
        zero = unpack(kept["weight_zero_point"], q.bits, (head.out_features, head.num_groups()), axis=0)
    yield f"{spec.embedding}.weight", dequantize(codes, scale, zero)


def _spool(
    file: IO[bytes],
    path: Path,
    expected: Mapping[str, tuple[str, tuple[int, ...]]],
    changed: Iterable[tuple[str, Tensor | None]],
) -> dict[str, Piece]:
    """Put changed tensors aside in a file as they come, because they are stored in another order."""
    pieces: dict[str, Piece] = {}
    for name, tensor in changed:
        if tensor is None:
            if name in expected:
                raise ValueError(f"{name} is removed, but the table describes it")
            continue
        if name not in expected or tuple(tensor.shape) != expected[name][1]:
            raise ValueError(f"{name} {list(tensor.shape)} is not what the table describes: {expected.get(name)}")
        dtype, shape = expected[name]
        content, offset = tensor_bytes(tensor, dtype), file.tell()
        file.write(content)
        pieces[name] = Piece(dtype, shape, Stored(dtype, shape, path, offset, len(content)).read)
    return pieces


def _recast(name: str, stored: Stored, dtype: str, shape: tuple[int, ...]) -> Piece:
    """A tensor of the source in another dtype."""
    if stored.shape != shape:
        raise UserError(f"{stored.file}: {name} has shape {list(stored.shape)}, expected {list(shape)}")
    if stored.dtype == dtype:
        return Piece(dtype, shape, stored.read)
    allowed = (*FLOATS, "F64") if dtype in FLOATS else ("I32", "I64")
    if stored.dtype not in allowed:
        raise UserError(f"{stored.file}: {name} is stored as {stored.dtype}; allowed: {', '.join(allowed)}")

    def read() -> memoryview:
        import torch

        values = torch.frombuffer(bytearray(stored.read()), dtype=getattr(torch, TORCH_NAMES[stored.dtype]))
        if name.endswith(".weight_scale") and not torch.equal(values.to(torch.bfloat16).to(values.dtype), values):
            raise UserError(f"{stored.file}: {name} holds scales that bfloat16, which strop keeps them in, cannot hold")
        return tensor_bytes(values, dtype)

    return Piece(dtype, shape, read)


def tensor_bytes(tensor: Tensor, dtype: str) -> memoryview:
    """The values of a tensor, cast to a safetensors dtype, row by row."""
    import torch

    values = tensor.detach().to("cpu", getattr(torch, TORCH_NAMES[dtype])).contiguous()
    return values.reshape(-1).view(torch.uint8).numpy().data


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


def write_config(out: Path, spec: ModelSpec, config: Mapping[str, Any]) -> None:
    """Write config.json: the given one with the dtype, ties and quantization that the table says, and no code.

    Each distinct quantization is one config group whose targets are full module names.
    """
    dropped = ("torch_dtype", "auto_map", "quantization_config", "compression_config")
    kept = {key: value for key, value in config.items() if key not in dropped}
    groups: dict[Quantization, list[str]] = {}
    for linear in spec.linears():
        if linear.quantization is not None:
            groups.setdefault(linear.quantization, []).append(linear.name)
    kept["dtype"] = spec.dtype
    kept["tie_word_embeddings"] = spec.is_tied and spec.head.quantization is None
    if groups:
        kept["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {f"group_{i}": _config_group(q, names) for i, (q, names) in enumerate(groups.items())},
            "ignore": [x.name for x in spec.linears() if x.quantization is None],
        }
        if [q.symmetric for q in groups] == [False]:
            # compressed-tensors 0.18 to 0.20 prepare packed zero points in the wrong shape, so transformers opens
            # asymmetric codes only by dequantizing at once. That rounds weights to bfloat16, the scales' dtype, and
            # takes the first group's format for every linear, so a mix with asymmetric groups stays closed to it.
            kept["quantization_config"]["dequantize"] = True
    write_json(out / CONFIG, kept)


def _config_group(q: Quantization, names: list[str]) -> dict[str, Any]:
    return {
        "targets": names,
        "format": "pack-quantized",
        "weights": {
            "num_bits": q.bits,
            "type": "int",
            "symmetric": q.symmetric,
            "strategy": "channel" if q.group_size is None else "group",
            "group_size": q.group_size,
            "dynamic": False,
        },
        "input_activations": None,
        "output_activations": None,
    }


def write_json(path: Path, value: Any) -> None:
    """Write JSON with sorted keys: equal values give equal bytes."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_companions(source: Path, out: Path) -> None:
    """Copy what belongs to a model besides weights and config: tokenizer, chat template, generation config, licence."""
    for path in companions(source):
        shutil.copyfile(path, out / path.name)


def companions(folder: Path) -> list[Path]:
    """The files that `copy_companions` copies, sorted."""
    return sorted({path for pattern in COMPANIONS for path in folder.glob(pattern) if path.is_file()})


# Opening.


def load_tokenizer(folder: Path) -> Any:
    """The transformers tokenizer of a model folder. Never code that came with it, never the network.

    Raises:
        UserError: The folder has none that transformers can open.
    """
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise UserError(f"{folder}: has no tokenizer; allowed: {', '.join(TOKENIZERS)}")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: its tokenizer cannot be opened: {str(error).splitlines()[0]}") from error
