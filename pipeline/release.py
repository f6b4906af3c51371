"""The release gate: a candidate against a reference, measured anew, judged, reported. For CI.

Either may be a program, a checkpoint, or a model from elsewhere (a Hugging Face folder, a .gguf file), which then runs
in eager. Leaves out where gates come from in a recipe (runner.py).
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from strop import conformance, document, faults, gate, recipe, sources
from strop.artifact import MANIFEST, Artifact, open_artifact, read_manifest
from strop.errors import ExitCode, UserError, did_you_mean
from strop.gate import Level, Verdict
from strop.machine import describe_machine
from strop.metric import MeasureContext, Metric
from strop.model import load_tokenizer
from strop.program import Traits, lacks
from strop.recipe import Recipe
from strop.report import Report, Row
from strop.runner import Attempt, Run
from strop.spec import ModelSpec
from strop.stage import Progress
from strop.store import Store

log = logging.getLogger(__name__)

SAMPLE = "Gate: 3.14 naïve\n\tcafés ≠ 東京, isn't it? def f(x):\n    return x  # 🙂"
"""Text that tokenizers must agree on, besides their vocabularies."""
KEYS = ("gates", "evals")
"""Of a file of gates."""


@dataclass(frozen=True)
class Side:
    """The candidate or the reference.

    Attributes:
        source: What the user named.
        program: What is measured.
        is_program: It was one, and was not made one here.
        spec: Table of the model behind it.
        traits: Of the program.
        bits: Fewest bits of a weight, 32 where it is not compressed.
    """

    source: str
    program: Artifact
    is_program: bool
    spec: ModelSpec
    traits: Traits
    bits: float


class Release:
    """One comparison.

    Attributes:
        candidate, reference: Both ready to be measured.
        rules: Gates and metrics, as a recipe holds them.
    """

    def __init__(self, candidate: str, reference: str, policy: Path | Level, store: Store, progress: Progress) -> None:
        """Bring both into the store as programs and read the gates.

        Args:
            candidate: Folder or .gguf file.
            reference: What it is compared with.
            policy: A file of gates, or the level of a built-in profile.
            store: Where models from elsewhere are kept as programs.
            progress: Where long work says how far it is.

        Raises:
            UserError: A source or a gate is unknown, or their tokenizers differ.
            ConformanceError: An artifact is not what its manifest says.
        """
        self.store, self.progress = store, progress
        base = {"version": 1, "model": {"source": reference}, "export": [{"use": "eager"}]}
        if isinstance(policy, Path):
            base |= read_gates(policy)
            self._parse(base, str(policy))  # before anything is loaded
        for source in (candidate, reference):  # before either is converted
            if not is_artifact(source):
                sources.describe(source, "float32", store.wheels)
        self._work = Run(recipe.parse(base, "gate"), store, True, progress)
        self.reference = self._side(reference, "reference")
        self.candidate = self._side(candidate, "candidate")
        check_tokenizers(self.candidate, self.reference)
        if not isinstance(policy, Path):
            base |= profile_gates(self.candidate, self.reference, policy)
        self.rules = self._parse(base, str(policy))

    @property
    def row_name(self) -> str:
        """Of the candidate."""
        return f"candidate / {self.candidate.traits.runtime}"

    def _parse(self, text: Mapping[str, Any], source: str) -> Recipe:
        rules = recipe.parse(text, "gate", source)
        gate.check_gates(rules.gates, rules.evals, ["candidate"])
        # whatever it is called, there is one reference
        gates = tuple(x.model_copy(update={"of": x.of and "parent", "rows": None}) for x in rules.gates)
        return replace(rules, gates=gates)

    def _side(self, source: str, name: str) -> Side:
        path = Path(source).expanduser()
        bits = 8 * path.stat().st_size if path.suffix == ".gguf" and path.is_file() else 0
        if is_artifact(source):
            conformance.check_files(path)  # what it computes is measured anyway
            artifact = open_artifact(path)
        else:
            artifact = self._work.source(source, self._work.recipe.model.dtype, name)
        is_program = artifact.format == "program"
        if not is_program:
            artifact = self._work.export(self._work.recipe.exports[0], name, artifact)
        manifest = read_manifest(artifact.path)
        if manifest.traits is None or manifest.spec is None:
            raise UserError(f"{source}: a {artifact.format}, neither a program nor a checkpoint")
        spec, traits = ModelSpec.from_json(manifest.spec), Traits(**manifest.traits)
        per_weight = bits / spec.num_parameters() if bits else weight_bits(spec, traits)
        return Side(source, artifact, is_program, spec, traits, per_weight)

    def judge(self) -> Report:
        """Measure the candidate against the reference, and judge it."""
        row = self._measure(self.candidate.program, self.rules.evals)
        verdicts = gate.judge(self.rules.gates, [row], self.rules.evals)
        codes = [gate.exit_code(verdicts), ExitCode.INCONCLUSIVE if row.failures else ExitCode.PASSED]
        reference = _row("reference", self.reference.program, self.reference.traits)
        names = [Path(x.source).name for x in (self.candidate, self.reference)]
        return Report(
            strop_version=version("strop"),
            recipe=dict(self.rules.text),
            recipe_name=" against ".join(names),
            created=_now(),
            machine=describe_machine(),
            rows=[reference, row],
            gates=verdicts,
            stages=self._work.records,
            notes=[*self._work.notes, *self._notes()],
            exit_code=int(ExitCode.worst(codes)),
        )

    def _notes(self) -> list[str]:
        sides = [("candidate", self.candidate), ("reference", self.reference)]
        made = [
            f"{name} {side.source} is not a program: it ran in eager" for name, side in sides if not side.is_program
        ]
        return [f"{x}, where its speed and size mean little" for x in made]

    def self_test(self, judged: Report) -> list[tuple[str, Verdict | None]]:
        """Plant each known fault into a copy of the candidate and see which gate fails that did not fail before.

        Args:
            judged: What `judge` found of the candidate as it is.

        Returns:
            (fault, the verdict that caught it, or None) for each fault.

        Raises:
            UserError: No gate on quality is left that could fail.
        """
        if (lack := lacks(self.candidate.program) or lacks(self.reference.program)) is not None:
            raise UserError(f"--self-test: no fault can show where the programs cannot run: {lack}")
        failed = {v.rule for v in judged.gates if v.outcome == "FAIL"}
        names = {x.metric.partition(".")[0] for x in self.rules.gates}
        evals = {k: v for k, v in self.rules.evals.items() if v.kind == "quality" and k in names}
        gates = [x for x in self.rules.gates if x.metric.partition(".")[0] in evals]
        if not {v.rule for v in judged.gates if v.kind == "quality"} - failed:
            raise UserError("--self-test: no gate on quality that the candidate itself does not fail")
        found = []
        with tempfile.TemporaryDirectory() as scratch:
            for number, fault in enumerate(faults.FAULTS):
                log.info("self-test: %s", fault.name)
                program = faults.plant(fault, self.candidate.program, Path(scratch) / str(number))
                verdicts = gate.judge(gates, [self._measure(program, evals)], evals)
                caught = [v for v in verdicts if v.outcome == "FAIL" and v.rule not in failed]
                found.append((fault.name, caught[0] if caught else None))
        return found

    def _measure(self, program: Artifact, evals: Mapping[str, Metric]) -> Row:
        row = _row("candidate", program, self.candidate.traits)
        if (lack := lacks(program) or lacks(self.reference.program)) is not None:
            row.failures.update(dict.fromkeys(evals, lack))
            return row
        context = MeasureContext(self._work.threads, self.rules.seed, self.progress)
        for name, metric in sorted(evals.items(), key=lambda x: x[1].kind):  # quality first
            log.info("%s: measuring %s", row.name, name)
            alone = self.store.lock("speed", "measuring speed") if metric.kind == "speed" else nullcontext()
            with alone, Attempt() as attempt:
                measured = metric.measure(program, {"parent": self.reference.program}, context)
            if attempt.failure is not None:
                row.failures[name] = attempt.failure
                continue
            row.measurements.update({f"{name}.{k}": m for k, m in measured.items()})
            row.measured_at.update({f"{name}.{k}": _now() for k in measured})
        return row


def is_artifact(source: str) -> bool:
    """Whether a source is the folder of an artifact, and not a model from elsewhere."""
    return (Path(source).expanduser() / MANIFEST).is_file()


def read_gates(path: Path) -> dict[str, Any]:
    """A file of gates: `gates:`, and `evals:` where the metrics are not to be measured with their defaults.

    Raises:
        UserError: It cannot be read or holds something else.
    """
    content = document.read(path)
    for key in content:
        if key not in KEYS:
            raise UserError(f"{path}: {key!r} is not known here; {did_you_mean(key, KEYS)}")
    gates = content.get("gates")
    if not isinstance(gates, list) or not gates:
        raise UserError(f"{path}: gates: a list with at least one gate is needed")
    return {"gates": gates, "evals": content.get("evals") or _default_evals(gates)}


def _default_evals(gates: Sequence[Any]) -> list[dict[str, Any]]:
    """Each metric that a gate names, with its default fields."""
    metrics = [str(x["metric"]).partition(".")[0] for x in gates if isinstance(x, dict) and "metric" in x]
    return [{"use": name} for name in dict.fromkeys(metrics)]


def profile_gates(candidate: Side, reference: Side, level: Level) -> dict[str, Any]:
    """Gates and evals of the built-in profile that fits the candidate. Speed and size count between programs only.

    Raises:
        UserError: The models differ in shape: what a pruned model may lose, only its user knows.
    """
    shapes = [[(x.in_features, x.out_features) for x in side.spec.linears()] for side in (candidate, reference)]
    if shapes[0] != shapes[1]:
        raise UserError("--profile: candidate and reference differ in shape and no limits fit that; write --gates")
    chosen = gate.profile(gate.profile_name(candidate.bits), level)
    if not (candidate.is_program and reference.is_program):
        chosen = [x for x in chosen if x.of is None]
    gates = [x.model_dump(exclude_none=True) for x in chosen]
    return {"gates": gates, "evals": _default_evals(gates)}


def weight_bits(spec: ModelSpec, traits: Traits) -> float:
    """Fewest bits that a weight of a model takes."""
    quantized = [x.quantization.bits for x in spec.linears() if x.quantization]
    return min([*quantized, 32 if traits.dtype == spec.dtype == "float32" else 16])


def check_tokenizers(candidate: Side, reference: Side) -> None:
    """Refuse to compare token for token what is cut into tokens differently.

    Raises:
        UserError: The vocabularies or the tokens of a sample differ.
    """
    ours, theirs = (load_tokenizer(side.program.path) for side in (candidate, reference))
    names = f"{candidate.source} and {reference.source}"
    if ours.get_vocab() != theirs.get_vocab():
        sizes = f"{len(ours.get_vocab())} and {len(theirs.get_vocab())} tokens"
        raise UserError(f"{names}: their tokenizers differ ({sizes}), they cannot be compared token for token")
    if ours.encode(SAMPLE) != theirs.encode(SAMPLE):
        raise UserError(f"{names}: their tokenizers cut the same text differently, they cannot be compared")


def _row(chain: str, program: Artifact, traits: Traits) -> Row:
    size = sum(x["size_bytes"] for x in read_manifest(program.path).files.values())
    return Row(f"{chain} / {traits.runtime}", chain, traits.runtime, program.key, size)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
