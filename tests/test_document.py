"""YAML is read without trust, and `--set` finds its way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop import document
from strop.errors import UserError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1", {"a": 1}),
        ("a: 1_000_000", {"a": 1_000_000}),
        ("a: 1e-3", {"a": 0.001}),
        ("a: -2.5", {"a": -2.5}),
        ("a: true", {"a": True}),
        ("a: ~", {"a": None}),
        ("a:", {"a": None}),
        ("a: 'true'", {"a": "true"}),
        ("a: yes", {"a": "yes"}),
        ("a: 12:30", {"a": "12:30"}),
        ("a: 2024-01-01", {"a": "2024-01-01"}),
        ("a: 1.2.3", {"a": "1.2.3"}),
        ("a: pypi:x==0.1.2", {"a": "pypi:x==0.1.2"}),
        ("a: [1, [x]]", {"a": [1, ["x"]]}),
        ("a: &x {b: 1}\nc: {<<: *x, b: 2}\nd: {<<: *x}", {"a": {"b": 1}, "c": {"b": 2}, "d": {"b": 1}}),
        ("a: &x [1]\nb: *x", {"a": [1], "b": [1]}),
    ],
)
def test_plain_values(text: str, value: Any) -> None:
    assert document.parse(text, "x") == value


LAUGHS = "\n".join(["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", r"x:\d: not YAML"),
        ("a: b: c", r"x:1: not YAML"),
        ("\x00", "not YAML"),
        ("a: 1\nb: 2\na: 3", r"x:3: duplicate key 'a'"),
        ("a: {b: 1, b: 2}", r"x:1: duplicate key 'b'"),
        ("1: 2", r"x:1: keys are text"),
        (LAUGHS, "aliases expand to more than"),
        ("a: &a [*a]", "an alias holds itself"),
        ("[" * 50 + "]" * 50, "nested more than"),
        ("[" * 100_000, "nested more than|not YAML"),
        ("a: !!python/object/apply:os.system ['true']", "tag .* is not allowed"),
        ("a: !x 1", "tag '!x' is not allowed"),
        ("a: .nan", "not a finite number"),
        ("a: 1e999", "not a finite number"),
        ("a: " + "9" * 10_000, "not a finite number"),
        ("a: 1\n---\nb: 2", "not YAML"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        document.parse(text, "x")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"# only a comment\n", "empty"),
        (b"- 1\n", "holds a list"),
        (b"text", "holds a text"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"#" * (2 << 20), "more than a recipe has"),
    ],
)
def test_files_that_hold_no_mapping(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        document.read(path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(UserError, match=str(path)):
            document.read(path)


KEYS = ("model", "stages", "evals", "gates", "calibration", "seed")
LISTS = ("stages", "export", "evals")


def recipe() -> dict[str, Any]:
    return {
        "model": {"dtype": "float32"},
        "stages": [{"use": "rtn", "name": "w4", "bits": 4}, {"use": "rtn", "bits": 8}],
        "evals": [{"use": "latency"}],
        "gates": [{"metric": "a.b", "at_most": 1}],
    }


@pytest.mark.parametrize(
    ("assignment", "path"),
    [
        ("model.dtype=bfloat16", ("model", "dtype", "bfloat16")),
        ("w4.bits=2", ("stages", 0, "bits", 2)),
        ("rtn.bits=2", ("stages", 1, "bits", 2)),
        ("stages[1].bits=2", ("stages", 1, "bits", 2)),
        ("stages.w4.targets=['*.mlp.*']", ("stages", 0, "targets", ["*.mlp.*"])),
        ("latency.pairs=3", ("evals", 0, "pairs", 3)),
        ("gates.0.at_most=0.5", ("gates", 0, "at_most", 0.5)),
        ("calibration.samples=8", ("calibration", "samples", 8)),
        ("stages.w4={use: gptq}", ("stages", 0, "use", "gptq")),
        ("seed=7", ("seed", 7)),
        ("model.dtype=", ("model", "dtype", None)),
    ],
)
def test_set_changes_one_value(assignment: str, path: tuple[Any, ...]) -> None:
    content = recipe()
    document.override(content, assignment, KEYS, LISTS)
    at: Any = content
    for step in path[:-1]:
        at = at[step]
    assert at == path[-1]


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("bits", "PATH=VALUE"),
        ("=3", "PATH=VALUE"),
        ("a..b=3", "PATH=VALUE"),
        ("stages[9].bits=3", "no element '9'"),
        ("stages.w5.bits=3", "no element 'w5'; allowed: 0, 1, rtn, w4"),
        ("gtq.bits=3", "nothing is called 'gtq'"),
        ("model_.dtype=float32", "did you mean 'model'"),
        ("model.dtype.x=3", "inside a text"),
        ("seed=[", "not YAML"),
    ],
)
def test_set_says_what_is_wrong(assignment: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        document.override(recipe(), assignment, KEYS, LISTS)
