"""What is compiled: a layer before attention, a layer after it, the head. Weights are arguments: one serves all layers.

Attention between the pieces is torch's own fused kernel over the cache. With one token a step a linear is a reduction
over its stored bytes, which the compiler vectorizes: codes are unpacked in registers and no dense weight is ever made.
With more tokens weights are dequantized and multiplied.

Legend: N tokens (of all rows), H hidden size, W (out, in) weight.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.export.torch_compile import layout
from strop.layers import Layer, make_norm
from strop.spec import LayerSpec, Linear, ModelSpec

BEFORE = ("qkv", "q", "k", "v", "input_norm", "q_norm", "k_norm")
"""Parts of a layer that are used before attention; the rest is used after it."""


class Matrix(nn.Module):
    """y = W x + b, W in the dtype of the activations or packed as `layout.Packing` says.

    Attributes:
        weight: W, unless it is packed.
        codes: uint8 (out, groups, width), codes made unsigned.
        scales: bfloat16 (out, groups).
        offsets: bfloat16 (out, groups): what a code of zero weight is; where it differs between groups.
        bias: (out,) or None.
    """

    weight: Tensor
    codes: Tensor
    scales: Tensor
    offsets: Tensor
    bias: Tensor | None

    def __init__(self, linear: Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.packing = linear, layout.packing(linear)
        rows = linear.out_features
        if self.packing is None:
            self.register_buffer("weight", torch.empty(rows, linear.in_features, dtype=dtype, device="meta"))
        else:
            groups = (rows, self.packing.groups)
            codes = torch.empty(*groups, self.packing.width, dtype=torch.uint8, device="meta")
            self.register_buffer("codes", codes)
            self.register_buffer("scales", torch.empty(groups, dtype=torch.bfloat16, device="meta"))
            if self.packing.has_offsets:
                self.register_buffer("offsets", torch.empty(groups, dtype=torch.bfloat16, device="meta"))
        bias = torch.empty(rows, dtype=dtype, device="meta") if linear.has_bias else None
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """(1, N, in) -> (1, N, out)."""
        if x.shape[1] != 1:
            return F.linear(x, self.dense(x.dtype), self.bias)
        # A view of its own makes the compiler store x: otherwise it computes x, norm and all, anew for every row of W.
        y = self._reduce(x.flatten().float().as_strided((x.shape[2],), (1,)))
        if self.bias is not None:
            y = y + self.bias.float()
        return y.to(x.dtype)[None, None]

    def dense(self, dtype: torch.dtype) -> Tensor:
        """W (out, in)."""
        if self.packing is None:
            return self.weight
        weight = dequantize(self.packing, self.codes, self.scales, self.offsets if self.packing.has_offsets else None)
        return weight.to(dtype)

    def _reduce(self, x: Tensor) -> Tensor:
        """W x of one x (in,), float32: (out,)."""
        if self.packing is None:
            return (self.weight.float() * x).sum(-1)
        form = self.packing
        # Sums over whole vectors of bytes, so that a row's horizontal sum is taken once and not once for each group.
        parts = x.view(form.groups, form.fields, form.chunks, -1)
        codes = self.codes.view(len(self.codes), form.groups, form.chunks, -1)
        offset = self.offsets if form.has_offsets else None
        terms = [
            field * parts[:, index, chunk]
            for chunk in range(form.chunks)
            for index, field in enumerate(_fields(form, codes[:, :, chunk], offset))
        ]
        return (sum(terms[1:], terms[0]) * self.scales.float()[:, :, None]).sum((1, 2))


def dequantize(form: layout.Packing, codes: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """W (rows, in), float32, of some rows.

    Args:
        form: Of the linear.
        codes: uint8 (rows, groups, width).
        scale: (rows, groups).
        offset: (rows, groups) or None.
    """
    values = torch.stack(_fields(form, codes, offset), dim=2)  # (rows, groups, fields, width)
    return (values * scale.float()[:, :, None, None]).flatten(1)


def pack(form: layout.Packing, codes: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """Signed codes and zero points as `Matrix` holds them.

    Args:
        form: Of the linear.
        codes: Q (out, in), int8.
        zero: z (out, groups), int8.

    Returns:
        `codes` and `offsets` of `Matrix`.
    """
    unsigned = (codes.to(torch.int16) + form.half).to(torch.uint8)
    fields = unsigned.view(len(codes), form.groups, form.fields, form.width)
    packed = fields[:, :, 0].clone()
    for index in range(1, form.fields):
        packed |= fields[:, :, index] << (form.bits * index)
    return packed, (zero.float() + form.half).to(torch.bfloat16)


def _fields(form: layout.Packing, codes: Tensor, offset: Tensor | None) -> list[Tensor]:
    """Codes less their offset, float32 (rows, groups, width), one tensor for each field of a byte."""
    if form.fields == 1:
        fields = [codes.float()]  # through int32 the compiler would not vectorize it
    else:
        wide, mask = codes.to(torch.int32), 2**form.bits - 1
        fields = [((wide >> (form.bits * index)) & mask).float() for index in range(form.fields)]
    return [x - (form.half if offset is None else offset.float()[:, :, None]) for x in fields]


class Half(nn.Module):
    """A layer before attention, or after it. Its weights are on no device: they come with every call.

    Attributes:
        tensors: Name -> what `forward` takes, in that order, without values.
    """

    def __init__(self, layer: LayerSpec, dtype: torch.dtype, *, is_before: bool) -> None:
        super().__init__()
        dense = {role: dataclasses.replace(x, quantization=None) for role, x in layer.linears.items()}
        whole = Layer(dataclasses.replace(layer, linears=dense), dtype).to("meta")
        for role, linear in layer.linears.items():
            setattr(whole, role, Matrix(linear, dtype))
        self._body = (_Before(whole) if is_before else _After(whole),)  # in a tuple: its tensors are not this module's
        every = {name.removeprefix("layer."): x for name, x in sorted(self._body[0].state_dict().items())}
        self.tensors = {name: x for name, x in every.items() if (name.split(".")[0] in BEFORE) == is_before}

    def forward(self, inputs: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
        """Run it.

        Args:
            inputs: Before: x (1, N, H), and where there is rope cos and sin (1, 1, N, W). After: x as the layer got
                it, and attention's output (1, N, heads · D).
            tensors: As the attribute says.

        Returns:
            Before: q, and k and v where the layer has its own, each (1, heads, N, D). After: x (1, N, H).
        """
        named = {f"layer.{name}": x for name, x in zip(self.tensors, tensors, strict=True)}
        found: list[Tensor] = torch.func.functional_call(self._body[0], named, tuple(inputs))
        return found


class _Before(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *rotary: Tensor) -> list[Tensor]:
        taken: list[Tensor] = []

        def attend(q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            taken.extend(each.contiguous() for each in (q, k, v) if each is not None)
            return q

        self.layer.attention(x, (rotary[0], rotary[1]) if rotary else None, attend)
        return taken


class _After(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, heads: Tensor) -> list[Tensor]:
        x = self.layer.add_attention(x, heads)
        return [self.layer.add_mlp(x, self.layer.inner(x))]


class Head(nn.Module):
    """Final norm, head and its softcap: hidden states (1, N, H) -> logits (1, N, V), float32.

    Attributes:
        tensors: Name -> what `forward` takes, in that order, without values.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self._body = (_Head(spec, dtype).to("meta"),)
        self.tensors: dict[str, Tensor] = dict(sorted(self._body[0].state_dict().items()))

    def forward(self, inputs: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
        """Run it; `tensors` as the attribute says."""
        named = dict(zip(self.tensors, tensors, strict=True))
        found: list[Tensor] = torch.func.functional_call(self._body[0], named, tuple(inputs))
        return found


class _Head(nn.Module):
    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.head = make_norm(spec.final_norm, dtype), Matrix(spec.head, dtype)
        self.cap = spec.logit_softcap

    def forward(self, hidden: Tensor) -> list[Tensor]:
        logits = self.head(self.norm(hidden)).float()
        return [logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap]
