"""Scales of inputs folded into what comes before: shared by methods that scale weights up and their inputs down.

A norm's gain, the rows of v for o, or the rows of up for down take the inverse, so the model computes the same until it
is rounded. Leaves out which scales (awq.py, smoothquant.py).

Legend: W (out, in) weights of linears that read the same input, s (in,) that input's scales: W x = (W · s) (x / s).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from strop.artifact import write_atomically
from strop.spec import Linear, ModelSpec, Norm

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from strop.model import Weights


# Which linears can be scaled, and where the inverse goes.


@dataclass(frozen=True)
class Fold:
    """What comes before linears and takes the inverse of their inputs' scales.

    Attributes:
        before: A norm, whose gain and bias take it, or a linear, of which some rows and their bias do.
        size: Distinct scales.
        first_row: Of those rows of a linear, `size` of them.
        width: Scales that are repeated together: a head's width.
        repeats: Query heads that read the same value.
    """

    before: Norm | Linear
    size: int
    first_row: int = 0
    width: int = 1
    repeats: int = 1

    def spread(self, scales: Tensor) -> Tensor:
        """s (in,) of distinct scales (size,): those of a value's head for each query head that reads it."""
        return scales.view(-1, 1, self.width).expand(-1, self.repeats, -1).reshape(-1)

    def pool(self, energy: Tensor) -> Tensor:
        """The mean energy (size,) of the inputs (in,) that get the same scale."""
        return energy.view(-1, self.repeats, self.width).mean(1).reshape(-1)

    def largest(self, magnitude: Tensor) -> Tensor:
        """The largest magnitude (size,) of the inputs (in,) that get the same scale."""
        return magnitude.view(-1, self.repeats, self.width).amax(1).reshape(-1)


@dataclass(frozen=True)
class Site:
    """Linears that read the same input.

    Attributes:
        readers: All of them, in the order of computation.
        chosen: Those to quantize.
        fold: Where the inverse of the scales goes, or why it can go nowhere.
    """

    readers: tuple[Linear, ...]
    chosen: tuple[Linear, ...]
    fold: Fold | str

    @property
    def num_scales(self) -> int:
        """Distinct scales; one for all where there are none."""
        return self.fold.size if isinstance(self.fold, Fold) else 1

    def spread(self, scales: Tensor) -> Tensor:
        """Distinct scales as s (in,), or (1,) where the inputs are not scaled."""
        return self.fold.spread(scales) if isinstance(self.fold, Fold) else scales


def find_sites(spec: ModelSpec, linears: Collection[Linear]) -> list[Site]:
    """Where the linears read their inputs, in the order of computation."""
    names = {x.name for x in linears}
    groups = [(index, tuple(group)) for index, layer in enumerate(spec.layers) for group in layer.groups()]
    groups.append((len(spec.layers), (spec.head,)))
    found = ((index, readers, tuple(x for x in readers if x.name in names)) for index, readers in groups)
    return [Site(readers, chosen, find_fold(spec, index, readers)) for index, readers, chosen in found if chosen]


def find_fold(spec: ModelSpec, index: int, readers: Sequence[Linear]) -> Fold | str:
    """Where the inverse of the scales of some linears' input can go.

    Args:
        spec: The table.
        index: Of the layer; the number of layers for the head.
        readers: All linears that read the input.

    Returns:
        A fold, or why there is none: a clause with the input as its subject.
    """
    for linear in readers:
        if linear.quantization is not None:
            return f"{linear.name}, quantized by an earlier stage, reads it too"
    if index == len(spec.layers):
        return "the head is tied to the embedding" if spec.is_tied else Fold(spec.final_norm, spec.hidden_size)
    layer = spec.layers[index]
    role = next(role for role, x in layer.linears.items() if x.name == readers[0].name)
    expert, dot, part = role.rpartition(".")
    if role == "o":
        return _fold_into_values(spec, index)
    if part == "down":
        if not layer.is_gated:
            return "it comes from an activation, which no scale passes through"
        roles = (f"{expert}{dot}gate_up", f"{expert}{dot}up")
        return _fold_into_last_rows(layer.linears, roles, readers[0].in_features)
    if expert:
        return "the router and other experts read it too"
    return Fold(layer.input_norm if role in ("qkv", "q") else layer.mlp_norm, spec.hidden_size)


def _fold_into_values(spec: ModelSpec, index: int) -> Fold | str:
    """Attention's output is a mean of values with weights that do not depend on them."""
    layer = spec.layers[index]
    if layer.kv_from_layer is not None:
        return f"its values come from layer {layer.kv_from_layer}"
    for other, x in enumerate(spec.layers):
        if x.kv_from_layer == index:
            return f"layer {other} reads the same values"
    fold = _fold_into_last_rows(layer.linears, ("qkv", "v"), layer.num_kv_heads * layer.head_dim)
    if isinstance(fold, str):
        return fold
    return Fold(fold.before, fold.size, fold.first_row, layer.head_dim, layer.num_heads // layer.num_kv_heads)


def _fold_into_last_rows(linears: dict[str, Linear], roles: Sequence[str], size: int) -> Fold | str:
    """Values are the last rows of qkv and all of v; up is the last rows of gate_up."""
    before = next(linears[x] for x in roles if x in linears)
    if before.quantization is not None:
        return f"it comes from {before.name}, quantized by an earlier stage"
    return Fold(before, size, before.out_features - size)


def notes(method: str, sites: Iterable[Site]) -> tuple[str, ...]:
    """What `check` says of inputs that a method cannot scale, a line for each reason."""
    names: dict[str, list[str]] = {}
    for site in sites:
        if isinstance(site.fold, str):
            names.setdefault(site.fold, []).append(site.chosen[0].name)
    return tuple(
        f"{method}: the input of {first}{f' and {len(more)} more' if more else ''} is not scaled: {why}"
        for why, (first, *more) in names.items()
    )


# Gains.


def storable_scales(weight: Tensor, scales: Tensor, offset: float, dtype: torch.dtype) -> Tensor:
    """The scales that a gain takes exactly, once it is divided by the scales wanted and stored.

    Args:
        weight: Of the norm as stored, (size,), float32; its gain is `offset` + `weight`.
        scales: Wanted, (size,), positive.
        offset: Of the norm.
        dtype: That the gain is stored in.

    Returns:
        (size,), float32; 1 where the stored gain would be off by more than a factor of two, as where it is zero.
    """
    import torch

    gain = weight + offset
    found = gain / (divide_gain(weight, scales, offset).to(dtype).float() + offset)
    is_close = (found > scales / 2) & (found < scales * 2)  # False for NaN
    return torch.where(is_close, found, 1.0)


def divide_gain(weight: Tensor, scales: Tensor, offset: float) -> Tensor:
    """The stored weight (size,) of a norm whose gain `offset` + `weight` is divided by scales."""
    return (weight + offset) / scales - offset


# Tensors of the scaled model.


@dataclass(frozen=True)
class Factors:
    """What scaling does to each tensor.

    Attributes:
        columns: Linear name -> (in,) that its columns are multiplied by.
        rows: Linear name -> (out,) that its rows and bias are divided by.
        gains: Norm name -> (size,) that its gain and bias are divided by.
    """

    columns: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    gains: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def gather(found: Iterable[tuple[Site, Tensor]]) -> Factors:
        """Factors of sites with a fold and their distinct scales (size,)."""
        factors = Factors()
        for site, scales in found:
            assert isinstance(site.fold, Fold)
            before = site.fold.before
            factors.columns.update({x.name: site.spread(scales) for x in site.readers})
            if isinstance(before, Norm):
                factors.gains[before.name] = scales
            else:
                rows = scales.new_ones(before.out_features)
                rows[site.fold.first_row :] = scales
                factors.rows[before.name] = rows
        return factors

    def scaled(self, weights: Weights, linear: Linear) -> Tensor:
        """W (out, in) of the scaled model, float32."""
        from strop.model import load_linear

        weight = load_linear(weights, linear)
        if linear.name in self.columns:
            weight = weight * self.columns[linear.name]
        return weight / self.rows[linear.name][:, None] if linear.name in self.rows else weight


def folded_tensors(
    weights: Weights, spec: ModelSpec, factors: Factors, left_out: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Stored tensors that scaling changes, weights of the linears `left_out` apart.

    Args:
        weights: The model before.
        spec: Its table.
        factors: What changes.
        left_out: Linear names. Their biases are there.
    """
    for norm in spec.norms():
        if norm.name in factors.gains:
            scales = factors.gains[norm.name]
            yield f"{norm.name}.weight", divide_gain(weights.load(f"{norm.name}.weight").float(), scales, norm.offset)
            if norm.kind == "layer":
                yield f"{norm.name}.bias", weights.load(f"{norm.name}.bias").float() / scales
    for linear in spec.linears():
        if linear.has_bias and linear.name in factors.rows:
            yield f"{linear.name}.bias", weights.load(f"{linear.name}.bias").float() / factors.rows[linear.name]
        if linear.name not in left_out and (linear.name in factors.columns or linear.name in factors.rows):
            weight = factors.scaled(weights, linear)
            yield f"{linear.name}.weight", weight.T if linear.is_transposed else weight


def storable(folder: Path, fold: Fold, scales: Tensor) -> Tensor:
    """Scales that what comes before takes exactly. Rows of linears are kept in float32 until they are rounded."""
    import torch

    from strop.model import Weights, read_spec

    if isinstance(fold.before, Linear):
        return scales
    with Weights(folder) as weights:
        weight = weights.load(f"{fold.before.name}.weight").float().to(scales.device)
    dtype: torch.dtype = getattr(torch, read_spec(folder).dtype)
    return storable_scales(weight, scales, fold.before.offset, dtype)


# Files of finished sites.


def kept_path(scratch: Path, site: Site) -> Path:
    """Where what was found for a site is kept, so that a killed run goes on after it."""
    return scratch / f"{site.readers[0].name}.safetensors"


def keep(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write what was found for a site, whole or not at all."""
    from safetensors.torch import save

    write_atomically(path, save({name: x.cpu().contiguous() for name, x in tensors.items()}))


def read_kept(path: Path, name: str) -> Tensor:
    """One tensor of a kept file."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor
