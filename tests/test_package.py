"""What ships: every folder, every recipe, and what a quick start must not load."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]


def test_every_folder_with_python_is_a_package_that_ships() -> None:
    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    roots = {"strop": "pipeline", **settings["package-dir"]}
    shipped = {
        CHECKOUT / roots[name] if name in roots else CHECKOUT.joinpath("pipeline", *name.split(".")[1:])
        for name in settings["packages"]
    }
    skipped = {"tests", "benchmarks", "build", "docs"}
    with_python = {p.parent for p in CHECKOUT.rglob("*.py") if p.relative_to(CHECKOUT).parts[0] not in skipped}
    assert {
        p for p in with_python if not any(part.startswith(".") for part in p.relative_to(CHECKOUT).parts)
    } == shipped


def test_every_recipe_is_in_the_installed_package() -> None:
    ours = {p.name for p in (CHECKOUT / "recipes").glob("*.yaml")}
    assert ours == {p.name for p in files("strop.recipes").iterdir() if p.name.endswith(".yaml")}
    assert "quickstart.yaml" in ours


def test_type_hints_and_the_licence_ship() -> None:
    assert files("strop").joinpath("py.typed").is_file()
    assert distribution("strop").metadata["License-Expression"] == "Apache-2.0"


def test_importing_strop_loads_no_heavy_library() -> None:
    heavy = {"torch", "transformers", "onnxruntime", "pydantic", "numpy"}
    code = f"import sys, strop; strop.UserError; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
