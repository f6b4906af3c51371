"""The table of number formats and runtimes: each of its cells is tried on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from references import VOCAB_SIZE, tiny_folder

from strop import catalog, plugin
from strop.artifact import Artifact, Manifest, write_manifest
from strop.errors import UserError
from strop.layers import round_inputs
from strop.methods.gptq import Gptq
from strop.methods.rtn import Rtn
from strop.model import read_spec
from strop.program import Logits, Program
from strop.spec import ModelSpec
from strop.stage import Context, Plan, Stage

KEY = "0" * 64
RUNTIMES = ("eager", "onnx_runtime", "gguf", "auto_gptq")
"""Those whose programs are made and run here in no time."""
IDS = np.arange(24)[None] * 11 % VOCAB_SIZE


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats") / "source"
    return tiny_folder(folder, hidden_size=192, intermediate_size=64, head_dim=32, num_hidden_layers=1)


@pytest.fixture(scope="module", params=list(catalog.FORMATS))
def checkpoint(
    request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Artifact]:
    """What a recipe writes, and the checkpoint that it gets."""
    place = tmp_path_factory.mktemp("checkpoint")
    fields = yaml.safe_load("{" + request.param + "}")
    stage: Stage = Rtn.model_validate(fields) if fields.get("activations") != "static" else Gptq.model_validate(fields)
    np.save(place / "ids.npy", np.random.default_rng(0).integers(0, VOCAB_SIZE, (4, 24)))
    for name in ("out", "scratch"):
        (place / name).mkdir()
    context = Context(place / "scratch", threads=1, calibration=place / "ids.npy")
    result = stage.run(Artifact(source, "checkpoint", KEY), place / "out", context)
    write_manifest(place / "out", Manifest("checkpoint", KEY, result["spec"].to_json()))
    return request.param, Artifact(place / "out", "checkpoint", KEY)


def logits(program: Program) -> Logits:
    return program.open(1, IDS.size).step(IDS, logits="all")[0].copy()


def open_exact(stage: Any, made: dict[str, Any], folder: Path, out: Path) -> Program:
    """The program, with no more rounding of inputs than its checkpoint asks for."""
    traits, write_exact = made["traits"], getattr(stage, "write_exact", None)
    exact = None if write_exact is None else write_exact(folder, traits, out)
    return stage.load(folder, traits) if exact is None else stage.load(out, exact)  # type: ignore[no-any-return]


def test_what_a_recipe_writes_is_what_the_table_says(checkpoint: tuple[str, Artifact]) -> None:
    text, artifact = checkpoint
    assert {x.quantization for x in read_spec(artifact.path).match(None)} == {catalog.FORMATS[text]}


@pytest.mark.parametrize("runtime", plugin.names("export"))
def test_each_cell_is_true(runtime: str, checkpoint: tuple[str, Artifact], source: Path, tmp_path: Path) -> None:
    text, artifact = checkpoint
    stage, spec = plugin.find("export", runtime, Stage)(), read_spec(artifact.path)
    said = catalog.support(runtime, catalog.FORMATS[text])
    if said is None:
        for refuse in (lambda: stage.support(spec), lambda: stage.plan(spec, 0)):
            with pytest.raises(UserError) as caught:
                refuse()
            assert "\n" not in str(caught.value)
        return
    assert stage.support(spec) == said
    if runtime not in RUNTIMES:
        return
    for name in ("out", "exact", "eager"):
        (tmp_path / name).mkdir()
    plan, made = stage.plan(spec, 0), stage.run(artifact, tmp_path / "out", Context(tmp_path, threads=1))
    write_manifest(tmp_path / "out", Manifest("program", KEY, spec.to_json()))
    eager = plugin.find("export", "eager", Stage)()
    reference = eager.run(artifact, tmp_path / "eager", Context(tmp_path, threads=1))
    ours = open_exact(stage, made, tmp_path / "out", tmp_path / "exact")
    theirs: Any = eager.load(tmp_path / "eager", reference["traits"])  # type: ignore[attr-defined]
    if "activations" in text and runtime != "eager":
        round_inputs(theirs.decoder, rounds=False)
    np.testing.assert_allclose(logits(ours), logits(theirs), atol=2e-4)
    if said != "dequantized":
        assert (bits_of_a_weight(plan, read_spec(source)) - catalog.FORMATS[text].bits >= 1) == (said == "widened")


def bits_of_a_weight(plan: Plan, parent: ModelSpec) -> float:
    """What the weights that are quantized take, scales and zero points included, by what a program is smaller."""
    weights = sum(x.in_features * x.out_features for x in parent.match(None))
    return 32 - 8 * (parent.size_bytes() - plan.size_bytes) / weights
