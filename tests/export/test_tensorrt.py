"""Engines up to the GPU: what is built and for whom, what is refused before loading, and what runs which step.

The library is a stand-in over onnxruntime (`fakes.tensorrt_library`) but for the tests at the end.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from references import assert_close, quantized, random_ids, tiny_folder

from strop.artifact import Artifact, Manifest, hash_file, write_manifest
from strop.errors import MissingExtra, UserError
from strop.export import _tensorrt
from strop.export._tensorrt import facts as engine_facts
from strop.export.eager import Eager
from strop.export.tensor_rt import TensorRt
from strop.export.tensorrt_rtx import TensorrtRtx
from strop.machine import Gpu
from strop.model import read_spec
from strop.program import Program, Traits, Tree
from strop.spec import Quantization
from strop.stage import Context, Stage

pytest.importorskip("onnx_ir")
pytest.importorskip("onnxruntime")

KEY = "0" * 64
ADA = Gpu("NVIDIA RTX 4090", "8.9")
Build = Callable[..., Artifact]


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """The stand-in, in place of both libraries, and no GPU."""
    if request.node.get_closest_marker("slow") or request.node.get_closest_marker("gpu"):
        return None
    from fakes import tensorrt_library

    monkeypatch.setitem(__import__("sys").modules, "tensorrt", tensorrt_library)
    monkeypatch.setitem(__import__("sys").modules, "tensorrt_rtx", tensorrt_library)
    see(monkeypatch, [])
    return tensorrt_library


def see(monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu]) -> None:
    """Let this machine have these GPUs."""
    for module in ("_tensorrt", "_tensorrt.facts", "tensor_rt", "tensorrt_rtx"):
        monkeypatch.setattr(f"strop.export.{module}.gpus", lambda: gpus)


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Runs an export stage on a checkpoint folder."""

    def run(source: Path, stage: Stage) -> Artifact:
        number = len(list(tmp_path.iterdir()))
        out, scratch = tmp_path / f"program-{number}", tmp_path / f"scratch-{number}"
        out.mkdir()
        scratch.mkdir()
        context = Context(scratch, threads=1, cache=tmp_path / "cache")
        result = stage.run(Artifact(source, "checkpoint", KEY), out, context)
        traits = asdict(result["traits"]) if "traits" in result else None
        write_manifest(out, Manifest(stage.gives, KEY, result["spec"].to_json(), traits))
        return Artifact(out, "program", KEY)

    return run


def on_cpu(program: Artifact, library: Any) -> Any:
    """The program of an engine, its buffers in the CPU's memory."""
    import torch

    from strop.artifact import read_manifest
    from strop.export._tensorrt.builder import deserialize
    from strop.export._tensorrt.session import EngineProgram

    traits = read_manifest(program.path).traits
    assert traits is not None
    facts = engine_facts.read(program.path, traits["runtime"])
    engine = deserialize(library, program.path / engine_facts.ENGINE)
    return EngineProgram(engine, read_spec(program.path), facts, Traits(**traits), torch.device("cpu"))


def eager(source: Path) -> Program:
    """The reference."""
    spec = read_spec(source)
    return Eager.load(
        source, Traits("eager", "float32", 1, "cpu", spec.max_positions, spec.vocab_size, takes_trees=True)
    )


# Sessions.


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt2"])
def test_steps_of_every_width_agree_with_the_decoder(family: str, tmp_path: Path, build: Build, library: Any) -> None:
    source = tiny_folder(tmp_path / "source", family)
    # Prompts of 17 tokens take three runs, steps of 4 tokens the second profile, ragged rows in both.
    program = on_cpu(build(source, TensorrtRtx(max_batch=3, prefill=7, verify=3, context=64)), library)
    assert_close(program, eager(source))
    widths = [{run["ids"][1] for run in context.runs} for context in program.contexts]
    assert widths == [{3, 5, 7, 2}, {1, 4}]


def test_a_quantized_model_agrees_with_the_decoder(tmp_path: Path, build: Build, library: Any) -> None:
    small = quantized(tiny_folder(tmp_path / "source", "llama"), tmp_path / "small", Quantization(4, 16, True))
    program = on_cpu(build(small, TensorrtRtx(max_batch=3, context=64)), library)
    assert_close(program, eager(small), atol=5e-5)


def test_trees_forks_and_kept_paths_agree_with_the_decoder(tmp_path: Path, build: Build, library: Any) -> None:
    source = tiny_folder(tmp_path / "source", "gemma3_text")
    program = on_cpu(build(source, TensorrtRtx(max_batch=2, context=64)), library)
    tree = Tree((-1, 0, 0, 1, 2, -1, 5))
    found = []
    for session in (program.open(2, 40), eager(source).open(2, 40)):
        session.step(random_ids(2, 7), counts=np.array([7, 3]))
        logits = [session.step(random_ids(2, 7, seed=1), tree=tree, logits="all").copy()]
        session.keep([[0, 2, 4], [5]])
        twin = session.fork()
        for seed in (2, 3):  # both go on in turn, each with a cache of its own
            logits += [
                x.step(random_ids(2, 3, seed=seed + i), logits="all").copy() for i, x in enumerate((session, twin))
            ]
        found.append(logits)
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_logits_of_a_few_rows_over_several_runs(tmp_path: Path, build: Build, library: Any) -> None:
    source = tiny_folder(tmp_path / "source", "llama")
    program = on_cpu(build(source, TensorrtRtx(max_batch=3, prefill=4, verify=1, context=64)), library)
    ids, counts = random_ids(3, 11), np.array([11, 5, 8])
    ours, theirs = (x.open(3, 64).step(ids, counts=counts, logits=5).copy() for x in (program, eager(source)))
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_what_an_engine_was_not_built_for_is_refused(tmp_path: Path, build: Build, library: Any) -> None:
    source = tiny_folder(tmp_path / "source", "llama")
    program = on_cpu(build(source, TensorrtRtx(prefill=4, verify=1, context=64)), library)
    with pytest.raises(UserError, match=r"takes 1 rows, not 2: export it with max_batch: 2"):
        program.open(2)
    with pytest.raises(UserError, match="context of 64"):
        program.open(1, 65)
    with pytest.raises(UserError, match="a tree of 5 tokens is more than this tensorrt_rtx program takes at once: 4"):
        program.open().step(random_ids(1, 5), tree=Tree((-1, 0, 0, 0, 0)))


# Building.


def test_an_engine_has_both_profiles_and_its_targets(tmp_path: Path, build: Build, library: Any) -> None:
    source = tiny_folder(tmp_path / "source", "gemma2")
    made = build(source, TensorrtRtx(compute_capabilities=["8.9", "12.0"], max_batch=2, prefill=16, verify=4))
    told = library.Engine((made.path / engine_facts.ENGINE).read_bytes()).told
    assert (told["capabilities"], told["tf32"]) == (["SM89", "SM120"], False)
    prefill, verify = told["profiles"]
    assert (prefill["ids"], verify["ids"]) == ([[1, 1], [1, 16], [2, 16]], [[1, 1], [1, 1], [2, 5]])
    assert prefill["mask_5"] == [[1, 1, 1, 1], [1, 1, 16, 32], [2, 1, 16, 128]]
    assert verify["past_keys_2"] == [[1, 2, 128, 16], [1, 2, 128, 16], [2, 2, 128, 16]]


def test_facts_say_what_an_engine_was_built_from(tmp_path: Path, build: Build, library: Any) -> None:
    source = tiny_folder(tmp_path / "source", "llama")
    first, second, other = (
        build(tiny_folder(tmp_path / f"{seed}-{i}", "llama", seed=seed), TensorrtRtx(context=32))
        for i, seed in enumerate((0, 0, 1))
    )
    facts = [engine_facts.read(x.path, "tensorrt_rtx") for x in (first, second, other)]
    assert facts[0] == facts[1]
    assert facts[0].weights_sha256 != facts[2].weights_sha256
    assert facts[0].engine_sha256 == hash_file(first.path / engine_facts.ENGINE)
    assert (facts[0].library, facts[0].version, facts[0].context) == ("tensorrt_rtx", "0.1.2", 32)
    assert (facts[0].prefill, facts[0].verify) == (32, 9)
    assert source.is_dir()


def test_timings_are_kept_from_build_to_build_where_kernels_are_timed(
    tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_folder(tmp_path / "source", "llama")
    build(source, TensorrtRtx())
    assert not (tmp_path / "cache").exists(), "tensorrt_rtx times nothing"
    see(monkeypatch, [ADA])
    kept = tmp_path / "cache" / "tensorrt-0.1.2-8.9.timing"
    for expected in (b"+", b"++"):
        build(source, TensorRt())
        assert kept.read_bytes() == expected
    kept.write_bytes(b"of another GPU")
    build(source, TensorRt())
    assert kept.read_bytes() == b"+"


def test_what_the_library_says_against_a_network_is_one_line(
    tmp_path: Path, build: Build, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_folder(tmp_path / "source", "llama")
    monkeypatch.setattr(library, "KERNELS", ())
    with pytest.raises(UserError, match=r"tensorrt_rtx 0\.1\.2 cannot build the engine: no kernel for attention$"):
        build(source, TensorrtRtx())
    monkeypatch.setattr(library, "OPERATORS", {"Add"})
    with pytest.raises(
        UserError, match=r"tensorrt_rtx 0\.1\.2 cannot parse the network: no importer for Shape, and \d+ more$"
    ):
        build(source, TensorrtRtx())


# What `check` says.


def test_check_says_that_it_builds_but_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(tiny_folder(tmp_path / "source", "llama"))
    note = "tensorrt_rtx builds here but cannot run: it runs on GPUs of compute capability"
    (found,) = TensorrtRtx().plan(spec, 0).notes
    assert found == f"{note} 8.9 or 12.0, and no NVIDIA GPU or driver is here; rows are NOT MEASURED"
    see(monkeypatch, [ADA])
    assert TensorrtRtx().plan(spec, 0).notes == ()
    (found,) = TensorrtRtx(compute_capabilities=["12.0"]).plan(spec, 0).notes
    assert found.startswith(f"{note} 12.0, here is NVIDIA RTX 4090 of 8.9")


def test_tensor_rt_needs_a_gpu_to_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(tiny_folder(tmp_path / "source", "llama"))
    with pytest.raises(UserError, match=r"no NVIDIA GPU or driver is here; allowed: .*tensorrt_rtx"):
        TensorRt().plan(spec, 0)
    see(monkeypatch, [ADA])
    assert TensorRt().plan(spec, 0).notes == ()


def test_plan_knows_the_bytes(tmp_path: Path, build: Build) -> None:
    source = tiny_folder(tmp_path / "source", "llama", hidden_size=192, intermediate_size=320)
    small = quantized(source, tmp_path / "small", Quantization(4, 32, False))
    for folder in (source, small):
        made = build(folder, TensorrtRtx(dtype="float16"))
        plan = TensorrtRtx(dtype="float16").plan(read_spec(folder), 0)
        # The stand-in writes no kernels.
        weights = plan.size_bytes - _tensorrt.ENGINE_BYTES - 3 * _tensorrt.ENGINE_BYTES_PER_LAYER
        assert weights == pytest.approx((made.path / engine_facts.ENGINE).stat().st_size, rel=0.1)


INT4, FP8 = Quantization(4, 16, True), Quantization(8, None, True, None, "fp8")
REFUSALS = [
    (Quantization(8, None, True, "dynamic"), ["8.9"], r"no scale for each token.*allowed: static or null"),
    (Quantization(4, 16, True, None, "nvfp4"), ["12.0"], r"holds integers and fp8, .*q_proj is nvfp4"),
    (INT4, ["8.9", "7.5"], r"GPUs of 7\.5 multiply no int weights, .*q_proj is such a one; allowed from 8\.0 on"),
    (FP8, ["8.6"], r"GPUs of 8\.6 multiply no fp8 weights, .*q_proj is such a one; allowed from 8\.9 on"),
]


@pytest.mark.parametrize(("form", "targets", "message"), REFUSALS, ids=str)
def test_plan_refuses_what_is_not_computed(form: Quantization, targets: Any, message: str, tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path / "source", "llama"))
    with pytest.raises(UserError, match=message):
        TensorrtRtx(compute_capabilities=targets).plan(spec.quantize({spec.layers[0].linears["q"].name: form}), 0)


def test_plan_refuses_rounded_inputs_beside_float32(tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path / "source", "llama"))
    rounded = spec.quantize({spec.layers[0].linears["q"].name: Quantization(8, None, True, "static")})
    with pytest.raises(UserError, match=r"q_proj rounds its inputs, .*; allowed: dtype float16, bfloat16"):
        TensorrtRtx().plan(rounded, 0)
    assert TensorrtRtx(dtype="float16").plan(rounded, 0)


def test_plan_refuses_bfloat16_where_gpus_have_none(tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path / "source", "llama"))
    with pytest.raises(UserError, match=r"GPUs of 7\.5 compute no bfloat16; allowed: float16, float32"):
        TensorrtRtx(dtype="bfloat16", compute_capabilities=["7.5"]).plan(spec, 0)


def test_plan_refuses_a_context_beyond_the_models(tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path / "source", "llama"))
    with pytest.raises(UserError, match="tensorrt_rtx: context 129, the model has 128 positions"):
        TensorrtRtx(context=129).plan(spec, 0)


# Before an engine is loaded.


@pytest.fixture
def engine(tmp_path: Path, build: Build) -> Path:
    """The folder of an engine for 8.9."""
    return build(tiny_folder(tmp_path / "source", "llama"), TensorrtRtx(compute_capabilities=["8.9"])).path


def refusal(path: Path, gpus: list[Gpu], version: str = "0.1.2") -> str:
    """What `check` says against loading."""
    with pytest.raises(UserError) as error:
        engine_facts.check(path, engine_facts.read(path, "tensorrt_rtx"), version, gpus)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_engine_is_let_pass_on_its_gpu(engine: Path) -> None:
    engine_facts.check(engine, engine_facts.read(engine, "tensorrt_rtx"), "0.1.2", [ADA])


def test_an_engine_for_another_machine_is_refused(engine: Path) -> None:
    needed = "it runs on GPUs of compute capability 8.9"
    assert f"{needed}, and no NVIDIA GPU or driver is here" in refusal(engine, [])
    assert f"{needed}, here is Tesla T4 of 7.5: export it again" in refusal(engine, [Gpu("Tesla T4", "7.5"), ADA])
    assert "built by tensorrt_rtx 0.1.2, here is 0.1.3: export it again" in refusal(engine, [ADA], "0.1.3")


def test_a_changed_engine_is_refused(engine: Path) -> None:
    file = engine / engine_facts.ENGINE
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert "its content is not what engine.json lists, and it is code: not loaded" in refusal(engine, [ADA])


def test_damaged_facts_are_one_line(engine: Path) -> None:
    file = engine / engine_facts.FACTS
    content = json.loads(file.read_text())
    for broken in ({**content, "profiles": ["prefill"]}, {"version": "1"}, []):
        file.write_text(json.dumps(broken))
        with pytest.raises(UserError, match=r"engine\.json: (damaged|profiles are)"):
            engine_facts.read(engine, "tensorrt_rtx")
    file.unlink()
    with pytest.raises(UserError, match=r"not a tensorrt_rtx program, engine\.json is missing"):
        engine_facts.read(engine, "tensorrt_rtx")


def test_loading_where_there_is_no_gpu_is_one_line(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traits = Traits("tensorrt_rtx", "float32", 1, "cuda", 128, 307, takes_trees=True)
    with pytest.raises(UserError, match="no NVIDIA GPU or driver is here"):
        TensorrtRtx.load(engine, traits)
    assert "no NVIDIA GPU" in (TensorrtRtx.lacks(engine, traits) or "")
    see(monkeypatch, [ADA])
    assert TensorrtRtx.lacks(engine, traits) is None
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="cannot use the GPU that is here: install a build with CUDA"):
        TensorrtRtx.load(engine, traits)


def test_what_the_library_says_against_an_engine_is_one_line(engine: Path, library: Any) -> None:
    from strop.export._tensorrt.builder import deserialize

    (engine / engine_facts.ENGINE).write_bytes(b"nonsense")
    with pytest.raises(UserError, match="cannot load it: magic tag does not match"):
        deserialize(library, engine / engine_facts.ENGINE)


def test_a_missing_library_is_named(tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    source = tiny_folder(tmp_path / "source", "llama")
    with pytest.raises(MissingExtra, match=r"exporting to tensorrt_rtx needs tensorrt_rtx: .*strop\[tensorrt-rtx\]"):
        build(source, TensorrtRtx())
    see(monkeypatch, [ADA])
    with pytest.raises(MissingExtra, match=r"exporting to tensor_rt needs tensorrt: .*strop\[tensorrt\]"):
        build(source, TensorRt())


def test_facts_survive_the_file(engine: Path) -> None:
    facts = dataclasses.replace(engine_facts.read(engine, "tensorrt_rtx"), compute_capabilities=("7.5", "12.1"))
    engine_facts.write(engine, facts)
    assert engine_facts.read(engine, "tensorrt_rtx") == facts
