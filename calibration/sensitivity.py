"""How much a model's predictions change when a few of its linears do: KL divergence, measured and not estimated.

Hidden states in front of a change are computed once, only what comes after it again. One block's weights are in memory
at a time, beside embedding and head. Leaves out what is changed (methods/).

Legend: N samples, T tokens, H hidden size, p and q what the model and the changed model predict.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from strop.calibration.capture import Stream, check_ids
from strop.layers import Decoder
from strop.spec import Linear, ModelSpec

HEAD_TOKENS = 128
"""Tokens whose logits are in memory together."""

Label = TypeVar("Label", bound=Hashable)


@dataclass(frozen=True)
class Site:
    """Linears of one block that read the same input.

    Attributes:
        layer: Index of the block.
        linears: In the order of computation.
        weights: Linear name -> W (out, in) float32. Not to be written into.
        inputs: (tokens, in), float32.
    """

    layer: int
    linears: Sequence[Linear]
    weights: Mapping[str, Tensor]
    inputs: Tensor


Vary = Callable[[Site], Iterable[tuple[Label, Mapping[str, Tensor]]]]
"""Names changes of a site, each with the weights that take the place of others. Labels differ within a block."""


@torch.no_grad()
def divergences(
    folder: Path, spec: ModelSpec, ids: Tensor, vary: Vary[Label], *, layers: Collection[int]
) -> Iterator[tuple[int, dict[Label, float]]]:
    """KL(p ‖ q) for every change of `vary`, each alone.

    Args:
        folder: The checkpoint. Quantized linears are dequantized; everything is computed in float32.
        spec: Its table.
        ids: (N, T) int64, on the device to compute on.
        vary: Called once for each site of `layers`, in the order of computation.
        layers: Indices of the blocks that it is called for.

    Yields:
        (layer, label -> mean over tokens, in nats; rounding can leave it a little below 0), from the first layer on.

    Raises:
        UserError: As `capture.check_ids`.
    """
    check_ids(spec, ids)
    if not layers:
        return
    blocks = _Blocks(Stream(folder, spec, ids))
    state = _State(torch.cat(blocks.stream.chunks), None, {})
    blocks.stream.chunks.clear()
    output = state
    for index in range(len(spec.layers)):
        with blocks.loaded(index):
            output = blocks.finish(output)
    blocks.stream.load_outside()
    for index in range(max(layers) + 1):
        changed: dict[Label, _State] = {}
        with blocks.loaded(index):
            for step in range(len(_STEPS)):
                if index in layers:
                    for label, weights in vary(blocks.site(state, step)):
                        changed[label] = blocks.finish_with(weights, state, step)
                state = blocks.advance(state, step)
        if index not in layers:
            continue
        for later in range(index + 1, len(spec.layers)):
            with blocks.loaded(later):
                changed = {label: blocks.finish(x) for label, x in changed.items()}
        yield index, divergence(blocks.stream.decoder, output.x, {label: x.x for label, x in changed.items()})


def divergence(decoder: Decoder, before: Tensor, after: Mapping[Label, Tensor]) -> dict[Label, float]:
    """KL(p ‖ q) from hidden states, the final norm and the head unchanged.

    Computed from z' - z, the difference of the logits, as log Σ p exp(z' - z) - Σ p (z' - z): near 0 its error is far
    smaller than that of a difference of log probabilities.

    Args:
        decoder: With its norm and head loaded.
        before: Hidden states after the last block (N, T, H).
        after: Label -> those of a changed model.

    Returns:
        Label -> mean over tokens, nats. Sums over tokens are kept in float64.
    """
    totals = dict.fromkeys(after, 0.0)
    pieces = torch.split(before.flatten(0, 1), HEAD_TOKENS)
    others = {label: torch.split(x.flatten(0, 1), HEAD_TOKENS) for label, x in after.items()}
    for i, piece in enumerate(pieces):
        logits = decoder.logits(piece)
        log_p = logits.log_softmax(-1)
        p = log_p.exp()
        for label, other in others.items():
            difference = decoder.logits(other[i]).sub_(logits)
            mean = (p * difference).sum(-1)
            totals[label] += float((difference.add_(log_p).logsumexp(-1) - mean).sum(dtype=torch.float64))
    num_tokens = before.shape[0] * before.shape[1]
    return {label: total / num_tokens for label, total in totals.items()}


@dataclass(frozen=True)
class _State:
    """What there is of all samples between two steps of a block.

    Attributes:
        x: Hidden states (N, T, H).
        taken: What `o` or `down` reads next (N, T, ·), None where neither is next.
        kept: Keys and values that later layers share, by layer.
    """

    x: Tensor
    taken: Tensor | None
    kept: Mapping[int, tuple[Tensor, Tensor]]


class _Blocks:
    """Runs parts of the block that is loaded.

    Attributes:
        stream: What loads the weights.
        index: Of the block.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream, self.index = stream, 0

    @contextmanager
    def loaded(self, index: int) -> Iterator[None]:
        """Has a block's weights in memory."""
        self.index = index
        self.stream.load_layer(index)
        yield
        self.stream.free_layer()

    def site(self, state: _State, step: int) -> Site:
        """What reads the input of a step."""
        linears = self.stream.spec.layers[self.index].groups()[step]
        inputs = _STEPS[step][0](self, state).flatten(0, -2)
        return Site(self.index, linears, {x.name: self.stream.weight(x.name) for x in linears}, inputs)

    def advance(self, state: _State, step: int) -> _State:
        """Do one step."""
        return _STEPS[step][1](self, state)

    def finish(self, state: _State, step: int = 0) -> _State:
        """Do all steps from `step` on."""
        for each in range(step, len(_STEPS)):
            state = self.advance(state, each)
        return state

    def finish_with(self, weights: Mapping[str, Tensor], state: _State, step: int) -> _State:
        """The same with other weights (by linear name), which go away after."""
        before = {name: self.stream.weight(name).clone() for name in weights}
        for name, weight in weights.items():
            self.stream.weight(name).copy_(weight)
        found = self.finish(state, step)
        for name, weight in before.items():
            self.stream.weight(name).copy_(weight)
        return found

    # What is read in each step, and the step.

    def attention_inputs(self, state: _State) -> Tensor:
        x: Tensor = self.stream.layer.input_norm(state.x)
        return x

    def attend(self, state: _State) -> _State:
        kept = dict(state.kept)
        rotary, attend = self.stream.decoder.whole(self.index, self.stream.positions, kept)
        taken = self.stream.layer.attention(state.x, rotary, attend)
        shared = {x.kv_from_layer for x in self.stream.spec.layers[self.index + 1 :]}
        return _State(state.x, taken, {layer: kv for layer, kv in kept.items() if layer in shared})

    def taken_inputs(self, state: _State) -> Tensor:
        assert state.taken is not None
        return state.taken

    def add_attention(self, state: _State) -> _State:
        return _State(self.stream.layer.add_attention(state.x, self.taken_inputs(state)), None, state.kept)

    def mlp_inputs(self, state: _State) -> Tensor:
        x: Tensor = self.stream.layer.mlp_norm(state.x)
        return x

    def activate(self, state: _State) -> _State:
        return _State(state.x, self.stream.layer.inner(state.x), state.kept)

    def add_mlp(self, state: _State) -> _State:
        return _State(self.stream.layer.add_mlp(state.x, self.taken_inputs(state)), None, state.kept)


_STEPS: tuple[tuple[Callable[[_Blocks, _State], Tensor], Callable[[_Blocks, _State], _State]], ...] = (
    (_Blocks.attention_inputs, _Blocks.attend),
    (_Blocks.taken_inputs, _Blocks.add_attention),
    (_Blocks.mlp_inputs, _Blocks.activate),
    (_Blocks.taken_inputs, _Blocks.add_mlp),
)
"""A block in the order of computation, a step for each of `LayerSpec.groups`: what its linears read, the way on."""
