"""Imports point one way: each module of strop imports only modules that come before it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import strop

WORDS = """
errors artifact machine spec families numerics kv_codes layers safetensors_file model gguf_file wheel sources plugin
stage program metric statistics decoding worker calibration export methods evals conformance faults gate
report comparison plots page doctor store document recipes recipe catalog preflight starter digest runner
release reply cli
"""
ORDER = WORDS.split()
ROOTS = {
    name: Path(strop.__file__).parent
    if name is None
    else Path(__import__(f"strop.{name}", fromlist=["_"]).__file__ or "").parent
    for name in (None, "calibration", "export", "methods", "evals", "decoding")
}


def modules() -> list[tuple[str, Path]]:
    """(part of the order, file) of every module but the package's own `__init__` and `__main__`."""
    core = [(p.stem, p) for p in ROOTS[None].glob("*.py") if not p.stem.startswith("__")]
    return core + [(name, p) for name, root in ROOTS.items() if name for p in root.rglob("*.py")]


def imported_parts(path: Path) -> set[str]:
    """Parts of strop that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "strop":
            names = [node.module] if node.module != "strop" else [f"strop.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("strop.")]
        else:
            continue
        found |= {name.split(".")[1] for name in names}
    return found


@pytest.mark.parametrize(("part", "path"), modules(), ids=lambda x: x if isinstance(x, str) else x.name)
def test_imports_only_what_comes_before(part: str, path: Path) -> None:
    assert part in ORDER, f"{path}: add {part} to the order here and in docs/architecture.md"
    assert {x for x in imported_parts(path) if ORDER.index(x) > ORDER.index(part)} == set()


@pytest.mark.parametrize("folder", ["methods", "evals"])
def test_plugins_do_not_import_each_other(folder: str) -> None:
    for path in ROOTS[folder].glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"strop.{folder}."):
                assert (node.module or "").split(".")[2].startswith("_"), f"{path} imports {node.module}"


def test_the_documented_order_is_this_one() -> None:
    document = Path(__file__).parents[1] / "docs" / "architecture.md"
    text = document.read_text(encoding="utf-8")
    block = text[text.index("errors <") :].split("\n\n")[0]
    assert [x.strip() for x in block.replace("\n", " ").split("<")] == ORDER
