"""What of the code and its libraries enters a key: all that could change a result, no comments and no docstrings.

Reads source text only, imports nothing. Leaves out the rest of a key (runner.py).
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import platform
import sys
from collections.abc import Iterator
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from strop.artifact import hash_json

DISTRIBUTIONS = {
    "yaml": ("pyyaml",),
    "sklearn": ("scikit-learn",),
    "tensorrt_rtx": ("tensorrt-rtx-cu12", "tensorrt-rtx-cu13"),
}
"""Imported name -> distributions that may hold it, where they differ by more than - and _."""


@cache
def code_digest(module: str) -> str:
    """sha256 of a module's code and of all code of the same package that it imports, docstrings and comments left out.

    Imports inside functions count, those under `if TYPE_CHECKING` do not: they run nothing.

    Args:
        module: Dotted name.
    """
    return hash_json({name: _parsed(name)[0] for name in _closure(module)})


@cache
def library_versions(module: str) -> dict[str, str]:
    """Versions of every library that a module, or what it imports of its own package, uses; and Python's.

    Libraries that are not installed are left out.
    """
    found = {"python": platform.python_version()}
    for name in _closure(module):
        for library in _parsed(name)[2]:
            for distribution in DISTRIBUTIONS.get(library, (library,)):
                with contextlib.suppress(PackageNotFoundError):
                    found[library] = version(distribution)
    return dict(sorted(found.items()))


@cache
def _closure(module: str) -> tuple[str, ...]:
    """A module and everything of its package, and of strop, that it imports, sorted."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting.extend(_parsed(name)[1])
    return tuple(sorted(seen))


@cache
def _parsed(module: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Digest of one file, modules of strop or of its own package that it imports, libraries that it imports."""
    path = _path(module)
    assert path is not None, module
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = {"strop", module.partition(".")[0]}
    inside: set[str] = set()
    libraries: set[str] = set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for name in _imports(tree, package):
        top = name.partition(".")[0]
        if top in own:
            # `from strop import model` names a module, `from strop.model import load` something in one
            found = name if _path(name) else name.rpartition(".")[0]
            if found and found != "strop" and _path(found):
                inside.add(found)
        elif top not in sys.stdlib_module_names:
            libraries.add(top)
    _drop_docstrings(tree)
    digest = hashlib.sha256(ast.dump(tree).encode()).hexdigest()
    return digest, tuple(sorted(inside)), tuple(sorted(libraries))


@cache
def _spec(module: str) -> ModuleSpec | None:
    """Where a module is. Imports nothing but the packages that it is in."""
    parent = module.rpartition(".")[0]
    if parent:
        package = _spec(parent)
        if package is None or package.submodule_search_locations is None:
            return None
    return importlib.util.find_spec(module)


def _path(module: str) -> Path | None:
    """The source file of a module, None where there is none."""
    spec = _spec(module)
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def _imports(node: ast.AST, package: str) -> Iterator[str]:
    """Every dotted name that code below a node imports, objects of modules included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
            base = ".".join([*parents, *([child.module] if child.module else [])])
            yield from (f"{base}.{alias.name}" for alias in child.names)
        yield from _imports(child, package)


def _drop_docstrings(tree: ast.Module) -> None:
    """Remove string expressions, in place: docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [x for x in body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]  # every node with a list for a body
