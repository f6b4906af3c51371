"""The recipe that `strop init` writes: commented, checked, and fitting the model's widths."""

from __future__ import annotations

import json

from strop.sources import describe
from strop.spec import Linear
from strop.store import Store

GROUP_SIZES = (64, 32, 128, 16)
"""In the order of preference: 64 is where accuracy and size balance at 4 bits."""
LENGTH = 512
"""Tokens of a calibration sample, where the model's context holds them."""
TEMPLATE = """\
# {note}
# Check it: strop check THIS_FILE     Run it: strop run THIS_FILE     All fields: strop list
version: 1
model:
  source: {source}
  dtype: {dtype}                      # of the parent; also float32, bfloat16 or float16

# Text for methods that calibrate (gptq). `self`: the model's own generations; also python, a .txt or .jsonl file.
calibration: {{source: self, samples: 64, length: {length}}}

# What is done to the model, in this order.
stages:
  - {{use: gptq, name: w4, bits: 4, group_size: {inside}}}{inside_note}
{head}
# Forks of the chain above, each a row of the table, sharing what is equal.
variants:
  rtn: {{replace: {{w4: {{use: rtn, bits: 4, group_size: {inside}}}}}, explore: true}}   # explore: shown, not gated

# Runtimes to lower to.
export:
  - {{use: onnx_runtime}}

# What is measured of every row.
evals:
  - {{use: divergence}}               # distance to the parent's predictions
  - {{use: perplexity}}
  - {{use: latency}}                  # paired with the parent
  - {{use: memory}}
  - {{use: size}}

# Bounds that decide the exit code. Start wide, then tighten to what your release needs.
gates:
  - {{metric: divergence.kl_mean, at_most: 0.5}}
  - {{metric: perplexity.ratio, at_most: 1.5}}
  - {{metric: latency.decode_tokens_per_s, at_least: 1.0, of: parent}}
  - {{metric: size.total_bytes, at_most: 0.5, of: parent}}
"""


def starter(source: str, store: Store) -> str:
    """A recipe to start from.

    Args:
        source: As `model.source` of a recipe.
        store: Where a package that holds the model may be.

    Raises:
        UserError: There is no such model.
    """
    spec, note = describe(source, "float32", store.wheels)
    inside = group_size([x for x in spec.linears() if x is not spec.head])
    head = group_size([spec.head])
    return TEMPLATE.format(
        note=note,
        source=json.dumps(source),
        dtype=spec.dtype,
        length=min(LENGTH, spec.max_positions or LENGTH),
        inside="null" if inside is None else inside,
        inside_note="" if inside else "   # null: no usual group size divides every width, one scale per channel",
        head=f"  - {{use: rtn, name: head, bits: 8, group_size: {head or 'null'}, targets: [{spec.head.name}]}}\n",
    )


def group_size(linears: list[Linear]) -> int | None:
    """The preferred group size that divides the inputs of all of these; None: none does."""
    return next((g for g in GROUP_SIZES if all(x.in_features % g == 0 for x in linears)), None)
