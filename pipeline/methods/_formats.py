"""What a recipe says of a number format -> `Quantization`: the fields that several methods have.

Formats other than `int` leave little to choose: fields that are left out take what the format has, others are refused.
"""

from __future__ import annotations

from typing import Protocol

from strop.errors import UserError
from strop.spec import FIXED_FORMATS, Activations, NumberFormat, Quantization


class Fields(Protocol):
    """A stage that rounds weights.

    Attributes:
        model_fields_set: Names of the fields that the recipe gives.
    """

    @property
    def bits(self) -> int: ...
    @property
    def group_size(self) -> int | None: ...
    @property
    def symmetric(self) -> bool: ...
    @property
    def activations(self) -> Activations | None: ...
    @property
    def format(self) -> NumberFormat: ...
    @property
    def per_tensor(self) -> bool: ...
    @property
    def model_fields_set(self) -> set[str]: ...


def quantization(stage: Fields) -> Quantization:
    """How a stage is to store a weight.

    Raises:
        UserError: The format has no such thing: names the field, what was found, what is allowed.
    """
    if stage.per_tensor and stage.format != "fp8":
        raise UserError(f"per_tensor true: only format fp8 has one scale for a matrix, found {stage.format}")
    if stage.format == "int":
        return Quantization(stage.bits, stage.group_size, stage.symmetric, stage.activations)
    only = FIXED_FORMATS[stage.format]
    for field, allowed in (("bits", only.bits), ("group_size", only.group_size), ("symmetric", True)):
        found = getattr(stage, field)
        if field in stage.model_fields_set and found != allowed:
            raise UserError(
                f"{field} {_told(found)}: format {stage.format} has {_told(allowed)}; leave {field} out, or take int"
            )
    if stage.activations is not None and stage.format != "fp8":
        raise UserError(
            f"activations {stage.activations}: format {stage.format} is for weights only; allowed: null, or format fp8"
        )
    return Quantization(only.bits, only.group_size, True, stage.activations, stage.format, stage.per_tensor)


def _told(value: object) -> str:
    """As YAML has it."""
    return "null" if value is None else str(value).lower()
