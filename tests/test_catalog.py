"""What `strop list` says is what the classes hold, and docs/recipes.md is current."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from strop import catalog, plugin
from strop.cli import main
from strop.spec import CacheQuantization

DOCUMENT = Path(__file__).parents[1] / "docs" / "recipes.md"


def test_the_document_is_current() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == catalog.markdown(), "run: strop list --markdown > docs/recipes.md"


def test_everything_that_a_recipe_can_name_is_listed(capsys: Any) -> None:
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    for kind in ("methods", "export", "evals"):
        for name in plugin.names(kind):  # type: ignore[arg-type]  # the literals above
            assert f"\n  {name}: " in text
    assert "  quickstart: " in text


def test_every_field_says_what_it_means() -> None:
    assert [(x.name, f.name) for x in catalog.entries() for f in x.fields if not f.text] == []
    assert [x.name for x in catalog.entries() if not x.summary] == []


def test_one_name_or_one_kind(capsys: Any) -> None:
    assert main(["list", "rtn"]) == 0
    text = capsys.readouterr().out
    assert "group_size" in text
    assert "divergence" not in text
    assert main(["list", "metrics"]) == 0
    assert "measures kl_mean" in capsys.readouterr().out
    assert main(["list", "gtpq"]) == 2
    assert "nothing is called 'gtpq'" in capsys.readouterr().err
    assert main(["list", "rtn", "--markdown"]) == 2


class Example(BaseModel):
    """Stands for a stage.

    Attributes:
        bits: width of a code
        ratio: A share.
    """

    bits: Literal[2, 4, 8] = 4
    ratio: float | None = Field(default=None, gt=0, le=1)
    names: list[str] = Field(description="which ones")
    flag: bool = False
    nested: dict[str, dict[str, Any]] = Field(default_factory=dict)


@pytest.mark.parametrize(
    ("name", "type_text", "default", "text"),
    [
        ("bits", "2, 4 or 8", "4", "Width of a code."),
        ("ratio", "number > 0, ≤ 1, or null", "null", "A share."),
        ("names", "list of text", "required", "Which ones."),
        ("flag", "true or false", "false", ""),
        ("nested", "mapping to mapping", "{}", ""),
    ],
)
def test_fields_are_told_in_the_words_of_yaml(name: str, type_text: str, default: str, text: str) -> None:
    found = {x.name: x for x in catalog.fields(Example)}
    assert found[name] == catalog.FieldText(name, type_text, default, text)


def test_listing_needs_no_torch() -> None:
    code = (
        "import sys; from strop import catalog; catalog.listing(); print({'torch', 'onnxruntime'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_which_cache_runs_where_is_read_from_the_exports() -> None:
    int4, fp8 = CacheQuantization("int4", "channel", "head"), CacheQuantization("fp8", "head", "head")
    assert [catalog.holds_cache("onnx_runtime", x) for x in (int4, fp8)] == [True, False]
    assert [catalog.holds_cache("eager", x) for x in (int4, fp8)] == [True, True]
    assert not any(catalog.holds_cache(x, int4) for x in ("gguf", "auto_gptq", "torch_compile", "tensor_rt"))
