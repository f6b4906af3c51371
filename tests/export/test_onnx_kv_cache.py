"""A rounded cache in ONNX Runtime: the decoder's codes and logits in fewer bytes, one line where nothing runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from references import kl, quantized, random_ids, tiny_folder, walk_session, with_spec

from strop.artifact import Artifact, Manifest, write_manifest
from strop.conformance import check_program
from strop.errors import ConformanceError, UserError
from strop.export.auto_gptq import AutoGptq
from strop.export.eager import DecoderProgram, Eager
from strop.export.gguf import Gguf
from strop.export.onnx_runtime import OnnxRuntime
from strop.export.torch_compile import TorchCompile
from strop.layers import round_cache
from strop.model import read_spec, save_checkpoint
from strop.program import Program, Tree, open_program, write_exact
from strop.spec import CacheQuantization, Quantization
from strop.stage import Context, Stage

pytest.importorskip("onnxruntime")

KEY = "0" * 64
SCALE = {"int8": 0.03, "int4": 0.5}
Export = Callable[..., tuple[Program, Artifact]]
FORMS = [
    CacheQuantization("int8", "tensor", "tensor"),
    CacheQuantization("int8", "channel", "head"),
    CacheQuantization("int4", "head", "channel"),
]


@pytest.fixture
def export(tmp_path: Path) -> Export:
    """Runs an export stage on a checkpoint folder and opens the program."""

    def run(source: Path, stage: Stage) -> tuple[Program, Artifact]:
        out = tmp_path / f"{source.name}-{stage.__class__.__name__}-{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        artifact = Artifact(out, "program", KEY)
        result = stage.run(Artifact(source, "checkpoint", KEY), out, Context(tmp_path, threads=1))
        write_manifest(out, Manifest("program", KEY, result["spec"].to_json(), asdict(result["traits"])))
        return open_program(artifact, 1), artifact

    return run


def with_cache(source: Path, form: CacheQuantization) -> Path:
    """The checkpoint with scales that differ from each other."""
    spec = dataclasses.replace(read_spec(source), kv_cache=form)
    generator = torch.Generator().manual_seed(1)
    scales = {
        name: ((1 + torch.rand(shape, generator=generator)) * SCALE[form.format]).to(torch.bfloat16)
        for name, shape in spec.cache_scales().items()
    }
    out = source.with_name(f"{source.name}-cache-{len(list(source.parent.iterdir()))}")
    out.mkdir()
    save_checkpoint(out, spec, source, scales.items())
    with_spec(out, spec)
    return out


def assert_same(ours: Program, theirs: Program, plain: Program) -> None:
    """Logits agree, but for a code here and there that a last bit moved; far nearer than what rounding does."""
    for batch in (1, 3):
        walks = [walk_session(x.open(batch, 64), 1) for x in (ours, theirs, plain)]
        for found, expected, unrounded in zip(*walks, strict=True):
            apart = np.abs(found - expected)
            assert (apart.max(-1) < 3e-5).mean() > 0.8
            assert apart.mean() < 0.1 * np.abs(unrounded - expected).mean()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "gpt2", "qwen3"])
def test_agrees_with_the_decoder(family: str, form: CacheQuantization, tmp_path: Path, export: Export) -> None:
    source = tiny_folder(tmp_path / "source", family)
    small = with_cache(source, form)
    (ours, _), (theirs, _), (plain, _) = export(small, OnnxRuntime()), export(small, Eager()), export(source, Eager())
    assert_same(ours, theirs, plain)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_cache_holds_the_very_codes_and_is_as_small_as_the_table_says(
    form: CacheQuantization, tmp_path: Path, export: Export
) -> None:
    small = with_cache(tiny_folder(tmp_path / "source", "llama"), form)
    (ours, _), (theirs, _) = export(small, OnnxRuntime()), export(small, Eager())
    ids = random_ids(2, 11)
    sessions = [x.open(2, 16) for x in (ours, theirs)]
    for each in sessions:
        each.step(ids)
    for found, expected in zip(*(x._cache for x in sessions), strict=True):
        assert found.dtype == expected.numpy().dtype
        assert (found == expected.numpy()).mean() > 0.999
    assert sum(x.nbytes for x in ours.allocate(3, 10)) == 30 * read_spec(small).kv_bytes_per_token()


@pytest.mark.parametrize("form", FORMS[1:], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_trees_keep_and_fork(family: str, form: CacheQuantization, tmp_path: Path, export: Export) -> None:
    small = with_cache(tiny_folder(tmp_path / "source", family), form)
    tree, found = Tree((-1, 0, 0, 1, 2, -1, 5)), []
    for stage in (OnnxRuntime(trees=True), Eager()):
        session = export(small, stage)[0].open(2, 40)
        session.step(random_ids(2, 7), counts=np.array([7, 3]))
        logits = [session.step(random_ids(2, 7, seed=1), tree=tree, logits="all").copy()]
        session.keep([[0, 2, 4], [5]])
        twin = session.fork()
        logits.append(session.step(random_ids(2, 3, seed=2), logits="all").copy())
        twin.step(random_ids(2, 2, seed=3))
        twin.truncate([10, 4])
        logits.append(twin.step(random_ids(2, 3, seed=2), logits="all").copy())
        np.testing.assert_allclose(logits[1], logits[2], atol=1e-6)
        found.append(logits)
    for ours, theirs in zip(*found, strict=True):
        assert (np.abs(ours - theirs).max(-1) < 3e-5).mean() > 0.8


def test_layers_that_share_keys_share_their_scales(tmp_path: Path, export: Export) -> None:
    source = tiny_folder(tmp_path / "source", "llama")
    spec = read_spec(source)
    linears = {role: x for role, x in spec.layers[2].linears.items() if role not in ("k", "v")}
    sharing = dataclasses.replace(spec.layers[2], linears=linears, kv_from_layer=0)
    shared = dataclasses.replace(spec, layers=(*spec.layers[:2], sharing))
    folder = tmp_path / "shared"
    folder.mkdir()
    save_checkpoint(folder, shared, source, [])
    with_spec(folder, shared)
    small = with_cache(folder, FORMS[1])
    assert_same(export(small, OnnxRuntime())[0], export(small, Eager())[0], export(folder, Eager())[0])


def test_without_rounding_the_program_is_the_decoder(tmp_path: Path, export: Export) -> None:
    source = quantized(tiny_folder(tmp_path / "source", "llama"), tmp_path / "w", Quantization(4, 16, True))
    for form in FORMS:
        small = with_cache(source, form)
        (_, program), (theirs, _) = export(small, OnnxRuntime(accuracy_level=1)), export(small, Eager())
        out = tmp_path / f"exact-{form.format}-{form.keys}"
        out.mkdir()
        exact = write_exact(program, out)
        assert exact is not None
        assert isinstance(theirs, DecoderProgram)
        round_cache(theirs.decoder, rounds=False)
        twin = open_program(exact, 1)
        assert twin.traits.kernels == "MatMulNBits accuracy_level 1"
        assert sum(x.nbytes for x in twin.allocate(1, 1)) == read_spec(source).kv_bytes_per_token()
        ids = random_ids(1, 20)
        ours, expected = (x.open(1, 20).step(ids, logits="all").copy() for x in (twin, theirs))
        np.testing.assert_allclose(ours, expected, atol=5e-5)
        assert kl(expected, ours) < 1e-6
        assert write_exact(exact, out) is None


def test_conformance_takes_the_program_and_finds_a_wrong_scale(tmp_path: Path, export: Export) -> None:
    small = with_cache(tiny_folder(tmp_path / "source", "llama"), FORMS[1])
    _, program = export(small, OnnxRuntime())
    checkpoint = Artifact(small, "checkpoint", KEY)
    assert check_program(program, checkpoint) < 0.1
    import onnx

    tensors = onnx.load(program.path / "model.onnx", load_external_data=False).graph.initializer
    content = bytearray((program.path / "model.onnx.data").read_bytes())
    for tensor in tensors:
        if tensor.name.endswith("v_scale"):
            start, size = (int(x.value) for x in tensor.external_data[1:3])
            scales = np.frombuffer(content[start : start + size], np.float32)
            content[start : start + size] = (scales * 64).tobytes()
    (program.path / "model.onnx.data").write_bytes(content)
    with pytest.raises(ConformanceError, match="its logits are not those of its checkpoint"):
        check_program(program, checkpoint)


def test_plan_counts_the_scales(tmp_path: Path, export: Export) -> None:
    changes = {"hidden_size": 192, "intermediate_size": 320}
    small = with_cache(tiny_folder(tmp_path / "source", "llama", **changes), FORMS[2])
    _, program = export(small, OnnxRuntime())
    size = sum(x.stat().st_size for x in program.path.glob("model.onnx*"))
    assert OnnxRuntime().plan(read_spec(small), 0).size_bytes == pytest.approx(size, rel=0.05)


@pytest.mark.parametrize(
    ("stage", "form", "message"),
    [
        (OnnxRuntime(), CacheQuantization("fp8", "head", "head"), "onnx_runtime: .* asks for format fp8; allowed"),
        (OnnxRuntime(), CacheQuantization("int8", "head", "token"), "onnx_runtime: .* asks for scales by token"),
        (OnnxRuntime(operators="standard"), FORMS[0], "onnx_runtime keeps keys and values as floats"),
        (TorchCompile(), FORMS[0], "torch_compile keeps keys and values as floats, kv_cache asks for int8; allowed"),
        (Gguf(), FORMS[0], "gguf: the file keeps keys and values as floats"),
        (AutoGptq(), FORMS[2], "auto_gptq: the layout keeps keys and values as floats, kv_cache asks for int4"),
    ],
)  # fmt: skip
def test_what_no_kernel_keeps_is_one_line(stage: Any, form: CacheQuantization, message: str, tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path / "source", "llama"))
    with pytest.raises(UserError, match=message):
        stage.plan(dataclasses.replace(spec, kv_cache=form), 0)
