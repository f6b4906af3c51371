"""The run: what is equal is reused, what differs is not, and what goes wrong shows in the report and the exit code."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from references import tiny_folder

from strop import recipe, runner
from strop.artifact import hash_file, list_files
from strop.errors import ExitCode, UserError
from strop.report import Report, read_report
from strop.store import Store

METRIC = '''
from typing import ClassVar
from strop.errors import UserError
from strop.metric import Estimate, Kind, Measurement, Metric

class Fake(Metric):
    """Counts bytes, and writes a line whenever it does."""
    kind: ClassVar[Kind] = "KIND"
    log: str
    crash: str = ""
    noisy: bool = False

    def names(self):
        return {"bytes": "bytes"}

    def measure(self, program, references, context):
        with open(self.log, "a") as file:
            file.write(f"{sorted(references)} {context.threads} {context.seed}\\n")
        if self.crash and program.key != references["parent"].key:
            raise {"user": UserError, "value": ValueError}[self.crash]("no such\\nluck")
        size = sum(x.stat().st_size for x in program.path.rglob("*.safetensors"))
        parent = sum(x.stat().st_size for x in references["parent"].path.rglob("*.safetensors"))
        ratios = {"parent": Estimate.exact(size / parent)}
        estimate = Estimate(size, size, size, 1.0, self.noisy)
        return {"bytes": Measurement(estimate, "bytes", "lower", 1, {"what": "bytes"}, ratios)}
'''
RUNTIME = '''
import dataclasses
import os
from typing import ClassVar

import numpy as np

from strop.artifact import Format
from strop.program import Program, Traits
from strop.stage import Plan, Stage

class Memo(Stage):
    """A program that has learned one answer by heart: it loads without torch, and conformance asks no more of it."""
    gives: ClassVar[Format] = "program"

    def plan(self, spec, num_calibration_tokens):
        return Plan(spec, spec.size_bytes(), 0, 1.0)

    def run(self, source, out, context):
        from strop.conformance import probe
        from strop.export.eager import Eager
        from strop.model import copy_companions, read_spec
        spec = read_spec(source.path)
        traits = Traits(__name__, "float32", context.threads, "cpu", spec.max_positions, spec.vocab_size, False)
        eager = Eager.load(source.path, dataclasses.replace(traits, runtime="eager"))
        np.save(out / "logits.npy", eager.open().step(probe(traits)[None], logits="all"))
        os.link(source.path / "model.safetensors", out / "model.safetensors")
        copy_companions(source.path, out)
        return {"spec": spec, "traits": traits, "report": {}}

    @staticmethod
    def load(path, traits):
        return MemoProgram(np.load(path / "logits.npy"), traits)

class MemoProgram(Program):
    def __init__(self, logits, traits):
        self.logits, self.traits = logits, traits

    def allocate(self, batch, max_tokens):
        return []

    def bind(self, cache):
        return lambda step: self.logits[:, step.logit_rows[0]]
'''
SHIFT = '''
from typing import ClassVar
from strop.stage import ArtifactRef, Plan, Stage

class Shift(Stage):
    """Adds the mean of the calibration tokens to the last norm; waits; may refuse."""
    needs_calibration: ClassVar[bool] = True
    by: float = 0.0
    teacher: ArtifactRef = ArtifactRef("parent")

    def plan(self, spec, num_calibration_tokens):
        return Plan(spec, spec.size_bytes(), 0, 1.0, (f"{num_calibration_tokens} tokens",))

    def run(self, source, out, context):
        import numpy as np
        from strop.model import Weights, read_spec, save_checkpoint
        spec = read_spec(source.path)
        assert (context.artifacts[self.teacher].path / "config.json").is_file()
        mean = float(np.load(context.calibration).mean())
        name = spec.final_norm.name + ".weight"
        with Weights(source.path) as weights:
            save_checkpoint(out, spec, source.path, [(name, weights.load(name) + self.by + mean)])
        return {"spec": spec, "report": {"mean": mean}}
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the fakes' package, on the path."""
    place = tmp_path_factory.mktemp("modules")
    package = place / "runner_fakes"
    package.mkdir()
    for name, text in {
        "__init__": "",
        "quality": METRIC.replace("KIND", "quality"),
        "speed": METRIC.replace("KIND", "speed"),
        "shift": SHIFT,
        "memo": RUNTIME,
    }.items():
        (package / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place)
        yield place


class Bench:
    """Runs recipes over a tiny model in one store."""

    def __init__(self, place: Path, model: Path) -> None:
        self.place = place
        self.store = Store(place / "store")
        self.text: dict[str, Any] = {
            "version": 1,
            "model": {"source": str(model)},
            "stages": [{"use": "rtn", "name": "w4", "group_size": 16}],
            "export": [{"use": "runner_fakes.memo", "name": "memo"}],
            "evals": [{"use": "runner_fakes.quality", "name": "size", "log": str(place / "quality.log")}],
            "gates": [{"metric": "size.bytes", "at_most": 0.9, "of": "parent"}],
            "threads": 1,
        }

    def run(self, *, remeasure: bool = False, **changes: Any) -> Report:
        chosen = recipe.parse({**self.text, **changes}, "tiny")
        return runner.run(chosen, self.store, self.place / "out", remeasure=remeasure)

    def measured(self, kind: str = "quality") -> int:
        """How often the fake metric ran."""
        path = self.place / f"{kind}.log"
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory, model: Path, modules: Path) -> Path:
    """A store in which the recipe has run, without having measured anything."""
    bench = Bench(tmp_path_factory.mktemp("seed"), model)
    bench.run(evals=[], gates=[])
    return bench.store.root


@pytest.fixture
def fresh(tmp_path: Path, model: Path) -> Bench:
    """An empty store."""
    return Bench(tmp_path, model)


@pytest.fixture
def bench(tmp_path: Path, model: Path, seed: Path) -> Bench:
    """A store in which everything is built."""
    shutil.copytree(seed, tmp_path / "store", copy_function=os.link)
    return Bench(tmp_path, model)


def built(report: Report) -> list[str]:
    """Stages that this run did not find in the store."""
    return [f"{x.chain}/{x.name}" for x in report.stages if not x.is_cached]


def test_rows_gates_records_and_files(bench: Bench) -> None:
    found = bench.run()
    assert [x.name for x in found.rows] == ["parent / eager", "parent / memo", "main / memo"]
    assert [(x.row, x.outcome) for x in found.gates] == [("main / memo", "PASS")]
    assert found.exit_code == 0
    assert [(x.chain, x.name) for x in found.stages] == [
        ("parent", "source"), ("parent", "eager"), ("parent", "memo"), ("main", "w4"), ("main", "memo"),
    ]  # fmt: skip
    assert all(x.seconds > 0 and x.peak_memory_bytes > 0 and x.size_bytes > 0 for x in found.stages)
    out = bench.place / "out"
    assert read_report(out).to_json() == found.to_json()
    assert {x.name for x in out.iterdir()} == {"report.json", "report.md", "report.csv", "report.html", "junit.xml"}


def test_the_second_run_builds_and_measures_nothing(fresh: Bench) -> None:
    bench = fresh
    first = bench.run()
    assert len(built(first)) == 5
    second = bench.run()
    assert built(second) == []
    assert bench.measured() == 3
    assert [x.measurements for x in second.rows] == [x.measurements for x in first.rows]
    assert [x.seconds for x in second.stages] == [x.seconds for x in first.stages]
    bench.run(remeasure=True)
    assert bench.measured() == 6


def test_speed_is_remembered_with_its_age(bench: Bench) -> None:
    evals = [{"use": "runner_fakes.speed", "name": "size", "log": str(bench.place / "speed.log")}]
    first = bench.run(evals=evals)
    time.sleep(1.1)
    second = bench.run(evals=evals)
    assert bench.measured("speed") == 3
    assert second.rows[0].measured_at == first.rows[0].measured_at
    assert [("--remeasure" in x) for x in (*first.notes, *second.notes)].count(True) == 1
    assert second.created > first.created


def test_what_a_noisy_machine_measured_is_not_remembered(bench: Bench) -> None:
    evals = [{"use": "runner_fakes.speed", "name": "size", "log": str(bench.place / "speed.log"), "noisy": True}]
    assert bench.run(evals=evals, gates=[{"metric": "size.bytes", "at_most": 1}]).exit_code == ExitCode.INCONCLUSIVE
    bench.run(evals=evals)
    assert bench.measured("speed") == 6


@pytest.mark.parametrize(
    ("changes", "rebuilt"),
    [
        ({"stages": [{"use": "rtn", "name": "w4", "group_size": 16, "bits": 8}]}, ["main/w4", "main/memo"]),
        ({"stages": [{"use": "rtn", "name": "other", "group_size": 16}]}, []),
        ({"seed": 1, "stages": []}, ["parent/eager", "parent/memo"]),
        ({"threads": 2, "stages": []}, ["parent/eager", "parent/memo"]),
        ({"stages": []}, []),
        ({"variants": {"again": {"replace": {"w4": {"use": "rtn", "group_size": 16}}}}}, []),
    ],
)
def test_a_change_rebuilds_what_depends_on_it(bench: Bench, changes: dict[str, Any], rebuilt: list[str]) -> None:
    assert built(bench.run(**changes)) == rebuilt


def test_another_content_of_the_model_rebuilds_all(bench: Bench, tmp_path: Path) -> None:
    bench.text["model"] = {"source": str(tiny_folder(tmp_path / "tiny", seed=1))}
    assert built(bench.run(stages=[])) == ["parent/source", "parent/eager", "parent/memo"]


def test_variants_share_a_prefix_and_explored_ones_are_not_gated(bench: Bench) -> None:
    stages = [
        {"use": "rtn", "name": "w4", "group_size": 16},
        {"use": "rtn", "name": "head", "targets": ["lm_head"], "group_size": 16},
    ]
    found = bench.run(
        stages=stages,
        variants={
            "w8": {"replace": {"head": {"use": "rtn", "bits": 8, "group_size": 16, "targets": ["lm_head"]}}},
            "dense": {"drop": ["w4", "head"], "explore": True},
        },
    )
    assert built(found) == ["main/head", "main/memo", "w8/head", "w8/memo"]
    assert [x.row for x in found.gates] == ["main / memo", "w8 / memo"]
    assert next(x for x in found.rows if x.chain == "dense").key == found.rows[1].key


def test_calibration_tokens_are_made_once_and_enter_the_key(bench: Bench) -> None:
    stages = [{"use": "runner_fakes.shift", "name": "a"}, {"use": "runner_fakes.shift", "name": "b", "teacher": "a"}]
    calibration = {"source": "python", "samples": 2, "length": 8}
    found = bench.run(stages=stages, calibration=calibration)
    assert built(found).count("main/calibration") == 1
    assert found.notes == ["main / a: 16 tokens", "main / b: 16 tokens"]
    again = bench.run(stages=stages, calibration={**calibration, "seed": 1})
    assert {"main/calibration", "main/a", "main/b"} <= set(built(again))


def test_a_reference_enters_the_key(bench: Bench, tmp_path: Path) -> None:
    calibration = {"source": "python", "samples": 2, "length": 8}
    other = str(tiny_folder(tmp_path / "teacher", seed=3))
    bench.run(stages=[{"use": "runner_fakes.shift", "name": "a"}], calibration=calibration)
    found = bench.run(stages=[{"use": "runner_fakes.shift", "name": "a", "teacher": other}], calibration=calibration)
    assert "main/a" in built(found)


def test_a_metric_that_crashes_is_reported_and_blocks(bench: Bench) -> None:
    log = str(bench.place / "quality.log")
    evals = [{"use": "runner_fakes.quality", "name": "size", "log": log, "crash": "value"}]
    found = bench.run(evals=evals)
    assert found.rows[2].failures == {"size": "ValueError: no such luck"}
    assert found.gates[0].outcome == "NOT_MEASURED"
    assert found.exit_code == ExitCode.INCONCLUSIVE
    assert bench.run(evals=evals, gates=[]).exit_code == ExitCode.INCONCLUSIVE
    assert bench.measured() == 5, "a crash is not remembered"


def test_what_the_user_must_change_ends_the_run(bench: Bench) -> None:
    log = str(bench.place / "quality.log")
    with pytest.raises(UserError, match="no such"):
        bench.run(evals=[{"use": "runner_fakes.quality", "name": "size", "log": log, "crash": "user"}])


def test_a_failed_gate_gives_its_exit_code(bench: Bench) -> None:
    gates = [{"metric": "size.bytes", "at_most": 0.01, "of": "parent"}]
    assert bench.run(gates=gates).exit_code == ExitCode.QUALITY
    evals = [{"use": "runner_fakes.speed", "name": "size", "log": str(bench.place / "speed.log")}]
    assert bench.run(gates=gates, evals=evals).exit_code == ExitCode.SPEED


def test_the_report_folder_must_be_writable(bench: Bench) -> None:
    (bench.place / "out").write_text("a file")
    with pytest.raises(UserError, match="the report cannot be written"):
        bench.run()


def test_a_damaged_artifact_is_built_again(bench: Bench) -> None:
    first = bench.run()
    path = bench.store.path(first.stages[3].key) / "model.safetensors"
    path.chmod(0o644)
    path.write_bytes(b"x" * path.stat().st_size)
    # the program links the checkpoint's file, so that one is damaged too
    assert built(bench.run()) == ["main/w4", "main/memo"]
    assert bench.store.verify()


def hashes(store: Store, found: dict[str, Any]) -> dict[str, str]:
    """Every file of every object that a report names."""
    keys = {x["key"] for x in found["stages"]}
    return {
        f"{k}/{p.name}": hash_file(p) for k in keys for p in [*list_files(store.path(k)), store.path(k) / "strop.json"]
    }


def test_killed_at_random_and_run_again_it_ends_in_the_same_bytes(bench: Bench, tmp_path: Path, modules: Path) -> None:
    text = {
        **bench.text,
        "export": [{"use": "eager"}],
        "calibration": {"source": "self", "samples": 4, "length": 24},
        "stages": [
            {"use": "rtn", "name": "w8", "bits": 8, "group_size": 16, "targets": ["lm_head"]},
            {"use": "gptq", "name": "w4", "group_size": 16},
        ],
    }
    path = tmp_path / "killed.yaml"
    path.write_text(yaml.safe_dump(text))
    environment = {**os.environ, "PYTHONPATH": str(modules), "OMP_NUM_THREADS": "1"}

    def start(store: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "strop", "run", str(path), "--store", store, "--out", store + ".out"]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    began = time.monotonic()
    process = start(str(tmp_path / "whole"))
    _, log = process.communicate()
    assert process.returncode == 0, log.decode()
    takes = time.monotonic() - began
    generator = random.Random(0)
    for _ in range(3):
        process = start(str(tmp_path / "broken"))
        try:
            process.wait(takes * (0.3 + 0.7 * generator.random()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        process.communicate()
    process = start(str(tmp_path / "broken"))
    assert process.wait(120) == 0
    process.communicate()
    reports = [json.loads((tmp_path / f"{x}.out" / "report.json").read_text()) for x in ("whole", "broken")]
    whole, broken = (hashes(Store(tmp_path / x), y) for x, y in zip(("whole", "broken"), reports, strict=True))
    assert whole == broken
