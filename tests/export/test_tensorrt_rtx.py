"""The real TensorRT-RTX, which builds engines without a GPU; and on a GPU, engines against the decoder."""

from __future__ import annotations

import importlib.util
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from references import quantized, random_ids, tiny_folder

from strop.artifact import Artifact, Manifest, open_artifact, write_manifest
from strop.errors import UserError
from strop.export._tensorrt import facts as engine_facts
from strop.export.eager import Eager
from strop.export.tensor_rt import TensorRt
from strop.export.tensorrt_rtx import TensorrtRtx
from strop.machine import gpus
from strop.methods.rtn import Rtn
from strop.model import read_spec
from strop.program import open_program
from strop.spec import Quantization
from strop.stage import Context, Stage

KEY = "0" * 64
needs_rtx = pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="no tensorrt_rtx")
MODEL = os.environ.get("STROP_TEST_MODEL", "")
"""A GGUF file or folder of SmolLM2-135M, for the test that builds its engines."""


def apply(stage: Stage, source: Path, out: Path) -> Path:
    """One stage, its output with a manifest."""
    out.mkdir()
    scratch = out.with_name(f"{out.name}-scratch")
    scratch.mkdir()
    result = stage.run(Artifact(source, "checkpoint", KEY), out, Context(scratch, threads=1))
    traits = asdict(result["traits"]) if "traits" in result else None
    write_manifest(out, Manifest(stage.gives, KEY, result["spec"].to_json(), traits))
    return out


FORMS = [None, Quantization(4, 32, True), Quantization(8, None, True), Quantization(8, None, True, "static")]
FORMS += [Quantization(8, None, True, x, "fp8") for x in (None, "static")]  # type: ignore[arg-type]  # literals


@needs_rtx
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_library_builds_engines_of_every_form(form: Quantization | None, tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", "llama", hidden_size=192, intermediate_size=320)
    if form is not None:
        source = quantized(source, tmp_path / "small", form, head=False)
    stage = TensorrtRtx(dtype="float16", compute_capabilities=["8.9"], max_batch=2, prefill=16, verify=4)
    made = apply(stage, source, tmp_path / "program")
    facts = engine_facts.read(made, "tensorrt_rtx")
    planned = stage.plan(read_spec(source), 0).size_bytes
    assert planned == pytest.approx((made / engine_facts.ENGINE).stat().st_size, rel=0.5)
    assert facts.compute_capabilities == ("8.9",)
    if not gpus():
        with pytest.raises(UserError, match="no NVIDIA GPU or driver is here"):
            engine_facts.check(made, facts, facts.version)


@needs_rtx
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gemma2", "gpt2", "phi3"])
def test_the_library_takes_the_network_of_other_families(family: str, dtype: Any, tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", family)
    apply(TensorrtRtx(dtype=dtype, context=64), source, tmp_path / "program")


@needs_rtx
@pytest.mark.slow
@pytest.mark.timeout(3600)  # the library swallows what a timeout raises inside its log call, and goes on
@pytest.mark.skipif(not MODEL, reason="STROP_TEST_MODEL names no model")
def test_engines_of_a_real_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from strop.sources import fetch

    (tmp_path / "fp16").mkdir()
    fetch(MODEL, "float16", tmp_path / "fp16")
    apply(Rtn(), tmp_path / "fp16", tmp_path / "int4")
    sizes: dict[tuple[str, str], int] = {}
    for name in ("fp16", "int4"):
        for capability in ("8.9", "12.0"):
            start = time.perf_counter()
            stage = TensorrtRtx(compute_capabilities=[capability], context=2048)
            made = apply(stage, tmp_path / name, tmp_path / f"{name}-{capability}")
            sizes[name, capability] = (made / engine_facts.ENGINE).stat().st_size
            with capsys.disabled():
                seconds = time.perf_counter() - start
                print(f"\n{name} for {capability}: {seconds:.1f} s, {sizes[name, capability]} bytes", end="")
    # Linears of the layers are 106 M weights: 212 MB in float16; in int4 they take 53 MB, scales and offsets 7 MB.
    for capability in ("8.9", "12.0"):
        assert sizes["int4", capability] < sizes["fp16", capability] - 140e6, "codes were unpacked when it was built"


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [TensorRt, TensorrtRtx])
@pytest.mark.parametrize(("dtype", "atol"), [("float32", 2e-3), ("float16", 0.05), ("bfloat16", 0.3)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_engines_agree_with_the_decoder_on_a_gpu(
    family: str, dtype: Any, atol: float, stage: Any, tmp_path: Path
) -> None:
    if not gpus():
        pytest.skip("no GPU")
    pytest.importorskip(stage.package)
    source = tiny_folder(tmp_path / "source", family)
    made = apply(stage(dtype=dtype, max_batch=3, prefill=7, verify=3, context=64), source, tmp_path / "program")
    reference = apply(Eager(), source, tmp_path / "eager")
    ours, theirs = (open_program(open_artifact(x)) for x in (made, reference))
    for batch, width in ((1, 1), (1, 17), (3, 5)):
        sessions = [x.open(batch, 40) for x in (ours, theirs)]
        for step in range(3):
            found = [x.step(random_ids(batch, width if step == 0 else 2, seed=step), logits="all") for x in sessions]
            assert np.isfinite(found[0]).all()
            np.testing.assert_allclose(found[0], found[1], atol=atol)
