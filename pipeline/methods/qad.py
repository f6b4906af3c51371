"""Quantization-aware distillation: codes stay, scales learn to give the teacher's predictions.

The loss is KL(teacher ‖ student) over whole sequences, so that what one block does wrong another can make good. Only
scales learn, as in the end-to-end phase of EfficientQAT (Chen et al. 2024, arXiv 2407.11062): a few numbers in a
thousand, in the form that every runtime takes already, so the result has the bytes and the speed of what went in. At
4 bits after GPTQ no gain was measured yet, and on little text it overfits (benchmarks/qad.md).

Legend: N samples, T tokens, H hidden size, V vocabulary; Q (out, in) codes, s (out, groups) scales as they came,
m (out, groups) what they are multiplied by, Ŵ = (Q - z) · s · m; p and q what the teacher and the student predict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from strop.artifact import Artifact, write_atomically
from strop.errors import UserError
from strop.spec import Linear, ModelSpec
from strop.stage import BFLOAT16_SPEEDUP, GFLOPS_PER_THREAD, ArtifactRef, Context, Plan, Stage

if TYPE_CHECKING:
    from torch import Tensor

    from strop.layers import Decoder

BATCH_TOKENS = 1024
"""Of one step."""
HEAD_TOKENS = 256
"""Tokens whose logits are in memory together."""
BETAS, EPSILON = (0.9, 0.99), 1e-12
"""Of Adam (Kingma and Ba 2015, arXiv 1412.6980); the second decays faster than usual because steps are few."""
SAVED_STEPS = 8
"""A killed run loses at most so many."""


class Qad(Stage):
    """Learn the scales of a quantized checkpoint from a teacher's predictions; its codes stay as they are.

    Attributes:
        teacher: Whose predictions to learn: `parent`, another stage's name, or a model source of the same vocabulary.
        epochs: How often the calibration samples are gone through.
        rate: How far a scale moves in a step at the beginning, as a part of its size; falls to zero in a line.
        targets: Patterns over full linear names, for example `*.mlp.*`; null: every quantized linear inside the layers.
    """

    needs_calibration: ClassVar[bool] = True

    teacher: ArtifactRef = ArtifactRef("parent")
    epochs: int = Field(default=1, ge=1, le=1000)
    rate: float = Field(default=0.001, gt=0, le=0.1)
    targets: list[str] | None = Field(default=None, min_length=1)

    def plan(self, spec: ModelSpec, num_calibration_tokens: int) -> Plan:
        """See `Stage.plan`."""
        self._learners(spec)
        inside = sum(x.in_features * x.out_features for layer in spec.layers for x in layer.linears.values())
        head = spec.vocab_size * spec.hidden_size
        tokens = num_calibration_tokens
        # The teacher once; the student forward, again, and backward to inputs and weights.
        products = tokens * (2 * inside + self.epochs * (8 * inside + 8 * head))
        widest = max(layer.intermediate_size for layer in spec.layers)
        states = 2 * tokens * spec.hidden_size + 4 * BATCH_TOKENS * len(spec.layers) * spec.hidden_size
        return Plan(
            spec=spec,
            size_bytes=spec.size_bytes(),
            memory_bytes=states
            + 3 * inside  # codes, and their values in bfloat16
            + 8 * head
            + 4 * (3 * HEAD_TOKENS * spec.vocab_size + BATCH_TOKENS * (12 * spec.hidden_size + 6 * widest)),
            seconds=products / (2 * GFLOPS_PER_THREAD * 1e9 * BFLOAT16_SPEEDUP),
        )

    def run(self, source: Artifact, out: Path, context: Context) -> dict[str, Any]:
        """See `Stage.run`. Every few steps all that learns is kept in the scratch folder; a killed run goes on there.

        Raises:
            UserError: The teacher has another vocabulary, or a loss is not finite.
        """
        import numpy as np
        import torch

        from strop.calibration.capture import check_ids
        from strop.model import read_spec, save_checkpoint

        torch.set_num_threads(context.threads)
        assert context.calibration is not None, "the runner provides it: needs_calibration"
        ids = torch.from_numpy(np.load(context.calibration)).to(context.device)
        spec = read_spec(source.path)
        check_ids(spec, ids)
        teacher = _Teacher(context.artifacts[self.teacher].path, ids, spec, context)
        student = _Student(source.path, self._learners(spec), context.device)
        state = _State.load(context.scratch) or _State.start(student.scales())
        size = min(len(ids), max(1, BATCH_TOKENS // ids.shape[1]))
        batches = list(_batches(len(ids), size, self.epochs, context.seed))
        for step in range(len(state.losses), len(batches)):
            rows = batches[step]
            student.set_scales(state.multipliers)
            loss, gradients = student.learn(ids[rows], teacher.predictions(rows))
            if not np.isfinite(loss):
                raise UserError(
                    f"qad: the loss is not finite in step {step + 1} of {len(batches)}, at rate {self.rate:g}"
                )
            state.losses.append(loss)
            state.descend(gradients, self.rate * (1 - step / len(batches)))
            if (step + 1) % SAVED_STEPS == 0:
                state.save(context.scratch)
            context.progress("qad", step + 1, len(batches))
        student.set_scales(state.multipliers)
        save_checkpoint(out, spec, source.path, student.stored())
        return {"spec": spec, "report": {"kl": [round(x, 5) for x in state.losses]}}

    def _learners(self, spec: ModelSpec) -> list[Linear]:
        """The linears whose scales learn."""
        spec.refuse_experts("qad", "rtn, hqq, gptq, awq, smoothquant, rotate")
        found = [x for x in spec.match(self.targets) if x.quantization is not None]
        if not found:
            raise UserError("qad: no quantized linear to learn; put it after a stage that quantizes, such as gptq")
        if spec.head in found:
            raise UserError(
                f"targets: qad learns linears inside the layers, not {spec.head.name}; allowed: patterns without it"
            )
        for linear in found:
            if linear.quantization is not None and linear.quantization.format != "int":
                raise UserError(f"qad: {linear.name} is stored in {linear.quantization.format}; allowed: int")
            if linear.quantization is not None and linear.quantization.activations is not None:
                raise UserError(f"qad: {linear.name} rounds its inputs (activations); allowed: quantized weights only")
        return found


# Maths.


@dataclass
class _State:
    """All that changes from step to step, on the CPU: it is small, and what is saved is what goes on.

    Attributes:
        multipliers: Linear name -> m.
        first: Linear name -> the running mean of gradients by m.
        second: Linear name -> that of their squares.
        losses: Of the steps that are done.
    """

    multipliers: dict[str, Tensor]
    first: dict[str, Tensor]
    second: dict[str, Tensor]
    losses: list[float]

    @classmethod
    def start(cls, scales: Mapping[str, Tensor]) -> _State:
        """Before the first step."""
        import torch

        ones = {name: torch.ones_like(x, device="cpu") for name, x in scales.items()}
        zeros, more = ({name: torch.zeros_like(x) for name, x in ones.items()} for _ in range(2))
        return cls(ones, zeros, more, losses=[])

    def descend(self, gradients: Mapping[str, Tensor], rate: float) -> None:
        """One step of Adam on m, after the loss was added.

        Args:
            gradients: Linear name -> of the loss by m.
            rate: Of this step.
        """
        step = len(self.losses)
        for name, gradient in gradients.items():
            first, second = self.first[name], self.second[name]
            first.lerp_(gradient, 1 - BETAS[0])
            second.lerp_(gradient.square(), 1 - BETAS[1])
            size = (second / (1 - BETAS[1] ** step)).sqrt_().add_(EPSILON)
            self.multipliers[name].addcdiv_(first, size, value=-rate / (1 - BETAS[0] ** step))

    def save(self, scratch: Path) -> None:
        """Put it into the scratch folder."""
        import torch
        from safetensors.torch import save

        parts = {"multipliers": self.multipliers, "first": self.first, "second": self.second}
        tensors = {f"{part}.{name}": x.cpu() for part, found in parts.items() for name, x in found.items()}
        tensors["losses"] = torch.tensor(self.losses, dtype=torch.float64)
        write_atomically(scratch / _STATE, save(tensors))

    @classmethod
    def load(cls, scratch: Path) -> _State | None:
        """What an earlier try saved."""
        from safetensors.torch import load_file

        if not (scratch / _STATE).exists():
            return None
        tensors = load_file(scratch / _STATE)
        losses = tensors.pop("losses").tolist()
        parts: dict[str, dict[str, Tensor]] = {"multipliers": {}, "first": {}, "second": {}}
        for name, tensor in tensors.items():
            part, _, linear = name.partition(".")
            parts[part][linear] = tensor
        return cls(**parts, losses=losses)


def divergence(logits: Tensor, target: Tensor) -> Tensor:
    """KL(p ‖ q) summed over tokens, nats.

    Args:
        logits: Of q (tokens, V), float32.
        target: Logits of p, as q's.
    """
    log_p, log_q = target.log_softmax(-1), logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum()


def scale_gradient(gradient: Tensor, codes: Tensor, zero: Tensor, scale: Tensor) -> Tensor:
    """Of the loss by m, where Ŵ = (Q - z) · s · m; the rounding of s · m to bfloat16 is passed straight through.

    Args:
        gradient: By Ŵ (out, in), any float dtype.
        codes: Q (out, in), int8.
        zero: z (out, groups), int8.
        scale: s (out, groups), float32.

    Returns:
        (out, groups), float32.
    """
    shape = (*scale.shape, -1)
    steps = codes.view(shape).float().sub_(zero[..., None])
    return (gradient.view(shape).float() * steps).sum(-1).mul_(scale)


def _batches(num_samples: int, size: int, epochs: int, seed: int) -> Iterator[Tensor]:
    """Indices of the samples of each step, every sample once an epoch; the last batch of one may be smaller."""
    import numpy as np
    import torch

    generator = np.random.default_rng(seed)
    for _ in range(epochs):
        yield from torch.split(torch.from_numpy(generator.permutation(num_samples)), size)


# The two models.


class _Teacher:
    """Predictions of the teacher, from its hidden states of all samples, computed once."""

    def __init__(self, folder: Path, ids: Tensor, student: ModelSpec, context: Context) -> None:
        """Compute the states, unless an earlier try did, and load what lies behind them.

        Raises:
            UserError: Its vocabulary is not the student's, or its family is not known.
        """
        import torch
        from safetensors.torch import load_file, save

        from strop.calibration.blocks import hidden_states
        from strop.calibration.capture import Stream
        from strop.model import read_spec

        spec = read_spec(folder)
        if spec.opaque_bytes is not None:
            raise UserError(f"qad: teacher: {spec.family} is not a known family")
        if spec.vocab_size != student.vocab_size:
            raise UserError(
                f"qad: teacher: its vocabulary has {spec.vocab_size} tokens, the student's {student.vocab_size}"
            )
        path = context.scratch / "teacher.safetensors"
        if not path.exists():
            states = hidden_states(
                folder, spec, ids, lambda done: context.progress("qad: teacher", done, len(spec.layers))
            )
            write_atomically(path, save({"states": states.to(torch.bfloat16).cpu()}))
        self._states = load_file(path)["states"]
        stream = Stream(folder, spec, ids[:0])
        stream.load_outside()
        self._decoder = stream.decoder

    def predictions(self, rows: Tensor) -> Iterator[Tensor]:
        """Logits (tokens, V) float32 of the samples `rows`, `HEAD_TOKENS` at a time."""
        import torch

        from strop.calibration.blocks import products

        device = self._decoder.device
        for x in torch.split(self._states[rows].flatten(0, 1), HEAD_TOKENS):
            with torch.no_grad(), products(device):
                logits = self._decoder.logits(x.to(device).float())
            yield logits


class _Student:
    """A decoder whose linears are dense and of the dtype of products; hidden states are kept in float32."""

    def __init__(self, folder: Path, learners: Sequence[Linear], device: str) -> None:
        import torch
        from torch import nn

        from strop.calibration.blocks import product_dtype
        from strop.layers import QuantLinear
        from strop.model import Weights, load_decoder, load_packed

        self._learners = list(learners)
        self._decoder: Decoder = load_decoder(folder, device).float().requires_grad_(False)
        with Weights(folder) as weights:
            self._packed = {x.name: tuple(y.to(device) for y in load_packed(weights, x)) for x in learners}
        for linear in self._decoder.spec.linears():
            old = self._decoder.linear(linear.name)
            if isinstance(old, QuantLinear):
                # The head's rows may be embeddings too, which are not rounded.
                dtype = torch.float32 if linear == self._decoder.spec.head else product_dtype(torch.device(device))
                new = nn.Linear(linear.in_features, linear.out_features, bias=linear.has_bias, device="meta")
                new.weight = nn.Parameter(old.dense().to(dtype), requires_grad=False)
                if old.bias is not None:
                    new.bias = nn.Parameter(old.bias, requires_grad=False)
                self._decoder.replace_linear(linear.name, new)
        self._now = self.scales()
        self._shared = {x.kv_from_layer for x in self._decoder.spec.layers}

    def scales(self) -> dict[str, Tensor]:
        """Linear name -> s."""
        return {name: scale for name, (_, scale, _) in self._packed.items()}

    def set_scales(self, multipliers: Mapping[str, Tensor]) -> None:
        """Compute with s · m, rounded as it will be stored."""
        from strop.numerics import dequantize, round_scales

        for name, (codes, scale, zero) in self._packed.items():
            self._now[name] = round_scales(scale * multipliers[name].to(scale.device))
            self._weight(name).data.copy_(dequantize(codes, self._now[name], zero))

    def learn(self, ids: Tensor, targets: Iterable[Tensor]) -> tuple[float, dict[str, Tensor]]:
        """Mean KL over the tokens of some samples, nats, and its gradients by m.

        Only the inputs of blocks are kept on the way forward; a block is computed again when its gradient comes, so
        that one block's graph and weight gradients are in memory at a time. What reaches later blocks through shared
        keys and values is left out.

        Args:
            ids: (B, T), int64.
            targets: Logits of p for all tokens in order, (tokens, V) `HEAD_TOKENS` at a time.
        """
        import torch

        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        inputs: list[Tensor] = []
        shared: dict[int, tuple[Tensor, Tensor]] = {}
        with torch.no_grad():
            x = self._decoder.embed(ids, positions)
            for index in range(len(self._decoder.layers)):
                inputs.append(x)
                kept = dict(shared)
                x = self._compute(index, x, positions, kept)
                if index in self._shared:
                    shared[index] = kept[index]
        loss, gradient = self._output(x, targets)
        gradients: dict[str, Tensor] = {}
        for index in reversed(range(len(inputs))):
            learners = [y for y in self._decoder.spec.layer_linears(index) if y.name in self._packed]
            for linear in learners:
                self._weight(linear.name).requires_grad_()
            x = inputs.pop().requires_grad_()
            with torch.enable_grad():
                y = self._compute(index, x, positions, dict(shared))
            torch.autograd.backward(y, gradient)
            assert x.grad is not None
            gradient = x.grad
            for linear in learners:
                weight = self._weight(linear.name).requires_grad_(False)
                assert weight.grad is not None
                codes, scale, zero = self._packed[linear.name]
                gradients[linear.name] = scale_gradient(weight.grad, codes, zero, scale).cpu()
                weight.grad = None
        return loss, gradients

    def stored(self) -> Iterator[tuple[str, Tensor | None]]:
        """The tensors of the learned linears, as they are stored."""
        from strop.model import packed_tensors

        for linear in self._learners:
            codes, _, zero = self._packed[linear.name]
            parts = (codes.cpu(), self._now[linear.name].cpu(), zero.cpu())
            yield from packed_tensors(linear, *parts).items()

    def _weight(self, name: str) -> Tensor:
        from torch import nn

        module = self._decoder.linear(name)
        assert isinstance(module, nn.Linear)
        return module.weight

    def _compute(self, index: int, x: Tensor, positions: Tensor, kept: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        """Outputs (B, T, H) of a block. Adds its keys and values to `kept`."""
        from strop.calibration.blocks import products

        with products(x.device):
            return self._decoder.block(index, x, positions, kept)

    def _output(self, x: Tensor, targets: Iterable[Tensor]) -> tuple[float, Tensor]:
        """Mean KL, and its gradient by the last hidden states x (B, T, H)."""
        import torch

        from strop.calibration.blocks import products

        num_tokens = x.shape[0] * x.shape[1]
        gradient = torch.empty_like(x)
        pieces = zip(*(torch.split(y.flatten(0, 1), HEAD_TOKENS) for y in (x, gradient)), targets, strict=True)
        loss = 0.0
        for piece, out, target in pieces:
            leaf = piece.detach().requires_grad_()
            with torch.enable_grad(), products(x.device):
                total = divergence(self._decoder.logits(leaf), target) / num_tokens
            out.copy_(torch.autograd.grad(total, leaf)[0])
            loss += float(total.detach())
        return loss, gradient


_STATE = "state.safetensors"
