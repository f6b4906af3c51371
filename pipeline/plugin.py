"""Finds methods, runtimes and metrics by name: module name = YAML name.

Three places, in this order: a dotted name (`package.module`), the modules shipped here, entry points of the group
`strop.methods`, `strop.export` or `strop.evals` (name = YAML name, value = module).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
from functools import cache
from importlib.metadata import entry_points
from typing import Literal, TypeVar

from strop.errors import UserError, did_you_mean

Kind = Literal["methods", "export", "evals"]
T = TypeVar("T")


@cache
def names(kind: Kind) -> tuple[str, ...]:
    """Every name of a kind that a recipe can use, sorted."""
    package = importlib.import_module(f"strop.{kind}")
    shipped = {m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")}
    return tuple(sorted(shipped | {e.name for e in entry_points(group=f"strop.{kind}")}))


def module_name(kind: Kind, name: str) -> str:
    """The importable module behind a YAML name.

    Raises:
        UserError: No such module.
    """
    if "." in name:
        return name
    if name not in names(kind):
        noun = {"methods": "method", "export": "runtime", "evals": "metric"}[kind]
        raise UserError(f"use: no {noun} named {name!r}; {did_you_mean(name, names(kind))}")
    for entry in entry_points(group=f"strop.{kind}"):
        if entry.name == name:
            return entry.value
    return f"strop.{kind}.{name}"


def find(kind: Kind, name: str, base: type[T]) -> type[T]:
    """The class behind a YAML name: the one subclass of `base` that the module defines.

    Raises:
        UserError: No such module, or it defines no such class or several.
    """
    path = module_name(kind, name)
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name and path.startswith(error.name):
            raise UserError(f"use: no module {path!r} can be imported") from error
        raise
    classes = [
        x
        for _, x in inspect.getmembers(module, inspect.isclass)
        if issubclass(x, base) and x.__module__ == module.__name__ and not inspect.isabstract(x)
    ]
    if len(classes) != 1:
        raise UserError(f"use: {path} must define exactly one {base.__name__}, it defines {len(classes)}")
    return classes[0]
