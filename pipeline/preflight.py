"""What `strop check` says: whether a recipe fits its model, and what it will take, from headers and tables alone.

Reads no weight and imports no torch. Leaves out what a recipe is (recipe.py) and running it (runner.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from strop.calibration.text import Split, documents, overlap
from strop.errors import UserError, did_you_mean
from strop.families import FAMILIES
from strop.gate import check_gates, show
from strop.model import experts_note
from strop.recipe import EAGER, Chain, NamedStage, Recipe
from strop.report import aligned
from strop.sources import describe
from strop.spec import ModelSpec
from strop.stage import Plan
from strop.store import Store


@dataclass(frozen=True)
class Planned:
    """One stage or export and what it will take.

    Attributes:
        chain: Name of its chain.
        name: Of the stage.
        plan: Its output's size, the memory and the time.
        is_shared: An earlier chain has the same stages up to here: done once.
    """

    chain: str
    name: str
    plan: Plan
    is_shared: bool


@dataclass(frozen=True)
class CheckResult:
    """A recipe that fits its model.

    Attributes:
        spec: Table of the parent.
        source: The parent, in words.
        steps: Every stage and export, chain by chain, the parent's exports first.
        notes: Lines worth a user's attention.
    """

    spec: ModelSpec
    source: str
    steps: tuple[Planned, ...]
    notes: tuple[str, ...]

    def table(self) -> str:
        """For the terminal."""
        lines = [["chain", "stage", "size", "memory", "time", "cache, a token"]]
        for step in self.steps:
            time = "shared" if step.is_shared else f"{max(1.0, step.plan.seconds):.0f} s"
            cache = step.plan.cache_bytes_per_token
            lines.append(
                [
                    step.chain,
                    step.name,
                    show(step.plan.size_bytes, "bytes"),
                    show(step.plan.memory_bytes, "bytes"),
                    time,
                    "" if cache is None else show(cache, "bytes"),
                ]
            )
        total = sum(max(1.0, x.plan.seconds) for x in self.steps if not x.is_shared)
        peak = max((x.plan.memory_bytes for x in self.steps), default=0)
        spec = self.spec
        inside = f"{len(spec.layers)} layers, {spec.num_parameters() / 1e6:.3g} M parameters"
        known = inside if spec.family in FAMILIES else "not a family that strop knows"
        head = f"{self.source}: {spec.family}, {known}, {show(spec.size_bytes(), 'bytes')} in {spec.dtype}"
        end = (
            f"about {total:.0f} s and {show(peak, 'bytes')}, beside libraries, measuring and the check of each result, "
            "which holds the whole model in float32; nothing was run"
        )
        notes = ["", "notes:", *(f"  {x}" for x in self.notes)] if self.notes else []
        return "\n".join([head, "", *aligned(lines), *notes, "", end])


def check(recipe: Recipe, store: Store) -> CheckResult:
    """Whether a recipe can run: order of stages, widths, names, gates, texts.

    Raises:
        UserError: It cannot. Names the place, what was found and what is allowed.
    """
    spec, source = describe(recipe.model.source, recipe.model.dtype, store.wheels)
    num_tokens = recipe.calibration.samples * recipe.calibration.length if recipe.calibration else 0
    check_gates(recipe.gates, recipe.evals, recipe.row_names())
    steps: list[Planned] = []
    notes: dict[str, None] = {}
    done: set[tuple[str, ...]] = set()
    for chain in (Chain("parent", ()), *recipe.chains):
        current = spec
        format = "checkpoint"
        path: tuple[str, ...] = ()
        for stage in chain.stages:
            _check_stage(recipe, chain, stage, format, store)
            if stage.stage.needs_calibration and recipe.calibration:
                _check_length(recipe.calibration.length, spec)
            plan = _plan(stage, current, num_tokens)
            path += (_identity(stage),)
            steps.append(Planned(chain.name, stage.name, plan, path in done))
            done.add(path)
            current, format = plan.spec, stage.stage.gives
            notes.update({f"{chain.name} / {stage.name}: {x}": None for x in plan.notes})
        if (note := experts_note(current)) is not None:
            notes[f"{chain.name}: {note}"] = None
        for export in recipe.with_eager() if chain.name == "parent" else recipe.exports:
            _check_format(export, format, after=chain)
            if current.family not in FAMILIES and export.use != EAGER:
                raise UserError(
                    f"{export.place} ({export.name}): {current.family} is not a family that strop knows, it runs "
                    f"in eager only; known: {', '.join(FAMILIES)}"
                )
            plan = _plan(export, current, num_tokens, after=chain)
            here = (*path, _identity(export))
            steps.append(Planned(chain.name, export.name, plan, here in done))
            done.add(here)
            notes.update({f"{chain.name} / {export.name}: {x}": None for x in plan.notes})
    _check_texts(recipe)
    if recipe.calibration and not any(s.stage.needs_calibration for c in recipe.chains for s in c.stages):
        notes["calibration: no stage uses it"] = None
    return CheckResult(spec, source, tuple(steps), tuple(notes))


def _identity(stage: NamedStage) -> str:
    return f"{stage.use}{stage.stage.model_dump_json()}"


def _plan(stage: NamedStage, spec: ModelSpec, num_tokens: int, after: Chain | None = None) -> Plan:
    try:
        return stage.stage.plan(spec, num_tokens)
    except UserError as error:
        chain = f" of {after.name}" if after else ""
        raise UserError(f"{stage.place} ({stage.name}{chain}): {error}") from error


def _check_stage(recipe: Recipe, chain: Chain, stage: NamedStage, format: str, store: Store) -> None:
    _check_format(stage, format, after=chain)
    if stage.stage.needs_calibration and recipe.calibration is None:
        raise UserError(f"{stage.place} ({stage.name}): {stage.use} needs text, add `calibration: {{source: self}}`")
    index = chain.stages.index(stage)
    earlier, later = ([x.name for x in part] for part in (chain.stages[:index], chain.stages[index:]))
    for field, name in stage.references().items():
        if name in later:
            allowed = did_you_mean(name, ["parent", *earlier])
            raise UserError(f"{stage.place}.{field}: {name!r} is not made before this stage; {allowed}")
        if name not in ("parent", *earlier):
            try:
                describe(name, recipe.model.dtype, store.wheels)
            except UserError as error:
                known = ", ".join(["parent", *earlier])
                raise UserError(f"{stage.place}.{field}: no stage {name!r} (there are {known}), and {error}") from error


def _check_format(stage: NamedStage, format: str, after: Chain) -> None:
    if stage.stage.takes != format:
        raise UserError(
            f"{stage.place} ({stage.name}): takes a {stage.stage.takes}, but what comes before it in {after.name} "
            f"is a {format}"
        )


def _check_texts(recipe: Recipe) -> None:
    """Refuse sources that hold no text, and to measure on text that was calibrated on."""
    ours = recipe.calibration.source if recipe.calibration else "self"
    if _needs_a_look(ours):
        _look(ours, "calibration", "calibration.source")
    for name, metric in recipe.evals.items():
        for theirs in metric.text_sources():
            if _needs_a_look(theirs):
                _look(theirs, "measure", f"evals ({name})")
            if shared := _shared_text(ours, theirs):
                raise UserError(
                    f"calibration.source: {ours} is also measured on by evals ({name}: {theirs}): {shared}; "
                    "choose another text for one of them"
                )


def _check_length(length: int, spec: ModelSpec) -> None:
    if 0 < spec.max_positions < length:
        raise UserError(f"calibration.length: {length} is more than the model's context of {spec.max_positions}")


def _look(source: str, split: Split, place: str) -> None:
    try:
        documents(source, split)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error


def _shared_text(ours: str, theirs: str) -> str | None:
    """What two sources share. `python` and `hub:` keep the two purposes apart themselves; hub texts are not fetched."""
    files = [x for x in (ours, theirs) if _needs_a_look(x)]
    if not files or ours == "self" or any(x.startswith("hub:") for x in (ours, theirs)):
        return None
    if len(files) == 2 and Path(ours).expanduser().resolve() == Path(theirs).expanduser().resolve():
        return "the same file"
    return overlap(documents(ours, "calibration"), documents(theirs, "measure"))


def _needs_a_look(source: str) -> bool:
    """Whether a source can be missing or empty, and is on this machine."""
    return source not in ("self", "python") and not source.startswith("hub:")
