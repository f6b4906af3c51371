"""Keys change with the code that a stage runs, and with nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from strop.digest import library_versions

Digest = Callable[..., str]
PRINT = "from strop.digest import code_digest; print(code_digest('PACKAGE.stage'))"


@pytest.fixture
def digest_of(tmp_path: Path) -> Digest:
    """A function: texts of the modules of a package -> digest of its module `stage`, found by a fresh process."""

    def run(**files: str) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir()))) / "PACKAGE"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        return subprocess.check_output([sys.executable, "-c", PRINT], cwd=folder.parent, text=True)

    return run


def test_docstrings_comments_and_layout_do_not_count(digest_of: Digest) -> None:
    plain = digest_of(stage="def run():\n    return 1\n")
    dressed = digest_of(stage='"""Doc."""\n\n\ndef run():  # why\n    """Doc."""\n    return (1)\n')
    assert plain == dressed
    assert plain != digest_of(stage="def run():\n    return 2\n")


@pytest.mark.parametrize(
    "statement",
    [
        "from PACKAGE.maths import scale",
        "from PACKAGE import maths",
        "import PACKAGE.maths",
        "from .maths import scale",
        "from . import maths",
    ],
)
def test_code_that_is_imported_inside_a_function_counts(digest_of: Digest, statement: str) -> None:
    stage = f"def run():\n    {statement}\n    return scale()\n"
    maths = "from PACKAGE.deeper import x\n\ndef scale():\n    return x\n"
    first = digest_of(stage=stage, maths=maths, deeper="x = 1\n")
    assert first == digest_of(stage=stage, maths=maths, deeper="x = 1\n", unrelated="y = 1\n")
    assert first != digest_of(stage=stage, maths=maths, deeper="x = 2\n")


def test_imports_for_type_checkers_do_not_count(digest_of: Digest) -> None:
    stage = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from PACKAGE.maths import T\n"
    assert digest_of(stage=stage, maths="T = int\n") == digest_of(stage=stage, maths="T = str\n")


def test_modules_that_import_each_other_have_a_digest(digest_of: Digest) -> None:
    assert digest_of(stage="import PACKAGE.maths\n", maths="import PACKAGE.stage\n")


def test_libraries_are_those_that_the_code_imports() -> None:
    found = library_versions("strop.document")
    assert set(found) == {"python", "yaml"}
    assert "torch" in library_versions("strop.methods.rtn")


def test_digesting_imports_no_library() -> None:
    code = (
        "import sys; from strop.digest import code_digest, library_versions; code_digest('strop.methods.rtn'); "
        "library_versions('strop.methods.rtn'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
