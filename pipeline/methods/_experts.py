"""Experts that few calibration tokens reach: what methods that calibrate do with them, and the one line about them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strop.calibration.capture import Group

log = logging.getLogger(__name__)

LEAST_TOKENS = 16
"""What fewer inputs of an expert ask for is wrong for others (benchmarks/gptq.md)."""
SHOWN_EXPERTS = 4
"""Named in the line about those that too few tokens reach; the report names all."""


def is_learned(group: Group) -> bool:
    """Whether enough tokens reach linears to learn from: all that belong to no expert, and experts of many tokens."""
    return group.expert is None or group.num_tokens >= LEAST_TOKENS


NO_EXPERT = -1
"""Kept in the place of a number of tokens by linears that belong to none."""


def report_experts(method: str, tokens: Mapping[str, int], instead: str = "rounded to nearest") -> dict[str, Any]:
    """What the report says of experts, after one line about those that too few tokens reach.

    Args:
        method: Its name.
        tokens: Expert -> tokens that reach it.
        instead: What is done with those that too few reach.

    Returns:
        `expert_tokens`, and the names of those under `instead`; nothing where there are no experts.
    """
    if not tokens:
        return {}
    few = [expert for expert, count in tokens.items() if count < LEAST_TOKENS]
    if few:
        shown = ", ".join(f"{x} ({tokens[x]})" for x in few[:SHOWN_EXPERTS])
        more = f" and {len(few) - SHOWN_EXPERTS} more, see the report" if len(few) > SHOWN_EXPERTS else ""
        log.warning(
            "%s: %d of %d experts are reached by fewer than %d calibration tokens and %s: %s%s",
            method, len(few), len(tokens), LEAST_TOKENS, instead, shown, more,
        )  # fmt: skip
    return {"expert_tokens": dict(tokens), instead.replace(" ", "_"): few}
