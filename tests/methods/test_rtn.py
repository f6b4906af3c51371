"""The stage `rtn`: what it refuses, and that checkpoints hold the nearest codes. Maths: tests/test_numerics.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from references import tiny_folder

from strop.artifact import Artifact
from strop.errors import UserError
from strop.methods.rtn import Rtn
from strop.model import Weights, load_linear, load_packed, read_spec
from strop.numerics import find_scales, quantize
from strop.spec import Quantization
from strop.stage import Context


@pytest.fixture
def source(tmp_path: Path) -> Artifact:
    return Artifact(tiny_folder(tmp_path / "source"), "checkpoint", "0" * 64)


def run(stage: Rtn, source: Artifact, out: Path) -> dict[str, Any]:
    out.mkdir()
    return stage.run(source, out, Context(scratch=out.parent, threads=1))


@pytest.mark.parametrize(
    "fields",
    [
        {"bits": 5},
        {"bits": "4"},
        {"group_size": 0},
        {"targets": []},
        {"targets": "*"},
        {"bit": 4},
        {"symmetric": 1},
        {"activations": "static"},
        {"activations": "none"},
    ],
)
def test_unknown_values_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as caught:
        Rtn.model_validate(fields)
    assert caught.value.errors()[0]["loc"][0] in fields


def test_the_message_about_bits_lists_what_is_allowed() -> None:
    with pytest.raises(ValidationError, match="2, 3, 4 or 8"):
        Rtn.model_validate({"bits": 5})


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("group_size", "symmetric"), [(16, True), (None, True), (8, False)])
def test_checkpoints_hold_the_nearest_codes_as_planned(
    source: Artifact, tmp_path: Path, bits: Any, group_size: int | None, symmetric: bool
) -> None:
    stage = Rtn(bits=bits, group_size=group_size, symmetric=symmetric)
    plan = stage.plan(read_spec(source.path), 0)
    result = run(stage, source, tmp_path / "out")
    assert result["spec"] == plan.spec == read_spec(tmp_path / "out")
    form = Quantization(bits, group_size, symmetric)
    with Weights(source.path) as before, Weights(tmp_path / "out") as after:
        for old, new in zip(read_spec(source.path).linears(), plan.spec.linears(), strict=True):
            if new == plan.spec.head:
                assert new.quantization is None
                continue
            weight = load_linear(before, old)
            scale, zero = find_scales(weight, form)
            expected = quantize(weight, scale, zero, bits), scale, zero
            for found, wanted in zip(load_packed(after, new), expected, strict=True):
                assert torch.equal(found, wanted)


def test_inputs_are_rounded_where_that_is_asked_for(source: Artifact, tmp_path: Path) -> None:
    stage = Rtn(bits=8, group_size=None, activations="dynamic")
    result = run(stage, source, tmp_path / "out")
    assert result["spec"] == stage.plan(read_spec(source.path), 0).spec == read_spec(tmp_path / "out")
    run(Rtn(bits=8, group_size=None), source, tmp_path / "weights")
    with Weights(tmp_path / "out") as integer, Weights(tmp_path / "weights") as packed:
        both = (read_spec(tmp_path / x).match(None) for x in ("out", "weights"))
        for ours, theirs in zip(*both, strict=True):
            assert ours.quantization == Quantization(8, None, True, "dynamic")
            assert torch.equal(load_packed(integer, ours)[0], load_packed(packed, theirs)[0])


def test_the_size_is_as_planned(source: Artifact, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    stage = Rtn(bits=3, group_size=16, targets=["*"])  # the tied head too: stored untied
    run(stage, source, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(x.nbytes for x in stored.values()) == stage.plan(read_spec(source.path), 0).size_bytes


def test_gpt2_is_quantized_along_its_inputs(tmp_path: Path) -> None:
    source = Artifact(tiny_folder(tmp_path / "source", "gpt2"), "checkpoint", "0" * 64)
    result = run(Rtn(bits=8, group_size=16), source, tmp_path / "out")
    with Weights(source.path) as before, Weights(tmp_path / "out") as after:
        pairs = list(zip(read_spec(source.path).linears(), result["spec"].linears(), strict=True))
        for old, new in pairs[:-1]:
            torch.testing.assert_close(load_linear(after, new), load_linear(before, old), atol=0.01, rtol=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group_size": 64}, r"group_size 64 does not divide the 48 inputs of model\.layers\.0.*here: \[8, 16, 48\]"),
        (
            {"bits": 8, "activations": "dynamic"},
            r"activations dynamic of model\.layers\.0.*found bits 8, group_size 64",
        ),
        ({"targets": ["*.mpl.*"]}, r"'\*\.mpl\.\*' matches no linear"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_by_the_plan(
    source: Artifact, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Rtn(**fields).plan(read_spec(source.path), 0)


def test_quantizing_twice_is_refused(source: Artifact, tmp_path: Path) -> None:
    run(Rtn(group_size=16), source, tmp_path / "out")
    with pytest.raises(UserError, match="already quantized to 4 bits"):
        Rtn(group_size=16).plan(read_spec(tmp_path / "out"), 0)
