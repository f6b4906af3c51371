"""The graph of standard operators against our decoder, in onnxruntime; its types; and the maths of its offsets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from references import assert_close, quantized, random_ids, tiny_folder, with_spec
from safetensors.torch import load_file, save_file

from strop.artifact import Artifact, Manifest, write_manifest
from strop.errors import UserError
from strop.export._onnx import layout
from strop.export.eager import Eager
from strop.export.onnx_runtime import OnnxRuntime
from strop.families import EXPERT_FAMILIES, FAMILIES
from strop.layers import round_inputs
from strop.model import Weights, read_spec, save_checkpoint
from strop.numerics import dequantize, find_scales, quantize
from strop.program import Program, Step, Tree, open_program, write_exact
from strop.spec import DType, Quantization
from strop.stage import Context, Stage

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from strop.export._onnx.standard import unsigned_scales, write_model  # noqa: E402  (needs onnx-ir)

KEY = "0" * 64
STANDARD = OnnxRuntime(operators="standard")
Export = Callable[..., Program]


@pytest.fixture
def export(tmp_path: Path) -> Export:
    """Runs an export stage on a checkpoint folder and opens the program."""

    def run(source: Path, stage: Stage) -> Program:
        out = tmp_path / f"{source.name}-{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        result = stage.run(Artifact(source, "checkpoint", KEY), out, Context(tmp_path, threads=1))
        write_manifest(out, Manifest("program", KEY, result["spec"].to_json(), asdict(result["traits"])))
        program: Program = stage.load(out, result["traits"])  # type: ignore[attr-defined]  # every export has it
        return program

    return run


def graph(source: Path, out: Path, dtype: DType) -> Any:
    """The model that is written for a checkpoint, as onnx sees it."""
    out.mkdir()
    with Weights(source) as weights:
        write_model(read_spec(source), weights, out, dtype=dtype, capacity=32)
    return onnx.load(out / layout.MODEL)


# What it computes.


@pytest.mark.parametrize("family", [x for x in FAMILIES if x not in EXPERT_FAMILIES])
def test_agrees_with_the_decoder_on_every_family(family: str, tmp_path: Path, export: Export) -> None:
    source = tiny_folder(tmp_path / "source", family)
    assert_close(export(source, STANDARD), export(source, Eager()))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_tree_step_agrees_with_the_decoder(family: str, tmp_path: Path, export: Export) -> None:
    source = tiny_folder(tmp_path / "source", family)
    tree = Tree((-1, 0, 0, 1, 2, -1, 5))
    found = []
    for session in (x.open(2, 40) for x in (export(source, STANDARD), export(source, Eager()))):
        session.step(random_ids(2, 7), counts=np.array([7, 3]))
        logits = [session.step(random_ids(2, 7, seed=1), tree=tree, logits="all").copy()]
        session.keep([[0, 2, 4], [5]])
        logits.append(session.step(random_ids(2, 3, seed=2), logits="all").copy())
        found.append(logits)
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


FORMS = [
    Quantization(bits, group, symmetric)
    for bits in (2, 3, 4, 8)
    for group, symmetric in ((16, True), (8, False), (None, True), (None, False))
]
FP8 = [Quantization(8, None, True, None, "fp8", per_tensor) for per_tensor in (False, True)]


@pytest.mark.parametrize("form", [*FORMS, *FP8], ids=str)
def test_codes_and_offsets_agree_with_the_dequantized_decoder(
    form: Quantization, tmp_path: Path, export: Export
) -> None:
    small = quantized(tiny_folder(tmp_path / "source", "llama"), tmp_path / "small", form)
    assert_close(export(small, STANDARD), export(small, Eager()), atol=5e-5)


@pytest.mark.parametrize("family", ["gpt2", "phi3", "qwen2"])
def test_codes_of_other_shapes_agree(family: str, tmp_path: Path, export: Export) -> None:
    small = quantized(tiny_folder(tmp_path / "source", family), tmp_path / "small", Quantization(4, 16, True))
    assert_close(export(small, STANDARD), export(small, Eager()), atol=5e-5)


@pytest.mark.parametrize("format", ["int", "fp8"])
def test_static_inputs_are_rounded_to_the_grid(format: Any, tmp_path: Path, export: Export) -> None:
    # One layer, and few inputs on the border between two codes, where float sums that differ in the last bit decide.
    source = tiny_folder(tmp_path / "source", "llama", num_hidden_layers=1)
    small = quantized(source, tmp_path / "small", Quantization(8, None, True, "static", format), head=False)
    program, eager = export(small, STANDARD), export(small, Eager())
    ours, theirs = (x.open(2, 64).step(random_ids(2, 40), logits="all").copy() for x in (program, eager))
    round_inputs(eager.decoder, rounds=False)  # type: ignore[attr-defined]  # a DecoderProgram
    plain = eager.open(2, 64).step(random_ids(2, 40), logits="all")
    assert (np.abs(ours - theirs).max(-1) < 2e-5).mean() > 0.8
    assert np.abs(ours - theirs).mean() < 0.1 * np.abs(plain - theirs).mean()


def test_a_program_that_rounds_inputs_has_an_exact_twin(tmp_path: Path, export: Export) -> None:
    source = tiny_folder(tmp_path / "source", "llama")
    small = quantized(source, tmp_path / "small", Quantization(8, None, True, "static"), head=False)
    program = export(small, STANDARD)
    assert program.traits.kernels == "standard operators, QuantizeLinear"
    (tmp_path / "exact").mkdir()
    exact = write_exact(Artifact(next(tmp_path.glob("*/model.onnx")).parent, "program", KEY), tmp_path / "exact")
    assert exact is not None
    eager = export(small, Eager())
    round_inputs(eager.decoder, rounds=False)  # type: ignore[attr-defined]  # a DecoderProgram
    assert_close(open_program(exact, 1), eager, atol=5e-5)
    (tmp_path / "again").mkdir()
    assert write_exact(exact, tmp_path / "again") is None


def test_layers_can_share_keys_and_values(tmp_path: Path, export: Export) -> None:
    source = tiny_folder(tmp_path / "source", "qwen3")
    spec = read_spec(source)
    linears = {role: x for role, x in spec.layers[2].linears.items() if role not in ("k", "v")}
    sharing = dataclasses.replace(spec.layers[2], linears=linears, kv_from_layer=0, k_norm=None)
    shared = dataclasses.replace(spec, layers=(*spec.layers[:2], sharing))
    folder = tmp_path / "shared"
    folder.mkdir()
    save_checkpoint(folder, shared, source, [])
    with_spec(folder, shared)
    assert_close(export(folder, STANDARD), export(folder, Eager()))


def test_a_long_residual_stream_survives_float16(tmp_path: Path) -> None:
    # Squares of 1e4 are beyond float16's largest number, 65504: norms have to be computed in float32.
    source = tiny_folder(tmp_path / "source", "llama", tie_word_embeddings=False)
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"].mul_(1e4 / tensors["model.embed_tokens.weight"].abs().max())
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    found = []
    for dtype in ("float32", "float16"):
        graph(source, tmp_path / dtype, dtype)
        session = onnxruntime.InferenceSession(tmp_path / dtype / layout.MODEL)
        found.append(session.run(["logits"], feeds(session, random_ids(1, 9)))[0])
    assert np.isfinite(found[1]).all()
    np.testing.assert_allclose(found[1], found[0], atol=0.05)


def feeds(session: Any, ids: Any) -> dict[str, Any]:
    """One row of tokens in a fresh cache, all logits."""
    width, types = ids.shape[1], {"tensor(float)": np.float32, "tensor(float16)": np.float16}
    seen = np.tri(width, 32, dtype=bool)[None, None]
    places = np.arange(width)[None]
    given = {"ids": ids, "positions": places, "lengths": np.zeros(1, np.int64), "logit_rows": places, "mask": seen}
    caches = {x.name: x for x in session.get_inputs() if x.name.startswith("past_")}
    return given | {k: np.zeros([1, *x.shape[1:]], types[x.type]) for k, x in caches.items()}


# What it is made of.


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_every_value_has_the_type_of_a_strongly_typed_network(family: str, dtype: DType, tmp_path: Path) -> None:
    small = quantized(tiny_folder(tmp_path / "source", family), tmp_path / "small", Quantization(4, 16, True))
    model = graph(small, tmp_path / dtype, dtype)
    onnx.checker.check_model(model, full_check=True)
    assert {(x.domain, x.version) for x in model.opset_import} == {("", 24)}
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    names = onnx.TensorProto.DataType
    types = {x.name: names.Name(x.data_type).lower() for x in model.graph.initializer}
    values = [*model.graph.value_info, *model.graph.input, *model.graph.output]
    types |= {x.name: names.Name(x.type.tensor_type.elem_type).lower() for x in values}
    allowed = {"MatMul": {dtype}, "Attention": {dtype}, "TensorScatter": {dtype}, "RotaryEmbedding": {dtype}}
    allowed |= {"RMSNormalization": {"float"}, "LayerNormalization": {"float"}, "Softmax": {"float"}}
    found: dict[str, set[str]] = {}
    for node in model.graph.node:
        floats = {types[x] for x in [*node.input, *node.output] if x and types[x] in ("float", "float16", "bfloat16")}
        if node.op_type != "Cast":
            assert len(floats) <= 1, f"{node.op_type} of {floats}"
        found.setdefault(node.op_type, set()).update(floats)
    plain = {"float32": "float"}.get(dtype, dtype)
    for operator in allowed.keys() & found.keys():
        assert found[operator] == {x if x == "float" else plain for x in allowed[operator]}, operator
    assert types["logits"] == "float"
    assert types["keys_0"] == plain


@pytest.mark.parametrize("form", [x for x in FORMS if x.bits in (3, 4, 8)], ids=str)
def test_engines_get_scales_above_zero_and_no_zero_points(form: Quantization, tmp_path: Path) -> None:
    small = quantized(tiny_folder(tmp_path / "source", "llama"), tmp_path / "small", form, head=False)
    model = graph(small, tmp_path / "graph", "float16")
    tensors = {x.name: x for x in model.graph.initializer}
    nodes = [x for x in model.graph.node if x.op_type == "DequantizeLinear"]
    assert len(nodes) == 7 * 3
    for node in nodes:
        codes, scales = (tensors[x] for x in node.input)
        assert codes.data_type == (onnx.TensorProto.INT8 if form.bits == 8 else onnx.TensorProto.INT4)
        assert (onnx.numpy_helper.to_array(scales) > 0).all()
        attributes = {x.name: x.i for x in node.attribute}
        if form.bits == 8 and form.group_size is None:
            assert (attributes, len(scales.dims)) == ({"axis": 1}, 1)
        else:
            assert attributes == {"axis": 0, "block_size": form.group_size or codes.dims[0]}


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_weights_are_equal_without_scales_below_zero(form: Quantization) -> None:
    weight = torch.randn(37, 48, generator=torch.Generator().manual_seed(0))
    scale, zero = find_scales(weight, form)
    codes = quantize(weight, scale, zero, form.bits)
    bits = 8 if form.bits == 8 else 4
    new_codes, new_scale, new_zero = unsigned_scales(codes, scale, zero, bits)
    assert (new_scale > 0).all()
    assert new_codes.min() >= -(2 ** (bits - 1))
    assert new_codes.max() <= 2 ** (bits - 1) - 1
    torch.testing.assert_close(
        dequantize(new_codes, new_scale, new_zero), dequantize(codes, scale, zero), rtol=0, atol=0
    )


def test_equal_checkpoints_give_equal_bytes(tmp_path: Path) -> None:
    small = quantized(tiny_folder(tmp_path / "source", "qwen2"), tmp_path / "small", Quantization(4, 16, False))
    for name in ("first", "second"):
        graph(small, tmp_path / name, "bfloat16")
    for name in (layout.MODEL, layout.DATA):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


@pytest.mark.parametrize(
    "form", [None, Quantization(3, 32, True), Quantization(4, 32, False), Quantization(8, 32, True)]
)
def test_plan_knows_the_bytes(form: Quantization | None, tmp_path: Path, export: Export) -> None:
    source = tiny_folder(tmp_path / "source", "llama", hidden_size=192, intermediate_size=320)
    folder = source if form is None else quantized(source, tmp_path / "small", form)
    export(folder, STANDARD)
    size = sum(x.stat().st_size for x in tmp_path.glob("*/model.onnx*"))
    plan = STANDARD.plan(read_spec(folder), 0)
    assert plan.size_bytes == pytest.approx(size, rel=0.05)
    assert any("3-bit codes of 22 linears as 4-bit" in x for x in plan.notes) == (form is not None and form.bits == 3)
    assert any("looks tokens up in a float32 copy" in x for x in plan.notes) == (form is not None)


def test_plan_refuses_inputs_rounded_by_token(tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path / "source", "llama"))
    name = spec.layers[0].linears["q"].name
    with pytest.raises(UserError, match=r"no scale for each token.*activations: dynamic; allowed: static or null"):
        STANDARD.plan(spec.quantize({name: Quantization(8, None, True, "dynamic")}), 0)


# What it attends to.


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("mask", [None, Tree((-1, 0, 0, 1)).mask()], ids=["causal", "tree"])
def test_masks_say_what_each_token_sees(mask: Any, window: int | None) -> None:
    lengths, depths = np.array([5, 0, 2]), np.arange(4) if mask is None else np.array([0, 1, 1, 2])
    rows = np.zeros((3, 1), np.int64)
    step = Step(np.zeros((3, 4), np.int64), np.full(3, 4), lengths, lengths[:, None] + depths, mask, rows)
    seen = layout.visible(step, 12, window)
    assert seen.shape == (3, 1, 4, 12)
    for row, token, place in np.ndindex(3, 4, 12):
        new = place - lengths[row]
        sees = new < 0 or (new < 4 and (new <= token if mask is None else mask[token, new]))
        position = place if new < 0 else lengths[row] + depths[min(new, 3)]
        near = window is None or position > lengths[row] + depths[token] - window
        assert seen[row, 0, token, place] == (sees and near), (row, token, place)
