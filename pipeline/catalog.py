"""What a recipe can name: methods, runtimes, metrics, shipped recipes, each with its fields. Text for people.

Read from the classes themselves, so `strop list` and docs/recipes.md cannot differ from the code.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from strop import plugin
from strop.calibration.tokens import CalibrationSpec
from strop.errors import UserError, did_you_mean
from strop.families import CACHE_KEY, cache_scheme
from strop.gate import Gate
from strop.metric import Metric
from strop.model import stored_format
from strop.recipe import ModelSource, RecipeText, VariantText, built_in, describe_fields
from strop.report import aligned
from strop.spec import (
    FIXED_FORMATS,
    Activations,
    CacheFormat,
    CacheQuantization,
    CacheScales,
    LayerSpec,
    Linear,
    ModelSpec,
    Norm,
    Quantization,
    Rope,
)
from strop.stage import ArtifactRef, Stage, Support

Kind = Literal["methods", "runtimes", "metrics", "recipes"]
KINDS: dict[Kind, str] = {
    "methods": "Under `stages:`. Each takes a checkpoint and gives one.",
    "runtimes": "Under `export:`. Each lowers a checkpoint to a program.",
    "metrics": "Under `evals:`. A gate names what they measure as `<metric>.<name>`.",
    "recipes": "Shipped: `strop run NAME`.",
}
PARTS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("The recipe", RecipeText),
    ("`model:`", ModelSource),
    ("`calibration:`", CalibrationSpec),
    ("`variants:`, each", VariantText),
    ("`gates:`, each", Gate),
)


FORMATS: dict[str, Quantization] = {
    **{f"bits: {x}": Quantization(x, 64, True) for x in (2, 3, 4, 8)},
    **{f"bits: {x}, symmetric: false": Quantization(x, 64, False) for x in (2, 3, 4, 8)},
    **{f"bits: 8, group_size: null, activations: {x}": Quantization(8, None, True, x) for x in get_args(Activations)},
    "format: fp8": Quantization(8, None, True, format="fp8"),
    **{f"format: fp8, activations: {x}": Quantization(8, None, True, x, "fp8") for x in get_args(Activations)},
    **{
        f"format: {x}": Quantization(y.bits, y.group_size, True, format=x)
        for x, y in FIXED_FORMATS.items()
        if x != "fp8"
    },
}
"""What a recipe writes -> what it gets."""


@dataclass(frozen=True)
class FieldText:
    """One field as people read it.

    Attributes:
        name: The YAML key.
        type: What it takes, for example `2, 3, 4 or 8`.
        default: As YAML would have it, or `required`.
        text: What it means.
    """

    name: str
    type: str
    default: str
    text: str


@dataclass(frozen=True)
class Entry:
    """One thing that a recipe can name.

    Attributes:
        kind: Of thing.
        name: As a recipe writes it.
        summary: First line of its module's docstring.
        fields: Its YAML keys.
        measures: Name -> unit, of a metric with its default fields.
    """

    kind: Kind
    name: str
    summary: str
    fields: tuple[FieldText, ...] = ()
    measures: tuple[tuple[str, str], ...] = ()


def entries() -> list[Entry]:
    """Everything that is installed, kind by kind, sorted by name. Imports no torch."""
    stages = [_entry("methods", x, plugin.find("methods", x, Stage)) for x in plugin.names("methods")]
    runtimes = [_entry("runtimes", x, plugin.find("export", x, Stage)) for x in plugin.names("export")]
    metrics = [_entry("metrics", x, plugin.find("evals", x, Metric)) for x in plugin.names("evals")]
    recipes = [Entry("recipes", name, _first_comment(path.read_text())) for name, path in built_in().items()]
    return [*stages, *runtimes, *metrics, *recipes]


def listing(name: str | None = None) -> str:
    """For the terminal.

    Args:
        name: One thing, or one kind; None: everything.

    Raises:
        UserError: Nothing is called so.
    """
    found = entries()
    if name is not None:
        chosen = [x for x in found if name in (x.name, x.kind)]
        if not chosen:
            raise UserError(
                f"list: nothing is called {name!r}; {did_you_mean(name, [*KINDS, *(x.name for x in found)])}"
            )
        found = chosen
    lines = []
    for kind, text in KINDS.items():
        members = [x for x in found if x.kind == kind]
        lines += [kind, f"  {text.replace('`', '')}", ""] if members else []
        for entry in members:
            lines.append(f"  {entry.name}: {entry.summary}")
            if entry.fields:
                fields = aligned([[x.name, x.type, f"= {x.default}", x.text] for x in entry.fields], right=False)
                lines += [f"    {x}" for x in fields]
            if entry.measures:
                lines.append(f"    measures {', '.join(x for x, _ in entry.measures)}")
            lines.append("")
    return "\n".join(lines).rstrip()


def markdown() -> str:
    """docs/recipes.md."""
    lines = [
        "# Recipes",
        "",
        "Generated from the code by `strop list --markdown`; what is installed here: `strop list`. A key that is not",
        "listed is refused. Every stage, export and eval takes `use` (what it is) and `name` (default: the same).",
    ]
    for title, part in PARTS:
        lines += ["", f"## {title}", "", *_table(fields(part))]
    found = entries()
    for kind, text in KINDS.items():
        lines += ["", f"## {kind.capitalize()}", "", text]
        for entry in found:
            if entry.kind != kind:
                continue
            if kind == "recipes":
                lines += ["", f"- `{entry.name}`: {entry.summary}"]
                continue
            lines += [
                "",
                f"### `{entry.name}`",
                "",
                entry.summary,
                *([""] if entry.fields else []),
                *_table(entry.fields),
            ]
            if entry.measures:
                measures = ", ".join(f"`{x}` ({unit})" if unit else f"`{x}`" for x, unit in entry.measures)
                lines += ["", f"Measures {measures}."]
        if kind == "runtimes":
            lines += _formats_table() + _caches_table()
    return "\n".join(lines) + "\n"


def support(runtime: str, q: Quantization) -> Support | None:
    """How a runtime, with its default fields, holds weights of a format; None: it refuses them."""
    stage = plugin.find("export", runtime, Stage)()  # type: ignore[type-abstract]  # only its subclasses are made
    try:
        return stage.support(_example(q))
    except UserError:
        return None


def _formats_table() -> list[str]:
    """Which format runs where."""
    runtimes = plugin.names("export")
    lines = [
        "",
        "### Number formats",
        "",
        "How a program holds the weights: `native`: in as many bits as the format has; `widened`: in more, its size",
        "says so; `dequantized`: as floats, once it is loaded or at every step, which is right for quality and slow;",
        "`refused`: `check` says so in one line. Checkpoints are compressed-tensors', for vLLM and transformers, or",
        "bitsandbytes', for transformers. Formats can be mixed, one stage with its `targets` for each.",
        "",
        f"| in a recipe | {' | '.join(f'`{x}`' for x in runtimes)} | stored as |",
        f"| --- |{' --- |' * len(runtimes)} --- |",
    ]
    for text, q in FORMATS.items():
        cells = [support(x, q) or "refused" for x in runtimes]
        lines.append(f"| `{text}` | {' | '.join(cells)} | {stored_format(q)} |")
    return lines


def _caches_table() -> list[str]:
    """Which cache of keys and values runs where."""
    runtimes = plugin.names("export")
    lines = [
        "",
        "### Caches of keys and values",
        "",
        "What the stage `kv_cache` asks for, and which runtimes hold it as codes; the others keep floats, and `check`",
        "refuses what they would not round. Where compressed-tensors has words for it, because keys and values are",
        "alike, config.json tells it as `kv_cache_scheme`, else as strop's own key, which other libraries read over.",
        "",
        f"| format, scales | {' | '.join(f'`{x}`' for x in runtimes)} | told by |",
        f"| --- |{' --- |' * len(runtimes)} --- |",
    ]
    for form, scales in itertools.product(get_args(CacheFormat), get_args(CacheScales)):
        cache = CacheQuantization(form, scales, scales)
        cells = ["native" if holds_cache(x, cache) else "refused" for x in runtimes]
        told = "kv_cache_scheme" if cache_scheme(cache) else CACHE_KEY
        lines.append(f"| `{form}`, `{scales}` | {' | '.join(cells)} | {told} |")
    return lines


def holds_cache(runtime: str, cache: CacheQuantization) -> bool:
    """Whether a runtime, with its default fields, keeps keys and values as they are asked for."""
    stage = plugin.find("export", runtime, Stage)()  # type: ignore[type-abstract]  # only its subclasses are made
    try:
        stage.plan(replace(_example(FORMATS["bits: 4"]), kv_cache=cache), 0)
    except UserError:
        return False
    return True


def _example(q: Quantization) -> ModelSpec:
    """A llama of one layer whose linears, the head apart, are stored in a format."""
    width, vocab = 256, 512
    norm = Norm("model.norm", width, "rms", 1e-5)
    names = {
        "self_attn": {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"},
        "mlp": {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    }
    linears = {
        role: Linear(f"model.layers.0.{part}.{name}", width, width)
        for part, roles in names.items()
        for role, name in roles.items()
    }
    layer = LayerSpec(
        num_heads=4,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=width,
        attention_scale=0.125,
        linears=linears,
        input_norm=replace(norm, name="model.layers.0.input_layernorm"),
        mlp_norm=replace(norm, name="model.layers.0.post_attention_layernorm"),
        activation="silu",
        rope=Rope(tuple(1e4 ** (-i / 32) for i in range(32))),
    )
    head = Linear("lm_head", width, vocab)
    spec = ModelSpec("llama", "float32", vocab, width, 512, "model.embed_tokens", (layer,), norm, head, False)
    return spec.quantize({x.name: q for x in linears.values()})


def _entry(kind: Kind, name: str, part: type[BaseModel]) -> Entry:
    module = importlib.import_module(part.__module__)
    measures: tuple[tuple[str, str], ...] = ()
    if issubclass(part, Metric) and not any(x.is_required() for x in part.model_fields.values()):
        measures = tuple(part().names().items())
    return Entry(kind, name, _first_line(module.__doc__), tuple(fields(part)), measures)


def fields(part: type[BaseModel]) -> Iterator[FieldText]:
    """The YAML keys of a part of a recipe, in order."""
    for name, text in describe_fields(part).items():
        field = part.model_fields[name]
        sentence = text[:1].upper() + text[1:] + ("" if text.endswith((".", "?")) or not text else ".")
        yield FieldText(name, _type(field.annotation, _bounds(field)), _default(field), sentence)


def _type(annotation: Any, bounds: str = "") -> str:
    """An annotation in the words of YAML."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return _either([str(x) for x in args])
    if origin in (Union, types.UnionType):
        words = [_type(x, bounds) for x in args if x is not type(None)]
        return ", or ".join([_either(words), "null"]) if type(None) in args else _either(words)
    if origin in (list, tuple):
        return f"list of {_type(args[0])}"
    if origin is dict:
        return "mapping" if args[1] is Any else f"mapping to {_type(args[1])}"
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "mapping"
    words_of = {str: "text", int: "integer", float: "number", bool: "true or false", ArtifactRef: "an artifact"}
    return words_of[annotation] + bounds


def _either(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _bounds(field: FieldInfo) -> str:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    found = [f"{sign} {getattr(x, name)}" for x in field.metadata for name, sign in signs.items() if hasattr(x, name)]
    return f" {', '.join(found)}" if found else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value) or '""'


def _table(fields: Iterable[FieldText]) -> list[str]:
    lines = [f"| `{x.name}` | {x.type} | {x.default} | {x.text} |" for x in fields]
    return ["| field | type | default | |", "| --- | --- | --- | --- |", *lines] if lines else []


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


def _first_comment(recipe: str) -> str:
    return next((x.removeprefix("#").strip() for x in recipe.splitlines() if x.startswith("# ")), "")
