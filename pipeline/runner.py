"""Runs a recipe: what the store has is reused, the rest is made, measured and judged. Knows no particular method.

Leaves out what a recipe is (recipe.py), where results are kept (store.py) and verdicts (gate.py).
"""

from __future__ import annotations

import contextlib
import logging
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from strop import conformance, gate, preflight, report, sources
from strop.artifact import Artifact, Format, hash_file, hash_json, read_manifest
from strop.digest import code_digest, library_versions
from strop.errors import ConformanceError, ExitCode, UserError
from strop.machine import describe_machine, usable_cores
from strop.metric import MeasureContext, Measurement, Metric
from strop.model import load_tokenizer
from strop.page import write_report
from strop.program import Elsewhere, lacks, open_program
from strop.recipe import EAGER, Chain, NamedStage, Recipe
from strop.report import Report, Row, StageRecord
from strop.spec import DType
from strop.stage import Context, Progress, StageCost, no_progress
from strop.store import SHORT, Step, Store

log = logging.getLogger(__name__)

TOKENS = "tokens.npy"
"""Calibration tokens (samples, length) int64, in an object of the store."""


def run(
    recipe: Recipe, store: Store, out: Path, *, remeasure: bool = False, progress: Progress = no_progress
) -> Report:
    """Run a recipe and write its report.

    Args:
        recipe: What to do.
        store: Where finished work is found and kept.
        out: Folder for report.json, report.md, report.csv, report.html and junit.xml.
        remeasure: Measure anew what the store remembers.
        progress: Where long work says how far it is.

    Raises:
        UserError: The recipe does not fit its model, or something about the machine can be changed.
        ConformanceError: An artifact is not what the recipe says.
    """
    planned = preflight.check(recipe, store)
    work = Run(recipe, store, remeasure, progress)
    rows = work.build()
    work.measure(rows)
    if recipe.attribution == "stages":
        work.attribute(rows)
    verdicts = gate.judge(recipe.gates, [x.row for x in rows], recipe.evals)
    codes = [gate.exit_code(verdicts)]
    if any(x.row.failures for x in rows):
        codes.append(ExitCode.INCONCLUSIVE)
    result = Report(
        strop_version=version("strop"),
        recipe=dict(recipe.text),
        recipe_name=recipe.name,
        created=_now(),
        machine=describe_machine(),
        rows=[x.row for x in rows],
        gates=verdicts,
        stages=work.records,
        notes=[*planned.notes, *work.notes],
        exit_code=int(ExitCode.worst(codes)),
    )
    try:
        write_report(result, out)
    except OSError as error:
        raise UserError(f"{out}: the report cannot be written, {error.strerror}") from error
    return result


@dataclass(frozen=True)
class Built:
    """A row of the table and its program."""

    row: Row
    program: Artifact


@dataclass
class Run:
    """One run of one recipe.

    Attributes:
        records: Of every stage and export, in the order they ran.
        notes: For the report.
        checkpoints: Chain -> the parent and what each of its stages made.
        programs: Export's name -> the parent on it.
        lacking: Key of a program -> what this machine lacks to run it.
    """

    recipe: Recipe
    store: Store
    remeasure: bool
    progress: Progress
    records: list[StageRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checkpoints: dict[str, list[Artifact]] = field(default_factory=dict)
    programs: dict[str, Artifact] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)
    _tokens: Path | None = None
    _old_speeds: list[str] = field(default_factory=list)
    _began: str = field(default_factory=lambda: _now())

    @property
    def threads(self) -> int:
        """To compute and to measure with."""
        return self.recipe.threads or usable_cores()

    # ------------------------------------------------------------------------------------------------- building

    def build(self) -> list[Built]:
        """Every row's program, made or reused. The parent's rows come first."""
        parent = self.source(self.recipe.model.source, self.recipe.model.dtype, "source")
        rows = []
        for export in self.recipe.with_eager():
            self.programs[export.name] = self.export(export, "parent", parent)
            rows.append(self._row("parent", export, self.programs[export.name]))
        for chain in self.recipe.chains:
            self.checkpoints[chain.name] = made = [parent]
            names = {"parent": parent}
            for stage in chain.stages:
                made.append(self.apply(stage, chain, made[-1], names))
                names[stage.name] = made[-1]
            for export in self.recipe.exports:
                program = self.export(export, chain.name, made[-1])
                rows.append(self._row(chain.name, export, program, chain.is_explored))
        return rows

    def _row(self, chain: str, export: NamedStage, program: Artifact, is_explored: bool = False) -> Built:
        name = f"{chain} / {export.name}"
        row = Row(name, chain, export.use, program.key, _size(program), is_explored=is_explored)
        if program.key in self.lacking:
            row.failures["conformance"] = self.lacking[program.key]
        return Built(row, program)

    def source(self, source: str, dtype: DType, name: str) -> Artifact:
        """A model as a checkpoint in the store."""
        module = "strop.sources"
        key = hash_json(
            {
                "source": sources.source_key(source, dtype, self.store.wheels),
                "code": code_digest(module),
                "libraries": library_versions(module),
            }
        )

        def write(out: Path, _: Path) -> Mapping[str, Any]:
            return {"spec": sources.fetch(source, dtype, out, self.progress, self.store.wheels)}

        step = Step(name, "source", {"source": source, "dtype": dtype})
        return self._make(key, step, "parent", "checkpoint", write)

    def apply(self, stage: NamedStage, chain: Chain, source: Artifact, names: Mapping[str, Artifact]) -> Artifact:
        """What a stage makes of an artifact."""
        artifacts = {
            x: names[x] if x in names else self.source(x, self.recipe.model.dtype, x)
            for x in stage.references().values()
        }
        tokens = self.tokens() if stage.stage.needs_calibration else None

        def accept(artifact: Artifact) -> None:
            conformance.check_checkpoint(artifact, source)

        return self._run_stage(stage, chain.name, source, artifacts=artifacts, tokens=tokens, accept=accept)

    def export(self, export: NamedStage, chain: str, source: Artifact) -> Artifact:
        """A checkpoint lowered to a runtime. What cannot run here is checked by the first run that can."""
        is_checked = False

        def accept(artifact: Artifact) -> None:
            nonlocal is_checked
            if lacks(artifact) is None:
                conformance.check_program(artifact, source)
                is_checked = True

        program = self._run_stage(export, chain, source, artifacts={}, tokens=None, accept=accept)
        if isinstance(type(export.stage), Elsewhere):
            self._check_late(f"{chain} / {export.name}", program, source, is_checked)
        return program

    def _check_late(self, name: str, program: Artifact, source: Artifact, is_checked: bool) -> None:
        """Check a program that may have been made where it could not run, or note what is lacking still."""
        if not is_checked and (lack := lacks(program)) is not None:
            log.warning("%s: %s", name, lack)
            self.lacking[program.key] = lack
            return
        if not is_checked and self.store.recall("checks", program.key) is not None:
            return
        if not is_checked:
            try:
                conformance.check_program(program, source)
            except ConformanceError as error:
                raise ConformanceError(f"{name}: {error}") from error
        self.store.remember("checks", program.key, {"checked_at": _now()})

    def _run_stage(
        self, stage: NamedStage, chain: str, source: Artifact, *, artifacts: Mapping[str, Artifact],
        tokens: Path | None, accept: Callable[[Artifact], None],
    ) -> Artifact:  # fmt: skip
        module = type(stage.stage).__module__
        fields = stage.stage.model_dump(mode="json")
        key = hash_json(
            {
                "use": module,
                "fields": fields,
                "source": source.key,
                "artifacts": {text: artifact.key for text, artifact in artifacts.items()},
                "calibration": None if tokens is None else hash_file(tokens),
                "code": code_digest(module),
                "libraries": library_versions(module),
                "seed": self.recipe.seed,
                "threads": self.threads,
                "device": "cpu",
            }
        )

        def write(out: Path, scratch: Path) -> Mapping[str, Any]:
            context = Context(
                scratch=scratch, seed=self.recipe.seed, threads=self.threads, calibration=tokens,
                artifacts=artifacts, cache=self.store.root / "cache", progress=self.progress,
            )  # fmt: skip
            return stage.stage.run(source, out, context)

        step = Step(stage.name, stage.use, fields)
        return self._make(key, step, chain, stage.stage.gives, write, after=source, accept=accept)

    def tokens(self) -> Path:
        """The recipe's calibration tokens, made once. The parent generates them on the first runtime it has."""
        from strop.calibration.tokens import calibration_tokens

        if self._tokens is not None:
            return self._tokens
        calibration = self.recipe.calibration
        assert calibration is not None  # preflight refuses a stage that needs some
        lowered = (self.programs[x.name] for x in self.recipe.exports if x.name in self.programs)
        program = next((x for x in lowered if x.key not in self.lacking), self.programs[EAGER])
        module = "strop.calibration.tokens"
        key = hash_json(
            {
                "fields": calibration.model_dump(mode="json"),
                "text": _text_identity(calibration.source),
                "program": program.key,
                "code": code_digest(module),
                "libraries": library_versions(module),
            }
        )

        def write(out: Path, scratch: Path) -> Mapping[str, Any]:
            import numpy as np

            tokens = calibration_tokens(
                calibration, load_tokenizer(program.path), lambda: open_program(program, self.threads),
                scratch=scratch, progress=self.progress,
            )  # fmt: skip
            np.save(out / TOKENS, tokens)
            return {"report": {"samples": tokens.shape[0], "length": tokens.shape[1]}}

        step = Step("calibration", calibration.source, calibration.model_dump(mode="json"))
        self._tokens = self._make(key, step, "main", "tokens", write).path / TOKENS
        return self._tokens

    def _make(
        self, key: str, step: Step, chain: str, format: Format, write: Callable[[Path, Path], Mapping[str, Any]], *,
        after: Artifact | None = None, accept: Callable[[Artifact], None] | None = None,
    ) -> Artifact:  # fmt: skip
        """Find or build one object, note what it took, and keep a record for the report."""
        cached = self.store.get(key)
        if cached is None:
            log.info("%s / %s: %s starts", chain, step.name, key[:SHORT])
            try:
                with Cost() as cost:
                    artifact = self.store.build(key, format, step, write, after=after, accept=accept)
            except ConformanceError as error:
                raise ConformanceError(f"{chain} / {step.name}: {error}") from error
            self.store.remember_cost(key, cost.cost)
            log.info(
                "%s / %s: %s finished in %.1f s, peak memory %.2f GB",
                chain, step.name, key[:SHORT], cost.cost.seconds, cost.cost.peak_memory_bytes / 1e9,
            )  # fmt: skip
        else:
            artifact = cached
            log.info("%s / %s: %s reused", chain, step.name, key[:SHORT])
        took = self.store.recall_cost(key) or StageCost(0.0, 0)
        self.records.append(
            StageRecord(
                name=step.name, use=step.use, key=key, chain=chain, seconds=took.seconds,
                peak_memory_bytes=took.peak_memory_bytes, is_cached=cached is not None, size_bytes=_size(artifact),
                report=read_manifest(artifact.path).report,
            )
        )  # fmt: skip
        return artifact

    # ------------------------------------------------------------------------------------------------ measuring

    def measure(self, rows: list[Built]) -> None:
        """Measure every row, quality first: nothing else of this run disturbs the speed."""
        for built in rows:
            for name, metric in self.recipe.evals.items():
                if metric.kind == "quality":
                    self._measure(built, name, metric)
        for built in rows:
            for name, metric in self.recipe.evals.items():
                if metric.kind == "speed":
                    self._measure(built, name, metric)
        if self._old_speeds:
            oldest = min(self._old_speeds)
            hours = (datetime.now(UTC) - datetime.fromisoformat(oldest)).total_seconds() / 3600
            self.notes.append(
                f"speed, memory and size are remembered from runs on this machine, the oldest of {oldest} "
                f"({hours:.1f} hours ago): --remeasure measures anew"
            )

    def attribute(self, rows: list[Built]) -> None:
        """Note in the records what the model is worth after each stage: distance to the parent, and bytes.

        Measured as the rows are, on the recipe's first runtime: what a stage cost is the difference to the one before.
        """
        use, _, quantity = report.QUALITY.partition(".")
        if use not in self.recipe.evals:
            return
        export = self.recipe.exports[0]
        for chain in self.recipe.chains:
            for stage, checkpoint in zip(chain.stages, self.checkpoints[chain.name][1:], strict=True):
                built = next((x for x in rows if x.row.name == f"{chain.name} / {export.name}"), None)
                if checkpoint is not self.checkpoints[chain.name][-1]:
                    program = self.export(export, chain.name, checkpoint)
                    built = self._row(f"{chain.name} after {stage.name}", export, program)
                    self._measure(built, use, self.recipe.evals[use])
                assert built is not None
                measured = built.row.measurements.get(report.QUALITY)
                if measured is not None:
                    worth = {quantity: measured.estimate.value, "size_bytes": built.row.size_bytes}
                    self.records = [
                        replace(x, attribution=worth) if (x.chain, x.key) == (chain.name, checkpoint.key) else x
                        for x in self.records
                    ]

    def _measure(self, built: Built, name: str, metric: Metric) -> None:
        """Measure one metric of one row, or remember it. What it raises ends up in the row's failures."""
        row = built.row
        if built.program.key in self.lacking:
            row.failures[name] = self.lacking[built.program.key]
            return
        references = {"parent": self.programs[EAGER]}
        if (same_runtime := self.programs.get(row.name.split(" / ")[1])) is not None:
            references["parent_same_runtime"] = same_runtime
        key = self._measurement_key(built.program, metric, references)
        found = None if self.remeasure else self.store.recall("measurements", key)
        if found is None:
            log.info("%s: measuring %s", row.name, name)
            context = MeasureContext(self.threads, self.recipe.seed, self.progress)
            began = time.monotonic()
            with self._alone(metric), Attempt() as attempt:
                measured = metric.measure(built.program, references, context)
            if attempt.failure is not None:
                row.failures[name] = attempt.failure
                log.warning("%s: %s crashed: %s", row.name, name, attempt.failure)
                return
            log.info("%s: %s took %.1f s", row.name, name, time.monotonic() - began)
            found = {"measured_at": _now(), "measurements": {k: m.to_json() for k, m in measured.items()}}
            if not any(_is_noisy(x) for x in measured.values()):  # a noisy machine is worth another try, not a memory
                self.store.remember("measurements", key, found)
        elif metric.kind == "speed" and found["measured_at"] < self._began:
            self._old_speeds.append(found["measured_at"])
        for quantity, data in found["measurements"].items():
            row.measurements[f"{name}.{quantity}"] = Measurement.from_json(data)
            row.measured_at[f"{name}.{quantity}"] = found["measured_at"]

    def _measurement_key(self, program: Artifact, metric: Metric, references: Mapping[str, Artifact]) -> str:
        module = type(metric).__module__
        return hash_json(
            {
                "metric": module,
                "fields": metric.model_dump(mode="json"),
                "program": program.key,
                "references": {name: x.key for name, x in references.items()},
                "texts": [_text_identity(x) for x in metric.text_sources()],
                "code": code_digest(module),
                "libraries": library_versions(module),
                "seed": self.recipe.seed,
                "threads": self.threads,
                "machine": describe_machine() if metric.kind == "speed" else None,
            }
        )

    @contextmanager
    def _alone(self, metric: Metric) -> Iterator[None]:
        """No other run that shares this store measures speed meanwhile."""
        if metric.kind == "quality":
            yield
            return
        with self.store.lock("speed", "measuring speed"):
            yield


class Cost:
    """Measures what happens inside `with`: wall time and the process's largest resident set.

    Attributes:
        cost: After the block.
    """

    cost: StageCost

    def __enter__(self) -> Self:
        with contextlib.suppress(OSError):  # not Linux, or not allowed: then the peak since the process began
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._began = time.monotonic()
        return self

    def __exit__(self, *exception: object) -> None:
        self.cost = StageCost(time.monotonic() - self._began, _peak_memory_bytes())


class Attempt:
    """Lets a metric crash without ending the run. What the user must change, and Ctrl-C, still end it.

    Attributes:
        failure: What the block raised, in one line, or None.
    """

    failure: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, UserError | ConformanceError):
            return False
        log.debug("a metric crashed", exc_info=error)
        text = " ".join(str(error).split())
        self.failure = f"{type(error).__name__}: {text}" if text else type(error).__name__
        return True


def _peak_memory_bytes() -> int:
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _is_noisy(measurement: Measurement) -> bool:
    return any(x.is_noisy for x in (measurement.estimate, *measurement.ratios.values()))


def _text_identity(source: str) -> str:
    """What tells one text from another: a file by its content."""
    path = Path(source).expanduser()
    return hash_file(path) if path.is_file() else source


def _size(artifact: Artifact) -> int:
    return sum(x["size_bytes"] for x in read_manifest(artifact.path).files.values())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
