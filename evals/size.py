"""Bytes of a program's folder, `strop.json` apart: what has to be shipped. Equal work gives equal bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from strop.artifact import Artifact, list_files
from strop.metric import Estimate, Kind, MeasureContext, Measurement, Metric

TEXT_SUFFIXES = (".json", ".txt", ".jinja", ".md", ".model", "")
"""Of tokenizer, configuration and licence files. The rest is weights and graphs."""


class Size(Metric):
    """Bytes of the program's files, and of those that hold weights."""

    kind: ClassVar[Kind] = "speed"

    def names(self) -> Mapping[str, str]:
        """See `Metric.names`."""
        return {"total_bytes": "bytes", "weight_bytes": "bytes"}

    def measure(
        self,
        program: Artifact,
        references: Mapping[str, Artifact],
        context: MeasureContext,  # noqa: ARG002 (the contract of a metric)
    ) -> dict[str, Measurement]:
        """See `Metric.measure`."""
        ours = count(program.path)
        theirs = {name: count(artifact.path) for name, artifact in references.items()}
        detail = {str(x.relative_to(program.path)): x.stat().st_size for x in list_files(program.path)}
        return {
            name: Measurement(
                Estimate.exact(float(ours[name])),
                "bytes",
                "lower",
                1,
                {"counts": "every file of the folder" if name == "total_bytes" else "weights and graphs"},
                {key: Estimate.exact(ours[name] / sizes[name]) for key, sizes in theirs.items() if sizes[name]},
                {"files": detail},
            )
            for name in self.names()
        }


def count(folder: Path) -> dict[str, int]:
    """`total_bytes` of every file but the manifest, `weight_bytes` of those that are no text."""
    sizes = {x: x.stat().st_size for x in list_files(folder)}
    return {
        "total_bytes": sum(sizes.values()),
        "weight_bytes": sum(size for x, size in sizes.items() if x.suffix not in TEXT_SUFFIXES),
    }
