"""GPTQ: codes chosen column by column, each rounding error made good by the columns that are still to come.

Frantar et al. 2022, arXiv 2210.17323. On top of the paper: scales of least error weighted with the inputs' energy
instead of from extremes, and groups that keep their place under act-order, so nothing but codes and scales is stored.

The maths and the walk through the model are in _compensation.py, which other methods build on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from strop.artifact import Artifact
from strop.methods._compensation import MOST_DAMPING, Compensation
from strop.methods._formats import Override, notes, quantizations
from strop.spec import Activations, ModelSpec, NumberFormat
from strop.stage import Context, Plan, Stage


class Gptq(Stage):
    """Quantize the weights of linears one column after the other, against the inputs that calibration text gives them.

    An expert learns from the tokens that reach it. The report counts them, and names experts that too few reach: those
    are rounded to nearest.

    Attributes:
        format: As in `rtn`. The three fields below are for `int` alone.
        bits: Width of a code.
        group_size: Inputs that share one scale; null: one scale per output channel.
        symmetric: Without zero points.
        activations: Inputs are rounded too (W8A8): to int8, which takes bits: 8 and group_size: null, or with `fp8` to
            that. `dynamic`: each token by a scale of its own; `static`: all by one scale, from the largest input of the
            calibration text.
        per_tensor: Of `fp8`, one scale for the whole matrix.
        overrides: What is otherwise for some of the targets, such as `{targets: ["*.down_proj"], bits: 8}`: the fields
            above. The first that fits holds; one that names a format begins from what that has, others from these.
        targets: Patterns over full linear names, for example `*.mlp.*`; null: every linear inside the layers.
        act_order: Begin with the columns whose inputs have the most energy.
        damping: Added to the Hessian's diagonal, as a part of the diagonal's mean. Where the Hessian cannot be
            inverted it is raised tenfold until it can, and the report names the linear. Of an expert's Hessian it is at
            least the number of inputs by that of the tokens that reach it.
        drift_correction: How much of the inputs' drift away from the unquantized model's is made good; 0: plain GPTQ.
    """

    needs_calibration: ClassVar[bool] = True

    format: NumberFormat = "int"
    bits: Literal[2, 3, 4, 8] = 4
    group_size: int | None = Field(default=64, gt=0)
    symmetric: bool = True
    activations: Activations | None = None
    per_tensor: bool = False
    overrides: list[Override] = Field(default_factory=list)
    targets: list[str] | None = Field(default=None, min_length=1)
    act_order: bool = True
    damping: float = Field(default=0.01, gt=0, le=MOST_DAMPING)
    drift_correction: float = Field(default=0.5, ge=0, le=1)

    def plan(self, spec: ModelSpec, num_calibration_tokens: int) -> Plan:
        """See `Stage.plan`."""
        linears = spec.match(self.targets)
        result = spec.quantize(quantizations(self, linears))
        memory, seconds = self._compensation().cost(spec, linears, num_calibration_tokens)
        return Plan(result, result.size_bytes(), memory, seconds, notes(result))

    def run(self, source: Artifact, out: Path, context: Context) -> dict[str, Any]:
        """See `Stage.run`. Finished linears are kept in the scratch folder; a killed run goes on after them."""
        from strop.model import read_spec

        linears = read_spec(source.path).match(self.targets)
        return self._compensation().quantize(source, out, context, quantizations(self, linears))

    def _compensation(self) -> Compensation:
        return Compensation(self.act_order, self.damping, self.drift_correction)
