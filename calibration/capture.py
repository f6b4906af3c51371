"""Walks a model block by block over calibration tokens: each block is fed by the blocks before it as they were changed.

Every linear is computed once, after it was changed; one block's weights are in memory at a time, and the hidden states
of all samples. Leaves out what is done to a linear (methods/).

Legend: X (tokens, in) inputs of a linear, W (out, in) its weight, H (in, in) its Hessian.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from strop.errors import UserError
from strop.layers import Decoder, Layer
from strop.model import Weights, load_linear
from strop.spec import Linear, ModelSpec

CHUNK_TOKENS = 4096
"""Tokens that are computed together: enough to keep the matrix units busy, few enough for attention's memory."""
STRIP = 192
"""Rows of H computed at once. H is symmetric, so a strip starts at the diagonal: at 1536, 56 % of the work is left."""

Kept = dict[int, tuple[Tensor, Tensor]]
"""Keys and values by layer, for layers that share them."""


@dataclass(frozen=True)
class Group:
    """Linears that read the same input.

    Attributes:
        layer: Index of the block; the number of blocks for the head.
        linears: In the order of computation.
        weights: Linear name -> W (out, in) float32. Write into it: what follows is computed with the new values.
        inputs: Gives the input in chunks, each (tokens, in) float32; as often as it is called, never all at once.
    """

    layer: int
    linears: Sequence[Linear]
    weights: dict[str, Tensor]
    inputs: Callable[[], Iterator[Tensor]]


Visit = Callable[[Group], bool]
"""Sees a group of linears, may change their weights, says whether to go on."""


def hessian(inputs: Iterable[Tensor]) -> Tensor:
    """Mean of 2 x xᵀ over all tokens (Frantar et al. 2022, arXiv 2210.17323, section 3.1).

    Args:
        inputs: Batches of a linear's inputs, each (tokens, in), float32.

    Returns:
        (in, in), float32, symmetric. Sums over batches are kept in float64.

    Raises:
        ValueError: No tokens at all.
    """
    total: Tensor | None = None
    num_tokens = 0
    for x in inputs:
        if total is None:
            total = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64, device=x.device)
        for start in range(0, x.shape[1], STRIP):
            strip = x[:, start : start + STRIP].T @ x[:, start:]
            total[start : start + STRIP, start:] += strip
        num_tokens += len(x)
    if total is None or num_tokens == 0:
        raise ValueError("no tokens to compute a Hessian of")
    upper = total.triu_().mul_(2 / num_tokens).float()
    return upper + upper.triu(1).T


@torch.no_grad()
def walk(folder: Path, spec: ModelSpec, ids: Tensor, visit: Visit) -> None:
    """Show every group of linears to `visit`, in the order of computation, the head last.

    Args:
        folder: The checkpoint. Quantized linears are dequantized; everything is computed in float32.
        spec: Its table.
        ids: (samples, length) int64, on the device to compute on.
        visit: The inputs of later groups follow from the weights that it left. Where it returns False the walk ends.

    Raises:
        UserError: The ids are not of this model's vocabulary, or the samples longer than its context.
    """
    if ids.shape[1] > spec.max_positions:
        raise UserError(f"calibration.length: {ids.shape[1]} is more than the model's context of {spec.max_positions}")
    if int(ids.max()) >= spec.vocab_size or int(ids.min()) < 0:
        raise UserError(
            f"calibration: token id {int(ids.max())} is outside the model's vocabulary of {spec.vocab_size}"
        )
    model = _Streamed(folder, spec, ids.device)
    decoder = model.decoder
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    model.load_outside()
    chunks = [decoder.embed(x, positions) for x in torch.split(ids, max(1, CHUNK_TOKENS // ids.shape[1]))]
    model.free_outside()
    kept: list[Kept] = [{} for _ in chunks]
    for index in range(len(spec.layers)):
        model.load_layer(index)
        if not _walk_layer(decoder, index, positions, chunks, kept, visit):
            return
        model.free_layer(index)
        shared = {x.kv_from_layer for x in spec.layers[index + 1 :]}
        kept = [{i: kv for i, kv in each.items() if i in shared} for each in kept]
    model.load_outside()
    visit(_group(decoder, len(spec.layers), [spec.head], lambda: map(decoder.norm, chunks)))


def _walk_layer(
    decoder: Decoder,
    index: int,
    positions: Tensor,
    chunks: list[Tensor],
    kept: list[Kept],
    visit: Visit,
) -> bool:
    """One layer: `chunks` (B, T, H), the hidden states before it, become those after it. False: the walk ends."""
    layer = decoder.layers[index]
    assert isinstance(layer, Layer)

    def show(roles: Sequence[str], inputs: Callable[[], Iterable[Tensor]]) -> bool:
        linears = [layer.spec.linears[role] for role in roles if role in layer.spec.linears]
        return visit(_group(decoder, index, linears, inputs))

    if not show(("qkv", "q", "k", "v"), lambda: map(layer.input_norm, chunks)):
        return False
    heads = [layer.attention(x, *decoder.whole(index, positions, own)) for x, own in zip(chunks, kept, strict=True)]
    if not show(("o",), lambda: heads):
        return False
    for i, x in enumerate(chunks):
        chunks[i] = layer.add_attention(x, heads.pop(0))
    if not show(("gate_up", "gate", "up"), lambda: map(layer.mlp_norm, chunks)):
        return False
    inner = [layer.inner(x) for x in chunks]
    if not show(("down",), lambda: inner):
        return False
    for i, x in enumerate(chunks):
        chunks[i] = layer.add_mlp(x, inner.pop(0))
    return True


def _group(decoder: Decoder, index: int, linears: Sequence[Linear], inputs: Callable[[], Iterable[Tensor]]) -> Group:
    weights = {x.name: _weight(decoder, x.name) for x in linears}
    return Group(index, linears, weights, lambda: (x.flatten(0, -2) for x in inputs()))


def _weight(decoder: Decoder, name: str) -> Tensor:
    module = decoder.linear(name)
    assert isinstance(module, nn.Linear)
    return module.weight.data


class _Streamed:
    """A dense float32 decoder whose weights are read when they are needed and freed after.

    Attributes:
        decoder: Filled only in part.
    """

    def __init__(self, folder: Path, spec: ModelSpec, device: torch.device) -> None:
        self.folder, self.spec, self.device = folder, spec, device
        layers = tuple(
            dataclasses.replace(x, linears={role: _dense(y) for role, y in x.linears.items()}) for x in spec.layers
        )
        self.decoder = Decoder(dataclasses.replace(spec, dtype="float32", layers=layers, head=_dense(spec.head)))
        self.decoder.to_empty(device="meta")

    def load_layer(self, index: int) -> None:
        layer = self.spec.layers[index]
        self.decoder.layers[index].to_empty(device=self.device)
        self._load(layer.linears.values(), [x.name for x in layer.norms()])

    def free_layer(self, index: int) -> None:
        self.decoder.layers[index].to_empty(device="meta")

    def load_outside(self) -> None:
        """Everything that is not in a layer: tables, the final norm, the head."""
        for module in self._outside():
            module.to_empty(device=self.device)
        embedding = [] if self.spec.is_tied else [self.spec.embedding]
        positions = [self.spec.position_embedding] if self.spec.position_embedding else []
        self._load([self.spec.head], [*embedding, *positions, self.spec.final_norm.name])

    def free_outside(self) -> None:
        for module in self._outside():
            module.to_empty(device="meta")

    def _outside(self) -> list[nn.Module]:
        return [module for name, module in self.decoder.named_children() if name != "layers"]

    def _load(self, linears: Iterable[Linear], others: Iterable[str]) -> None:
        """Fill linears, and every tensor of the other names.

        The files are closed after: what was read of a mapped file counts as this process's memory until then.
        """
        linears, others = list(linears), list(others)
        names = {f"{x.name}.bias" for x in linears} | {f"{x}.{part}" for x in others for part in ("weight", "bias")}
        with Weights(self.folder) as weights:
            for linear in linears:
                _weight(self.decoder, linear.name).copy_(load_linear(weights, linear))
            for name, tensor in self.decoder.tensors().items():
                if name in names:
                    tensor.data.copy_(weights.load(name))


def _dense(linear: Linear) -> Linear:
    return dataclasses.replace(linear, quantization=None)
