"""The compiled package against our decoder in PyTorch: same logits for every packing, step shape and tree."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from references import assert_close, kl, quantized, random_ids, tiny_folder
from safetensors.torch import load_file, save_file

from strop import faults
from strop.artifact import Artifact, Manifest, hash_file, write_manifest
from strop.errors import UserError
from strop.export.eager import Eager
from strop.export.torch_compile import TorchCompile, layout, pieces
from strop.model import read_spec
from strop.numerics import code_range, dequantize, round_scales
from strop.program import Program, Traits, Tree, open_program
from strop.spec import Linear, Quantization
from strop.stage import Context, Stage

KEY = "0" * 64


@dataclass(frozen=True)
class Built:
    """A checkpoint and the folder of its compiled program."""

    source: Path
    out: Path
    traits: Traits

    def open(self) -> Program:
        return TorchCompile.load(self.out, self.traits)

    def reference(self, tmp_path: Path) -> Program:
        folder = tmp_path / "eager"
        folder.mkdir()
        return Eager.load(folder, export(Eager(), self.source, folder))


def export(stage: Stage, source: Path, out: Path) -> Traits:
    result = stage.run(Artifact(source, "checkpoint", KEY), out, Context(out.parent / "scratch", threads=1))
    traits: Traits = result["traits"]
    files = {x.name: {"sha256": hash_file(x), "size_bytes": x.stat().st_size} for x in sorted(out.iterdir())}
    write_manifest(out, Manifest("program", KEY, result["spec"].to_json(), asdict(traits), files=files))
    return traits


CASES: dict[str, tuple[str, Quantization | None]] = {
    "llama, 4 bits": ("llama", Quantization(4, 16, True)),  # tied head, looked up in its codes
    "smollm3, 3 bits": ("smollm3", Quantization(3, 16, False)),  # two kinds of layers
    "gpt2, 8 bits": ("gpt2", Quantization(8, None, False)),  # biases, LayerNorm, learned positions, no gate
    "gemma2": ("gemma2", None),  # softcaps, windows, four norms a layer, a scaled embedding
}


@pytest.fixture(scope="module", params=CASES)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    family, packing = CASES[request.param]
    place = tmp_path_factory.mktemp("compiled")
    source = tiny_folder(place / "source", family)
    if packing is not None:
        source = quantized(source, place / "packed", packing)
    (place / "program").mkdir()
    return Built(source, place / "program", export(TorchCompile(), source, place / "program"))


def test_agrees_with_the_decoder(built: Built, tmp_path: Path) -> None:
    assert_close(built.open(), built.reference(tmp_path), atol=5e-5)


def test_a_tree_step_agrees_with_the_decoder(built: Built, tmp_path: Path) -> None:
    tree = Tree((-1, 0, 0, 1, 2, -1, 5))
    found = []
    for program in (built.open(), built.reference(tmp_path)):
        session = program.open(2, 40)
        session.step(random_ids(2, 7), counts=np.array([7, 3]))
        logits = [session.step(random_ids(2, 7, seed=1), tree=tree, logits="all").copy()]
        session.keep([[0, 2, 4], [5]])
        logits.append(session.step(random_ids(2, 3, seed=2), logits="all").copy())
        found.append(logits)
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-5)


def test_a_fresh_process_elsewhere_compiles_nothing(built: Built, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(built.out, moved)
    code = f"""
import sys
from pathlib import Path
import numpy as np
from strop.artifact import open_artifact
from strop.program import open_program
session = open_program(open_artifact(Path({str(moved)!r}))).open(1, 80)
session.step(np.array([[1, 2, 3]]))
for token in range(64):
    logits = session.step(np.array([[token]]))
print(float(logits.sum()))
assert not any(name.startswith(("torch._inductor.compile_fx", "torch._dynamo.convert_frame")) for name in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=False, capture_output=True, text=True, env={"PATH": ""}
    )
    assert done.returncode == 0, done.stderr
    session = built.open().open(1, 80)
    session.step(np.array([[1, 2, 3]]))
    for token in range(64):
        logits = session.step(np.array([[token]]))
    assert float(done.stdout) == pytest.approx(float(logits.sum()), abs=1e-3)


def test_bytes_are_as_planned(built: Built) -> None:
    spec = read_spec(built.source)
    size = (built.out / "model.safetensors").stat().st_size
    planned = TorchCompile().plan(spec, 0).size_bytes
    assert planned == layout.size_bytes(spec, "float32")
    assert planned <= size <= planned + 20_000  # the header


def test_bfloat16_activations_stay_close(tmp_path: Path) -> None:
    source = quantized(tiny_folder(tmp_path / "source", "llama"), tmp_path / "packed", Quantization(8, 16, True))
    (tmp_path / "program").mkdir()
    built = Built(source, tmp_path / "program", export(TorchCompile(dtype="bfloat16"), source, tmp_path / "program"))
    ours, theirs = built.open().open(1, 40), built.reference(tmp_path).open(1, 40)
    assert built.traits.dtype == "bfloat16"
    ids = random_ids(1, 17)
    assert kl(theirs.step(ids, logits="all").copy(), ours.step(ids, logits="all").copy()) < 1e-2
    assert kl(theirs.step(ids[:, :1]).copy(), ours.step(ids[:, :1]).copy()) < 1e-2
    weights = [x.dtype for x in built.open().tensors.values()]  # type: ignore[attr-defined]  # of our own program
    assert torch.float32 not in weights


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("group_size", "width"), [(16, 48), (64, 128), (None, 48), (None, 45)])
def test_packed_codes_stand_for_the_same_weights(
    bits: int, group_size: int | None, symmetric: bool, width: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = Linear("x", width, 7, quantization=Quantization(bits, group_size, symmetric))
    form = layout.packing(linear)
    assert form is not None
    shape = (7, linear.num_groups())
    codes = torch.randint(*code_range(bits), (7, width), generator=generator, dtype=torch.int8)
    zero = torch.randint(*code_range(bits), shape, generator=generator, dtype=torch.int8) * (not symmetric)
    scale = round_scales(torch.randn(shape, generator=generator))
    expected = dequantize(codes, scale, zero)
    matrix = pieces.Matrix(linear, torch.float32).to_empty(device="cpu")
    matrix.codes, offsets = pieces.pack(form, codes, zero)
    matrix.scales = scale.bfloat16()
    if form.has_offsets:
        matrix.offsets = offsets
    assert torch.equal(matrix.dense(torch.float32), expected)
    for tokens in (1, 3):
        x = torch.randn(1, tokens, width, generator=generator)
        torch.testing.assert_close(matrix(x), x @ expected.T, atol=1e-5, rtol=1e-5)
    stored = sum(x.nbytes for x in (matrix.codes, matrix.scales, *([matrix.offsets] if form.has_offsets else [])))
    assert stored == form.size_bytes(7)


def test_one_piece_serves_all_layers_that_are_built_alike(tmp_path: Path) -> None:
    assert layout.kinds(read_spec(tiny_folder(tmp_path / "llama", "llama"))) == [0, 0, 0]
    assert layout.kinds(read_spec(tiny_folder(tmp_path / "smollm3", "smollm3"))) == [0, 1, 0]
    gemma = read_spec(tiny_folder(tmp_path / "gemma", "gemma3_text"))  # another rope: other frequencies, no other code
    assert layout.kinds(gemma) == [0, 0, 0]


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda x: x.name)
def test_planted_faults_reach_it(built: Built, tmp_path: Path, fault: faults.Fault) -> None:
    planted = faults.plant(fault, Artifact(built.out, "program", KEY), tmp_path / "planted")
    wrong, right = (
        x.open(1, 24).step(random_ids(1, 17), logits="all").copy() for x in (open_program(planted), built.open())
    )
    assert np.isfinite(wrong).all()
    assert np.abs(wrong - right).max() > 0.02 * right.std()


@pytest.fixture
def damaged(built: Built, tmp_path: Path) -> Built:
    shutil.copytree(built.out, tmp_path / "program")
    return Built(built.source, tmp_path / "program", built.traits)


@pytest.mark.parametrize("built", ["llama, 4 bits"], indirect=True)
class TestRefusals:
    def test_another_version_of_torch(self, damaged: Built) -> None:
        edit(damaged.out / layout.FACTS, torch="1.0")
        with pytest.raises(UserError, match=r"compiled for torch 1\.0, here is .*: export it again"):
            damaged.open()

    def test_a_processor_that_lacks_instructions(self, damaged: Built) -> None:
        edit(damaged.out / layout.FACTS, isa=["avx1024"])
        with pytest.raises(UserError, match="compiled for a processor with avx1024"):
            damaged.open()

    def test_code_that_is_not_what_the_manifest_lists(self, damaged: Built) -> None:
        with (damaged.out / layout.PACKAGE).open("ab") as file:
            file.write(b"x")
        with pytest.raises(UserError, match=r"model\.pt2: its content is not what the manifest lists"):
            damaged.open()

    def test_facts_that_say_something_else(self, damaged: Built) -> None:
        (damaged.out / layout.FACTS).write_text('{"torch": "2.13"}')
        with pytest.raises(UserError, match=r"compiled\.json: damaged, it must say torch and isa"):
            damaged.open()

    def test_weights_that_lack_a_tensor(self, damaged: Built) -> None:
        path = damaged.out / "model.safetensors"
        tensors = load_file(path)
        del tensors["model.layers.1.mlp.up_proj.codes"]
        save_file(tensors, path)
        with pytest.raises(UserError, match=r"damaged, its weights lack model\.layers\.1\.mlp\.up_proj\.codes"):
            damaged.open()

    def test_a_missing_package(self, damaged: Built) -> None:
        (damaged.out / layout.PACKAGE).unlink()
        with pytest.raises(UserError, match=r"not a torch_compile program, model\.pt2 is missing"):
            open_program(Artifact(damaged.out, "program", KEY))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_no_compiler_is_told_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(tiny_folder(tmp_path / "source", "llama"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler to export, g\+\+ is not on the path"):
        TorchCompile().plan(spec, 0)


def test_a_compiler_that_does_not_work_is_told_in_one_line(tmp_path: Path) -> None:
    from torch._inductor import config, cpp_builder

    source = tiny_folder(tmp_path / "source", "llama")
    (tmp_path / "program").mkdir()
    cpp_builder.cpp_compiler_search.cache_clear()
    try:
        with (
            config.patch({"cpp.cxx": (None, "/bin/false")}),
            pytest.raises(UserError, match=r"torch_compile: the C\+\+ compiler does not work: .*/bin/false"),
        ):
            export(TorchCompile(), source, tmp_path / "program")
    finally:
        cpp_builder.cpp_compiler_search.cache_clear()


def test_inputs_that_are_rounded_are_refused_before_anything_runs(tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path / "source", "llama"))
    spec = spec.quantize({x.name: Quantization(8, None, True, "dynamic") for x in spec.match(["*.1.mlp.*"])})
    with pytest.raises(
        UserError, match=r"no int8 inputs, model\.layers\.1\.mlp\.gate_proj asks.*allowed: onnx_runtime"
    ):
        TorchCompile().plan(spec, 0)


def test_float16_is_refused(tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path / "source", "llama", dtype="float16"))
    with pytest.raises(UserError, match="float32 or bfloat16"):
        TorchCompile().plan(spec, 0)
