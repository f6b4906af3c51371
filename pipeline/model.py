"""Checkpoint folders: the table, weights read one at a time, checkpoints written as one stream.

Leaves out where models come from (sources.py) and the files that hold tensors (safetensors_file.py). Torch is imported
where a tensor's values are needed, so `strop check` can read headers without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from strop.artifact import MANIFEST, read_manifest
from strop.errors import UserError
from strop.families import CACHE_KEY, FAMILIES, build_spec, cache_scheme, expected_shapes, opaque_spec
from strop.safetensors_file import Piece, Stored, locate, read_json, write_json, write_tensors
from strop.spec import BITSANDBYTES, CHOSEN, DType, Linear, ModelSpec, Quantization

if TYPE_CHECKING:
    from torch import Tensor

    from strop.layers import Decoder

Headers = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> (safetensors dtype, shape)."""
CONFIG = "config.json"
LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "COPYING*")
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
    *LICENCES,
)
"""Files that go wherever a model goes. Never code, never weights."""
PLAIN_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Names of transformers' class that takes tokenizer.json as it is."""
OTHER_TOKENIZERS = ("qwen2", "phi3")
"""Model types whose own class transformers takes all the same."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""A model folder holds at least one of these."""
FLOATS: Mapping[str, DType] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
STORED_AS: Mapping[DType, str] = {dtype: name for name, dtype in FLOATS.items()}
TORCH_NAMES: Mapping[str, str] = {
    **FLOATS, "F64": "float64", "I64": "int64", "I32": "int32", "I8": "int8", "U8": "uint8", "F8_E4M3": "float8_e4m3fn"
}  # fmt: skip
SCALES = (".weight_scale", ".input_scale", ".weight_global_scale", ".k_scale", ".v_scale")
"""How names of scales end: of weights, inputs, keys and values."""


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
    data = read_manifest(folder).spec if (folder / MANIFEST).is_file() else None
    if data is not None and data.get("opaque_bytes") is None:
        try:
            return ModelSpec.from_json(data if dtype is None else {**data, "dtype": dtype})
        except (KeyError, TypeError) as error:
            raise UserError(f"{folder / MANIFEST}: damaged, its spec cannot be read ({error})") from error
    config, headers = read_config(folder), read_headers(folder)
    try:
        return make_spec(config, headers, dtype or _main_dtype(headers))
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error


def make_spec(config: Mapping[str, Any], headers: Headers, dtype: DType) -> ModelSpec:
    """The table of a checkpoint whose unquantized tensors are of `dtype`, of a known family or not.

    Raises:
        UserError: As `families.build_spec` and `families.opaque_spec`.
    """
    if config.get("model_type") in FAMILIES:
        return build_spec(config, headers, dtype)
    return opaque_spec(config, _recast_headers(config, headers, dtype), dtype)


def _recast_headers(config: Mapping[str, Any], headers: Headers, dtype: DType) -> Headers:
    """The tensors of an unknown family in another dtype; nothing changes where some are quantized."""
    if "quantization_config" in config:
        return headers
    return {name: (STORED_AS[dtype] if kind in FLOATS else kind, shape) for name, (kind, shape) in headers.items()}


def _main_dtype(headers: Headers) -> DType:
    counts = dict.fromkeys(FLOATS, 0)
    for name, (dtype, shape) in headers.items():
        if dtype in counts and not name.endswith((*SCALES, ".absmax", ".quant_map", ".SCB")):
            counts[dtype] += math.prod(shape)
    most = max(counts, key=lambda x: counts[x])
    if counts[most] == 0:
        found = ", ".join(sorted({dtype for dtype, _ in headers.values()}))
        raise UserError(f"its weights are {found or 'empty'}; allowed: {', '.join(FLOATS)}")
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
    """Codes, scales and zero points of a quantized linear's weight.

    Args:
        weights: The checkpoint.
        linear: A linear with a quantization.

    Returns:
        Codes (out, in) of `numerics.code_dtype`, scale (out, groups) float32, zero (out, groups) int8; zeros where it
        is symmetric.
    """
    return _unpack(linear, lambda part: weights.load(f"{linear.name}.{part}"))


def _unpack(linear: Linear, load: Callable[[str], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """As `load_packed`, from a function that gives the stored parts by name."""
    import torch

    from strop.numerics import load_fixed, unpack

    q = _quantization(linear)
    if q.format != "int":
        return load_fixed(load, q, linear.out_features)
    rows, columns, groups = linear.out_features, linear.in_features, linear.num_groups()
    codes = unpack(load("weight_packed"), q.bits, (rows, columns)) if q.is_packed else load("weight")
    scale = load("weight_scale").float()
    if q.symmetric:
        return codes, scale, torch.zeros((rows, groups), dtype=torch.int8)
    zero = unpack(load("weight_zero_point"), q.bits, (rows, groups), axis=0)
    return codes, scale, zero.contiguous()


def _quantization(linear: Linear) -> Quantization:
    if linear.quantization is None:
        raise ValueError(f"{linear.name} is not quantized")
    return linear.quantization


# Writing.


def packed_tensors(
    linear: Linear,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    input_scale: Tensor | None = None,
    *,
    global_scale: Tensor | None = None,
) -> dict[str, Tensor]:
    """A quantized linear as compressed-tensors stores it.

    Also for linears that transformers keeps transposed (gpt2's Conv1D): they are stored (out, in) all the same, which
    strop opens and transformers does not, having no packed form for them.

    Args:
        linear: With the quantization that the codes are of.
        codes: Q (out, in), of `numerics.code_dtype`.
        scale: s (out, groups), float32 as `numerics.find_scales` rounds them: of integers, bfloat16 values.
        zero: z (out, groups), int8; not stored where the format is symmetric.
        input_scale: One value, float32 holding a bfloat16 value, where inputs are rounded by a static scale.
        global_scale: Of nvfp4, the `numerics.global_scale` of all linears that engines run as one; None: of this one.

    Returns:
        Tensor name -> tensor: `weight_packed` int32, `weight_scale` bfloat16, `weight_shape` int64, and where it is
        asymmetric `weight_zero_point` int32, packed along the rows. Where inputs are rounded: `weight` int8,
        `weight_scale`, and where that is static `input_scale` bfloat16 (1,). Of other formats as
        `numerics.store_fixed`.

    Raises:
        ValueError: A scale is not a bfloat16 value: the codes were computed with another one. Or the scale of inputs
            is missing.
    """
    import torch

    from strop.numerics import pack, store_fixed

    q = _quantization(linear)
    if not q.is_packed:
        if q.format == "int":
            parts = {"weight": codes, "weight_scale": _stored_scale(linear, scale)}
        else:
            parts = store_fixed(codes, scale, q, global_scale)
        if q.activations == "static":
            if input_scale is None:
                raise ValueError(f"{linear.name}: no scale for its inputs")
            parts["input_scale"] = _stored_scale(linear, input_scale.reshape(1))
        return {f"{linear.name}.{part}": tensor for part, tensor in parts.items()}
    tensors = {
        f"{linear.name}.weight_packed": pack(codes, q.bits),
        f"{linear.name}.weight_scale": _stored_scale(linear, scale),
        f"{linear.name}.weight_shape": torch.tensor([linear.out_features, linear.in_features], dtype=torch.int64),
    }
    if not q.symmetric:
        tensors[f"{linear.name}.weight_zero_point"] = pack(zero, q.bits, axis=0)
    return tensors


def _stored_scale(linear: Linear, scale: Tensor) -> Tensor:
    import torch

    rounded = scale.to(torch.bfloat16)
    if not torch.equal(rounded.float(), scale.float()):
        raise ValueError(f"{linear.name}: round scales with numerics.round_scales before codes are computed")
    return rounded


def stored_tensors(spec: ModelSpec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensor name -> (safetensors dtype, shape) of a checkpoint that holds just what its table describes."""
    main = STORED_AS[spec.dtype]
    parts = {f"{x.name}.{part}": kind for x in spec.linears() for part, (kind, _) in x.parts().items()}
    special = {**parts, **dict.fromkeys(spec.cache_scales(), "BF16")}
    return {name: (special.get(name) or main, shape) for name, shape in sorted(expected_shapes(spec).items())}


def save_checkpoint(out: Path, spec: ModelSpec, source: Path, changed: Iterable[tuple[str, Tensor | None]]) -> None:
    """Write a checkpoint folder that strop, transformers and vLLM open: the source's tensors but for the changed ones.

    transformers reads symmetric codes to the very same weights, asymmetric ones of one format rounded to bfloat16, and
    rounds inputs where the table says so.
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
    config, stored = read_config(source), locate(source)
    if spec.opaque_bytes is None:
        expected: Headers = stored_tensors(spec)
    else:
        expected = _recast_headers(config, {name: (x.dtype, x.shape) for name, x in stored.items()}, spec.dtype)
    spool = out / ".changed"
    try:
        with spool.open("wb") as file:
            pieces = _spool(file, spool, expected, _with_tied_embedding(spec, changed))
        for name in sorted(expected.keys() - pieces.keys()):
            if name not in stored:
                raise ValueError(f"{source}: no tensor {name}")
            pieces[name] = _recast(name, stored[name], *expected[name])
        write_tensors(out, pieces)
    finally:
        spool.unlink(missing_ok=True)
    write_config(out, spec, config)
    copy_companions(source, out)


def _with_tied_embedding(
    spec: ModelSpec, changed: Iterable[tuple[str, Tensor | None]]
) -> Iterator[tuple[str, Tensor | None]]:
    """`changed`, and after it the embedding that follows from a tied head's new codes."""
    from strop.numerics import dequantize

    head, kept = spec.head, dict[str, "Tensor"]()
    for name, tensor in changed:
        is_head = spec.is_tied and head.quantization is not None and name.startswith(f"{head.name}.weight")
        if is_head and tensor is not None:
            kept[name.rsplit(".", 1)[1]] = tensor
        yield name, tensor
    if kept:
        yield f"{spec.embedding}.weight", dequantize(*_unpack(head, kept.__getitem__))


def _spool(
    file: IO[bytes],
    path: Path,
    expected: Headers,
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
        if name.endswith(SCALES) and not torch.equal(values.to(torch.bfloat16).to(values.dtype), values):
            raise UserError(f"{stored.file}: {name} holds scales that bfloat16, which strop keeps them in, cannot hold")
        return tensor_bytes(values, dtype)

    return Piece(dtype, shape, read)


def tensor_bytes(tensor: Tensor, dtype: str) -> memoryview:
    """The values of a tensor, cast to a safetensors dtype, row by row."""
    import torch

    values = tensor.detach().to("cpu", getattr(torch, TORCH_NAMES[dtype])).contiguous()
    return values.reshape(-1).view(torch.uint8).numpy().data


def write_config(out: Path, spec: ModelSpec, config: Mapping[str, Any]) -> None:
    """Write config.json: the given one with the dtype, ties and quantization that the table says, and no code.

    Each distinct quantization is one config group whose targets are full module names, and a pattern for experts. Of an
    unknown family only the dtype is changed.
    """
    kept = {key: value for key, value in config.items() if key not in ("torch_dtype", "auto_map")} | {
        "dtype": spec.dtype
    }
    if spec.opaque_bytes is not None:
        write_json(out / CONFIG, kept)
        return
    replaced = ("quantization_config", "compression_config", CACHE_KEY)
    kept = {key: value for key, value in kept.items() if key not in replaced}
    groups: dict[Quantization, list[str]] = {}
    for linear in spec.linears():
        if linear.quantization is not None:
            groups.setdefault(linear.quantization, []).append(linear.name)
    theirs = next((q for q in groups if q.format in BITSANDBYTES), None)
    scheme = None if spec.kv_cache is None or theirs is not None else cache_scheme(spec.kv_cache)
    if spec.kv_cache is not None and scheme is None:
        kept[CACHE_KEY] = dataclasses.asdict(spec.kv_cache)
    kept["tie_word_embeddings"] = spec.is_tied and spec.head.quantization is None
    if theirs is not None:
        kept["quantization_config"] = _bitsandbytes(spec, theirs)
    elif groups or scheme:
        formats = sorted({stored_format(q) for q in groups}) or ["dense"]
        kept["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": formats[0] if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{i}": _config_group(q, _targets(spec, names)) for i, (q, names) in enumerate(groups.items())
            },
            "ignore": [x.name for x in spec.linears() if x.quantization is None],
            **({"kv_cache_scheme": scheme} if scheme else {}),
        }
        if len(groups) == 1 and not next(iter(groups)).symmetric:
            # compressed-tensors 0.18 to 0.20 prepare packed zero points in the wrong shape, so transformers opens
            # asymmetric codes only by dequantizing at once. That rounds weights to bfloat16, the scales' dtype, and
            # takes the first group's format for every linear, so a mix with asymmetric groups stays closed to it.
            kept["quantization_config"]["dequantize"] = True
        if len(groups) == 1 and "fp4" in next(iter(groups)).format and spec.dtype != "bfloat16":
            # It unpacks these formats to bfloat16, which holds them exactly, and leaves them so unless at once.
            kept["quantization_config"]["dequantize"] = True
    write_json(out / CONFIG, kept)


def _targets(spec: ModelSpec, names: list[str]) -> list[str]:
    """Of a config group: the names, but one pattern for experts where all of the model are among them.

    transformers 5 holds all experts of a layer in one tensor, so it finds no module of such a name: it warns of each,
    and takes the format of experts from the first group that has a pattern with "experts" in it.
    """
    experts = {x.name for layer in spec.layers for role, x in layer.linears.items() if role.startswith(CHOSEN)}
    if not experts or not experts <= set(names):
        return names
    block = next(x.moe.router.name for x in spec.layers if x.moe is not None).split(".")[-2]
    return [*(x for x in names if x not in experts), rf"re:.*\.{block}\.experts\.\d+\..*"]


def experts_note(spec: ModelSpec) -> str | None:
    """What to know of a model whose quantized experts transformers 5 does not open to what is stored, else None.

    Tried with transformers 5.24: it unpacks experts when it loads them, all by the format of the first group that names
    them and without zero points or global scales, and rounds no inputs.
    """
    forms = {x.quantization for layer in spec.layers for role, x in layer.linears.items() if role.startswith(CHOSEN)}
    if forms <= {None}:
        return None
    q = next(iter(forms))
    is_plain = q is not None and q.symmetric and q.activations is None and q.format in ("int", "fp8", "mxfp4")
    if len(forms) == 1 and is_plain:
        return None
    return (
        "transformers opens experts that are all stored alike, as symmetric integers, fp8 or mxfp4, without "
        "activations; others it refuses or opens to other weights: run them in eager"
    )


def stored_format(q: Quantization) -> str:
    """What compressed-tensors calls it. Engines that multiply integers take int8 weights as they are, not packed."""
    others = {"fp8": "float-quantized", "mxfp4": "mxfp4-pack-quantized", "nvfp4": "nvfp4-pack-quantized"}
    others |= dict.fromkeys(BITSANDBYTES, "bitsandbytes")
    return others.get(q.format) or ("pack-quantized" if q.is_packed else "int-quantized")


def _bitsandbytes(spec: ModelSpec, q: Quantization) -> dict[str, Any]:
    """What transformers' BitsAndBytesConfig says of a checkpoint whose linears are stored so, or as they are."""
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": q.bits == 4,
        "load_in_8bit": q.bits == 8,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": spec.dtype,
        "llm_int8_skip_modules": [x.name for x in spec.linears() if x.quantization is None],
    }


def _config_group(q: Quantization, names: list[str]) -> dict[str, Any]:
    kind = "int" if q.format == "int" else "float"
    inputs = None
    if q.activations is not None:
        is_dynamic = q.activations == "dynamic"
        strategy = "token" if is_dynamic else "tensor"
        inputs = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": is_dynamic}
    strategy = "tensor" if q.per_tensor else "channel" if q.group_size is None else "group"
    scales = {"mxfp4": {"scale_dtype": "torch.uint8"}, "nvfp4": {"scale_dtype": "torch.float8_e4m3fn"}}
    return {
        "targets": names,
        "format": stored_format(q),
        "weights": {
            "num_bits": q.bits,
            "type": kind,
            "symmetric": q.symmetric,
            "strategy": "tensor_group" if q.format == "nvfp4" else strategy,
            "group_size": q.group_size,
            "dynamic": False,
            **scales.get(q.format, {}),
        },
        "input_activations": inputs,
        "output_activations": None,
    }


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
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise UserError(f"{folder}: has no tokenizer; allowed: {', '.join(TOKENIZERS)}")
    try:
        if _has_plain_tokenizer(folder):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: its tokenizer cannot be opened: {str(error).splitlines()[0]}") from error


def _has_plain_tokenizer(folder: Path) -> bool:
    """Whether the tokenizer is what tokenizer.json says and nothing else: `AutoTokenizer` would give the same.

    `AutoTokenizer` loads torch and takes three seconds to be imported.
    """
    settings, file = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not settings.is_file() or not file.is_file() or not (folder / "config.json").is_file():
        return False
    content = read_json(settings)
    is_plain = content.get("tokenizer_class") in PLAIN_TOKENIZERS and "auto_map" not in content
    return is_plain and read_config(folder).get("model_type") not in OTHER_TOKENIZERS


def load_decoder(folder: Path, device: str = "cpu") -> Decoder:
    """A checkpoint as a `Decoder` in evaluation mode, quantized linears kept packed.

    Args:
        folder: A checkpoint that strop wrote, or any of a known family.
        device: `cpu` or `cuda`.

    Raises:
        UserError: As `read_spec`.
    """
    import torch

    from strop.layers import Decoder

    decoder = Decoder(read_spec(folder))
    with Weights(folder) as weights, torch.no_grad():
        for name, tensor in decoder.tensors().items():
            tensor.copy_(weights.load(name))
    return decoder.to(device).eval()
