"""Compress, lower, measure and gate transformer language models by recipe.

    import strop

    recipe = strop.load_recipe("quickstart", ["w4.bits=3"])
    report = strop.run(recipe, strop.Store(), out)

Names are imported when they are first used, so that importing strop is instant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strop.artifact import Artifact, open_artifact
    from strop.errors import ConformanceError, ExitCode, UserError
    from strop.preflight import CheckResult, check
    from strop.program import Program, Session, open_program
    from strop.recipe import Recipe
    from strop.recipe import load as load_recipe
    from strop.reply import Reply
    from strop.report import Report, read_report, table
    from strop.runner import run
    from strop.store import Store

    __version__: str

__all__ = [
    "Artifact",
    "CheckResult",
    "ConformanceError",
    "ExitCode",
    "Program",
    "Recipe",
    "Reply",
    "Report",
    "Session",
    "Store",
    "UserError",
    "__version__",
    "check",
    "load_recipe",
    "open_artifact",
    "open_program",
    "read_report",
    "run",
    "table",
]

_MODULES = {
    "Artifact": "artifact",
    "CheckResult": "preflight",
    "ConformanceError": "errors",
    "ExitCode": "errors",
    "Program": "program",
    "Recipe": "recipe",
    "Reply": "reply",
    "Report": "report",
    "Session": "program",
    "Store": "store",
    "UserError": "errors",
    "check": "preflight",
    "load_recipe": "recipe",
    "open_artifact": "artifact",
    "open_program": "program",
    "read_report": "report",
    "run": "runner",
    "table": "report",
}
_ELSEWHERE = {"load_recipe": "load"}
"""Names that differ inside their module."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("strop")
    if name not in _MODULES:
        raise AttributeError(f"module 'strop' has no attribute {name!r}")
    module = importlib.import_module(f"strop.{_MODULES[name]}")
    return getattr(module, _ELSEWHERE.get(name, name))
