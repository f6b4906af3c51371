"""Keys and values in few bits: the cache that grows with every token, as codes with scales found by calibration.

The format is that of compressed-tensors and vLLM: symmetric with static scales, int8, int4 or E4M3 floats. Channels of
keys can have scales of their own, because some are loud in every token (Liu et al. 2024, KIVI, arXiv 2402.02750). Keys
are rounded as they are cached, after rope. Their scales are found with keys turned to places all over the context: in a
short sample a channel that turns slowly shows only a part of its range. Beyond that, a scale may be smaller than the
largest value asks for; that of keys by the error of attention's scores, where a channel counts by the energy of the
queries that it meets. Leaves out zero points, and recent tokens kept as they are: no engine here runs them.

Legend: q queries, k keys, v values (B, N, T, D); N heads, of queries their groups' sums; s scales (N or 1, 1, D or 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from strop.artifact import Artifact, write_atomically
from strop.errors import UserError
from strop.families import cache_scheme
from strop.spec import CacheFormat, CacheQuantization, CacheScales, ModelSpec
from strop.stage import GFLOPS_PER_THREAD, Context, Plan, Stage

if TYPE_CHECKING:
    from torch import Tensor

    from strop.calibration.capture import Stream

SHRINKS = tuple(x / 20 for x in range(20, 5, -1))
"""What the scale that fits the largest value is multiplied by in a search, that scale itself first."""
SEARCH_OPERATIONS = 12
"""For each key and value and each scale that is tried: memory-bound, counted as operations."""
Triples = Iterable[tuple["Tensor", "Tensor", "Tensor"]]
"""q (B, heads, T, D), k and v (B, N, T, D) of one layer, a few samples each."""


class KvCache(Stage):
    """Keep keys and values in the cache as codes of 8 or 4 bits.

    Attributes:
        format: `int8`, `int4`, or `fp8` (E4M3).
        keys: What shares a scale of the keys: `tensor` (a layer), `head`, `channel` (one of the values of a head), each
            found by calibration, or `token` (a head of one token, by its own largest value, when it is cached).
        values: The same of the values.
        clip: Scales may be smaller than the largest value asks for, where that makes the error less.
    """

    needs_calibration: ClassVar[bool] = True

    format: Literal["int8", "int4", "fp8"] = "int8"
    keys: Literal["tensor", "head", "channel", "token"] = "head"
    values: Literal["tensor", "head", "channel", "token"] = "head"
    clip: bool = Field(default=True)

    def plan(self, spec: ModelSpec, num_calibration_tokens: int) -> Plan:
        """See `Stage.plan`."""
        result = self._result(spec)
        inside = [x for layer in spec.layers for x in layer.linears.values()]
        widest = max(x.in_features for x in inside)
        cached = sum(2 * x.num_kv_heads * x.head_dim for x in spec.layers if x.kv_from_layer is None)
        tried = len(SHRINKS) if self.clip else 1
        forward = sum(2 * x.in_features * x.out_features for x in inside)
        block = sum(x.in_features * x.out_features for x in spec.layers[0].linears.values())
        return Plan(
            spec=result,
            size_bytes=result.size_bytes(),
            memory_bytes=4 * (num_calibration_tokens * (spec.hidden_size + widest) + 2 * block),
            seconds=num_calibration_tokens
            * (forward + SEARCH_OPERATIONS * tried * cached)
            / (2 * GFLOPS_PER_THREAD * 1e9),
            notes=self._notes(spec, result),
        )

    def run(self, source: Artifact, out: Path, context: Context) -> dict[str, Any]:
        """See `Stage.run`. What is found of a layer is kept in the scratch folder; a killed run goes on after it."""
        import numpy as np
        import torch

        from strop.calibration.capture import check_ids
        from strop.model import read_spec, save_checkpoint

        torch.set_num_threads(context.threads)
        assert context.calibration is not None, "the runner provides it: needs_calibration"
        ids = torch.from_numpy(np.load(context.calibration)).to(context.device)
        spec = read_spec(source.path)
        result = self._result(spec)
        check_ids(spec, ids)
        scales = result.cache_scales()
        with torch.no_grad():
            found = self._calibrate(source.path, spec, ids, context) if scales else {}
        changed = ((name, found[name].reshape(shape)) for name, shape in scales.items())
        save_checkpoint(out, result, source.path, changed)
        errors = {
            name.removesuffix(".error"): round(float(x), 6) for name, x in found.items() if name.endswith("error")
        }
        return {"spec": result, "report": {"relative_error": errors}}

    def _result(self, spec: ModelSpec) -> ModelSpec:
        """The table of the output.

        Raises:
            UserError: A family that is not known, a cache that is rounded already, or heads of odd width in 4 bits.
        """
        import dataclasses

        spec.match(None)
        if spec.kv_cache is not None:
            raise UserError(
                f"kv_cache: keys and values are kept in {spec.kv_cache.format} already, by an earlier stage"
            )
        for index, layer in enumerate(spec.layers):
            if self.format == "int4" and layer.head_dim % 2:
                raise UserError(
                    f"format int4: two codes fill a byte, the heads of layer {index} are {layer.head_dim} wide; "
                    "allowed here: int8, fp8"
                )
        return dataclasses.replace(spec, kv_cache=CacheQuantization(self.format, self.keys, self.values))

    def _notes(self, spec: ModelSpec, result: ModelSpec) -> tuple[str, ...]:
        assert result.kv_cache is not None
        before, after = spec.kv_bytes_per_token(2), result.kv_bytes_per_token()
        size = f"a cached token takes {after} bytes, {before} in 16-bit floats"
        if cache_scheme(result.kv_cache) is None:
            return (size, "transformers and vLLM have no such scales: they open the checkpoint with a cache of floats")
        if self.format != "fp8":
            return (size, f"transformers rounds the cache as told; vLLM takes fp8 only and refuses {self.format}")
        return (size,)

    def _calibrate(self, folder: Path, spec: ModelSpec, ids: Tensor, context: Context) -> dict[str, Tensor]:
        """Scales by stored name, and by that and `.error` what they do to keys and values; one layer in memory."""
        from safetensors.torch import load_file, save

        from strop.calibration.capture import Stream, steps

        owners = [i for i, x in enumerate(spec.layers) if x.kv_from_layer is None]
        stream, found = Stream(folder, spec, ids), dict[str, "Tensor"]()
        for index in range(owners[-1] + 1):
            kept = context.scratch / f"layer_{index}.safetensors"
            stream.load_layer(index)
            if index in owners and not kept.exists():
                scales = {f"{spec.layers[index].attention}.{part}": x for part, x in self.solve(stream).items()}
                write_atomically(kept, save({name: x.cpu().contiguous() for name, x in scales.items()}))
            if index in owners:
                found |= load_file(kept)
            for step in steps(spec.layers[index]) if index < owners[-1] else ():
                step.advance(stream)
            stream.free_layer()
            context.progress("kv_cache", index + 1, owners[-1] + 1)
        return found

    def solve(self, stream: Stream) -> dict[str, Tensor]:
        """`k_scale`, `v_scale` and the relative error of each, of the block that is loaded.

        Raises:
            UserError: Keys or values are not finite.
        """
        place = stream.layer.spec.attention
        largest_k, largest_v, energy = observe(stream.keys_values())
        if not bool(largest_k.isfinite().all() and largest_v.isfinite().all()):
            raise UserError(f"kv_cache: {place}: keys or values are not finite on the calibration text")
        shrinks, found = SHRINKS if self.clip else SHRINKS[:1], dict[str, "Tensor"]()
        parts: tuple[tuple[str, int, CacheScales, Tensor, Tensor], ...] = (
            ("k", 1, self.keys, largest_k, energy),
            ("v", 2, self.values, largest_v, energy.new_ones(())),
        )
        for part, at, kind, largest, weight in parts:
            if kind != "token":
                source = _Part(stream.keys_values, at)
                scale, error = fit(source, share(largest, kind, "amax"), weight, self.format, kind, shrinks)
                found |= {f"{part}_scale": scale, f"{part}_scale.error": error}
        return found


class _Part:
    """Keys or values of a layer, in chunks, as often as asked for."""

    def __init__(self, triples: Callable[[], Triples], at: int) -> None:
        self.triples, self.at = triples, at

    def __iter__(self) -> Iterator[Tensor]:
        return (x[self.at] for x in self.triples())


# Maths.


def observe(triples: Triples) -> tuple[Tensor, Tensor, Tensor]:
    """The largest magnitudes of keys and of values, and the energy Σ q² of the queries that each key channel meets.

    Returns:
        Three of (N, 1, D), float32.
    """
    import torch

    keys, values, queries = [], [], []
    for q, k, v in triples:
        keys.append(k.float().abs().amax((0, 2)))
        values.append(v.float().abs().amax((0, 2)))
        queries.append(q.float().square().sum((0, 2)).reshape(k.shape[1], -1, k.shape[3]).sum(1))
    largest_k, largest_v = (torch.stack(x).amax(0)[:, None] for x in (keys, values))
    return largest_k, largest_v, torch.stack(queries).sum(0)[:, None]


def share(x: Tensor, kind: CacheScales, how: Literal["amax", "sum"]) -> Tensor:
    """(..., N, 1, D) reduced to what shares a scale, axes kept."""
    axes = {"tensor": (-3, -1), "head": (-1,), "channel": ()}[kind]
    for axis in axes:
        x = getattr(x, how)(axis, keepdim=True)
    return x


def fitting_scale(largest: Tensor, form: CacheFormat) -> Tensor:
    """The smallest bfloat16 scales that bring no magnitude beyond the end of the range, in float32."""
    from strop.kv_codes import LARGEST
    from strop.numerics import round_scales

    exact = largest / LARGEST[form]
    rounded = round_scales(exact)
    above = round_scales(rounded * (1 + 2**-8 + 2**-14))  # between a half and one and a half steps of bfloat16 further
    return rounded.where(rounded >= exact, above)


def fit(
    parts: Iterable[Tensor], largest: Tensor, weight: Tensor, form: CacheFormat, kind: CacheScales,
    shrinks: tuple[float, ...],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The scales of least Σ weight · (x - x̂)², and that error relative to Σ weight · x².

    Args:
        parts: Keys or values in chunks (B, N, T, D).
        largest: Of the magnitudes that share a scale.
        weight: Broadcasts against (N, 1, D), not negative.
        form: Of the codes.
        kind: What shares a scale.
        shrinks: Of the scale that fits `largest`; each is tried.

    Returns:
        s float32 holding bfloat16 values, shaped as `largest`; the error, a number.
    """
    import torch

    from strop.kv_codes import decode, encode
    from strop.numerics import round_scales

    base = fitting_scale(largest, form)
    scales = torch.stack([base, *(round_scales(base * x) for x in shrinks[1:])])
    errors, energy = torch.zeros(scales.shape, dtype=torch.float64, device=base.device), 0.0
    for x in parts:
        for i, scale in enumerate(scales):
            lost = (decode(encode(x, scale, form), scale, form) - x).square_().sum((0, 2))[:, None] * weight
            errors[i] += share(lost, kind, "sum")
        energy += float((x.float().square().sum((0, 2))[:, None] * weight).sum(dtype=torch.float64))
    best = errors.argmin(0, keepdim=True)
    total = errors.gather(0, best).sum() / max(energy, torch.finfo(torch.float64).tiny)
    return scales.gather(0, best)[0], total.float()
