"""Time of onnxruntime's attention alone over caches of float32, int8 and int4, in turn. Results: `kv_cache.md`.

    python benchmarks/cache_kernels.py

One row, one thread, SmolLM2-135M's heads: 9 queries over 3 keys of 64, room for 4352 tokens, updated in place.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

HEADS, KV_HEADS, WIDTH, ROOM = 9, 3, 64, 4352
TYPES = {32: TensorProto.FLOAT, 8: TensorProto.INT8, 4: TensorProto.UINT8}
STEPS = ((1, (128, 1024, 4096), 60), (128, (0, 3968), 6))
"""New tokens, cached ones before them, repeats."""


def attention(bits: int, new: int) -> Callable[[int], None]:
    """A step of so many new tokens over a cache of this width, given the number of cached ones."""
    cache = (1, KV_HEADS, ROOM, WIDTH // 2 if bits == 4 else WIDTH)
    random = np.random.default_rng(0)
    feeds = {
        name: random.standard_normal((1, new, heads * WIDTH)).astype(np.float32)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    }
    for name in ("past_k", "past_v"):
        is_float = bits == 32
        values = random.standard_normal(cache) if is_float else random.integers(0, 100, cache)
        feeds[name] = values.astype({32: np.float32, 8: np.int8, 4: np.uint8}[bits])
    ends = np.zeros(1, np.int32)
    feeds |= {"ends": ends, "total": np.array([ROOM], np.int32), "counts": np.array([new], np.int32)}
    attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "scale": WIDTH**-0.5}
    scales = ["", ""]
    if bits != 32:
        scales = ["k_scale", "v_scale"]
        feeds |= {name: np.full((1, KV_HEADS, 1, WIDTH), 0.02, np.float32) for name in scales}
        attributes |= dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_CHANNEL")
        attributes["kv_cache_bit_width"] = bits
    names = ["q", "k", "v", "past_k", "past_v", "ends", "total", *[""] * 5, *scales, "", "", "counts"]
    output = np.zeros((1, new, HEADS * WIDTH), np.float32)
    results = {"output": output, "new_k": feeds["past_k"], "new_v": feeds["past_v"]}
    node = helper.make_node("GroupQueryAttention", names, list(results), domain="com.microsoft", **attributes)
    sides = [
        [helper.make_tensor_value_info(x, helper.np_dtype_to_tensor_dtype(y.dtype), y.shape) for x, y in side.items()]
        for side in (feeds, results)
    ]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "attention", *sides), opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for bind, side in ((binding.bind_input, feeds), (binding.bind_output, results)):
        for name, array in side.items():
            bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def run(cached: int, kept: object = (feeds, output)) -> None:  # noqa: ARG001 (the session reads them by address)
        ends[0] = cached + new - 1
        session.run_with_iobinding(binding)

    return run


def main() -> None:
    """Print a row for each shape of step."""
    print("| new tokens | cached before | float32, ms | int8 | int4 |\n|---|---|---|---|---|")
    for new, lengths, repeats in STEPS:
        runs = {bits: attention(bits, new) for bits in TYPES}
        for cached in lengths:
            seconds: dict[int, list[float]] = {bits: [] for bits in runs}
            for turn in range(repeats):
                for bits in list(runs)[:: 1 if turn % 2 else -1]:
                    start = time.perf_counter()
                    runs[bits](cached)
                    seconds[bits].append(time.perf_counter() - start)
            base, *others = (float(np.median(x)) for x in seconds.values())
            print(f"| {new} | {cached} | {1e3 * base:.3g} | " + " | ".join(f"{x / base:.2f} ×" for x in others) + " |")


if __name__ == "__main__":
    main()
