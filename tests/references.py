"""Slow, obvious references and tiny models that several tests share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

VOCAB_SIZE = 307
"""Of every tiny model: odd, and a little more than its tokenizer has."""
BOS, EOS = 0, 1
INPUT_SCALE = 2.0**-5
"""Static scale of rounded inputs in tiny models: normed values up to 4 fit."""

_LLAMA: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
_GEMMA: Mapping[str, Any] = {
    **_LLAMA,
    "head_dim": 16,
    "sliding_window": 5,
    "query_pre_attn_scalar": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_EXPERTS: Mapping[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_TINY: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_LLAMA, "head_dim": 16, "tie_word_embeddings": True},
    "mistral": {**_LLAMA, "head_dim": 16, "sliding_window": 5},
    "qwen2": {**_LLAMA, "tie_word_embeddings": True},
    "qwen3": {**_LLAMA, "head_dim": 16},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {
        **_GEMMA,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "phi3": {
        **_LLAMA,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    },
    "smollm3": {**_LLAMA, "no_rope_layers": [1, 0, 1], "tie_word_embeddings": True},
    "mixtral": {**_LLAMA, "head_dim": 16, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_LLAMA, **_EXPERTS, "shared_expert_intermediate_size": 64, "mlp_only_layers": [1]},
    "qwen3_moe": {**_LLAMA, **_EXPERTS, "head_dim": 16, "decoder_sparse_step": 2, "norm_topk_prob": True},
    "gpt2": {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 6,
        "n_inner": 80,
        "n_positions": 128,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    },
}


def tiny_config(family: str, **changes: Any) -> Any:
    """A transformers config of a family: 3 layers, 6 heads over 2 K/V heads (gpt2: 6), widths 48 and 80, context 128.

    Widths into every linear are multiples of 16 and not powers of two, but for experts of qwen2_moe and qwen3_moe (32,
    the shared one 64). Mistral, mixtral, gemma2 and gemma3_text slide over 5. Of 4 experts (qwen 5) 2 are chosen, in
    all layers of mixtral, the first and last of qwen2_moe, the middle one of qwen3_moe.

    Args:
        family: A `model_type`; one that is not listed here gets the fields of llama.
        changes: Fields that differ.
    """
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**_TINY.get(family, _LLAMA), **changes})


def tiny_model(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """A float32 transformers model of `tiny_config` whose every weight, norms and biases too, is random."""
    import torch
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes)).eval()
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                weight.add_(noise, alpha=0.2)
            else:
                weight.copy_(noise / 48**0.5)
    return model


def stored_weights(model: Any) -> dict[str, Any]:
    """The tensors of a transformers model under the names that save_pretrained gives them.

    transformers 5 holds all experts of a layer in one tensor and stores each as its own.
    """
    from transformers.core_model_loading import revert_weight_conversion

    weights = dict(revert_weight_conversion(model, model.state_dict()))
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer of 300 tokens with <s> (0), </s> (1) and a chat template."""
    import pydoc_data.topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([pydoc_data.topics.topics["assert"]], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    return fast


def decoder_of(model: Any) -> Any:
    """Our `Decoder` with the weights of a transformers model."""
    import torch

    from strop.families import build_spec
    from strop.layers import Decoder

    weights = stored_weights(model)
    headers = {name: ("F32", tuple(tensor.shape)) for name, tensor in weights.items()}
    decoder = Decoder(build_spec(model.config.to_dict(), headers, str(model.dtype).removeprefix("torch.")))
    with torch.no_grad():
        for name, tensor in decoder.tensors().items():
            tensor.copy_(weights[name])
    return decoder.eval()


def random_decoder(spec: Any, seed: int = 0) -> Any:
    """A `Decoder` of any table with random weights, quantized where the table says so."""
    import torch

    from strop import numerics
    from strop.layers import Decoder, IntegerLinear, QuantLinear

    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(spec)
    with torch.no_grad():
        for name, tensor in decoder.tensors().items():
            if tensor.dtype.is_floating_point:
                noise = torch.randn(tensor.shape, generator=generator)
                is_norm = tensor.ndim == 1 and name.endswith(".weight")
                tensor.copy_(1 + 0.2 * noise if is_norm else noise / tensor.shape[-1] ** 0.5)
        for linear in spec.linears():
            module = decoder.linear(linear.name)
            if not isinstance(module, QuantLinear | IntegerLinear):
                continue
            q = linear.quantization
            weight = torch.randn(linear.out_features, linear.in_features, generator=generator)
            scale, zero = numerics.find_scales(weight / linear.in_features**0.5, q)
            codes = numerics.quantize(weight / linear.in_features**0.5, scale, zero, q.bits)
            module.scale.copy_(scale)
            if isinstance(module, IntegerLinear):
                module.codes.copy_(codes)
                if module.input_scale is not None:
                    module.input_scale.fill_(INPUT_SCALE)
            else:
                module.packed.copy_(numerics.pack(codes, q.bits))
                if module.zero is not None:
                    module.zero.copy_(numerics.pack(zero, q.bits, axis=0))
    return decoder.eval()


def tiny_folder(
    folder: Path, family: str = "llama", *, dtype: str = "float32", seed: int = 0, shard: str = "1GB", **changes: Any
) -> Path:
    """Save `tiny_model` with its tokenizer, generation config and a licence file, as a hub folder looks.

    Args:
        folder: Where; made if it is not there.
        family: As in `tiny_config`.
        dtype: Of the stored weights.
        seed: Of the random weights.
        shard: Largest file, such as `20KB`.
        changes: Config fields that differ.

    Returns:
        `folder`.
    """
    import torch

    model = tiny_model(family, seed=seed, **changes).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=shard)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "LICENSE").write_text("Use it as you like.\n")
    return folder


def slow_harrell_davis(values: list[float], p: float) -> float:
    """Σ W_i x_(i) with each W_i the beta density summed over ((i-1)/n, i/n) in 2,000 slices."""
    n = len(values)
    a, b = p * (n + 1), (1 - p) * (n + 1)
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    total = 0.0
    for i, x in enumerate(sorted(values)):
        slices = ((i + (k + 0.5) / 2000) / n for k in range(2000))
        weight = sum(math.exp((a - 1) * math.log(u) + (b - 1) * math.log(1 - u) - log_beta) for u in slices)
        total += weight / (2000 * n) * x
    return total


def slow_softmax(logits: Sequence[float]) -> list[float]:
    """exp(x) / Σ exp(x), one number after the other."""
    weights = [math.exp(x) for x in logits]
    return [w / math.fsum(weights) for w in weights]


def slow_kl(parent: Sequence[float], candidate: Sequence[float]) -> float:
    """Σ p log(p / q) of two rows of logits, nats."""
    pairs = zip(slow_softmax(parent), slow_softmax(candidate), strict=True)
    return math.fsum(p * math.log(p / q) for p, q in pairs)


def tiny_gguf(path: Path, model: Any, *, types: Mapping[str, str] | None = None, **metadata: Any) -> Path:
    """Save a transformers model as llama.cpp's converter does, with `tiny_tokenizer`.

    Tensor names come from gguf's own table, the layouts are written out anew here.

    Args:
        path: The file; made or overwritten.
        model: What `tiny_model` gives. Mistral is written as llama, as llama.cpp does.
        types: llama.cpp's tensor name -> storage type, where it is not F32.
        metadata: More keys of the architecture, dots written as `__`, or of tensors (arrays) with `tensor__` in front.

    Returns:
        `path`.
    """
    import gguf
    import numpy as np
    import torch

    config = model.config
    family = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    layers = config.num_hidden_layers
    table = gguf.get_tensor_name_map(arch, layers)
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_feed_forward_length(config.n_inner if family == "gpt2" else config.intermediate_size)
    if family == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        if (head_dim := getattr(config, "head_dim", None)) is not None:
            writer.add_key_length(head_dim)
    for key, value in metadata.items():
        if key.startswith("tensor__"):
            writer.add_tensor(key.removeprefix("tensor__").replace("__", "."), np.asarray(value, dtype=np.float32))
        else:
            add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
            add(key.replace("__", ".") if "general" in key else f"{family}.{key.replace('__', '.')}", value)
    _add_tokenizer(writer, config.vocab_size)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        base, _, suffix = name.rpartition(".")
        values = tensor.float()
        if family in ("llama", "smollm3") and ("q_proj" in base or "k_proj" in base):
            heads = config.num_attention_heads if "q_proj" in base else config.num_key_value_heads
            halves = [torch.stack(x.chunk(2), 1).flatten(0, 1) for x in values.chunk(heads)]
            values = torch.cat(halves)  # first and second half of a head, row by row in turn
        if family in ("gemma2", "gemma3") and base.endswith("norm"):
            values = values + 1
        if family == "gpt2" and ".c_" in base and values.ndim == 2:
            values = values.T
        stored = f"{table.get_name(base)}.{suffix}"
        array = values.contiguous().numpy()
        if types and stored in types:
            kind = gguf.GGMLQuantizationType[types[stored]]
            writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any, vocab_size: int) -> None:
    import json

    content = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    unused = [f"[PAD{i}]" for i in range(len(tokens), vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + unused)
    writer.add_token_types([3 if x in (BOS, EOS) else 1 for x in range(len(tokens))] + [5] * len(unused))
    writer.add_token_merges([" ".join(x) for x in content["merges"]])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_chat_template(tiny_tokenizer().chat_template)


def slow_gptq(
    weight: Any, hessian: Any, scale: Any, zero: Any, bits: int, order: Sequence[int], table: Sequence[float] = ()
) -> Any:
    """GPTQ as its paper tells it, in float64: column by column, the inverse of what is left computed anew each time.

    Args:
        weight: W (out, in).
        hessian: H (in, in), damped.
        scale: s (out, groups).
        zero: z (out, groups).
        bits: Width of a code.
        order: Columns as they are taken.
        table: Values by code, where codes are no integers in a row.

    Returns:
        Q (out, in), float64.
    """
    import torch

    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    w, h = weight.double().clone(), hessian.double()
    codes = torch.zeros_like(w)
    width = w.shape[1] // scale.shape[1]
    for position, column in enumerate(order):
        left = list(order[position:])
        inverse = torch.linalg.inv(h[left][:, left])
        for row in range(len(w)):
            s, z = float(scale[row, column // width]), int(zero[row, column // width])
            quotient = float(w[row, column]) / s
            code = slow_nearest(quotient, table) if table else min(max(round(quotient) + z, lowest), highest)
            codes[row, column] = code
            error = (w[row, column] - (code - z) * s) / inverse[0, 0]
            w[row, left] -= error * inverse[0]
    return codes


def slow_signed_step(
    start: Sequence[Any], bits: int, gradient: Any, offset: Any, multiplier: Any, rates: tuple[float, float]
) -> tuple[Any, Any]:
    """One step of AutoRound by autograd: rounding passed straight through, clamping not.

    Args:
        start: W (out, in), s₀ and z (out, groups).
        bits: Width of a code.
        gradient: By Ŵ (out, in).
        offset: V (out, groups, group size).
        multiplier: m (out, groups, 1).
        rates: How far V and m move.

    Returns:
        V and m after the step.
    """
    import torch

    from strop.numerics import round_scales

    weight, scale, zero = start
    v, m = offset.clone().requires_grad_(), multiplier.clone().requires_grad_()
    s, z = m * scale[..., None], zero[..., None].float()
    s = s + (round_scales(s) - s).detach()
    u = weight.reshape(v.shape) / s + z + v
    q = (u + (u.round() - u).detach()).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    ((q - z) * s * gradient.reshape(v.shape)).sum().backward()
    with torch.no_grad():
        return (v - rates[0] * v.grad.sign()).clamp(-0.5, 0.5), m - rates[1] * m.grad.sign()


def slow_fisher(decoder: Any, index: int, x: Any) -> Any:
    """Second derivative of KL by the hidden states after a layer, from the whole Jacobian, mean over tokens.

    Args:
        decoder: Float32.
        index: Of the layer.
        x: Its outputs (1, T, hidden).

    Returns:
        (hidden, hidden), each token scaled to hidden states of mean square 1.
    """
    import torch

    def logits(hidden: Any) -> Any:
        kept: dict[int, Any] = {}
        for later in range(index + 1, len(decoder.layers)):
            hidden = decoder.block(later, hidden, kept=kept)
        return decoder.logits(hidden)[0]

    p = logits(x).detach().softmax(-1)
    jacobian = torch.autograd.functional.jacobian(logits, x)[:, :, 0]  # (T, V, T, hidden)
    total = torch.zeros(x.shape[-1], x.shape[-1])
    for i in range(x.shape[1]):  # the token whose hidden states change
        for j in range(x.shape[1]):  # the token whose prediction does
            curvature = torch.diag(p[j]) - torch.outer(p[j], p[j])
            total += x[0, i].square().mean() * jacobian[j, :, i].T @ curvature @ jacobian[j, :, i]
    return total / x.shape[1]


def quantized(source: Path, out: Path, choices: Any, *, head: bool = True) -> Path:
    """A checkpoint folder rounded to nearest, manifest included.

    Args:
        source: The checkpoint.
        out: Where.
        choices: One quantization for every linear, or one by linear's name.
        head: One for every linear includes the head.
    """
    import torch

    from strop.model import Weights, load_linear, packed_tensors, read_spec, save_checkpoint
    from strop.numerics import find_scales, quantize

    spec = read_spec(source)
    if not isinstance(choices, Mapping):
        choices = {x.name: choices for x in spec.linears() if head or x is not spec.head}
    new = spec.quantize(choices)
    out.mkdir()
    with Weights(source) as weights:
        changed: dict[str, Any] = {}
        for old, linear in zip(spec.linears(), new.linears(), strict=True):
            if linear.quantization is not None:
                weight = load_linear(weights, old)
                scale, zero = find_scales(weight, linear.quantization)
                codes = quantize(weight, scale, zero, linear.quantization.bits, linear.quantization.format)
                changed.update(packed_tensors(linear, codes, scale, zero, torch.tensor(INPUT_SCALE)))
        save_checkpoint(out, new, source, changed.items())
    with_spec(out, new)
    return out


def with_spec(folder: Path, spec: Any) -> None:
    """Write the manifest of a checkpoint."""
    from strop.artifact import Manifest, write_manifest

    write_manifest(folder, Manifest("checkpoint", "0" * 64, spec.to_json()))


def random_ids(*shape: int, seed: int = 0) -> Any:
    """Token ids of a tiny model."""
    import numpy as np

    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, shape)


def kl(p: Any, q: Any) -> float:
    """Mean KL(p ‖ q) in nats over positions."""
    import numpy as np

    p64, q64 = (x.astype(np.float64) - np.logaddexp.reduce(x.astype(np.float64), -1, keepdims=True) for x in (p, q))
    return float((np.exp(p64) * (p64 - q64)).sum(-1).mean())


def walk_session(session: Any, seed: int) -> list[Any]:
    """Logits of prompts of 1, 5 and 17 tokens, and after each of steps of 1, 4, 9 and 1 tokens, rows ragged."""
    import numpy as np

    batch, found = len(session.lengths), []
    for prompt in (1, 5, 17):
        session.truncate([0] * batch)
        found.append(session.step(random_ids(batch, prompt, seed=seed), logits="all").copy())
        for width in (1, 4, 9, 1):
            counts = np.array([width, (width + 1) // 2, max(1, width - 1)][:batch])
            found.append(session.step(random_ids(batch, width, seed=seed + width), counts=counts).copy())
    return found


def assert_close(program: Any, reference: Any, *, atol: float = 2e-5, max_kl: float = 1e-6) -> None:
    """Both programs give the same logits for 1 and 3 rows, in the steps of `walk_session`."""
    import numpy as np

    for batch in (1, 3):
        found = (walk_session(x.open(batch, 64), 1) for x in (program, reference))
        for ours, theirs in zip(*found, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=atol)
            assert kl(theirs, ours) <= max_kl


def slow_e4m3() -> list[float]:
    """What each of the 256 codes of E4M3 stands for (Micikevicius et al. 2022, table 1): code -> value."""
    found = []
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        found.append(math.nan if code & 127 == 127 else math.copysign(size, -1.0 if code & 128 else 1.0))
    return found


def slow_e2m1() -> list[float]:
    """What each of the 16 codes of E2M1 stands for (OCP Microscaling v1.0, table 5): code -> value."""
    found = []
    for code in range(16):
        exponent, mantissa = code >> 1 & 3, code & 1
        size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        found.append(math.copysign(size, -1.0 if code & 8 else 1.0))
    return found


def slow_nearest(value: float, table: Sequence[float]) -> float:
    """The nearest value of a table by code; of two as near that of the even code; beyond the largest, the largest."""
    largest = max(x for x in table if not math.isnan(x))
    clipped = min(max(value, -largest), largest)
    codes = [code for code, x in enumerate(table) if not math.isnan(x)]
    return table[min(codes, key=lambda code: (abs(table[code] - clipped), code & 1))]
