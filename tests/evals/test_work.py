"""Counted bytes and FLOPs are those of the tensors and graphs that really run, for every family and packing."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from references import tiny_folder

from strop.artifact import Artifact, Manifest, write_manifest
from strop.evals._work import weight_bytes, work
from strop.export.eager import DecoderProgram, Eager
from strop.export.onnx_runtime import OnnxRuntime
from strop.export.torch_compile import layout as compiled
from strop.families import EXPERT_FAMILIES, FAMILIES
from strop.methods.rtn import Rtn
from strop.model import read_spec
from strop.program import Traits
from strop.spec import CacheQuantization, Linear, ModelSpec, Quantization
from strop.stage import Context, Stage

KEY = "0" * 64
STEPS = [(0, 1), (3, 1), (9, 1), (0, 7), (4, 3)]
"""Cached tokens and new ones: within the window of 5 that some families have, at it, and beyond."""
PACKINGS = [
    (bits, group, symmetric) for bits in (2, 3, 4, 8) for group, symmetric in ((16, True), (16, False), (None, False))
]


def lowered(source: Path, out: Path, stage: Stage) -> tuple[Path, ModelSpec, Traits]:
    """A stage's output with its manifest, table and traits."""
    out.mkdir()
    result = stage.run(Artifact(source, "checkpoint", KEY), out, Context(out.parent, threads=1))
    traits = result.get("traits")
    write_manifest(out, Manifest(stage.gives, KEY, result["spec"].to_json(), asdict(traits) if traits else None))
    return out, result["spec"], traits


def seen(window: int | None, cached: int, width: int) -> list[set[int]]:
    """Of each new token: the positions that it attends to, one by one."""
    reach = window or 10**9
    return [{p for p in range(cached + i + 1) if p > cached + i - reach} for i in range(width)]


def slow_flops(spec: ModelSpec, cached: int, width: int) -> int:
    """Two for every weight and token, and for every product of a head's query and key, and of a weight and a value."""
    total = 2 * spec.hidden_size * spec.vocab_size
    for layer in spec.layers:
        for visible in seen(layer.window, cached, width):
            total += sum(2 * x.in_features * x.out_features for x in layer.linears.values())
            for _ in range(layer.num_heads):
                total += sum(2 * layer.head_dim + 2 * layer.head_dim for _ in visible)
    return total


def tensor_bytes(program: DecoderProgram, cached: int, width: int) -> int:
    """Of the decoder in memory: every weight once, of tables a row per token, and what is seen of the cache."""
    spec = program.decoder.spec
    weights = program.decoder.tensors()
    rows = [f"{x}.weight" for x in (spec.embedding, spec.position_embedding) if x]
    tables = rows[1:] if spec.is_tied else rows
    total = sum(x.numel() * x.itemsize for name, x in weights.items() if name not in tables)
    total += width * sum(weights[name][0].numel() * weights[name].itemsize for name in rows)
    cache = program.allocate(1, cached + width)
    for index, layer in enumerate(spec.layers):
        for array in cache[2 * index : 2 * index + 2]:
            total += len(set().union(*seen(layer.window, cached, width))) * array[0, :, 0].numel() * array.itemsize
    return total


def graph_bytes(folder: Path, cached: int, width: int) -> int:
    """Of the tensors of model.onnx.data that each node reads: of those that are gathered a row per token, else all."""
    ir = pytest.importorskip("onnx_ir")
    total = 0
    for node in ir.load(folder / "model.onnx").graph:
        stored = [
            x.const_value if x is not None and isinstance(x.const_value, ir.ExternalTensor) else None
            for x in node.inputs
        ]
        sizes = [(x.nbytes, x.shape[0]) for x in stored if x is not None]
        is_lookup = node.op_type.startswith("Gather")
        total += sum(width * size // rows if is_lookup else size for size, rows in sizes)
        if node.op_type == "GroupQueryAttention":
            window = node.attributes["local_window_size"].value if "local_window_size" in node.attributes else None
            for past in node.inputs[3:5]:
                _, heads, _, head_dim = past.shape
                total += 4 * heads * head_dim * len(set().union(*seen(window, cached, width)))
    return total


DENSE = [x for x in FAMILIES if x not in EXPERT_FAMILIES]


@pytest.mark.parametrize("family", DENSE)
def test_an_eager_step_reads_the_tensors_of_its_decoder(family: str, tmp_path: Path) -> None:
    out, spec, traits = lowered(tiny_folder(tmp_path / "source", family), tmp_path / "eager", Eager())
    program: Any = Eager.load(out, traits)
    for cached, width in STEPS:
        assert work(spec, traits, cached, width).size_bytes == tensor_bytes(program, cached, width)


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_a_token_reads_the_experts_that_it_chooses(family: str, tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path / "source", family))
    traits = Traits("eager", "float32", 1, "cpu", 128, spec.vocab_size, takes_trees=True)
    weights = flops = 0
    for layer in spec.layers:
        chosen = range(layer.moe.top_k) if layer.moe else ()
        roles = [x for x in layer.linears if not x.startswith("experts.")]
        roles += [f"experts.{i}.{part}" for i in chosen for part in ("gate", "up", "down")]
        linears = [*(layer.linears[x] for x in roles), *layer.gates()]
        weights += sum(4 * (x.in_features * x.out_features + x.has_bias * x.out_features) for x in linears)
        flops += sum(2 * x.in_features * x.out_features for x in linears)
    found = work(spec, traits, 3, 1)
    assert found.read_bytes["linears"] == weights
    assert found.flops_of["linears"] == flops
    assert work(spec, traits, 3, 4).flops_of["linears"] == 4 * flops
    everything = sum(x.size_bytes("float32") for x in (*list(spec.linears())[:-1], *spec.gates()))
    assert weights < work(spec, traits, 3, 2).read_bytes["linears"] < everything
    assert work(spec, traits, 3, 500).read_bytes["linears"] == everything


def test_an_eager_program_of_packed_codes_reads_them_dequantized(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", "llama", dtype="bfloat16")
    packed, spec, _ = lowered(source, tmp_path / "packed", Rtn(group_size=16, targets=["*"]))
    out, _, traits = lowered(packed, tmp_path / "eager", Eager())
    dense = read_spec(source)
    assert work(spec, traits, 3, 2) == work(dense, traits, 3, 2)
    program: Any = Eager.load(out, traits)
    weights = [program.decoder.linear(y.name).weight for x in spec.layers for y in x.linears.values()]
    assert work(spec, traits, 3, 2).read_bytes["linears"] == sum(x.numel() * x.itemsize for x in weights)


@pytest.mark.parametrize(("form", "keys"), [("int8", "head"), ("int4", "channel"), ("int8", "token")])
def test_rounded_keys_and_values_are_read_as_codes(form: Any, keys: Any, tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path / "source", "llama"))
    rounded = dataclasses.replace(spec, kv_cache=CacheQuantization(form, keys, keys))
    traits = Traits("onnx_runtime", "float32", 1, "cpu", 128, spec.vocab_size, takes_trees=False)
    found = work(rounded, traits, 9, 2).read_bytes["keys_values"]
    layer = spec.layers[0]
    numbers = 2 * layer.num_kv_heads * layer.head_dim * len(spec.layers) * 11
    scales = 2 * 4 * layer.num_kv_heads * len(spec.layers) * 11 if keys == "token" else 0
    assert found == numbers // (2 if form == "int4" else 1) + scales
    assert work(spec, traits, 9, 2).read_bytes["keys_values"] == 4 * numbers


@pytest.mark.parametrize("family", DENSE)
def test_an_onnx_step_reads_the_tensors_of_its_graph(family: str, tmp_path: Path) -> None:
    out, spec, traits = lowered(tiny_folder(tmp_path / "source", family), tmp_path / "onnx", OnnxRuntime())
    for cached, width in STEPS:
        assert work(spec, traits, cached, width).size_bytes == graph_bytes(out, cached, width)


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@pytest.mark.parametrize("targets", [None, ["*"]], ids=["head in floats", "head in codes"])
def test_an_onnx_step_reads_codes_scales_and_zeros(
    packing: tuple[Any, Any, bool], targets: list[str] | None, tmp_path: Path
) -> None:
    bits, group_size, symmetric = packing
    rtn = Rtn(bits=bits, group_size=group_size, symmetric=symmetric, targets=targets)
    small, _, _ = lowered(tiny_folder(tmp_path / "source", "llama", dtype="bfloat16"), tmp_path / "small", rtn)
    out, spec, traits = lowered(small, tmp_path / "onnx", OnnxRuntime())
    for cached, width in STEPS[-2:]:
        assert work(spec, traits, cached, width).size_bytes == graph_bytes(out, cached, width)


def test_integers_are_counted_as_they_are_kept(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", "qwen2")
    rtn = Rtn(bits=8, group_size=None, activations="dynamic")
    small, spec, _ = lowered(source, tmp_path / "small", rtn)
    out, _, traits = lowered(small, tmp_path / "onnx", OnnxRuntime())
    assert work(spec, traits, 6, 2).size_bytes == graph_bytes(out, 6, 2)
    out, _, traits = lowered(small, tmp_path / "eager", Eager())
    program: Any = Eager.load(out, traits)
    assert work(spec, traits, 3, 2).size_bytes == tensor_bytes(program, 3, 2)


@pytest.mark.parametrize("family", ["gpt2", "phi3", "qwen2", "gemma2"])
def test_packed_linears_of_other_shapes_are_counted_as_stored(family: str, tmp_path: Path) -> None:
    rtn = Rtn(group_size=16, symmetric=False)
    small, _, _ = lowered(tiny_folder(tmp_path / "source", family), tmp_path / "small", rtn)
    out, spec, traits = lowered(small, tmp_path / "onnx", OnnxRuntime())
    assert work(spec, traits, 6, 2).size_bytes == graph_bytes(out, 6, 2)


@pytest.mark.parametrize("family", DENSE)
def test_flops_are_those_of_a_slow_count(family: str, tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path / "source", family))
    for cached, width in STEPS:
        done = work(spec, traits_of("eager"), cached, width)
        assert done.flops == slow_flops(spec, cached, width)
        assert math.isclose(done.intensity, done.flops / done.size_bytes)


def traits_of(runtime: str, dtype: str = "float32") -> Traits:
    return Traits(runtime, dtype, 1, "cpu", 128, 307, takes_trees=False)


def test_another_runtime_is_taken_to_keep_what_the_checkpoint_stores() -> None:
    linear = Linear("x", 48, 20, has_bias=True, quantization=Quantization(4, 16, symmetric=False))
    codes, scales, zeros, bias = 20 * 48 // 2, 20 * 3 * 2, 3 * 4 * 3, 20 * 2
    assert weight_bytes(linear, traits_of("elsewhere", "bfloat16")) == codes + scales + zeros + bias


def test_a_layer_that_shares_keys_reads_them_once_more(tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path / "source", "llama"))
    last = spec.layers[-1]
    linears = {role: x for role, x in last.linears.items() if role not in "kv"}
    shared = dataclasses.replace(last, linears=linears, kv_from_layer=0)
    saved = step_bytes(spec) - step_bytes(dataclasses.replace(spec, layers=(*spec.layers[:-1], shared)))
    assert saved == 4 * sum(last.linears[x].in_features * last.linears[x].out_features for x in "kv")


def step_bytes(spec: ModelSpec) -> int:
    return work(spec, traits_of("eager"), 5, 1).size_bytes


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_compiled_step_reads_all_that_the_program_stores(bits: Any, tmp_path: Path) -> None:
    rtn = Rtn(bits=bits, group_size=16, symmetric=False, targets=["*"])
    _, spec, _ = lowered(tiny_folder(tmp_path / "source", "qwen2"), tmp_path / "small", rtn)
    read = work(spec, traits_of("torch_compile", "bfloat16"), 5, 1).read_bytes
    assert read["linears"] + read["head"] + read["norms"] == compiled.size_bytes(spec, "bfloat16")
