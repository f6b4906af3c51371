"""A runtime whose program is two tables: logits follow from the last two tokens, read back through the cache."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strop.artifact import Artifact, Manifest, write_manifest
from strop.errors import UserError
from strop.program import Cache, Forward, Logits, Program, Step, Traits
from strop.spec import ModelSpec
from strop.stage import Context, Plan, Stage

KEY = "f" * 64
CONTEXT = 1024


@dataclass(frozen=True)
class Behaviour:
    """How a program misbehaves.

    Attributes:
        step_s: Busy time of every step.
        sleep_s: Idle time of every step, and more of it for each of its new tokens.
        exit_at: Token id at which the process exits with a line on stderr.
        kill_at: Token id at which the process kills itself.
        refuse: It cannot be loaded.
        chatter: It prints to stdout.
        ballast_bytes: Memory that it takes when loaded.
    """

    step_s: float = 0.0
    sleep_s: tuple[float, float] = (0.0, 0.0)
    exit_at: int = -1
    kill_at: int = -1
    refuse: bool = False
    chatter: bool = False
    ballast_bytes: int = 0


class TableProgram(Program):
    """Logits of position t: last[id_t] + before[id_(t-1)]; ids of earlier steps come from the cache."""

    def __init__(self, last: Logits, before: Logits, traits: Traits, behaviour: Behaviour = Behaviour()) -> None:
        self.last, self.before, self.traits, self.behaviour = last, before, traits, behaviour
        self.ballast = np.ones(behaviour.ballast_bytes, np.int8)

    def allocate(self, batch: int, max_tokens: int) -> Cache:
        return [np.zeros((batch, 1, max_tokens, 1), dtype=np.int64)]

    def bind(self, cache: Cache) -> Forward:
        ids = cache[0][:, 0, :, 0]

        def forward(step: Step) -> Logits:
            self._misbehave(step)
            rows = np.arange(len(step.ids))[:, None]
            ids[rows, step.lengths[:, None] + np.arange(step.ids.shape[1])] = step.ids
            at = step.lengths[:, None] + step.logit_rows
            logits: Logits = (
                self.last[ids[rows, at]] + self.before[ids[rows, np.maximum(at - 1, 0)]] * (at > 0)[..., None]
            )
            return logits

        return forward

    def _misbehave(self, step: Step) -> None:
        if self.behaviour.exit_at in step.ids:
            os.write(2, b"table is wobbly\n")
            os._exit(7)
        if self.behaviour.kill_at in step.ids:
            os.kill(os.getpid(), signal.SIGKILL)
        end = time.perf_counter() + self.behaviour.step_s
        while time.perf_counter() < end:
            pass
        each, per_token = self.behaviour.sleep_s
        time.sleep(each + per_token * step.ids.shape[1])


class TableExport(Stage):
    """Only what `open_program` needs."""

    def plan(self, spec: ModelSpec, num_calibration_tokens: int) -> Plan:
        raise NotImplementedError

    def run(self, source: Artifact, out: Path, context: Context) -> dict[str, Any]:
        raise NotImplementedError

    @staticmethod
    def load(path: Path, traits: Traits) -> TableProgram:
        behaviour = Behaviour(**json.loads((path / "behaviour.json").read_text()))
        if behaviour.refuse:
            raise UserError("this table has no legs")
        if behaviour.chatter:
            print("a table says hello")
        return TableProgram(np.load(path / "last.npy"), np.load(path / "before.npy"), traits, behaviour)


def save_table(
    folder: Path, last: Logits, before: Logits, *, behaviour: Mapping[str, Any] | None = None, key: str = KEY
) -> Artifact:
    """A program artifact whose runtime is this module."""
    folder.mkdir(parents=True)
    np.save(folder / "last.npy", last)
    np.save(folder / "before.npy", before)
    (folder / "behaviour.json").write_text(json.dumps(dict(behaviour or {})))
    traits = Traits(__name__, "float32", 1, "cpu", CONTEXT, last.shape[1], takes_trees=False)
    write_manifest(folder, Manifest("program", key, traits=asdict(traits)))
    return Artifact(folder, "program", key)
