"""Known faults planted into a copy of a program, to show that gates can fail. Works on the bytes of stored tensors.

Knows safetensors folders, ONNX models with external data and GGUF files, so a fault reaches the runtime as a real one
would: through its files. Leaves out who judges (release.py).
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strop import gguf_file
from strop.artifact import Artifact, Manifest, hash_file, hash_json, list_files, read_manifest, write_manifest
from strop.errors import UserError
from strop.model import FLOATS
from strop.safetensors_file import Stored, locate
from strop.spec import ModelSpec

ONNX, GGUF = "*.onnx", "*.gguf"
NOISE = 0.5
"""Standard deviation of the log of the factors on the final norm's weights."""
SCALE_SUFFIXES = (".weight_scale", ".scales")
"""Of tensors that hold one scale per group, a row per output."""
Slots = Mapping[str, Stored]
"""Tensor name -> where its bytes lie."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong in compression tools.

    Attributes:
        name: For people.
        plant: Changes the tensors of a folder in place.
    """

    name: str
    plant: Callable[[Slots, ModelSpec], None]


def plant(fault: Fault, program: Artifact, out: Path) -> Artifact:
    """A copy of a program with a fault in it.

    Args:
        fault: What to do to it.
        program: Not changed.
        out: A folder that does not exist yet.

    Raises:
        UserError: Its files are neither safetensors, nor ONNX with external data, nor GGUF.
    """
    shutil.copytree(program.path, out)
    for path in (out, *out.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    manifest = read_manifest(out)
    if manifest.spec is None:
        raise UserError(f"{program.path}: holds no table of the model, no fault can be planted")
    fault.plant(_slots(out), ModelSpec.from_json(manifest.spec))
    files = {str(p.relative_to(out)): {"sha256": hash_file(p), "size_bytes": p.stat().st_size} for p in list_files(out)}
    key = hash_json([program.key, fault.name])
    changed: Manifest = dataclasses.replace(manifest, key=key, files=files)
    write_manifest(out, changed)
    return Artifact(out, program.format, key)


def noisy_logits(slots: Slots, spec: ModelSpec) -> None:
    """Random factors on the last norm: every logit is off a little."""
    slot = slots[f"{spec.final_norm.name}.weight"]
    values = _read_floats(slot)
    factors = np.exp(NOISE * np.random.default_rng(0).standard_normal(values.shape))
    _write_floats(slot, (values * factors).astype(np.float32))


def swapped_layers(slots: Slots, spec: ModelSpec) -> None:
    """Two layers in each other's place, as an off-by-one in a loop over names does it."""
    last = len(spec.layers) - 1
    one, other = (_prefix(spec, i) for i in ((1, last - 1) if last > 2 else (0, last)))
    for name in [x for x in slots if x.startswith(one)]:
        first, second = slots[name], slots.get(name.replace(one, other))
        if second is None or first.shape != second.shape:
            raise UserError(f"self-test: {other} has nothing of the shape of {name}, layers cannot be swapped")
        ours, theirs = first.read(), second.read()
        _write(first, theirs)
        _write(second, ours)


def shifted_scales(slots: Slots, spec: ModelSpec) -> None:
    """A wrong stride: scales of one layer belong to the group before, or to the row before where a row has only one.

    In a layer without scales the rows of one weight are shifted.
    """
    prefix = _prefix(spec, len(spec.layers) // 2)
    chosen = [x for x in slots if x.startswith(prefix) and x.endswith(SCALE_SUFFIXES)]
    if not chosen:
        linear = spec.layers[len(spec.layers) // 2].linears["down"]
        chosen = [f"{linear.name}.weight"]
    for name in chosen:
        slot = slots[name]
        values = np.frombuffer(slot.read(), dtype=np.uint8).reshape(*slot.shape, -1)
        shifted = np.roll(values, 1, axis=len(slot.shape) - 1) if name.endswith(SCALE_SUFFIXES) else values
        if np.array_equal(shifted, values):  # one scale a row, however often it is repeated
            shifted = np.roll(values, 1, axis=0)
        _write(slot, shifted.tobytes())


FAULTS = (
    Fault("noise on the logits", noisy_logits),
    Fault("two layers swapped", swapped_layers),
    Fault("scales of one layer shifted by a group", shifted_scales),
)


def _prefix(spec: ModelSpec, layer: int) -> str:
    """How the names of a layer's tensors begin: `model.layers.3.`."""
    return spec.layers[layer].input_norm.name.rsplit(".", 1)[0] + "."


def _slots(folder: Path) -> Slots:
    models, files = sorted(folder.glob(ONNX)), sorted(folder.glob(GGUF))
    if files:
        return _gguf_slots(files[0])
    if not models:
        return locate(folder)
    import onnx_ir

    found = {}
    for model in models:
        for name, value in onnx_ir.load(model).graph.initializers.items():
            tensor = value.const_value
            if isinstance(tensor, onnx_ir.ExternalTensor):
                dtype = {"FLOAT": "F32", "FLOAT16": "F16", "BFLOAT16": "BF16"}.get(tensor.dtype.name, tensor.dtype.name)
                shape = tensor.shape.numpy()
                found[name] = Stored(dtype, shape, Path(tensor.path), tensor.offset or 0, tensor.length or 0)
    if not found:
        raise UserError(f"{folder}: no tensor that a fault could be planted in")
    return found


def _gguf_slots(path: Path) -> Slots:
    """Under the hub's names; matrices of blocks are rows of bytes."""
    from gguf import GGMLQuantizationType

    file = gguf_file.read_gguf(path)
    found = {}
    for name, stored in gguf_file.tensor_names(file).items():
        tensor = file.tensors[stored]
        kind = GGMLQuantizationType(tensor.type).name
        shape = tensor.shape if kind in FLOATS else (tensor.shape[0], tensor.size_bytes // tensor.shape[0])
        found[name] = Stored(kind, shape, path, tensor.offset, tensor.size_bytes)
    return found


def _read_floats(slot: Stored) -> NDArray[np.float32]:
    content = slot.read()
    if slot.dtype == "BF16":
        return (np.frombuffer(content, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(slot.shape)
    return (
        np.frombuffer(content, np.dtype({"F32": "f4", "F16": "f2"}[slot.dtype])).astype(np.float32).reshape(slot.shape)
    )


def _write_floats(slot: Stored, values: NDArray[np.float32]) -> None:
    if slot.dtype == "BF16":
        _write(slot, (values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    else:
        _write(slot, values.astype({"F32": "f4", "F16": "f2"}[slot.dtype]).tobytes())


def _write(slot: Stored, content: bytes) -> None:
    assert len(content) == slot.size_bytes
    with slot.file.open("r+b") as file:
        file.seek(slot.offset)
        file.write(content)
