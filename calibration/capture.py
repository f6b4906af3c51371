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
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from strop.errors import UserError
from strop.layers import Decoder, Layer, Routes
from strop.model import Weights, load_linear
from strop.spec import SHARED, LayerSpec, Linear, ModelSpec

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
            followed there. Of an expert both are of the tokens that reach it in the changed model.
        everyone: As `inputs`, but of an expert all tokens, those too that do not reach it.
        num_tokens: That `inputs` gives: 0 of an expert that is never chosen.
        num_followed: Tokens that `pairs` gives.
        expert: Name of the chosen expert that they belong to; None where all tokens reach them.
    """

    layer: int
    linears: Sequence[Linear]
    weights: dict[str, Tensor]
    inputs: Callable[[], Iterator[Tensor]]
    pairs: Callable[[], Iterator[tuple[Tensor, Tensor]]]
    everyone: Callable[[], Iterator[Tensor]]
    num_tokens: int
    num_followed: int
    expert: str | None = None


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
    unchanged.follows = changed
    streams = [changed, unchanged] if num_followed else [changed]
    for index, layer in enumerate(spec.layers):
        for stream in streams:
            stream.load_layer(index)
        for step in steps(layer):
            if not visit(group_of(index, step, changed, unchanged)):
                return
            for stream in streams:
                step.advance(stream)
        for stream in streams:
            stream.free_layer()
    for stream in streams:
        stream.load_outside()
    visit(group_of(len(spec.layers), Step([spec.head], Stream.head_inputs, Stream.free_outside), changed, unchanged))


@dataclass(frozen=True)
class Step:
    """A part of a block.

    Attributes:
        linears: That read the same input.
        reads: Gives that input chunk by chunk, each (…, in).
        advance: The way on from there.
        expert: How the roles of an expert begin that the linears belong to, else None.
        everyone: As `reads`, of all tokens; None: `reads` gives them.
    """

    linears: Sequence[Linear]
    reads: Callable[[Stream], Iterator[Tensor]]
    advance: Callable[[Stream], None]
    expert: str | None = None
    everyone: Callable[[Stream], Iterator[Tensor]] | None = None


def steps(layer: LayerSpec) -> list[Step]:
    """A block in the order of computation, a step for each of `LayerSpec.groups`."""
    qkv, o, *mlp = layer.groups()
    found = [Step(qkv, Stream.attention_inputs, Stream.attend)]
    if layer.moe is None:
        found.append(Step(o, Stream.taken_inputs, Stream.add_attention))
        found.append(Step(mlp[0], Stream.mlp_inputs, Stream.activate))
        return [*found, Step(mlp[1], Stream.taken_inputs, Stream.add_mlp)]
    found.append(Step(o, Stream.taken_inputs, Stream.send))
    experts = layer.moe.experts()
    for expert, gate_up, down in zip(experts, mlp[::2], mlp[1::2], strict=True):
        reads, activate = partial(Stream.expert_inputs, expert=expert), partial(Stream.activate_expert, expert=expert)
        found.append(Step(gate_up, reads, activate, expert, Stream.mlp_inputs))
        reads, add = partial(Stream.inner_inputs, expert=expert), partial(Stream.add_expert, expert=expert)
        found.append(Step(down, reads, add, expert, partial(Stream.all_inner, expert=expert)))
    return [*found[:-1], dataclasses.replace(found[-1], advance=partial(Stream.add_last_expert, expert=experts[-1]))]


def group_of(index: int, step: Step, changed: Stream, unchanged: Stream) -> Group:
    """What a walk shows of a step of block `index`."""
    is_chosen = step.expert is not None and step.expert != SHARED

    def inputs() -> Iterator[Tensor]:
        return (x.flatten(0, -2) for x in step.reads(changed) if len(x))

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        both = zip(step.reads(unchanged), step.reads(changed), strict=False)
        return ((before.flatten(0, -2), x[: len(before)].flatten(0, -2)) for before, x in both if len(before))

    def everyone() -> Iterator[Tensor]:
        return inputs() if step.everyone is None else (x.flatten(0, -2) for x in step.everyone(changed))

    return Group(
        layer=index,
        linears=step.linears,
        weights={x.name: changed.weight(x.name) for x in step.linears},
        inputs=inputs,
        pairs=pairs,
        everyone=everyone,
        num_tokens=changed.num_tokens(step.expert),
        num_followed=unchanged.num_tokens(step.expert),
        expert=step.linears[0].name.rpartition(".")[0] if is_chosen else None,
    )


class Stream:
    """Samples on their way through a dense float32 decoder whose weights are read when needed and freed after.

    Attributes:
        decoder: Filled only in part.
        chunks: Hidden states (B, T, H), a few samples each, all in one piece of memory and changed in place.
        taken: What `o` or `down` of the block reads next, chunk by chunk, all in one piece of memory: as tensors of
            their own, made and freed layer by layer, they left holes that took half as much again.
        follows: A stream of the same samples and more, whose choice of experts decides which tokens are read here;
            None: its own does.
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
        self.follows: Stream | None = None
        self._routes: list[Routes] = []
        self._sums: list[Tensor] = []

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
        """Queries, keys and values of the block, each (B, heads, T, D), after norms and rope.

        Rope turns them to places all over the model's context, not to those that they were computed at: what turns
        slowly would show only a part of its range in a short sample.
        """
        taken: list[Tensor] = []

        def take(q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            taken.extend(x for x in (q, k, v) if x is not None)
            return q

        length = self.positions.shape[1]
        places = self.positions * max(1, self.spec.max_positions // length)
        rotary, _ = self.decoder.whole(self._index, places, {})
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

    # The same of experts, one after the other: each reads some tokens, and what it gives is added to a sum.

    def send(self) -> None:
        self.add_attention()
        self._routes = [self.layer.route(x.flatten(0, -2)) for x in self.mlp_inputs()]
        self._sums = [torch.zeros_like(x).flatten(0, -2) for x in self.chunks]

    def sent(self, expert: str) -> list[Tensor]:
        """Indices of the tokens of each chunk, in its flat order, that reach an expert."""
        routes = (self if self.follows is None else self.follows)._routes
        found = zip(self.chunks, (x.of(expert)[0] for x in routes), strict=False)
        return [tokens[tokens < x.shape[0] * x.shape[1]] for x, tokens in found]

    def num_tokens(self, expert: str | None = None) -> int:
        """All tokens, or those that reach an expert."""
        if expert is not None:
            return sum(len(x) for x in self.sent(expert))
        return sum(x.shape[0] * x.shape[1] for x in self.chunks)

    def expert_inputs(self, expert: str) -> Iterator[Tensor]:
        pairs = zip(self.chunks, self.sent(expert), strict=True)
        return (self.layer.mlp_norm(x.flatten(0, -2)[tokens]) for x, tokens in pairs)

    def inner_inputs(self, expert: str) -> Iterator[Tensor]:
        if self.follows is None:
            return iter(self.taken)
        return map(self.layer.expert(expert).inner, self.expert_inputs(expert))

    def all_inner(self, expert: str) -> Iterator[Tensor]:
        return map(self.layer.expert(expert).inner, self.mlp_inputs())

    def activate_expert(self, expert: str) -> None:
        for x, routes in zip(self.mlp_inputs(), self._routes, strict=True):
            tokens, _ = routes.of(expert)
            self._take(self.layer.expert(expert).inner(x.flatten(0, -2)[tokens]))

    def add_expert(self, expert: str) -> None:
        for y, routes in zip(self._sums, self._routes, strict=True):
            tokens, weights = routes.of(expert)
            y.index_add_(0, tokens, self.layer.expert(expert).down(self.taken.pop(0)) * weights)

    def add_last_expert(self, expert: str) -> None:
        self.add_expert(expert)
        for x in self.chunks:
            x.copy_(self.layer.add_branch(x, self._sums.pop(0).view(x.shape)))

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
        other._routes, other._sums = [], []
        return other

    def _take(self, x: Tensor) -> None:
        """Add the next chunk (…, width) to what is taken."""
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
        self._load(layer.linears.values(), [*(x.name for x in layer.norms()), *(x.name for x in layer.gates())])

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


def _widest_taken(layer: LayerSpec) -> int:
    return max(x.in_features for role, x in layer.linears.items() if role.rpartition(".")[2] in ("o", "down"))


def _dense(linear: Linear) -> Linear:
    return dataclasses.replace(linear, quantization=None)
