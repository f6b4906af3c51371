"""Every shipped recipe runs end to end, on a tiny model and little text, and ends in a report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from references import tiny_folder

from strop import recipe
from strop.cli import main

QUICK = "quickstart"
"""The recipe that runs with every metric; of the others, those that start many processes are left out."""
SLOW = ("latency", "memory")
SMALL = {
    "calibration": ("samples=2", "length=32"),
    "divergence": ("windows=2", "length=32", "shortest=8"),
    "perplexity": ("windows=2", "length=32", "shortest=8"),
    "latency": ("prompts=5", "prompt_tokens=4", "new_tokens=2", "min_pairs=10", "max_pairs=10"),
    "memory": ("prompt_tokens=8",),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    widths = {"hidden_size": 96, "intermediate_size": 64}  # the blocks of a GGUF file divide them
    return tiny_folder(tmp_path_factory.mktemp("recipes") / "tiny", **widths)


def small(found: recipe.Recipe, model: Path) -> list[str]:
    """Overrides that make a recipe fit a tiny model and a test's patience."""
    left_out = () if found.name == QUICK else SLOW
    evals = [x for x in found.text["evals"] if x["use"] not in left_out]
    gates = [x for x in found.text["gates"] if x["metric"].split(".")[0] not in left_out]
    present = {x["use"] for x in evals} | ({"calibration"} if found.calibration else set())
    grouped = {
        x.place: x
        for y in found.chains
        for x in y.stages
        if getattr(x.stage, "group_size", None) is not None and getattr(x.stage, "format", "int") == "int"
    }
    groups = [place if place.startswith("variants") else x.name for place, x in grouped.items()]
    return [
        f"model.source={model}", "threads=1", f"evals={json.dumps(evals)}", f"gates={json.dumps(gates)}",
        *(f"{name}.{x}" for name in sorted(present) for x in SMALL.get(name, ())),
        *(f"{x}.group_size=32" for x in groups),
    ]  # fmt: skip


@pytest.mark.timeout(900)  # a dozen fresh processes, each importing a runtime
@pytest.mark.parametrize("name", sorted(recipe.built_in()))
def test_a_shipped_recipe_runs(name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = recipe.load(name)
    arguments = [y for x in small(found, model) for y in ("--set", x)]
    code = main(["run", name, *arguments, "--store", str(tmp_path / "store"), "--out", str(tmp_path / "out")])
    assert code in (0, 3, 4, 5), capsys.readouterr().err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [x["failures"] for x in report["rows"]] == [{}] * len(report["rows"])
    assert [x["name"] for x in report["rows"]] == found.row_names()
    assert {x["outcome"] for x in report["gates"]} <= {"PASS", "FAIL", "INCONCLUSIVE"}
