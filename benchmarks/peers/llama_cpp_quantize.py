"""llama.cpp's quantization of a GGUF file, with an importance matrix. Runs in an environment of its own.

`python llama_cpp_quantize.py FILE.gguf OUT.gguf TYPE [IMATRIX.npz]`: TYPE is Q4_0, Q4_K_M or Q8_0; IMATRIX holds for
tensor names of the file the mean square of each input (in,), as llama.cpp's own tool computes it. llama-cpp-python
0.3.36.
"""

from __future__ import annotations

import ctypes
import sys

import llama_cpp
import numpy as np


def main() -> None:
    """Quantize one file."""
    source, out, kind = sys.argv[1:4]
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    settings.nthread = 2
    if len(sys.argv) > 4:
        matrix = {name: np.ascontiguousarray(x, np.float32) for name, x in np.load(sys.argv[4]).items()}
        entries = (llama_cpp.llama_model_imatrix_data * (len(matrix) + 1))()
        for entry, (name, x) in zip(entries, matrix.items(), strict=False):  # the last entry stays empty: the end
            entry.name, entry.size = name.encode(), x.size
            entry.data = x.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        settings.imatrix = entries
    if llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(settings)):
        sys.exit("llama_model_quantize failed")


if __name__ == "__main__":
    main()
