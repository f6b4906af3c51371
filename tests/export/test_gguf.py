"""The GGUF export writes what llama.cpp's converter writes, codes as they are, and strop reads it back as it was."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from references import VOCAB_SIZE, quantized, random_ids, tiny_folder, tiny_gguf, tiny_model

from strop import faults, gguf_file
from strop.artifact import Artifact, Manifest, write_manifest
from strop.conformance import check_program
from strop.errors import ConformanceError, UserError
from strop.evals._work import weight_bytes
from strop.export.gguf import Gguf, blocks, layout
from strop.families import build_spec
from strop.gguf_file import read_gguf
from strop.model import Weights, load_linear, read_spec
from strop.program import Program, open_program
from strop.sources import describe
from strop.spec import ModelSpec, Quantization
from strop.stage import Context

WIDE: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 64}
"""Widths that blocks of 32 divide."""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.25, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 64,
}
GEMMA2 = {"query_pre_attn_scalar": 16}
GEMMA3 = {
    "query_pre_attn_scalar": 16,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama untied with biases": ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3}),
    "llama with linear scaling": ("llama", {"rope_parameters": LINEAR}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 with yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", GEMMA2),
    "gemma3": ("gemma3_text", GEMMA3),
    "phi3": ("phi3", {"sliding_window": 5}),
    "phi3 with long contexts": (
        "phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 64, "sliding_window": None},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": None}),
    "gpt2": ("gpt2", {}),
}
CODES: dict[str, tuple[Quantization, str]] = {
    "4 bits": (Quantization(4, 32, True), "Q4_0"),
    "4 bits, one group a row": (Quantization(4, None, True), "Q4_0"),
    "3 bits": (Quantization(3, 32, True), "Q4_0"),
    "2 bits": (Quantization(2, 32, True), "Q4_0"),
    "8 bits": (Quantization(8, 32, True), "Q8_0"),
    "8 bits, one group a row": (Quantization(8, None, True), "Q8_0"),
    "2 bits asymmetric": (Quantization(2, 32, False), "Q4_0"),
    "3 bits asymmetric": (Quantization(3, 32, False), "Q4_0"),
    "4 bits asymmetric": (Quantization(4, 32, False), "Q5_0"),
}


def exported(source: Path, out: Path, stage: Gguf) -> Artifact:
    """Run the stage and write the manifest that the runner would."""
    out.mkdir()
    made = stage.run(Artifact(source, "checkpoint", "a" * 64), out, Context(out.parent / "scratch", threads=1))
    spec, traits = made["spec"].to_json(), dataclasses.asdict(made["traits"])
    write_manifest(out, Manifest("program", "b" * 64, spec, traits, report=made["report"]))
    return Artifact(out, "program", "b" * 64)


def contents(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and dequantized tensors, by gguf's own reader."""
    reader = gguf.GGUFReader(path)
    keys = {k: x.contents() for k, x in reader.fields.items() if not k.startswith("GGUF.")}
    return keys, {x.name: gguf.dequantize(x.data, x.tensor_type) for x in reader.tensors}


def values(folder: Path, spec: ModelSpec) -> dict[str, Any]:
    """Linear -> its dense weight in a checkpoint, the embedding's too."""
    with Weights(folder) as weights:
        return {x.name: load_linear(weights, x).numpy() for _, x, _ in layout.matrices(spec)}


@pytest.mark.parametrize("case", CASES)
def test_every_family_is_stored_as_llama_cpp_stores_it(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    source = tiny_folder(tmp_path / "source", family, **changes)
    model = tiny_model(family, **changes)

    program = exported(source, tmp_path / "out", Gguf())

    metadata, tensors = contents(program.path / layout.FILE)
    expected_metadata, expected = contents(tiny_gguf(tmp_path / "expected.gguf", model))
    if family == "qwen2":  # transformers gives every model of the family its own rule that cuts text
        expected_metadata = {k: v for k, v in expected_metadata.items() if not k.startswith("tokenizer.ggml.")}
    assert {k: metadata.get(k) for k in expected_metadata} == expected_metadata
    assert (
        tensors.keys() - {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
        == expected.keys()
    )
    for name, tensor in expected.items():
        np.testing.assert_array_equal(tensors[name], tensor, err_msg=name)
    ids = random_ids(2, 20)
    found = open_program(program, 1).open(2, 20).step(ids, logits="all")
    with torch.inference_mode():
        logits = model(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(found, logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_strop_reads_the_same_model_back(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    source = tiny_folder(tmp_path / "source", family, **changes)
    program = exported(source, tmp_path / "out", Gguf())
    path = program.path / layout.FILE
    spec = describe(str(path), "float32")[0]
    assert dataclasses.replace(spec, family=family) == read_spec(source)
    file = read_gguf(path)
    with Weights(source) as weights:
        for hub, name in gguf_file.tensor_names(file).items():
            close = {"rtol": 0, "atol": 3e-7} if "norm" in name and family.startswith("gemma") else {"rtol": 0}
            np.testing.assert_allclose(gguf_file.load(file, name), weights.load(hub).numpy(), **close)


@pytest.mark.parametrize("case", CODES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_codes_and_scales_are_taken_over_as_they_are(family: str, case: str, tmp_path: Path) -> None:
    q, kind = CODES[case]
    changes = {"n_embd": 96, "n_inner": 64} if family == "gpt2" else WIDE
    source = quantized(tiny_folder(tmp_path / "source", family, **changes), tmp_path / "packed", q)

    program = exported(source, tmp_path / "out", Gguf())

    file = read_gguf(program.path / layout.FILE)
    spec = read_spec(source)
    assert file.types() == ([kind] if family != "gpt2" else ["F32", kind])  # gpt2's positions
    dense = values(source, spec)
    for name, linear, _ in layout.matrices(spec):
        found = gguf_file.load(file, name)
        found = found.T if family == "gpt2" and name.startswith("blk.") else found
        np.testing.assert_array_equal(found, dense[linear.name], err_msg=name)


@pytest.mark.parametrize("kind", sorted(layout.CODE_BITS))
def test_packed_blocks_are_what_the_format_dequantizes(kind: str) -> None:
    generator = np.random.default_rng(0)
    half = 2 ** (layout.CODE_BITS[kind] - 1)
    codes = generator.integers(-half, half, (5, 192), dtype=np.int8)
    codes[0, :2] = -half, half - 1
    scale = (generator.standard_normal((5, 3)) / 16).astype(np.float16).astype(np.float32)
    found = gguf.dequantize(blocks.pack(codes, scale, kind), gguf.GGMLQuantizationType[kind])
    for row in range(5):
        for column in range(192):
            assert found[row, column] == float(codes[row, column]) * scale[row, column // 64]


@pytest.mark.parametrize(
    ("q", "holds"), [(Quantization(8, 32, False), "F32"), (Quantization(4, 16, True), "F16")]
)  # fmt: skip
def test_codes_that_no_type_holds_are_refused_or_rounded_anew_by_name(
    q: Quantization, holds: Any, tmp_path: Path
) -> None:
    source = quantized(tiny_folder(tmp_path / "source", **WIDE), tmp_path / "packed", q)
    spec = read_spec(source)
    with pytest.raises(UserError, match=f"only {holds} holds their values: set requantize") as caught:
        Gguf().plan(spec, 0)
    assert "\n" not in str(caught.value)
    dense = values(source, spec)
    for name, kind in (("exact", holds), ("rounded", "Q8_0")):
        program = exported(source, tmp_path / name, Gguf(requantize=kind))
        file = read_gguf(program.path / layout.FILE)
        assert file.types() == [kind]
        for stored, linear, _ in layout.matrices(spec):
            weight, found = dense[linear.name], gguf_file.load(file, stored)
            step = np.abs(weight).reshape(*weight.shape[:-1], -1, 32).max(-1, keepdims=True) / 127
            most = 0.5 + 127 * 2**-11  # of a step: rounding the code, and the step itself to float16
            allowed = 0 if kind == holds else np.repeat(most * step, 32, -1).reshape(weight.shape)
            assert (np.abs(found - weight) <= allowed).all(), stored


def test_a_type_is_for_what_is_not_quantized(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "source", **WIDE)
    source = quantized(folder, tmp_path / "packed", Quantization(4, 32, True), head=False)
    stage = Gguf(type="Q8_0")
    program = exported(source, tmp_path / "out", stage)
    file = read_gguf(program.path / layout.FILE)
    kinds = {name: gguf.GGMLQuantizationType(x.type).name for name, x in file.tensors.items() if len(x.shape) > 1}
    assert kinds.pop("token_embd.weight") == "Q8_0"
    assert set(kinds.values()) == {"Q4_0"}
    plan = stage.plan(read_spec(source), 0)
    assert plan.size_bytes == sum(-(-x.size_bytes // 32) * 32 for x in file.tensors.values())
    assert plan.spec.head.quantization == Quantization(8, 32, True)


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", "BF16"), ("float16", "F16"), ("float32", "F32")])
def test_unquantized_matrices_keep_their_dtype_unless_asked(dtype: str, kind: str, tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", dtype=dtype)
    program = exported(source, tmp_path / "out", Gguf())
    file = read_gguf(program.path / layout.FILE)
    assert file.types() == [kind]
    with Weights(source) as weights:
        for hub, name in gguf_file.tensor_names(file).items():
            np.testing.assert_array_equal(gguf_file.load(file, name), weights.load(hub).float().numpy())


def test_equal_work_gives_equal_bytes(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", **WIDE)
    one, other = (exported(source, tmp_path / x, Gguf(type="Q4_0")).path / layout.FILE for x in ("one", "other"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("smollm3", {}, "a rotary embedding of layer 1 is False"),
        ("gemma2", {}, "attention_scale of layer 0"),
        ("gemma3_text", {"query_pre_attn_scalar": 16}, "the window of layer 1 is None"),
        ("qwen3", {"attention_bias": True}, "biases of layer 0 on"),
        ("llama", {"hidden_act": "gelu"}, "activation of layer 0"),
    ],
)
def test_models_that_llama_cpp_would_compute_otherwise_are_refused(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    spec = read_spec(tiny_folder(tmp_path / "source", family, **changes))
    with pytest.raises(UserError, match=message):
        Gguf().plan(spec, 0)


def test_layers_that_differ_and_widths_that_blocks_do_not_divide_are_refused(tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path / "source"))
    uneven = (dataclasses.replace(spec.layers[0], intermediate_size=64), *spec.layers[1:])
    with pytest.raises(UserError, match="intermediate_size of layer 1 is 80"):
        Gguf().plan(dataclasses.replace(spec, layers=uneven), 0)
    with pytest.raises(UserError, match="blocks of 32, which do not divide the 48 inputs"):
        Gguf(type="Q8_0").plan(spec, 0)


def test_rounded_inputs_are_refused_with_what_takes_them(tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path / "source", **WIDE))
    name = spec.match(None)[0].name
    rounds = spec.quantize({name: Quantization(8, None, True, "dynamic")})
    message = f"{name} rounds its inputs to int8 .*; allowed: activations null, or onnx_runtime"
    with pytest.raises(UserError, match=message) as caught:
        Gguf().plan(rounds, 0)
    assert "\n" not in str(caught.value)


def test_a_scaling_that_gguf_has_no_words_for_is_refused(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", rope_parameters={**YARN, "attention_factor": 1.5})
    with pytest.raises(UserError, match=r"the rope of layer 0 of the model is .* GGUF can only tell"):
        exported(source, tmp_path / "out", Gguf())


def test_a_window_that_llama_cpp_has_not_ends_the_context(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", "mistral", sliding_window=5)
    plan = Gguf().plan(read_spec(source), 0)
    assert "context_length is 5" in " ".join(plan.notes)
    program = exported(source, tmp_path / "out", Gguf())
    assert contents(program.path / layout.FILE)[0]["llama.context_length"] == 5
    assert open_program(program).traits.context == 5


@pytest.mark.parametrize("stage", [Gguf(type="Q4_0"), Gguf(type="F16")], ids=["Q4_0", "F16"])
def test_conformance_tells_rounding_from_faults(stage: Gguf, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "source", dtype="bfloat16", **WIDE)
    spec = read_spec(folder)
    write_manifest(folder, Manifest("checkpoint", "a" * 64, spec.to_json()))
    source = Artifact(folder, "checkpoint", "a" * 64)
    program = exported(folder, tmp_path / "out", stage)
    assert check_program(program, source) < 1e-4
    swapped = faults.plant(faults.FAULTS[1], program, tmp_path / "swapped")
    with pytest.raises(ConformanceError, match="its logits are not those of its checkpoint"):
        check_program(swapped, source)


def test_what_rounding_changes_is_what_it_is_compared_with(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "source", "gpt2", n_embd=96, n_inner=64)
    source = quantized(folder, tmp_path / "packed", {"transformer.h.1.mlp.c_fc": Quantization(8, 32, False)})
    program = exported(source, tmp_path / "out", Gguf(type="Q4_0", requantize="Q8_0"))
    out = tmp_path / "reference"
    out.mkdir()
    spec = Gguf.write_reference(program.path, source, out)
    assert spec is not None
    assert not any(x.quantization for x in spec.linears())
    found = values(out, spec)
    file = read_gguf(program.path / layout.FILE)
    for name, linear, _ in layout.matrices(spec):
        stored = gguf_file.load(file, name)
        stored = stored.T if name.startswith("blk.") else stored
        np.testing.assert_array_equal(found[linear.name], stored)


def test_what_is_not_rounded_is_compared_with_the_checkpoint_itself(tmp_path: Path) -> None:
    source = quantized(tiny_folder(tmp_path / "source", **WIDE), tmp_path / "packed", Quantization(4, 32, True))
    program = exported(source, tmp_path / "out", Gguf())
    assert Gguf.write_reference(program.path, source, tmp_path) is None


def test_steps_trees_and_ragged_rows_run_as_in_eager(tmp_path: Path) -> None:
    program: Program = open_program(exported(tiny_folder(tmp_path / "source"), tmp_path / "out", Gguf()), 1)
    assert program.traits.vocab_size == VOCAB_SIZE
    ids = random_ids(2, 9)
    whole = program.open(2, 16).step(ids, logits="all")
    session = program.open(2, 16)
    session.step(ids[:, :5], counts=np.array([5, 3]))
    found = session.step(np.stack((ids[0, 5:7], ids[1, 3:5])), logits="all")
    np.testing.assert_allclose(found[0], whole[0, 5:7], atol=1e-5)
    np.testing.assert_allclose(found[1], whole[1, 3:5], atol=1e-5)


def test_a_step_is_counted_as_pytorch_takes_it(tmp_path: Path) -> None:
    source = quantized(tiny_folder(tmp_path / "source", **WIDE), tmp_path / "packed", Quantization(4, 32, True))
    traits = open_program(exported(source, tmp_path / "out", Gguf())).traits
    linear = read_spec(source).layers[0].linears["down"]
    assert weight_bytes(linear, traits) == 4 * 96 * 64


def test_the_table_of_a_file_is_known_before_it_is_written(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", **WIDE)
    program = exported(source, tmp_path / "out", Gguf(type="Q8_0"))
    file = read_gguf(program.path / layout.FILE)
    told = build_spec(gguf_file.config(file), gguf_file.headers(file), "float32")
    planned = Gguf(type="Q8_0").plan(read_spec(source), 0).spec
    assert all(x.quantization == Quantization(8, 32, True) for x in planned.linears())
    assert [(x.name, x.in_features) for x in told.linears()] == [(x.name, x.in_features) for x in planned.linears()]
