"""The stage `rtn`: what it refuses, and that checkpoints hold the nearest codes. Maths: tests/test_numerics.py."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from strop.methods.rtn import Rtn


@pytest.mark.parametrize(
    "fields", [{"bits": 5}, {"bits": "4"}, {"group_size": 0}, {"targets": []}, {"targets": "*"}, {"bit": 4}]
)
def test_unknown_values_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as caught:
        Rtn.model_validate(fields)
    assert caught.value.errors()[0]["loc"][0] in fields


def test_the_message_about_bits_lists_what_is_allowed() -> None:
    with pytest.raises(ValidationError, match="2, 3, 4 or 8"):
        Rtn.model_validate({"bits": 5})
