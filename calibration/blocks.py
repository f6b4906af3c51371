"""Walks a model block by block for methods that learn from a block's output, not from the inputs of single linears.

Two sets of hidden states go through each block: those of the unchanged model, whose outputs are the targets, and those
that the changed blocks before it give. Hidden states are kept in float32; where the device has units for matrices of
bfloat16, products are taken in it, with an error far below that of 8-bit weights. One block's
weights are in memory at a time. Leaves out what is learned (methods/).

Legend: N samples, T tokens, H hidden size, B samples that are computed together; x hidden states, g their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from strop.calibration.capture import CHUNK_TOKENS, Group, Stream, check_ids, group_of, hessian, steps
from strop.layers import Decoder
from strop.machine import instruction_sets
from strop.spec import Linear, ModelSpec

HEAD_TOKENS = 256
"""Tokens whose logits are in memory together."""


@dataclass(frozen=True)
class Block:
    """A block between its inputs, as changed blocks give them, and its outputs in the unchanged model.

    Attributes:
        index: Of the layer.
        linears: In the order of computation.
        module: Linear name -> the linear, its weight W (out, in) float32 and without gradient. Put another in its
            place to change what `compute` and everything after it gives.
        compute: Indices of samples (B,) -> the block's outputs (B, T, H) float32, with a graph where gradients are
            enabled and a weight wants some.
        targets: (N, T, H) float32: outputs of the unchanged block in the unchanged model.
    """

    index: int
    linears: Sequence[Linear]
    module: Callable[[str], nn.Linear]
    compute: Callable[[Tensor], Tensor]
    targets: Tensor


Visit = Callable[[Block], bool]
"""Sees a block, may change its weights, says whether to go on."""
Prepare = Callable[[Group], None]
"""Sees linears that read the same input before their block is shown, may change their weights."""


@torch.no_grad()
def walk_blocks(
    folder: Path, spec: ModelSpec, ids: Tensor, visit: Visit, *, prepare: Prepare | None = None, num_prepared: int = 0
) -> None:
    """Show every block to `visit`, from the first to the last.

    Args:
        folder: The checkpoint. Quantized linears are dequantized.
        spec: Its table.
        ids: (samples, length) int64, on the device to compute on.
        visit: The inputs of later blocks follow from the weights that it left. Where it returns False the walk ends.
        prepare: Called before `visit` for each group of the block's linears, in the order of computation; the inputs
            of later groups follow from the weights that it left.
        num_prepared: Samples that it sees, at least one.

    Raises:
        UserError: As `capture.check_ids`.
    """
    unchanged = _start(folder, spec, ids)
    stream, changed = unchanged.stream, _States(unchanged.stream, unchanged.x.clone())
    original = Stream(folder, spec, ids[:num_prepared]) if prepare else None
    for index in range(len(spec.layers)):
        stream.load_layer(index)
        unchanged.advance(index)
        if prepare and original:
            _prepare(index, prepare, changed.fork(num_prepared), original)
        if not visit(_block(index, unchanged, changed)):
            return
        changed.advance(index)
        stream.free_layer()


def _prepare(index: int, prepare: Prepare, changed: Stream, original: Stream) -> None:
    """Take samples through a block step by step, as the changed blocks before it give them and as they were."""
    original.load_layer(index)
    original.follows = changed
    for step in steps(changed.spec.layers[index]):
        prepare(group_of(index, step, changed, original))
        for stream in (changed, original):
            step.advance(stream)
    original.free_layer()


@torch.no_grad()
def hidden_states(folder: Path, spec: ModelSpec, ids: Tensor, progress: Callable[[int], None]) -> Tensor:
    """Hidden states after the last block, one block in memory at a time.

    Args:
        folder: The checkpoint. Quantized linears are dequantized.
        spec: Its table.
        ids: (samples, length) int64, on the device to compute on.
        progress: Called after each block with the number of those that are done.

    Returns:
        (N, T, H), float32.

    Raises:
        UserError: As `capture.check_ids`.
    """
    states = _start(folder, spec, ids)
    for index in range(len(spec.layers)):
        states.stream.load_layer(index)
        states.advance(index)
        states.stream.free_layer()
        progress(index + 1)
    return states.x


@torch.no_grad()
def sensitivities(folder: Path, spec: ModelSpec, ids: Tensor, seed: int) -> Iterator[tuple[int, Tensor]]:
    """How much the model's predictions change with the hidden states after each block.

    A small change δ of hidden states costs ½ δᵀ F δ of KL, with F the Fisher information: the mean of g gᵀ over
    gradients g of v · logits, where v is random with mean(v vᵀ) = diag(p) - p pᵀ, the second derivative of KL in the
    logits. Averaged over tokens, each scaled to hidden states of mean square 1 first, as the norms that read them do.
    Guiding quantization by it is the idea of Tseng et al. 2025 (YAQA, arXiv 2505.22988) and Kim et al. 2025
    (GuidedQuant, arXiv 2505.07004). What reaches later layers through shared keys and values is left out.

    Args:
        folder: The checkpoint.
        spec: Its table.
        ids: (samples, length) int64, on the device to compute on.
        seed: Of v.

    Yields:
        (layer, F (H, H) float32, symmetric), from the last layer to the first.

    Raises:
        UserError: As `capture.check_ids`.
    """
    states = _start(folder, spec, ids)
    stream, inputs = states.stream, []
    for index in range(len(spec.layers)):
        inputs.append(states.x.to(torch.bfloat16))
        stream.load_layer(index)
        states.advance(index)
        stream.free_layer()
    stream.load_outside()
    generator = torch.Generator(ids.device).manual_seed(seed)
    pieces = torch.split(states.x.flatten(0, 1), HEAD_TOKENS)
    gradients = torch.cat([_output_gradients(stream.decoder, x, generator) for x in pieces]).view_as(states.x)
    stream.free_outside()
    outputs = states.x
    for index in reversed(range(len(spec.layers))):
        scaled = gradients * mean_square(outputs).sqrt()
        yield index, hessian(torch.split(scaled.flatten(0, 1), CHUNK_TOKENS)) / 2
        outputs = inputs.pop().float()
        stream.load_layer(index)
        for rows in states.chunks():
            with torch.enable_grad():
                x = outputs[rows].requires_grad_()
                (gradients[rows],) = torch.autograd.grad(states.compute(index, x, rows), x, gradients[rows])
        stream.free_layer()


def _output_gradients(decoder: Decoder, x: Tensor, generator: torch.Generator) -> Tensor:
    """g of the last hidden states x (tokens, H), for one random v each."""
    with torch.enable_grad(), products(x.device):
        x = x.detach().requires_grad_()
        logits = decoder.logits(x)
    p = logits.detach().softmax(-1)
    v = torch.randn(p.shape, generator=generator, device=p.device).mul_(p.sqrt())
    v.sub_(p.mul_(v.sum(-1, keepdim=True)))
    return torch.autograd.grad(logits, x, v)[0]


def product_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device has matrix units for it, else float32.

    Vector instructions for bfloat16 alone (avx512_bf16) do not count: float32 was 1.7 times as fast on a processor
    that has them and no AMX.
    """
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return torch.bfloat16 if "amx_bf16" in instruction_sets() else torch.float32


def products(device: torch.device) -> torch.autocast:
    """A context in which products are of `product_dtype`."""
    dtype = product_dtype(device)
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


def mean_square(x: Tensor) -> Tensor:
    """Of each token: (..., H) -> (..., 1), at least 1e-12."""
    return x.square().mean(-1, keepdim=True).clamp_min_(1e-12)


class _States:
    """Hidden states of all samples on their way through the blocks.

    Attributes:
        stream: What loads the weights.
        x: (N, T, H), float32.
        num_chunk: Samples that are computed together.
    """

    def __init__(self, stream: Stream, x: Tensor) -> None:
        self.stream, self.x = stream, x
        self.num_chunk = max(1, CHUNK_TOKENS // x.shape[1])
        self._shared: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys and values that later layers read
        self._owners = {layer.kv_from_layer for layer in stream.spec.layers}

    def chunks(self) -> Iterator[Tensor]:
        """Indices of all samples, a few at a time."""
        return iter(torch.split(torch.arange(len(self.x)), self.num_chunk))

    def fork(self, num_samples: int) -> Stream:
        """The first samples, to be taken through the loaded block linear by linear."""
        rows = torch.split(torch.arange(num_samples), self.num_chunk)
        kept = [{index: (k.float(), v.float()) for index, (k, v) in self._kept(x).items()} for x in rows]
        return self.stream.fork(self.x[:num_samples], kept)

    def compute(self, index: int, x: Tensor, rows: Tensor) -> Tensor:
        """Outputs of the loaded block, layer `index`, for x (B, T, H) of the samples `rows`."""
        return self._compute(index, x, self._kept(rows))

    def advance(self, index: int) -> None:
        """Replace the hidden states by the outputs of the loaded block, layer `index`."""
        owned = []
        for rows in self.chunks():
            kept = self._kept(rows)
            self.x[rows] = self._compute(index, self.x[rows], kept)
            if index in self._owners:
                owned.append(kept[index])
        if owned:
            self._shared[index] = torch.cat([k for k, _ in owned]), torch.cat([v for _, v in owned])

    def _kept(self, rows: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        return {index: (k[rows], v[rows]) for index, (k, v) in self._shared.items()}

    def _compute(self, index: int, x: Tensor, kept: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        """Adds its keys and values to `kept`."""
        rotary, attend = self.stream.decoder.whole(index, self.stream.positions, kept)
        with products(x.device):
            y: Tensor = self.stream.layer(x, rotary, attend)
        return y


def _start(folder: Path, spec: ModelSpec, ids: Tensor) -> _States:
    """Embedded samples, in front of the first block."""
    check_ids(spec, ids)
    stream = Stream(folder, spec, ids)
    stream.decoder.requires_grad_(False)
    x = torch.cat(stream.chunks)
    stream.chunks.clear()
    return _States(stream, x)


def _block(index: int, unchanged: _States, changed: _States) -> Block:
    stream = unchanged.stream

    def module(name: str) -> nn.Linear:
        found = stream.decoder.linear(name)
        assert isinstance(found, nn.Linear)
        return found

    def compute(rows: Tensor) -> Tensor:
        return changed.compute(index, changed.x[rows], rows)

    linears = list(stream.spec.layers[index].linears.values())
    return Block(index, linears, module, compute, unchanged.x)
