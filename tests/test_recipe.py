"""Recipes: every mistake is named with its place, and variants fork as they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from strop import recipe
from strop.errors import SeveralErrors, UserError

METRIC = """
from typing import ClassVar
from strop.metric import Kind, Metric

class Fake(Metric):
    kind: ClassVar[Kind] = "quality"
    samples: int = 4

    def names(self):
        return {"value": "nats"}

    def measure(self, program, references, context):
        raise NotImplementedError
"""
RUNTIME = """
from typing import ClassVar
from strop.artifact import Format
from strop.stage import ArtifactRef, Stage

class Fake(Stage):
    gives: ClassVar[Format] = "program"
    level: int = 0
    teacher: ArtifactRef = ArtifactRef("parent")

    def plan(self, spec, num_calibration_tokens):
        raise NotImplementedError

    def run(self, source, out, context):
        raise NotImplementedError
"""


@pytest.fixture(autouse=True)
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "modules" / "recipe_fakes"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "metric.py").write_text(METRIC)
    (folder / "runtime.py").write_text(RUNTIME)
    monkeypatch.syspath_prepend(folder.parent)


def content(**changes: Any) -> dict[str, Any]:
    plain = {
        "version": 1,
        "model": {"source": "somewhere"},
        "stages": [{"use": "rtn", "name": "w4", "bits": 4}, {"use": "rtn", "name": "head", "targets": ["lm_head"]}],
        "export": [{"use": "recipe_fakes.runtime", "name": "fake"}],
        "evals": [{"use": "recipe_fakes.metric", "name": "quality"}],
        "gates": [{"metric": "quality.value", "at_most": 1}],
    }
    return {**plain, **changes}


def errors(found: Any) -> tuple[str, ...]:
    with pytest.raises(SeveralErrors) as caught:
        recipe.parse(found, "x", "x.yaml")
    return caught.value.lines


def test_a_whole_recipe() -> None:
    found = recipe.parse(content(variants={"w8": {"replace": {"w4": {"use": "rtn", "bits": 8}}, "explore": True}}), "x")
    main, w8 = found.chains
    assert [(x.name, x.use, x.stage.bits) for x in main.stages] == [("w4", "rtn", 4), ("head", "rtn", 4)]
    assert [(x.name, x.use, x.stage.bits) for x in w8.stages] == [("w4", "rtn", 8), ("head", "rtn", 4)]
    assert (main.is_explored, w8.is_explored) == (False, True)
    assert found.row_names() == ["parent / eager", "parent / fake", "main / fake", "w8 / fake"]
    assert found.exports[0].references() == {"teacher": "parent"}
    assert list(found.evals) == ["quality"]


def test_a_variant_drops_stages() -> None:
    found = recipe.parse(content(variants={"plain_head": {"drop": ["head"]}}), "x")
    assert [x.name for x in found.chains[1].stages] == ["w4"]


def test_a_name_defaults_to_use() -> None:
    assert recipe.parse(content(stages=[{"use": "rtn"}]), "x").chains[0].stages[0].name == "rtn"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version: found 2, allowed: 1"),
        ({"stagse": []}, "stagse: unknown key; did you mean 'stages'?"),
        ({"model": {"source": "x", "dtyp": "float32"}}, "model.dtyp: unknown key; did you mean 'dtype'?"),
        ({"model": {"source": "x", "dtype": "int4"}}, "model.dtype: found \"int4\", allowed: 'float32', 'bfloat16'"),
        ({"model": {}}, "model.source: is missing"),
        ({"model": "x"}, 'model: found "x", should be'),
        ({"stages": {"use": "rtn"}}, 'stages: found {"use": "rtn"}, a list is needed'),
        ({"stages": [4]}, "stages[0]: found 4"),
        ({"stages": [{"bits": 4}]}, "stages[0].use: is missing"),
        ({"stages": [{"use": "rtm"}]}, "stages[0].use: no method named 'rtm'; did you mean 'rtn'?"),
        ({"stages": [{"use": "rtn", "bits": 5}]}, "stages[0].bits: found 5, allowed: 2, 3, 4 or 8"),
        ({"stages": [{"use": "rtn", "bits": "4"}]}, 'stages[0].bits: found "4", allowed'),
        (
            {"stages": [{"use": "rtn", "group_sise": 4}]},
            "stages[0].group_sise: unknown key; did you mean 'group_size'?",
        ),
        ({"stages": [{"use": "rtn", "group_size": 0}]}, "stages[0].group_size: found 0, should be greater than 0"),
        ({"stages": [{"use": "rtn"}, {"use": "rtn"}]}, "stages[1].name: 'rtn' is taken"),
        ({"stages": [{"use": "rtn", "name": "parent"}]}, "stages[0].name: 'parent' is not allowed"),
        ({"stages": [{"use": "rtn", "name": "a / b"}]}, "stages[0].name: 'a / b' is not allowed"),
        ({"export": []}, "export: found [], at least 1 needed"),
        ({"export": [{"use": "no.such.module"}]}, "export[0].use: no module 'no.such.module' can be imported"),
        (
            {"export": [{"use": "recipe_fakes.metric"}]},
            "export[0].use: recipe_fakes.metric must define exactly one Stage",
        ),
        ({"evals": [{"use": "nothing"}]}, "evals[0].use: no metric named 'nothing'"),
        ({"gates": [{"metric": "a.b"}]}, "gates[0]: found"),
        ({"gates": [{"metric": "a.b", "atmost": 1}]}, "gates[0].atmost: unknown key; did you mean 'at_most'?"),
        ({"variants": {"v": {"drop": ["w5"]}}}, "variants.v.drop: no stage named 'w5'; allowed: head, w4"),
        ({"variants": {"v": {"replace": {"w4": {"use": "rtn", "bits": 5}}}}}, "variants.v.replace.w4.bits: found 5"),
        ({"variants": {"main": {}}}, "variants.main: this name is not allowed"),
        ({"variants": {"v": {"explore": True}}}, "variants.v: changes nothing, it would be the main chain again"),
        ({"variants": {"v": {"add": []}}}, "variants.v.add: unknown key; allowed: drop, explore, replace"),
        ({"threads": 0}, "threads: found 0, should be greater than 0"),
        ({"seed": True}, "seed: found true"),
    ],
)
def test_a_mistake_is_named_with_its_place(changes: dict[str, Any], message: str) -> None:
    found = errors(content(**changes))
    assert any(x.startswith("x.yaml: " + message) for x in found), found
    assert all("\n" not in x for x in found)


def test_every_mistake_is_named_at_once() -> None:
    found = errors(content(stages=[{"use": "rtn", "bits": 5, "x": 1}, {"use": "rtm"}], evals=[{"use": "y"}]))
    assert len(found) == 4


def test_overrides_are_applied_before_checking(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content()))
    found = recipe.load(path, ["w4.bits=2", "model.source=elsewhere"])
    assert found.name == "mine"
    assert found.chains[0].stages[0].stage.bits == 2  # type: ignore[attr-defined]
    assert found.text["model"]["source"] == "elsewhere"
    with pytest.raises(UserError, match=r"mine\.yaml --set w4\.bits=7: stages\[0\]\.bits: found 7"):
        recipe.load(path, ["w4.bits=7"])


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(UserError, match="did you mean 'quickstart'"):
        recipe.load("quikstart")


@pytest.mark.parametrize("name", sorted(recipe.built_in()))
def test_every_shipped_recipe_loads(name: str) -> None:
    assert recipe.load(name).name == name


def test_the_schema_knows_the_fields_of_a_method() -> None:
    schema = recipe.json_schema()
    json.dumps(schema)
    options = {x.get("title"): x for x in schema["$defs"]["Stage"]["oneOf"]}
    assert options["rtn"]["properties"]["bits"]["enum"] == [2, 3, 4, 8]
    assert options["rtn"]["properties"]["bits"]["description"] == "Width of a code."
    assert options["rtn"]["required"] == ["use"]
    assert "patterns" in options["rtn"]["properties"]["targets"]["description"].lower()
