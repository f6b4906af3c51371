"""The ONNX program against our decoder in PyTorch: same logits for every family, packing, step shape and tree."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from references import assert_close, kl, quantized, random_ids, tiny_folder, with_spec
from safetensors.torch import load_file, save_file

from strop.artifact import Artifact, Manifest, write_manifest
from strop.errors import UserError
from strop.export.eager import Eager
from strop.export.onnx_runtime import OnnxRuntime
from strop.families import EXPERT_FAMILIES, FAMILIES
from strop.layers import round_inputs
from strop.model import Weights, load_packed, read_spec, save_checkpoint
from strop.program import Program, Tree, open_program, write_exact
from strop.spec import Quantization
from strop.stage import Context, Stage

pytest.importorskip("onnxruntime")

KEY = "0" * 64
Floats = NDArray[np.float32]
Export = Callable[..., Program]


@pytest.fixture
def export(tmp_path: Path) -> Export:
    """Runs an export stage on a checkpoint folder and opens the program."""

    def run(source: Path, stage: Stage) -> Program:
        out = tmp_path / f"{source.name}-{stage.__class__.__name__}-{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        result = stage.run(Artifact(source, "checkpoint", KEY), out, Context(tmp_path, threads=1))
        write_manifest(out, Manifest("program", KEY, result["spec"].to_json(), asdict(result["traits"])))
        program: Program = stage.load(out, result["traits"])  # type: ignore[attr-defined]  # every export has it
        return program

    return run


@pytest.mark.parametrize("family", [x for x in FAMILIES if x not in EXPERT_FAMILIES])
def test_agrees_with_the_decoder_on_every_family(family: str, tmp_path: Path, export: Export) -> None:
    source = tiny_folder(tmp_path / "source", family)
    assert_close(export(source, OnnxRuntime()), export(source, Eager()))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2"])
def test_a_tree_step_agrees_with_the_decoder(family: str, tmp_path: Path, export: Export) -> None:
    source = tiny_folder(tmp_path / "source", family)
    sessions = [x.open(2, 40) for x in (export(source, OnnxRuntime(trees=True)), export(source, Eager()))]
    tree = Tree((-1, 0, 0, 1, 2, -1, 5))
    found: list[list[Floats]] = []
    for session in sessions:
        session.step(random_ids(2, 7), counts=np.array([7, 3]))
        logits = [session.step(random_ids(2, 7, seed=1), tree=tree, logits="all").copy()]
        session.keep([[0, 2, 4], [5]])
        logits.append(session.step(random_ids(2, 3, seed=2), logits="all").copy())
        found.append(logits)
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_a_program_with_tree_inputs_agrees_on_plain_steps(tmp_path: Path, export: Export) -> None:
    source = tiny_folder(tmp_path / "source", "gemma3_text")
    assert_close(export(source, OnnxRuntime(trees=True)), export(source, Eager()))


PACKINGS = [
    Quantization(bits, group, symmetric)
    for bits in (2, 3, 4, 8)
    for group, symmetric in ((16, True), (16, False), (None, True), (None, False))
]


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_packed_linears_agree_with_the_dequantized_decoder(
    packing: Quantization, tmp_path: Path, export: Export
) -> None:
    source = tiny_folder(tmp_path / "source", "llama")
    small = quantized(source, tmp_path / "small", packing)
    assert_close(export(small, OnnxRuntime(accuracy_level=1)), export(small, Eager()), atol=5e-5)


@pytest.mark.parametrize("family", ["gpt2", "phi3", "qwen2", "gemma2"])
def test_packed_linears_of_other_shapes_agree(family: str, tmp_path: Path, export: Export) -> None:
    source = tiny_folder(tmp_path / "source", family)
    small = quantized(source, tmp_path / "small", Quantization(4, 16, False), head=family == "gemma2")
    assert_close(export(small, OnnxRuntime(accuracy_level=1)), export(small, Eager()), atol=5e-5)


def test_linears_that_differ_in_packing_are_kept_apart(tmp_path: Path, export: Export) -> None:
    source = tiny_folder(tmp_path / "source", "llama")
    names = [x.name for x in read_spec(source).linears()]
    choices = {
        name: Quantization(8 if "v_proj" in name or name == "lm_head" else 4, 16, "k_proj" not in name)
        for name in names
        if "gate_proj" not in name
    }
    small = quantized(source, tmp_path / "small", choices)
    assert_close(export(small, OnnxRuntime(accuracy_level=1)), export(small, Eager()), atol=5e-5)


def test_int8_activations_stay_near(tmp_path: Path, export: Export) -> None:
    source = tiny_folder(tmp_path / "source", "llama")
    small = quantized(source, tmp_path / "small", Quantization(4, 16, True))
    ours, theirs = (export(small, x).open(1, 64) for x in (OnnxRuntime(), Eager()))
    ids = random_ids(1, 40)
    assert 0 < kl(theirs.step(ids, logits="all"), ours.step(ids, logits="all")) < 0.01


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_stored_codes_are_the_checkpoints(bits: int, tmp_path: Path, export: Export) -> None:
    import onnx

    source = tiny_folder(tmp_path / "source", "llama")
    small = quantized(source, tmp_path / "small", Quantization(bits, 16, False))
    export(small, OnnxRuntime())
    model = onnx.load(next(tmp_path.glob("*/model.onnx")))
    tensors = {x.name: onnx.numpy_helper.to_array(x) for x in model.graph.initializer}
    with Weights(small) as weights:
        for linear in read_spec(small).linears():
            codes, scale, zero = (x.float().numpy() for x in load_packed(weights, linear))
            name = next(x.removesuffix(".codes") for x in tensors if linear.name in x and x.endswith(".codes"))
            start = 0
            for part in name.split("+"):
                if part == linear.name:
                    break
                start += next(x.out_features for x in read_spec(small).linears() if x.name == part)
            rows = slice(start, start + linear.out_features)
            offset = 2 ** (bits - 1)
            np.testing.assert_array_equal(
                unpack(tensors[f"{name}.codes"][rows], bits, linear.in_features), codes + offset
            )
            np.testing.assert_array_equal(tensors[f"{name}.scales"][rows], scale)
            np.testing.assert_array_equal(unpack(tensors[f"{name}.zeros"][rows], bits, scale.shape[1]), zero + offset)


def unpack(packed: NDArray[np.uint8], bits: int, columns: int) -> NDArray[np.int64]:
    """Unsigned codes, one bit after another, lowest first."""
    stream = np.unpackbits(packed.reshape(len(packed), -1), axis=1, bitorder="little")
    stream = stream[:, : columns * bits].reshape(len(packed), columns, bits).astype(np.int64)
    codes: NDArray[np.int64] = (stream << np.arange(bits)).sum(-1)
    return codes


W8A8 = {name: Quantization(8, None, True, name) for name in ("dynamic", "static")}  # type: ignore[arg-type]  # literals


@pytest.mark.parametrize("activations", W8A8)
@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "qwen2", "gemma2"])
def test_without_rounding_integer_linears_agree_with_the_decoder(
    family: str, activations: str, tmp_path: Path, export: Export
) -> None:
    source = tiny_folder(tmp_path / "source", family)
    small = quantized(source, tmp_path / "small", W8A8[activations], head=not read_spec(source).is_tied)
    program = export(small, OnnxRuntime())
    assert program.traits.kernels == "MatMulIntegerToFloat"
    (tmp_path / "exact").mkdir()
    exact = write_exact(Artifact(next(tmp_path.glob("*/model.onnx")).parent, "program", KEY), tmp_path / "exact")
    assert exact is not None
    eager = export(small, Eager())
    round_inputs(eager.decoder, rounds=False)  # type: ignore[attr-defined]  # a DecoderProgram
    twin = open_program(exact, 1)
    assert twin.traits.kernels == "MatMul float32"
    assert write_exact(exact, tmp_path / "exact") is None
    assert_close(twin, eager, atol=5e-5)


@pytest.mark.parametrize("activations", W8A8)
def test_integer_linears_compute_what_the_decoder_computes(activations: str, tmp_path: Path, export: Export) -> None:
    # One layer, and no input on the border between two codes: float sums that differ in the last bit change nothing.
    source = tiny_folder(tmp_path / "source", "llama", num_hidden_layers=1)
    small = quantized(source, tmp_path / "small", W8A8[activations], head=False)
    program, eager = export(small, OnnxRuntime()), export(small, Eager())
    ids = random_ids(2, 40)
    ours, theirs = (x.open(2, 64).step(ids, logits="all").copy() for x in (program, eager))
    round_inputs(eager.decoder, rounds=False)  # type: ignore[attr-defined]  # a DecoderProgram
    plain = eager.open(2, 64).step(ids, logits="all")
    apart = np.abs(ours - theirs).max(-1)
    assert (apart < 2e-5).mean() > 0.8
    assert np.abs(ours - theirs).mean() < 0.1 * np.abs(plain - theirs).mean()


def test_integer_linears_beside_packed_ones_and_steps_of_every_shape(tmp_path: Path, export: Export) -> None:
    source = tiny_folder(tmp_path / "source", "qwen2")
    inside = {x.name for x in read_spec(source).match(None)}
    choices = {x: W8A8["dynamic"] if "mlp" in x else W8A8["static"] for x in inside if "v_proj" not in x}
    choices |= {"lm_head": Quantization(8, 16, True), "model.layers.1.self_attn.v_proj": Quantization(4, 16, False)}
    small = quantized(source, tmp_path / "small", choices)
    program = export(small, OnnxRuntime())
    assert program.traits.kernels == "MatMulNBits accuracy_level 4, MatMulIntegerToFloat"
    assert_close(program, export(small, Eager()), atol=0.5, max_kl=5e-3)


def test_a_token_of_zeros_gives_zeros(tmp_path: Path, export: Export) -> None:
    source = tiny_folder(tmp_path / "source", "llama")
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        if "layernorm" in name:
            tensors[name].zero_()  # every linear of the layers reads zeros
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    small = quantized(source, tmp_path / "small", W8A8["dynamic"], head=False)
    assert_close(export(small, OnnxRuntime()), export(small, Eager()))


def test_joined_integer_linears_have_one_input_scale(tmp_path: Path, export: Export) -> None:
    source = tiny_folder(tmp_path / "source", "llama")
    small = quantized(source, tmp_path / "small", W8A8["static"], head=False)
    tensors = load_file(small / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.input_scale"] *= 2
    save_file(tensors, small / "model.safetensors", metadata={"format": "pt"})
    assert_close(export(small, OnnxRuntime()), export(small, Eager()), atol=0.3, max_kl=5e-3)
    import onnx

    nodes = onnx.load(next(tmp_path.glob("*/model.onnx")), load_external_data=False).graph.node
    products = [x for x in nodes if x.op_type == "MatMulIntegerToFloat"]
    roundings = [x for x in nodes if x.op_type == "QuantizeLinear"]
    assert len(products) == 2 * (1 + 1 + 2 + 1) + (3 + 1 + 2 + 1)
    assert len(roundings) == 2 * 4 + (2 + 3)


def test_a_tied_head_cannot_be_multiplied_as_integers(tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path / "source", "llama"))
    with pytest.raises(UserError, match=r"tokens are looked up in the quantized lm_head.*activations null"):
        OnnxRuntime().plan(spec.quantize({"lm_head": W8A8["dynamic"]}), 0)


def test_integers_are_multiplied_exactly_without_vnni(
    tmp_path: Path, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_folder(tmp_path / "source", "llama")
    small = quantized(source, tmp_path / "small", W8A8["dynamic"], head=False)
    ids = random_ids(2, 20)
    expected = export(small, OnnxRuntime()).open(2, 64).step(ids, logits="all").copy()
    monkeypatch.setattr("strop.export.onnx_runtime.session.instruction_sets", lambda: ["avx2"])
    np.testing.assert_allclose(export(small, OnnxRuntime()).open(2, 64).step(ids, logits="all"), expected, atol=1e-6)


def test_layers_can_share_keys_and_values(tmp_path: Path, export: Export) -> None:
    for family in ("llama", "qwen3", "smollm3"):
        source = tiny_folder(tmp_path / family, family)
        spec = read_spec(source)
        linears = {role: x for role, x in spec.layers[2].linears.items() if role not in ("k", "v")}
        sharing = dataclasses.replace(spec.layers[2], linears=linears, kv_from_layer=0, k_norm=None)
        shared = dataclasses.replace(spec, layers=(*spec.layers[:2], sharing))
        folder = tmp_path / f"{family}-shared"
        folder.mkdir()
        save_checkpoint(folder, shared, source, [])
        with_spec(folder, shared)
        assert_close(export(folder, OnnxRuntime()), export(folder, Eager()))


def test_ropes_that_share_keys_may_differ(tmp_path: Path, export: Export) -> None:
    source = tiny_folder(tmp_path / "source", "llama")
    spec = read_spec(source)
    linears = {role: x for role, x in spec.layers[1].linears.items() if role not in ("k", "v")}
    rope = spec.layers[0].rope
    assert rope is not None
    other = dataclasses.replace(rope, inv_freq=tuple(x / 4 for x in rope.inv_freq), factor=1.1)
    sharing = dataclasses.replace(spec.layers[1], linears=linears, kv_from_layer=0, rope=other)
    shared = dataclasses.replace(spec, layers=(spec.layers[0], sharing, spec.layers[2]))
    folder = tmp_path / "shared"
    folder.mkdir()
    save_checkpoint(folder, shared, source, [])
    with_spec(folder, shared)
    assert_close(export(folder, OnnxRuntime()), export(folder, Eager()))


def test_a_fork_goes_its_own_way(tmp_path: Path, export: Export) -> None:
    session = export(tiny_folder(tmp_path / "source", "llama"), OnnxRuntime()).open(1, 30)
    session.step(random_ids(1, 5))
    twin = session.fork()
    expected = session.step(random_ids(1, 3, seed=1)).copy()
    twin.step(random_ids(1, 3, seed=2))
    twin.truncate([5])
    np.testing.assert_allclose(twin.step(random_ids(1, 3, seed=1)), expected, atol=1e-6)
    session.truncate([5])
    np.testing.assert_allclose(session.step(random_ids(1, 3, seed=1)), expected, atol=1e-6)


def test_many_step_shapes_share_one_cache(tmp_path: Path, export: Export) -> None:
    session = export(tiny_folder(tmp_path / "source", "llama"), OnnxRuntime()).open(1, 60)
    ids = random_ids(1, 21)
    whole = session.step(ids, logits="all").copy()
    session.truncate([0])
    parts, start = [], 0
    for width in (6, 5, 4, 3, 2, 1):
        parts.append(session.step(ids[:, start : start + width], logits="all").copy())
        start += width
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=1e-5)


def test_equal_checkpoints_give_equal_bytes(tmp_path: Path, export: Export) -> None:
    source = tiny_folder(tmp_path / "source", "llama")
    small = quantized(source, tmp_path / "small", Quantization(4, 16, True))
    for _ in range(2):
        export(small, OnnxRuntime())
    for name in ("model.onnx", "model.onnx.data"):
        first, second = (x.read_bytes() for x in tmp_path.glob(f"*/{name}"))
        assert first == second


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize(
    "form", [None, Quantization(3, 32, False), Quantization(8, 32, False), *W8A8.values()], ids=str
)
def test_plan_knows_the_bytes(family: str, form: Quantization | None, tmp_path: Path, export: Export) -> None:
    # Wide enough that tensors, not their names, make up the files.
    changes = {"n_embd": 192, "n_inner": 320} if family == "gpt2" else {"hidden_size": 192, "intermediate_size": 320}
    source = tiny_folder(tmp_path / "source", family, **changes)
    if form is not None:
        has_head = family != "gpt2" and form.activations is None
        source = quantized(source, tmp_path / "small", form, head=has_head)
    export(source, OnnxRuntime())
    size = sum(x.stat().st_size for x in tmp_path.glob("*/model.onnx*"))
    plan = OnnxRuntime().plan(read_spec(source), 0)
    assert plan.size_bytes == pytest.approx(size, rel=0.05)
    assert any("3 bits" in note for note in plan.notes) == (form is not None and form.bits == 3)


def test_plan_refuses_what_no_kernel_takes(tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path / "source", "llama"))
    with pytest.raises(UserError, match="groups of 24; allowed: multiples of 16"):
        OnnxRuntime().plan(spec.quantize({spec.layers[0].linears["q"].name: Quantization(4, 24, True)}), 0)
    layers = tuple(dataclasses.replace(x, head_dim=12) for x in spec.layers)
    with pytest.raises(UserError, match="heads of width 12; allowed: multiples of 8"):
        OnnxRuntime().plan(dataclasses.replace(spec, layers=layers), 0)


def test_a_damaged_program_is_one_line(tmp_path: Path, export: Export) -> None:
    program = export(tiny_folder(tmp_path / "source", "llama"), OnnxRuntime())
    folder = next(tmp_path.glob("*/model.onnx")).parent
    traits = program.traits
    with pytest.raises(UserError, match=r"is not the program that its strop\.json describes"):
        OnnxRuntime.load(folder, dataclasses.replace(traits, vocab_size=5))
    data = (folder / "model.onnx.data").read_bytes()
    for content in (data + b"x", data[:-1000], data[:10], b""):
        (folder / "model.onnx.data").write_bytes(content)
        with pytest.raises(UserError, match=rf"{len(content)} bytes") as error:
            OnnxRuntime.load(folder, traits)
        assert "\n" not in str(error.value)
    (folder / "model.onnx").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="cannot open it"):
        OnnxRuntime.load(folder, traits)
    (folder / "model.onnx.data").unlink()
    with pytest.raises(UserError, match=r"model\.onnx\.data is missing"):
        OnnxRuntime.load(folder, traits)


def test_running_needs_no_torch_and_leaves_no_telemetry(tmp_path: Path, export: Export) -> None:
    program = export(tiny_folder(tmp_path / "source", "llama"), OnnxRuntime())
    folder = next(tmp_path.glob("*/model.onnx")).parent
    code = (
        "import json, sys, numpy as np, pathlib\n"
        "from strop.export.onnx_runtime import OnnxRuntime\n"
        "from strop.program import Traits\n"
        "program = OnnxRuntime.load(pathlib.Path(sys.argv[1]), Traits(**json.loads(sys.argv[2])))\n"
        "program.open(1, 8).step(np.array([[3, 4]]))\n"
        "print(sorted({'torch', 'transformers', 'onnx', 'onnx_ir'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(folder), json.dumps(asdict(program.traits))]
    home = tmp_path / "home"
    home.mkdir()
    environment = {k: v for k, v in os.environ.items() if k not in ("XDG_CACHE_HOME", "ORT_DISABLE_TELEMETRY")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**environment, "HOME": str(home)})
    assert done.stdout.strip() == "[]"
    assert list(home.rglob("*onnxruntime*")) == [], "onnxruntime keeps a device id and a database of events"
