"""What a recipe says of number formats -> a `Quantization` for each linear: the fields that several methods have.

Formats other than `int` leave little to choose: fields that are left out take what the format has, others are refused.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from strop.errors import UserError
from strop.spec import CHOSEN, FIXED_FORMATS, Activations, Linear, ModelSpec, NumberFormat, Quantization


class Fields(Protocol):
    """What says how a weight is stored: a stage, or an override of it.

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


class Override(BaseModel):
    """What is otherwise for some linears of a stage.

    Attributes:
        targets: Patterns over full linear names. The other fields are as the stage has them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    targets: list[str] = Field(min_length=1)
    format: NumberFormat = "int"
    bits: Literal[2, 3, 4, 8] = 4
    group_size: int | None = Field(default=64, gt=0)
    symmetric: bool = True
    activations: Activations | None = None
    per_tensor: bool = False

    @model_serializer(mode="wrap")
    def _given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Only what the recipe gives: a field that is left out is not the same as one with the default's value."""
        return {name: value for name, value in handler(self).items() if name in self.model_fields_set}

    def fits(self, name: str) -> bool:
        """Whether it is for a linear."""
        return any(fnmatch.fnmatchcase(name, x) for x in self.targets)


class OverriddenFields(Fields, Protocol):
    """A stage whose linears need not all be stored alike."""

    @property
    def overrides(self) -> Sequence[Override]: ...


def quantizations(stage: OverriddenFields, linears: Sequence[Linear]) -> dict[str, Quantization]:
    """Linear name -> how a stage is to store its weight.

    Args:
        stage: The first of its overrides that fits a linear holds for it. One that names a format begins from what that
            format has, another one from the stage's own fields.
        linears: The stage's targets.

    Raises:
        UserError: As `quantization`, or a pattern fits no target.
    """
    names = [x.name for x in linears]
    found = dict.fromkeys(names, quantization(stage))
    for index, override in reversed(list(enumerate(stage.overrides))):
        for pattern in override.targets:
            if not any(fnmatch.fnmatchcase(x, pattern) for x in names):
                raise UserError(f"overrides[{index}]: pattern {pattern!r} matches none of the stage's targets")
        try:
            form = quantization(_merged(stage, override))
        except UserError as error:
            raise UserError(f"overrides[{index}]: {error}") from error
        found.update({x: form for x in names if override.fits(x)})
    return found


def _merged(stage: OverriddenFields, override: Override) -> Override:
    """An override with what it takes over from its stage."""
    given: dict[str, Any] = {x: getattr(override, x) for x in override.model_fields_set}
    if "format" not in given:
        own = Override.model_fields.keys() & stage.model_fields_set
        given = {"format": stage.format, **{x: getattr(stage, x) for x in own}, **given}
    return Override.model_validate(given)


def notes(spec: ModelSpec) -> tuple[str, ...]:
    """What `check` says of a table's formats."""
    linears = [(role, x.quantization) for layer in spec.layers for role, x in layer.linears.items()]
    if any(q is not None and q.format == "nvfp4" and role.startswith(CHOSEN) for role, q in linears):
        return (
            "experts in nvfp4 are for vLLM: transformers 5.24 opens them without their global scale, as other weights",
        )
    return ()


def quantization(fields: Fields) -> Quantization:
    """How a weight is to be stored.

    Raises:
        UserError: The format has no such thing: names the field, what was found, what is allowed.
    """
    if fields.per_tensor and fields.format != "fp8":
        raise UserError(f"per_tensor true: only format fp8 has one scale for a matrix, found {fields.format}")
    if fields.format == "int":
        return Quantization(fields.bits, fields.group_size, fields.symmetric, fields.activations)
    only = FIXED_FORMATS[fields.format]
    for field, allowed in (("bits", only.bits), ("group_size", only.group_size), ("symmetric", True)):
        found = getattr(fields, field)
        if field in fields.model_fields_set and found != allowed:
            raise UserError(
                f"{field} {_told(found)}: format {fields.format} has {_told(allowed)}; leave {field} out, or take int"
            )
    if fields.activations is not None and fields.format != "fp8":
        raise UserError(
            f"activations {fields.activations}: format {fields.format} is for weights only; allowed: null, or fp8"
        )
    return Quantization(only.bits, only.group_size, True, fields.activations, fields.format, fields.per_tensor)


def _told(value: object) -> str:
    """As YAML has it."""
    return "null" if value is None else str(value).lower()
