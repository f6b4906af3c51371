"""Rotations folded into the weights: the model computes the same, and no single value stands out when it is rounded.

Randomized Hadamard matrices as in QuaRot (Ashkboos et al. 2024, arXiv 2404.00456), on the residual stream and on the
values of each head (R1 and R2 of SpinQuant, Liu et al. 2024, arXiv 2405.16406). Left out: rotations that cost time when
the model runs (queries and keys after rope, the input of `down`) and rotations that are learned.

Legend: H hidden size, D width of a head, Q (H, H) and R (D, D) orthogonal, g (H,) gain of a norm. A row x of the
residual stream becomes x Q and a head's value v becomes v R. So the embedding E becomes E Q, a linear that reads the
stream W diag(g) Q with gain 1 left in the norm, and one that writes it Qᵀ W; of v and o each head's part turns by R.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from strop.artifact import Artifact
from strop.errors import UserError
from strop.spec import DTYPE_BYTES, LayerSpec, Linear, ModelSpec, Norm
from strop.stage import GFLOPS_PER_THREAD, Context, Plan, Stage

if TYPE_CHECKING:
    from torch import Tensor

    from strop.model import Weights

OPERATIONS_PER_WEIGHT = 700
"""Some ten passes over float64 numbers: memory-bound, counted as operations."""
LARGEST_POWER = 64
"""Order of the largest power of two that is applied as one matrix: larger ones would cost more than a pass more."""
NUMBERS_AT_ONCE = 2**17
"""Weights that are turned together: in float64 they stay in the processor's cache, however large a matrix is."""
ATTENTION = ("qkv", "q", "k", "v")
"""Roles that read the first norm; `gate_up`, `gate` and `up`, of experts too, read the second."""
WRITERS = ("o", "down")
"""Roles that write the residual stream."""
VALUES = ("qkv", "v", "o")
"""Roles that write or read the heads' values."""


class Rotate(Stage):
    """Turn the residual stream and the heads' values into bases without outliers, in the weights alone.

    Attributes:
        parts: What is turned. `residual` unties a tied head, and cannot be where branches end in a norm (gemma2,
            gemma3) or norms subtract a mean (gpt2); `heads` always can.
    """

    parts: list[Literal["residual", "heads"]] = Field(default=["residual", "heads"], min_length=1)

    def plan(self, spec: ModelSpec, num_calibration_tokens: int) -> Plan:  # noqa: ARG002 # needs none
        """See `Stage.plan`."""
        spec.check_cache("rotate")
        result = self._rotated(spec)
        sizes = [x.in_features * x.out_features for x in self._changed(spec)]
        largest = max(spec.vocab_size * spec.hidden_size if self._turns_residual else 0, *sizes)
        return Plan(
            spec=result,
            size_bytes=result.size_bytes(),
            memory_bytes=3 * 4 * largest + 5 * 8 * NUMBERS_AT_ONCE,  # as read, turned, written
            seconds=OPERATIONS_PER_WEIGHT * sum(sizes) / (GFLOPS_PER_THREAD * 1e9),
            notes=tuple(self._notes(spec)),
        )

    def run(self, source: Artifact, out: Path, context: Context) -> dict[str, Any]:
        """See `Stage.run`."""
        import torch

        from strop.model import Weights, read_spec, save_checkpoint

        torch.set_num_threads(context.threads)
        spec = read_spec(source.path)
        result = self._rotated(spec)
        residual = rotation(spec.hidden_size, context.seed) if self._turns_residual else None
        widths = {x.head_dim for x in spec.layers} if "heads" in self.parts else set()
        heads = {width: rotation(width, context.seed) for width in sorted(widths)}

        def changed(weights: Weights) -> Iterator[tuple[str, Tensor | None]]:
            if residual is not None:
                yield from _turned_outside(weights, spec, residual)
            for done, layer in enumerate(spec.layers, 1):
                yield from _turned_layer(weights, layer, residual, heads.get(layer.head_dim))
                context.progress("rotate", done, len(spec.layers))

        with Weights(source.path) as weights:
            save_checkpoint(out, result, source.path, changed(weights))
        report = {
            "num_linears": len(self._changed(spec)),
            "residual": None if residual is None else describe(spec.hidden_size),
            "heads": {str(width): describe(width) for width in heads},
        }
        return {"spec": result, "report": report}

    @property
    def _turns_residual(self) -> bool:
        return "residual" in self.parts

    def _changed(self, spec: ModelSpec) -> list[Linear]:
        """The linears whose weights change."""
        if self._turns_residual:
            return [*spec.linears(), *spec.gates()]
        return [x for layer in spec.layers for role, x in layer.linears.items() if role in VALUES]

    def _rotated(self, spec: ModelSpec) -> ModelSpec:
        """The table of the output.

        Raises:
            UserError: The family cannot be rotated, or a weight is quantized already.
        """
        spec.match(None)  # refuses a family that is not known
        if self._turns_residual:
            _check_norms(spec)
        for linear in self._changed(spec):
            if linear.quantization is not None:
                raise UserError(
                    f"{linear.name}: already quantized to {linear.quantization.bits} bits by an earlier stage; "
                    "rotate comes before what quantizes"
                )
        return dataclasses.replace(spec, is_tied=False) if self._turns_residual else spec

    def _notes(self, spec: ModelSpec) -> Iterator[str]:
        if self._turns_residual and spec.is_tied:
            size = spec.vocab_size * spec.hidden_size * DTYPE_BYTES[spec.dtype]
            yield (
                f"{spec.head.name} takes the final norm's gain, so it is no longer tied to the embedding: "
                f"{size / 1e6:.1f} MB more"
            )
        if spec.dtype != "float32":
            yield f"turned weights are rounded to {spec.dtype} once more; with model.dtype float32 they are not"
        widths = {spec.hidden_size} if self._turns_residual else set()
        widths |= {x.head_dim for x in spec.layers} if "heads" in self.parts else set()
        for width in sorted(widths):
            if hadamard_order(width) is None:
                yield f"no Hadamard matrix of order {width} is known here: turned by a {describe(width)}"


def _check_norms(spec: ModelSpec) -> None:
    """Refuse norms that a rotation of the residual stream cannot pass.

    Raises:
        UserError: Names the norm.
    """
    allowed = f"allowed for {spec.family}: parts: [heads]"
    for layer in spec.layers:
        for norm in (layer.post_attention_norm, layer.post_mlp_norm):
            if norm is not None:
                raise UserError(
                    f"rotate: {norm.name} scales single values of what is added to the residual stream, so the "
                    f"stream cannot be rotated; {allowed}"
                )
    for norm in spec.norms():
        if norm.kind == "layer":
            raise UserError(
                f"rotate: {norm.name} subtracts a mean, which a rotation does not keep, so the residual stream "
                f"cannot be rotated; {allowed}"
            )


def _turned_outside(weights: Weights, spec: ModelSpec, residual: Rotation) -> Iterator[tuple[str, Tensor]]:
    """Embedding, final norm and head."""
    from strop.model import load_linear

    embedding = f"{spec.embedding}.weight"
    yield embedding, turn(weights.load(embedding), residual=residual)
    head = weights.load(embedding) if spec.is_tied else load_linear(weights, spec.head)
    yield f"{spec.head.name}.weight", turn(head, gain=_gain(weights, spec.final_norm), residual=residual)
    yield _unit_norm(spec.final_norm)


def _turned_layer(
    weights: Weights, layer: LayerSpec, residual: Rotation | None, head: Rotation | None
) -> Iterator[tuple[str, Tensor]]:
    """What changes of one layer. The biases of linears that only read the residual stream stay as they are."""
    from strop.model import load_linear

    gates = {x.name.rpartition(".")[2]: x for x in layer.gates()}  # they read what `gate` and `up` of experts read
    for role, linear in {**layer.linears, **gates}.items():
        across = head if role in VALUES else None
        if residual is None and across is None:
            continue
        is_writer = role.rpartition(".")[2] in WRITERS
        norm = layer.input_norm if role in ATTENTION else layer.mlp_norm
        gain = None if is_writer or residual is None else _gain(weights, norm)
        first = (layer.num_heads + layer.num_kv_heads) * layer.head_dim if role == "qkv" else 0
        weight = load_linear(weights, linear)
        weight = weight.T if is_writer else weight
        weight = turn(weight, gain=gain, residual=residual, head=across, first=first)
        yield f"{linear.name}.weight", weight if is_writer == linear.is_transposed else weight.T
        if linear.has_bias:
            bias = weights.load(f"{linear.name}.bias")
            if is_writer and residual is not None:
                yield f"{linear.name}.bias", turn(bias[None], residual=residual)[0]
            elif not is_writer and across is not None:
                yield f"{linear.name}.bias", turn(bias[:, None], head=across, first=first)[:, 0]
    if residual is not None:
        yield _unit_norm(layer.input_norm)
        yield _unit_norm(layer.mlp_norm)


def _gain(weights: Weights, norm: Norm) -> Tensor:
    """g (H,), float64."""
    return weights.load(f"{norm.name}.weight").double() + norm.offset


def _unit_norm(norm: Norm) -> tuple[str, Tensor]:
    """The stored weight of a norm of gain 1."""
    import torch

    return f"{norm.name}.weight", torch.full((norm.size,), 1 - norm.offset)


# Maths.


@dataclass(frozen=True)
class Rotation:
    """Q = diag(signs) · (F₁ ⊗ F₂ ⊗ …), orthogonal, never formed: its factors are applied one after the other.

    Attributes:
        signs: (n,) of ±1, float64.
        factors: Each (k, k) orthogonal, float64; n is the product of their orders.
    """

    signs: Tensor
    factors: tuple[Tensor, ...]

    @property
    def size(self) -> int:
        """n."""
        return len(self.signs)

    def apply(self, x: Tensor) -> Tensor:
        """x Q for rows x (…, n), float64."""
        y = x * self.signs
        for factor in self.factors:
            # The axis that is turned comes first and goes last: after all factors the axes are as they were.
            order = len(factor)
            y = y.reshape(-1, order, self.size // order).transpose(1, 2).reshape(-1, order) @ factor
        return y.reshape(x.shape)


def rotation(size: int, seed: int) -> Rotation:
    """A randomized Hadamard matrix of order `size`, or where there is none here, the nearest thing to it.

    Args:
        size: n.
        seed: Of the signs, and of a factor that is random.

    Returns:
        The factors are the Hadamard matrix of the smallest order m for which n / m is a power of two, and Sylvester's
        (powers of two), each over the root of its order. Where no such m is known, m is n's odd part and the factor a
        random orthogonal matrix (QR of normal numbers, signs such that it is uniform: Mezzadri 2007, arXiv
        math-ph/0609050).
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    signs = 2.0 * torch.randint(0, 2, (size,), generator=generator).double() - 1
    order = hadamard_order(size)
    if order is None:
        order = odd_part(size)
        basis, upper = torch.linalg.qr(torch.randn(order, order, generator=generator, dtype=torch.float64))
        first = (basis * upper.diagonal().sign()).contiguous()
    else:
        first = paley(order) / math.sqrt(order)
    factors, left = [first], size // order
    while left > 1:
        power = min(left, LARGEST_POWER)
        factors.append(sylvester(power) / math.sqrt(power))
        left //= power
    return Rotation(signs, tuple(factors))


def turn(
    matrix: Tensor,
    *,
    gain: Tensor | None = None,
    residual: Rotation | None = None,
    head: Rotation | None = None,
    first: int = 0,
) -> Tensor:
    """A matrix in the new bases: Bᵀ M diag(g) Q, where B turns each block of D rows from `first` on by R.

    Args:
        matrix: M (rows, H), any float dtype: W of a linear that reads the residual stream, Wᵀ of one that writes it.
        gain: g (H,), float64; None: 1.
        residual: Q; None: the identity.
        head: R; None: the identity. Its order divides the rows from `first` on.
        first: Rows before it keep their basis.

    Returns:
        (rows, H), float32, computed in float64.
    """
    import torch

    width = matrix.shape[1]
    block = 1 if head is None else head.size
    step = block * max(1, NUMBERS_AT_ONCE // (width * block))
    parts: list[tuple[Tensor, Rotation | None]] = [(matrix[:first], None), (matrix[first:], head)]
    found = []
    for piece, across in ((x, turned) for part, turned in parts if len(part) for x in torch.split(part, step)):
        y = piece.double()
        if gain is not None:
            y = y * gain
        if residual is not None:
            y = residual.apply(y)
        if across is not None:
            y = across.apply(y.reshape(-1, block, width).transpose(1, 2)).transpose(1, 2).reshape(piece.shape)
        found.append(y.float())
    return torch.cat(found)


def sylvester(order: int) -> Tensor:
    """The Hadamard matrix of a power of two, each twice as large as the one before (Sylvester 1867): (order, order)."""
    import torch

    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < order:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def hadamard_order(size: int) -> int | None:
    """The smallest order m of a Hadamard matrix that `paley` builds with size / m a power of two, or None."""
    odd = odd_part(size)
    if odd == 1:
        return 1
    order = 4 * odd
    while size % order == 0:
        if is_prime(order - 1) or (order % 8 == 4 and is_prime(order // 2 - 1)):
            return order
        order *= 2
    return None


def paley(order: int) -> Tensor:
    """A Hadamard matrix by Paley's two constructions (1933, J. Math. Phys. 12): ±1, rows orthogonal.

    Args:
        order: 1, q + 1 with q a prime of 4k + 3, or 2 (q + 1) with q a prime of 4k + 1.

    Returns:
        (order, order), float64.
    """
    import torch

    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    is_first = is_prime(order - 1)
    q = order - 1 if is_first else order // 2 - 1
    squares = {x * x % q for x in range(1, q)}
    character = torch.tensor([0.0 if x == 0 else 1.0 if x in squares else -1.0 for x in range(q)], dtype=torch.float64)
    index = torch.arange(q)
    conference = torch.ones(q + 1, q + 1, dtype=torch.float64)
    conference[0, 0] = 0
    conference[1:, 1:] = character[(index[:, None] - index) % q]
    identity = torch.eye(q + 1, dtype=torch.float64)
    if is_first:
        conference[1:, 0] = -1
        return identity + conference
    one, two = torch.tensor([[[1.0, 1.0], [1.0, -1.0]], [[1.0, -1.0], [-1.0, -1.0]]], dtype=torch.float64)
    return torch.kron(conference, one) + torch.kron(identity, two)


def describe(size: int) -> str:
    """A rotation of that size in words, for the report."""
    order = hadamard_order(size)
    if order is None:
        odd = odd_part(size)
        return f"random orthogonal matrix of order {odd} times Hadamard matrix of order {size // odd}"
    return f"Hadamard matrix of order {order} times {size // order}"


def odd_part(size: int) -> int:
    """`size` without its factors of two."""
    return size // (size & -size)


def is_prime(number: int) -> bool:
    """Whether a number has no divisor but 1 and itself."""
    return number > 1 and all(number % x for x in range(2, int(number**0.5) + 1))
