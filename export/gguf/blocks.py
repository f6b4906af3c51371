"""Maths of ggml's blocks: codes and scales in, bytes out, and floats through a type and back. Arrays in, arrays out.

Legend: Q (rows, columns) signed codes less their zero points, s (rows, groups) scales, d (rows, blocks) of the blocks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strop.errors import UserError
from strop.export.gguf.layout import BLOCK, CODE_BITS
from strop.numerics import E2M1

Bytes = NDArray[np.uint8]
Codes = NDArray[np.int8]
Floats = NDArray[np.float32]
LARGEST_FLOAT16 = 65504.0


def pack(codes: Codes, scale: Floats, kind: str) -> Bytes:
    """Codes as they are, in blocks of Q4_0, Q5_0, Q8_0 or MXFP4.

    A block holds d, then of 5-bit codes their highest bits (bit i of a word: code i), then for each of 16 bytes code i
    in its low half and code i + 16 in its high half, or 32 bytes of 8-bit codes. One of MXFP4 holds the exponent of 2 d
    plus 127, then 4-bit codes: sign and magnitude, an index of `numerics.E2M1`.

    Args:
        codes: Q (rows, columns), whole blocks, within the type's range.
        scale: s (rows, groups); a group is whole blocks.
        kind: ggml's type.

    Returns:
        (rows, bytes of a row).

    Raises:
        UserError: A scale is not a number of float16.
    """
    rows = codes.shape[0]
    blocks = codes.reshape(rows, -1, BLOCK)
    wide = np.repeat(scale, blocks.shape[1] // scale.shape[1], axis=1)
    if kind == "MXFP4":
        places = np.searchsorted(E2M1, np.abs(blocks)).astype(np.uint8) | ((blocks < 0).astype(np.uint8) << 3)
        exponents = (np.frexp(wide)[1] + 127).astype(np.uint8)[..., None]
        halves = places[..., : BLOCK // 2] | (places[..., BLOCK // 2 :] << 4)
        return np.concatenate([exponents, halves], axis=-1).reshape(rows, -1)
    with np.errstate(over="ignore"):
        d = wide.astype(np.float16)
    if not np.array_equal(d.astype(np.float32), wide):
        worst = wide[d.astype(np.float32) != wide][0]
        raise UserError(f"a scale of {worst:.6g} is no number of float16, which GGUF's blocks store")
    half = 2 ** (CODE_BITS[kind] - 1)
    if blocks.min() < -half or blocks.max() >= half:
        raise ValueError(f"codes from {blocks.min()} to {blocks.max()} do not fit {kind}")
    parts = [d[..., None].view(np.uint8)]
    if kind == "Q8_0":
        parts.append(blocks.view(np.uint8))
    else:
        shifted = (blocks + half).astype(np.uint8)
        if kind == "Q5_0":
            parts.append(np.packbits(shifted >> 4, axis=-1, bitorder="little"))
        parts.append((shifted[..., : BLOCK // 2] & 15) | (shifted[..., BLOCK // 2 :] << 4))
    return np.concatenate(parts, axis=-1).reshape(rows, -1)


def encode(values: Floats, kind: str) -> Bytes:
    """Floats in a type of ggml, rounded as llama.cpp's own quantizer rounds them.

    Args:
        values: (rows, columns); whole blocks where the type has some.
        kind: ggml's type.

    Returns:
        (rows, bytes of a row).

    Raises:
        UserError: A value is beyond what float16, which holds it or its block's scale, can hold.
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    largest = float(np.abs(values).max())
    if kind not in ("F32", "BF16") and not largest <= LARGEST_FLOAT16:
        raise UserError(f"values up to {largest:.6g} do not fit {kind}; allowed: F32, BF16")
    return np.ascontiguousarray(quantize(np.ascontiguousarray(values), GGMLQuantizationType[kind])).view(np.uint8)


def decode(stored: Bytes, kind: str) -> Floats:
    """The floats (rows, columns) that `encode` or `pack` gave the bytes of."""
    from gguf import GGMLQuantizationType, dequantize

    return np.asarray(dequantize(stored, GGMLQuantizationType[kind]), dtype=np.float32)


def interleave(rows: NDArray[np.generic], num_heads: int) -> NDArray[np.generic]:
    """Rows (heads · head_dim, ...) of q or k in llama.cpp's order: first and second half of a head in turn."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
