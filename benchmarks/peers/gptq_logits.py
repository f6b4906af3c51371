"""Logits of a folder in AutoGPTQ's layout by transformers and GPTQModel. Runs in an environment of its own.

`python gptq_logits.py FOLDER IDS.npy OUT.npy`: IDS (B, T) int64, OUT (B, T, V) float32. Computed by GPTQModel's kernel
in PyTorch, on the CPU.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GPTQConfig


def main() -> None:
    """Open the folder as transformers does and save what it computes."""
    folder, ids, out = sys.argv[1:]
    settings = GPTQConfig(bits=4, backend="torch")  # the folder's own settings win over the bits
    model = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", quantization_config=settings)
    kinds = sorted({type(x).__name__ for x in model.modules() if "Linear" in type(x).__name__})
    with torch.inference_mode():
        logits = model(torch.from_numpy(np.load(ids))).logits.float().numpy()
    np.save(out, logits)
    print(f"{', '.join(kinds)}; transformers {sys.modules['transformers'].__version__}", flush=True)


if __name__ == "__main__":
    main()
