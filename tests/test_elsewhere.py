"""Programs that cannot run where they were made: kept, NOT MEASURED, and checked by the first machine that can."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from references import tiny_folder

from strop import cli, digest, recipe, release, runner
from strop.errors import ConformanceError, ExitCode, UserError
from strop.report import Report
from strop.stage import no_progress
from strop.store import Store

RUNTIME = '''
import dataclasses
import os
from pathlib import Path
from typing import ClassVar

import numpy as np

from strop.artifact import Format
from strop.errors import UserError
from strop.program import Program, Traits
from strop.stage import Plan, Stage

PLACE = Path(__file__).parent.parent

class Far(Stage):
    """Knows the answer to what conformance asks by heart, on a machine that has the file `device`."""
    gives: ClassVar[Format] = "program"

    def plan(self, spec, num_calibration_tokens):
        return Plan(spec, spec.size_bytes(), 0, 1.0)

    def run(self, source, out, context):
        from strop.conformance import probe
        from strop.export.eager import Eager
        from strop.model import copy_companions, read_spec
        spec = read_spec(source.path)
        traits = Traits(__name__, "float32", context.threads, "cuda", spec.max_positions, spec.vocab_size, False)
        eager = Eager.load(source.path, dataclasses.replace(traits, runtime="eager", device="cpu"))
        np.save(out / "logits.npy", eager.open().step(probe(traits)[None], logits="all"))
        copy_companions(source.path, out)
        return {"spec": spec, "traits": traits, "report": {}}

    @staticmethod
    def load(path, traits):
        if (lack := Far.lacks(path, traits)) is not None:
            raise UserError(lack)
        return FarProgram(np.load(path / "logits.npy") * (2 if (PLACE / "wrong").exists() else 1), traits)

    @staticmethod
    def lacks(path, traits):
        return None if (PLACE / "device").exists() else "it runs on a Turbo 9000, and none is here"

class FarProgram(Program):
    def __init__(self, logits, traits):
        self.logits, self.traits = logits, traits

    def allocate(self, batch, max_tokens):
        return []

    def bind(self, cache):
        return lambda step: self.logits[:, step.logit_rows[0]]
'''
METRIC = '''
from typing import ClassVar
from strop.metric import Estimate, Kind, Measurement, Metric
from strop.program import open_program

class Loaded(Metric):
    """1 where a program can be loaded."""
    kind: ClassVar[Kind] = "quality"

    def names(self):
        return {"one": "count"}

    def measure(self, program, references, context):
        open_program(program, 1)
        return {"one": Measurement(Estimate.exact(1.0), "count", "higher", 1, {"what": "loaded"}, {})}
'''
LACK = "it runs on a Turbo 9000, and none is here"


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a model, the runtime and the metric, and a store where a run without the device left its programs.

    What differs from test to test is copied from here.
    """
    place = tmp_path_factory.mktemp("origin")
    tiny_folder(place / "tiny")
    (place / "far").mkdir()
    for name, text in (("__init__", ""), ("runtime", RUNTIME), ("loaded", METRIC)):
        (place / "far" / f"{name}.py").write_text(text)
    sys.path.insert(0, str(place))
    assert run(place, gates=[]).exit_code == ExitCode.INCONCLUSIVE
    yield place
    sys.path.remove(str(place))
    for name in ("far", "far.runtime", "far.loaded"):
        sys.modules.pop(name, None)
    for cache in (digest.code_digest, digest.library_versions):
        cache.cache_clear()


@pytest.fixture
def place(origin: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the store, and the device gone again afterwards."""
    shutil.copytree(origin / "store", tmp_path / "store")
    yield tmp_path
    for name in ("device", "wrong"):
        (origin / name).unlink(missing_ok=True)


def run(place: Path, model: Path | None = None, **changes: Any) -> Report:
    """One run of a recipe on that runtime."""
    content = {
        "version": 1,
        "model": {"source": str((model or place) / "tiny")},
        "export": [{"use": "far.runtime", "name": "far"}],
        "evals": [],
        **changes,
    }
    return runner.run(recipe.parse(content, "tiny"), Store(place / "store"), place / "out")


MEASURED = {
    "evals": [{"use": "far.loaded"}],
    "gates": [{"metric": "far.loaded.one", "at_least": 1, "rows": ["parent / far"]}],
}


def program(place: Path) -> Path:
    """The folder of the finished program of that runtime."""
    found = (x.parent for x in (place / "store" / "objects").glob("*/strop.json"))
    return next(x for x in found if '"far.runtime"' in (x / "strop.json").read_text())


def test_what_cannot_run_here_is_kept_and_not_measured(origin: Path, place: Path) -> None:
    report = run(place, origin, **MEASURED)
    far = next(x for x in report.rows if x.runtime == "far.runtime")
    assert set(far.failures.values()) == {LACK}
    assert "conformance" in far.failures
    assert [x.outcome for x in report.gates] == ["NOT_MEASURED"]
    assert report.exit_code == ExitCode.INCONCLUSIVE
    assert program(place).is_dir()


def test_the_first_machine_that_can_run_it_checks_and_measures_it(origin: Path, place: Path) -> None:
    (origin / "device").touch()
    report = run(place, origin, **MEASURED)
    assert report.exit_code == ExitCode.PASSED
    assert all(x.is_cached for x in report.stages)
    assert [x.outcome for x in report.gates] == ["PASS"]
    assert [x.stem for x in (place / "store" / "checks").iterdir()] == [program(place).name]


def test_a_fault_that_could_not_be_seen_where_it_was_made_is_seen_later(origin: Path, place: Path) -> None:
    (origin / "device").touch()
    (origin / "wrong").touch()
    for _ in range(2):  # a failure is not remembered as a check
        with pytest.raises(ConformanceError, match=r"parent / far: .*logits are not those of its checkpoint"):
            run(place, origin)


def test_verify_says_that_it_was_not_measured(origin: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", str(program(place))]) == ExitCode.INCONCLUSIVE
    assert f"NOT MEASURED: {LACK}" in capsys.readouterr().out
    (origin / "device").touch()
    assert cli.main(["verify", str(program(place))]) == ExitCode.PASSED


def test_generate_says_what_is_lacking(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", str(program(place)), "--prompt", "a"]) == ExitCode.USER
    assert capsys.readouterr().err.strip().endswith(LACK)


def test_the_release_gate_does_not_pass_what_cannot_run(place: Path) -> None:
    gates, far = place / "gates.yaml", str(program(place))
    gates.write_text("gates: [{metric: far.loaded.one, at_least: 1}]\nevals: [{use: far.loaded}]\n")
    chosen = release.Release(far, far, gates, Store(place / "store"), no_progress)
    judged = chosen.judge()
    assert judged.exit_code == ExitCode.INCONCLUSIVE
    assert [(x.outcome, row.failures) for x in judged.gates for row in judged.rows[1:]] == [
        ("NOT_MEASURED", {"far.loaded": LACK})
    ]
    with pytest.raises(UserError, match="no fault can show where the programs cannot run"):
        chosen.self_test(judged)
