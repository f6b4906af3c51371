"""Walks a model block by block over calibration tokens: each block is fed by the blocks before it as they were changed.

Every linear is computed once, after it was changed; one block's weights are in memory at a time, and the hidden states
of all samples. Leaves out what is done to a linear (methods/).

Legend: X (tokens, in) inputs of a linear, W (out, in) its weight, H (in, in) its Hessian.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from strop.errors import UserError
from strop.layers import Decoder, Layer
from strop.model import Weights, load_linear
from strop.spec import LayerSpec, Linear, ModelSpec

CHUNK_TOKENS = 4096
"""Tokens that are computed together: enough to keep the matrix units busy, few enough for attention's memory."""
STRIP = 192
"""Rows of H computed at once. H is symmetric, so a strip starts at the diagonal: at 1536, 56 % of the work is left."""


@dataclass(frozen=True)
class Group:
    """Linears that read the same input.

    Attributes:
        layer: Index of the block; the number of blocks for the head.
        linears: In the order of computation.
        weights: Linear name -> W (out, in) float32. Write into it: what follows is computed with the new values.
        inputs: Gives the input in chunks, each (tokens, in) float32; as often as it is called, never all at once.
        pairs: Gives (X₀, X) in chunks: the input in the unchanged model and the input, for the samples that are
            followed there.
    """

    layer: int
    linears: Sequence[Linear]
    weights: dict[str, Tensor]
    inputs: Callable[[], Iterator[Tensor]]
    pairs: Callable[[], Iterator[tuple[Tensor, Tensor]]]


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


def drift(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Mean of 2 (x₀ - x) xᵀ over all tokens: how far inputs have moved, as their outputs can still make it good.

    Args:
        pairs: (X₀, X), each (tokens, in), float32.

    Returns:
        (in, in), float32. Sums over batches are kept in float64.

    Raises:
        ValueError: No tokens at all.
    """
    total: Tensor | None = None
    num_tokens = 0
    for before, x in pairs:
        product = ((before - x).T @ x).double()
        total = product if total is None else total.add_(product)
        num_tokens += len(x)
    if total is None or num_tokens == 0:
        raise ValueError("no tokens to compute a drift of")
    return total.mul_(2 / num_tokens).float()


def check_ids(spec: ModelSpec, ids: Tensor) -> None:
    """Refuse token ids (samples, length) that the model cannot take.

    Raises:
        UserError: They are not of its vocabulary, or longer than its context.
    """
    if ids.shape[1] > spec.max_positions:
        raise UserError(f"calibration.length: {ids.shape[1]} is more than the model's context of {spec.max_positions}")
    if int(ids.max()) >= spec.vocab_size or int(ids.min()) < 0:
        raise UserError(
            f"calibration: token id {int(ids.max())} is outside the model's vocabulary of {spec.vocab_size}"
        )


@torch.no_grad()
def walk(folder: Path, spec: ModelSpec, ids: Tensor, visit: Visit, *, num_followed: int = 0) -> None:
    """Show every group of linears to `visit`, in the order of computation, the head last.

    Args:
        folder: The checkpoint. Quantized linears are dequantized; everything is computed in float32.
        spec: Its table.
        ids: (samples, length) int64, on the device to compute on.
        visit: The inputs of later groups follow from the weights that it left. Where it returns False the walk ends.
        num_followed: So many samples are computed with the unchanged model too, for `Group.pairs`.

    Raises:
        UserError: As `check_ids`.
    """
    check_ids(spec, ids)
    changed, unchanged = (Stream(folder, spec, x) for x in (ids, ids[:num_followed]))
    streams = [changed, unchanged] if num_followed else [changed]
    for index, layer in enumerate(spec.layers):
        for stream in streams:
            stream.load_layer(index)
        for roles, reads, advance in STEPS:
            linears = [layer.linears[role] for role in roles if role in layer.linears]
            if not visit(group_of(index, linears, changed, unchanged, reads)):
                return
            for stream in streams:
                advance(stream)
        for stream in streams:
            stream.free_layer()
    for stream in streams:
        stream.load_outside()
    visit(group_of(len(spec.layers), [spec.head], changed, unchanged, Stream.head_inputs))


def group_of(
    index: int,
    linears: Sequence[Linear],
    changed: Stream,
    unchanged: Stream,
    reads: Callable[[Stream], Iterator[Tensor]],
) -> Group:
    def inputs() -> Iterator[Tensor]:
        return (x.flatten(0, -2) for x in reads(changed))

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        both = zip(reads(unchanged), reads(changed), strict=False)
        return ((before.flatten(0, -2), x[: len(before)].flatten(0, -2)) for before, x in both)

    return Group(index, linears, {x.name: changed.weight(x.name) for x in linears}, inputs, pairs)


class Stream:
    """Samples on their way through a dense float32 decoder whose weights are read when needed and freed after.

    Attributes:
        decoder: Filled only in part.
        chunks: Hidden states (B, T, H), a few samples each, all in one piece of memory and changed in place.
        taken: What `o` or `down` of the block reads next, chunk by chunk, all in one piece of memory: as tensors of
            their own, made and freed layer by layer, they left holes that took half as much again.
    """

    def __init__(self, folder: Path, spec: ModelSpec, ids: Tensor) -> None:
        self.folder, self.spec, self.device = folder, spec, ids.device
        layers = tuple(
            dataclasses.replace(x, linears={role: _dense(y) for role, y in x.linears.items()}) for x in spec.layers
        )
        table = dataclasses.replace(spec, dtype="float32", layers=layers, head=_dense(spec.head), kv_cache=None)
        self.decoder = Decoder(table)
        self.decoder.to_empty(device="meta")
        self.positions = torch.arange(ids.shape[1], device=ids.device)[None]
        self.taken: list[Tensor] = []
        self.load_outside()
        size = max(1, CHUNK_TOKENS // ids.shape[1])
        states = torch.empty(*ids.shape, spec.hidden_size, device=self.device)
        self.chunks = list(torch.split(states, size)) if len(ids) else []
        for chunk, batch in zip(self.chunks, torch.split(ids, size), strict=False):  # of no ids, split makes one piece
            chunk.copy_(self.decoder.embed(batch, self.positions))
        self.free_outside()
        self._room: Tensor | None = None
        self._kept: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in self.chunks]
        self._index = 0

    @property
    def layer(self) -> Layer:
        """The block that is loaded."""
        layer = self.decoder.layers[self._index]
        assert isinstance(layer, Layer)
        return layer

    def weight(self, name: str) -> Tensor:
        """W (out, in) of a loaded linear."""
        module = self.decoder.linear(name)
        assert isinstance(module, nn.Linear)
        return module.weight.data

    # What linears read, and the way from one to the next.

    def attention_inputs(self) -> Iterator[Tensor]:
        return map(self.layer.input_norm, self.chunks)

    def attend(self) -> None:
        for x, kept in zip(self.chunks, self._kept, strict=True):
            rotary, attend = self.decoder.whole(self._index, self.positions, kept)
            self._take(self.layer.attention(x, rotary, attend))

    def keys_values(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Queries, keys and values of the block, each (B, heads, T, D), after norms and rope."""
        taken: list[Tensor] = []

        def take(q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            taken.extend(x for x in (q, k, v) if x is not None)
            return q

        rotary, _ = self.decoder.whole(self._index, self.positions, {})
        for x in self.chunks:
            taken.clear()
            self.layer.attention(x, rotary, take)
            yield taken[0], taken[1], taken[2]

    def taken_inputs(self) -> Iterator[Tensor]:
        return iter(self.taken)

    def add_attention(self) -> None:
        for x in self.chunks:
            x.copy_(self.layer.add_attention(x, self.taken.pop(0)))

    def mlp_inputs(self) -> Iterator[Tensor]:
        return map(self.layer.mlp_norm, self.chunks)

    def activate(self) -> None:
        for x in self.chunks:
            self._take(self.layer.inner(x))

    def add_mlp(self) -> None:
        for x in self.chunks:
            x.copy_(self.layer.add_mlp(x, self.taken.pop(0)))

    def head_inputs(self) -> Iterator[Tensor]:
        return map(self.decoder.norm, self.chunks)

    def fork(self, x: Tensor, kept: Sequence[dict[int, tuple[Tensor, Tensor]]]) -> Stream:
        """Other samples in front of the block that is loaded, through the same weights.

        Args:
            x: Their hidden states (N, T, H), which are copied.
            kept: Of each chunk of them, keys and values that later layers share, by layer.
        """
        other = copy.copy(self)
        other.chunks = list(torch.split(x.clone(), max(1, CHUNK_TOKENS // x.shape[1])))
        other.taken, other._room, other._kept = [], None, list(kept)
        return other

    def _take(self, x: Tensor) -> None:
        """Add the next chunk (B, T, width) to what is taken."""
        if self._room is None:
            num_tokens = sum(y.shape[0] * y.shape[1] for y in self.chunks)
            self._room = torch.empty(num_tokens * max(map(_widest_taken, self.spec.layers)), device=self.device)
        start = sum(y.numel() for y in self.taken)
        place = self._room[start : start + x.numel()].view(x.shape)
        self.taken.append(place.copy_(x))

    # Weights.

    def load_layer(self, index: int) -> None:
        """Make a block the current one."""
        self._index = index
        layer = self.spec.layers[index]
        self.decoder.layers[index].to_empty(device=self.device)
        self._load(layer.linears.values(), [x.name for x in layer.norms()])

    def free_layer(self) -> None:
        """Drop the current block's weights, and keys and values that no later block shares."""
        self.decoder.layers[self._index].to_empty(device="meta")
        shared = {x.kv_from_layer for x in self.spec.layers[self._index + 1 :]}
        self._kept = [{i: kv for i, kv in each.items() if i in shared} for each in self._kept]

    def load_outside(self) -> None:
        """Everything that is not in a block: tables, the final norm, the head."""
        for module in self._outside():
            module.to_empty(device=self.device)
        embedding = [] if self.spec.is_tied else [self.spec.embedding]
        positions = [self.spec.position_embedding] if self.spec.position_embedding else []
        self._load([self.spec.head], [*embedding, *positions, self.spec.final_norm.name])

    def free_outside(self) -> None:
        """Drop what `load_outside` loads."""
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
                self.weight(linear.name).copy_(load_linear(weights, linear))
            for name, tensor in self.decoder.tensors().items():
                if name in names:
                    tensor.data.copy_(weights.load(name))


STEPS: tuple[
    tuple[tuple[str, ...], Callable[[Stream], Iterator[Tensor]], Callable[[Stream], None]],
    ...,
] = (
    (("qkv", "q", "k", "v"), Stream.attention_inputs, Stream.attend),
    (("o",), Stream.taken_inputs, Stream.add_attention),
    (("gate_up", "gate", "up"), Stream.mlp_inputs, Stream.activate),
    (("down",), Stream.taken_inputs, Stream.add_mlp),
)
"""A block in the order of computation: roles of the linears that read the same input, that input, the way on."""


def _widest_taken(layer: LayerSpec) -> int:
    return max(layer.linears[role].in_features for role in ("o", "down"))


def _dense(linear: Linear) -> Linear:
    return dataclasses.replace(linear, quantization=None)
