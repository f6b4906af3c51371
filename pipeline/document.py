"""YAML text as plain values, read without trust: no tags, no duplicate keys, bounded aliases. And `--set` on them.

Leaves out what the values mean (recipe.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from strop.errors import UserError, did_you_mean

Value = Any
"""None, bool, int, float, str, or lists and string-keyed dicts of these."""

TAG = "tag:yaml.org,2002:"
IMPLICIT = ("null", "bool", "int", "float", "str", "timestamp", "merge", "value")
"""Tags that PyYAML gives to text that has none; what they mean is read from `SCALARS` instead."""
MAX_BYTES = 1 << 20
MAX_VALUES = 20_000
"""Values after aliases are expanded: a few lines of aliases of aliases can stand for billions."""
MAX_DEPTH = 40

SCALARS: Mapping[str, tuple[re.Pattern[str], Callable[[str], Value]]] = {
    "null": (re.compile(r"~|null|Null|NULL|"), lambda _: None),
    "bool": (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    "int": (re.compile(r"[-+]?[0-9][0-9_]{0,30}"), lambda text: int(text.replace("_", ""))),
    "float": (
        re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"),
        lambda text: float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan")),
    ),
}  # fmt: skip
"""YAML 1.2's core schema: `1e-3` is a number here, `yes` and `12:30` are text, unlike in YAML 1.1."""


def read(path: Path) -> dict[str, Value]:
    """The mapping in a YAML file.

    Raises:
        UserError: No such file, not YAML, not a mapping, or one of the things that this module refuses.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path}: {path.stat().st_size} bytes are more than a recipe has ({MAX_BYTES} at most)")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not YAML, byte {error.start} is not UTF-8 text") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read, {error.strerror}") from error
    value = parse(text, str(path))
    if value is None:
        raise UserError(f"{path}: empty, a recipe begins with `version: 1`")
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a {_kind(value)}, a recipe is a mapping that begins with `version: 1`")
    return value


def parse(text: str, source: str) -> Value:
    """The value of YAML text.

    Args:
        text: One YAML document.
        source: What to call it in errors.

    Raises:
        UserError: Not YAML, or one of the things that this module refuses.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = " ".join(f"{error.context or ''} {error.problem or ''}".split())
        raise UserError(f"{source}{line}: not YAML, {problem}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{source}: not YAML, {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise UserError(f"{source}: nested more than {MAX_DEPTH} deep") from error
    return None if node is None else Reader(source).value(node, 0)


class Reader:
    """Turns YAML nodes into plain values.

    Attributes:
        num_values: So far, aliases expanded.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.num_values = 0

    def value(self, node: yaml.Node, depth: int) -> Value:
        """The plain value of a node that is `depth` levels down."""
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise self.error(node, f"aliases expand to more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise self.error(node, f"nested more than {MAX_DEPTH} deep, or an alias holds itself")
        if isinstance(node, yaml.SequenceNode):
            self.require(node, "seq")
            return [self.value(x, depth + 1) for x in node.value]
        if isinstance(node, yaml.MappingNode):
            self.require(node, "map")
            return self.mapping(node, depth)
        return self.scalar(node)

    def mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Value]:
        """A dict; `<<: *anchor` fills in keys that are not there."""
        result: dict[str, Value] = {}
        defaults: dict[str, Value] = {}
        for key_node, value_node in node.value:
            if key_node.tag == TAG + "merge":
                merged = self.value(value_node, depth + 1)
                for one in merged if isinstance(merged, list) else [merged]:
                    if not isinstance(one, dict):
                        raise self.error(key_node, f"<< takes a mapping, found a {_kind(one)}")
                    defaults = {**one, **defaults}
                continue
            key = self.value(key_node, depth + 1)
            if not isinstance(key, str):
                raise self.error(key_node, f"keys are text, found the {_kind(key)} {key!r}")
            if key in result:
                raise self.error(key_node, f"duplicate key {key!r}")
            result[key] = self.value(value_node, depth + 1)
        return {**defaults, **result}

    def scalar(self, node: yaml.Node) -> Value:
        """Text, or what unquoted text reads as."""
        assert isinstance(node, yaml.ScalarNode)
        if node.style in ("'", '"', "|", ">"):
            self.require(node, "str")
            return node.value
        if node.tag.removeprefix(TAG) not in IMPLICIT:
            raise self.error(node, f"tag {node.tag!r} is not allowed, values are plain YAML")
        for pattern, convert in SCALARS.values():
            if pattern.fullmatch(node.value):
                value = convert(node.value)
                if isinstance(value, float) and not math.isfinite(value):
                    raise self.error(node, f"{node.value} is not a finite number")
                return value
        return node.value

    def require(self, node: yaml.Node, kind: str) -> None:
        """Refuse a node whose tag is not the plain one."""
        if node.tag != TAG + kind:
            raise self.error(node, f"tag {node.tag!r} is not allowed, values are plain YAML")

    def error(self, node: yaml.Node, problem: str) -> UserError:
        """An error at a node."""
        return UserError(f"{self.source}:{node.start_mark.line + 1}: {problem}")


def override(document: dict[str, Value], assignment: str, keys: Iterable[str], lists: Iterable[str]) -> None:
    """Apply one `--set PATH=VALUE`, in place.

    A path is made of keys, indices (`gates[0]` or `gates.0`) and, within a list of mappings, the `name` or `use` of one
    of them. It begins at the top or, for short, with the name of an element of one of `lists`.

    Args:
        document: What to change.
        assignment: `PATH=VALUE`; the value is YAML.
        keys: What may stand at the top.
        lists: Keys of lists whose elements can begin a path; the first list that has the name wins.

    Raises:
        UserError: The path leads nowhere or the value is not YAML.
    """
    where = f"--set {assignment}"
    path, equals, text = assignment.partition("=")
    steps = path.strip().replace("[", ".").replace("]", "").split(".")
    if not equals or not all(steps):
        raise UserError(f"{where}: write PATH=VALUE, for example model.dtype=bfloat16 or w4.bits=3")
    value = parse(text, where)
    at: Value = document
    if steps[0] not in keys:
        begins = [document[x] for x in lists if _index(document.get(x), steps[0]) is not None]
        if not begins:
            elements = [x for name in lists if isinstance(document.get(name), list) for x in document[name]]
            known = [*keys, *(name for x in elements for name in _names(x))]
            raise UserError(f"{where}: nothing is called {steps[0]!r}; {did_you_mean(steps[0], known, limit=30)}")
        at = begins[0]
    for step in steps[:-1]:
        at = _descend(at, step, where)
    last = steps[-1]
    if isinstance(at, dict):
        at[last] = value
    elif isinstance(at, list) and (index := _index(at, last)) is not None:
        at[index] = value
    else:
        raise _nowhere(at, last, where)


def _descend(at: Value, step: str, where: str) -> Value:
    if isinstance(at, dict):
        if at.get(step) is None:
            at[step] = {}
        return at[step]
    index = _index(at, step)
    if index is None:
        raise _nowhere(at, step, where)
    return at[index]


def _index(at: Value, step: str) -> int | None:
    """Where in a list `step` points to, by number, `name` or `use`; None: nowhere."""
    if not isinstance(at, list):
        return None
    if step.isdecimal():
        return int(step) if int(step) < len(at) else None
    return next((i for i, x in enumerate(at) if step in _names(x)), None)


def _names(element: Value) -> Iterator[str]:
    """What an element of a list is called: its `name`, else its `use`."""
    if isinstance(element, dict):
        name = element.get("name", element.get("use"))
        if isinstance(name, str):
            yield name


def _nowhere(at: Value, step: str, where: str) -> UserError:
    if isinstance(at, list):
        known = [str(i) for i in range(len(at))] + [name for x in at for name in _names(x)]
        return UserError(f"{where}: no element {step!r}; {did_you_mean(step, known)}")
    return UserError(f"{where}: {step!r} would be inside a {_kind(at)}")


def _kind(value: Value) -> str:
    names = {dict: "mapping", list: "list", str: "text", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
