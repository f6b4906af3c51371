"""Conformance: a finished artifact is what its recipe and its table say, judged by what a fresh reader finds on disk.

"Looks saved, is wrong" is the largest class of faults of compression tools: ties materialized, layers left out, packed
tensors constant, a template forgotten. Each is looked for here. Leaves out quality (evals) and verdicts (gate.py).
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from strop.artifact import (
    MANIFEST,
    Artifact,
    Manifest,
    hash_file,
    list_files,
    open_artifact,
    read_manifest,
    write_manifest,
)
from strop.errors import ConformanceError, UserError
from strop.export.eager import DecoderProgram, Eager
from strop.model import (
    FLOATS,
    Weights,
    companions,
    load_linear,
    load_packed,
    make_spec,
    read_config,
    read_headers,
    stored_tensors,
)
from strop.program import Ints, Logits, Traits, lacks, write_exact, write_reference
from strop.safetensors_file import ITEM_BYTES
from strop.spec import Linear, ModelSpec
from strop.stage import Context
from strop.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor, nn

NUM_TOKENS = 32
"""Length of the row of token ids whose logits are compared."""


@dataclass(frozen=True)
class Difference:
    """How far logits are, or may be, from those of the checkpoint in eager.

    Attributes:
        largest: Of |difference|, relative to the root mean square of the reference's logits.
        kl_mean: Of the divergence in nats, averaged over positions.
    """

    largest: float
    kl_mean: float


FLOAT32 = Difference(1e-3, 1e-6)
"""Equal arithmetic in another order."""
ROUNDED = Difference(0.6, 0.5)
"""16-bit floats, or activations rounded to int8: noise in every layer. On SmolLM2-135M in 4 bits, int8 activations give
0.18 and 0.02 on these random tokens, scales of one layer shifted by a group 1.06 and 1.98."""
NOISE = 2.0
"""How many times what rounding inputs alone does is allowed beyond that: a model that 2 bits broke multiplies it (on
SmolLM2-135M 2.0 and 0.6, and int8 activations give 2.5 and 0.7). Such a bound finds only coarse faults of a kernel;
that the graph is right is decided before, without rounding and by `FLOAT32`."""


@dataclass(frozen=True)
class Finding:
    """One thing that was checked and holds.

    Attributes:
        is_measured: False: it could not be checked here, `detail` says why.
    """

    name: str
    detail: str
    is_measured: bool = True


def check_checkpoint(artifact: Artifact, source: Artifact) -> None:
    """Refuse a checkpoint that is not what its table says, or that lost what belongs to its source.

    Args:
        artifact: What a stage made.
        source: What it was made from.

    Raises:
        ConformanceError: Names the tensor or the file, what was expected and what is there.
    """
    spec = _spec(artifact)
    _check_stored(artifact.path, spec)
    _check_config(artifact.path, spec)
    _check_values(artifact.path, spec, source.path)
    _check_companions(artifact.path, source.path)


def check_program(program: Artifact, checkpoint: Artifact) -> float:
    """Refuse a program that does not compute, in a fresh process, what its checkpoint computes in eager.

    One that rounds activations is compared twice: its twin that does not round by a narrow bound, itself by a wide one.
    That holds where the checkpoint itself asks for rounding, too: a difference in a sum's last bit moves an input to
    the next integer, and what follows differs as if it was rounded anew. One that rounds weights is compared with the
    checkpoint whose weights are rounded too.

    Args:
        program: What an export made.
        checkpoint: What it was made from.

    Returns:
        The largest difference of a logit, relative to their root mean square.

    Raises:
        ConformanceError: It cannot be loaded, a logit is not finite, or they differ by more than the runtime's
            arithmetic explains.
    """
    traits = _traits(program)
    _check_companions(program.path, checkpoint.path)
    ids = probe(traits)
    with tempfile.TemporaryDirectory() as scratch:
        reference = write_reference(program, checkpoint, Path(scratch))
        spec = _spec(reference)
        eager = Eager.load(reference.path, dataclasses.replace(traits, runtime="eager", device="cpu"))
        expected = eager.open(1, ids.size).step(ids[None], logits="all")[0]
    if not np.isfinite(expected).all():
        raise ConformanceError(f"{program.path}: its checkpoint's logits are not finite in eager")
    with tempfile.TemporaryDirectory() as scratch:
        twin = write_exact(program, Path(scratch))
        if twin is not None:
            plain = _plain_logits(eager, ids) if isinstance(eager, DecoderProgram) else expected
            exact = _difference(_fresh_logits(twin, _traits(twin), ids), plain)
            _check_difference(program, "without rounding its activations, its logits", exact, _tolerance(traits, spec))
    difference = _difference(_fresh_logits(program, traits, ids), expected)
    allowed = _tolerance(traits, spec) if twin is None else ROUNDED
    if twin is not None and not _is_within(difference, allowed) and isinstance(eager, DecoderProgram):
        allowed = _amplified(_difference(_rounded_logits(eager, ids), plain))
    _check_difference(program, "its logits", difference, allowed)
    return difference.largest


def check_files(folder: Path) -> list[Finding]:
    """Check that an artifact's files and manifest are as they were written.

    Args:
        folder: Of any artifact.

    Returns:
        What was checked and holds.

    Raises:
        UserError: Not an artifact.
        ConformanceError: A file is missing, changed or foreign, or the manifest is damaged.
    """
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{folder}: not a strop artifact, {MANIFEST} is missing")
    try:
        manifest = read_manifest(folder)
    except UserError as error:
        raise ConformanceError(str(error)) from error
    return [_check_hashes(folder, manifest), _check_lineage(manifest)]


def verify(folder: Path) -> list[Finding]:
    """Check everything that can be checked of an artifact from its folder, and from the one it was made from where
    that lies beside it, as it does in a store.

    Args:
        folder: Of any artifact.

    Returns:
        What was checked and holds.

    Raises:
        UserError: Not an artifact.
        ConformanceError: Something is off.
    """
    findings = check_files(folder)
    artifact, manifest = open_artifact(folder), read_manifest(folder)
    source = _neighbour(artifact, manifest)
    if manifest.format == "checkpoint":
        findings += _verify_checkpoint(artifact, source)
    elif manifest.format == "program":
        findings.append(_verify_program(artifact, source))
    return findings


def probe(traits: Traits) -> Ints:
    """Token ids to compare logits on: always the same for a vocabulary, spread over all of it."""
    length = min(NUM_TOKENS, traits.context)
    ids: Ints = np.random.default_rng(0).integers(0, traits.vocab_size, length, dtype=np.int64)
    return ids


# What is on disk.


def _check_hashes(folder: Path, manifest: Manifest) -> Finding:
    found = {str(path.relative_to(folder)): path for path in list_files(folder)}
    for name, entry in manifest.files.items():
        if name not in found:
            raise ConformanceError(f"{folder}: {name} is missing")
        size = found[name].stat().st_size
        if size != entry["size_bytes"]:
            raise ConformanceError(f"{found[name]}: has {size} bytes, {MANIFEST} says {entry['size_bytes']}")
        if hash_file(found[name]) != entry["sha256"]:
            raise ConformanceError(f"{found[name]}: its content is not the one that {MANIFEST} lists")
    for name in sorted(found.keys() - manifest.files.keys()):
        raise ConformanceError(f"{folder}: {name} does not belong to the artifact")
    total = sum(entry["size_bytes"] for entry in manifest.files.values())
    return Finding("hashes", f"{len(manifest.files)} files of {total / 1e6:.1f} MB are as they were written")


def _check_lineage(manifest: Manifest) -> Finding:
    keys = [entry["key"] for entry in manifest.lineage]
    if not keys or keys[-1] != manifest.key:
        raise ConformanceError(f"{MANIFEST}: its lineage ends in {keys[-1:]}, not in its own key {manifest.key}")
    return Finding("lineage", " > ".join(entry["name"] for entry in manifest.lineage))


def _check_stored(folder: Path, spec: ModelSpec) -> None:
    """The very tensors that the table describes: quantized where planned, ties kept, bytes as computed."""
    try:
        headers = read_headers(folder)
    except UserError as error:
        raise ConformanceError(str(error)) from error
    if spec.opaque_bytes is None:
        expected = stored_tensors(spec)
        for name in sorted(expected.keys() | headers.keys()):
            if name not in headers:
                raise ConformanceError(f"{folder}: tensor {name} is missing: planned is {_shown(expected[name])}")
            if name not in expected:
                raise ConformanceError(f"{folder}: tensor {name} is stored, but not planned")
            if headers[name] != expected[name]:
                raise ConformanceError(
                    f"{folder}: tensor {name} is {_shown(headers[name])}, planned is {_shown(expected[name])}"
                )
    total = sum(math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in headers.values())
    if total != spec.size_bytes():
        raise ConformanceError(f"{folder}: its tensors take {total} bytes, computed are {spec.size_bytes()}")


def _shown(stored: tuple[str, tuple[int, ...]]) -> str:
    return f"{stored[0]} {list(stored[1])}"


def _check_config(folder: Path, spec: ModelSpec) -> None:
    """What other libraries read of config.json is what the table says."""
    if spec.opaque_bytes is not None:
        return
    try:
        config = read_config(folder)
        told = make_spec(config, read_headers(folder), spec.dtype)
    except UserError as error:
        raise ConformanceError(f"{folder}: {error}") from error
    if told.is_tied != (spec.is_tied and spec.head.quantization is None):
        raise ConformanceError(f"{folder}: config.json has tie_word_embeddings {str(told.is_tied).lower()}")
    if told.kv_cache != spec.kv_cache:
        raise ConformanceError(f"{folder}: config.json says {told.kv_cache} of the cache, planned is {spec.kv_cache}")
    plans = {x.name: x.quantization for x in spec.linears()}
    for linear in told.linears():
        plan = plans.get(linear.name)
        if plan != linear.quantization:
            raise ConformanceError(
                f"{folder}: config.json says {linear.quantization} of {linear.name}, planned is {plan}"
            )


def _check_values(folder: Path, spec: ModelSpec, source: Path | None) -> None:
    """Nothing that is not finite, no packed tensor of one value, unless the weight it was made from has only one."""
    with Weights(folder) as weights:
        for name, (dtype, _) in read_headers(folder).items():
            if dtype in FLOATS and not bool(weights.load(name).isfinite().all()):
                raise ConformanceError(f"{folder}: {name} holds values that are not finite")
        for name in spec.cache_scales():
            if not bool((weights.load(name) > 0).all()):
                raise ConformanceError(f"{folder}: {name} is not positive")
        for linear in spec.linears():
            if linear.quantization is None:
                continue
            codes, scale, _ = load_packed(weights, linear)
            if not bool(scale.isfinite().all() and codes.float().isfinite().all()):
                raise ConformanceError(f"{folder}: {linear.name} holds values that are not finite")
            if not bool(scale.all()):
                raise ConformanceError(f"{folder}: {linear.name} has scales of zero")
            if linear.quantization.is_packed:
                shape = weights.load(f"{linear.name}.weight_shape").tolist()
                if shape != [linear.out_features, linear.in_features]:
                    raise ConformanceError(f"{folder}: {linear.name}.weight_shape is {shape}")
            is_static = linear.quantization.activations == "static"
            if is_static and not bool(weights.load(f"{linear.name}.input_scale") > 0):
                raise ConformanceError(f"{folder}: {linear.name}.input_scale is not positive")
            if _is_constant(codes) and not (source is not None and _has_constant(source, linear)):
                raise ConformanceError(f"{folder}: every code of {linear.name} is {float(codes.flatten()[0]):g}")


def _is_constant(values: Tensor) -> bool:
    return bool((values.float() == values.flatten()[0].float()).all())


def _has_constant(folder: Path, linear: Linear) -> bool:
    """Whether the weight of that name is constant in another checkpoint."""
    before = next((x for x in _spec(open_artifact(folder)).linears() if x.name == linear.name), None)
    if before is None:
        return False
    with Weights(folder) as weights:
        return _is_constant(load_linear(weights, before))


def _check_companions(folder: Path, source: Path) -> None:
    """Tokenizer, chat template, generation config and licence, byte for byte."""
    for path in companions(source):
        copy = folder / path.name
        if not copy.is_file():
            raise ConformanceError(f"{folder}: {path.name} was lost, the source has it")
        if hash_file(copy) != hash_file(path):
            raise ConformanceError(f"{folder}: {path.name} is not the source's")


# What it computes.


def _fresh_logits(program: Artifact, traits: Traits, ids: Ints) -> Logits:
    try:
        with Worker(program.path, traits.threads) as worker:
            found = worker.logits(ids.tolist())
    except (UserError, RuntimeError) as error:  # WorkerDied is a RuntimeError
        raise ConformanceError(f"{program.path}: does not run in a fresh process: {error}") from error
    if found.shape != (ids.size, traits.vocab_size):
        raise ConformanceError(
            f"{program.path}: logits are {list(found.shape)}, its traits say {[ids.size, traits.vocab_size]}"
        )
    if not np.isfinite(found).all():
        raise ConformanceError(f"{program.path}: {np.count_nonzero(~np.isfinite(found))} logits are not finite")
    return found


def _tolerance(traits: Traits, spec: ModelSpec) -> Difference:
    """Of a program that rounds no more than its dtype does."""
    return FLOAT32 if traits.dtype == spec.dtype == "float32" else ROUNDED


def _check_difference(program: Artifact, what: str, found: Difference, allowed: Difference) -> None:
    if not _is_within(found, allowed):
        raise ConformanceError(
            f"{program.path}: {what} are not those of its checkpoint: largest difference {found.largest:.2g}, "
            f"allowed {allowed.largest:.2g}; mean KL {found.kl_mean:.2g}, allowed {allowed.kl_mean:.2g}"
        )


def _difference(found: Logits, expected: Logits) -> Difference:
    """Between two programs' finite logits (tokens, vocab)."""
    ours, theirs = found.astype(np.float64), expected.astype(np.float64)
    largest = float(np.abs(ours - theirs).max() / np.sqrt(np.mean(theirs**2)))
    log_q, log_p = (x - x.max(-1, keepdims=True) for x in (ours, theirs))
    log_q, log_p = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (log_q, log_p))
    return Difference(largest, float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean()))


def _is_within(found: Difference, allowed: Difference) -> bool:
    return found.largest <= allowed.largest and found.kl_mean <= allowed.kl_mean


def _plain_logits(program: DecoderProgram, ids: Ints) -> Logits:
    """What a checkpoint computes in eager when inputs of linears, keys and values stay as they are."""
    from strop.layers import round_cache, round_inputs

    round_inputs(program.decoder, rounds=False)
    round_cache(program.decoder, rounds=False)
    logits: Logits = program.open(1, ids.size).step(ids[None], logits="all")[0]
    round_inputs(program.decoder, rounds=True)
    round_cache(program.decoder, rounds=True)
    return logits


def _rounded_logits(program: DecoderProgram, ids: Ints) -> Logits:
    """What a checkpoint computes in eager when quantized linears take inputs rounded to int8. Changes `program`."""

    for linear in program.decoder.spec.linears():
        if linear.quantization is not None and linear.quantization.activations is None:
            width = linear.quantization.group_size or linear.in_features
            program.decoder.linear(linear.name).register_forward_pre_hook(partial(_round_inputs, width))
    logits: Logits = program.open(1, ids.size).step(ids[None], logits="all")[0]
    return logits


def _round_inputs(width: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # noqa: ARG001
    """A forward pre-hook: the input (..., in) in blocks of `width`, each on a symmetric int8 grid of its own."""
    blocks = inputs[0].reshape(*inputs[0].shape[:-1], -1, width)
    step = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-12)
    return ((blocks / step).round().mul(step).reshape(inputs[0].shape),)


def _amplified(noise: Difference) -> Difference:
    """What to allow a model in which rounding inputs alone makes this difference."""
    return Difference(max(ROUNDED.largest, NOISE * noise.largest), max(ROUNDED.kl_mean, NOISE * noise.kl_mean))


def _verify_checkpoint(artifact: Artifact, source: Artifact | None) -> Iterator[Finding]:
    spec = _spec(artifact)
    _check_stored(artifact.path, spec)
    _check_config(artifact.path, spec)
    _check_values(artifact.path, spec, None if source is None else source.path)
    num_quantized = sum(x.quantization is not None for x in spec.linears())
    size = spec.size_bytes() / 1e6
    yield Finding("tensors", f"{num_quantized} quantized linears as planned, {size:.1f} MB as computed, all finite")
    if source is not None:
        _check_companions(artifact.path, source.path)
        yield Finding("companions", f"{len(companions(source.path))} files as in the source")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "program"
        out.mkdir()
        made = Eager().run(artifact, out, Context(Path(scratch)))
        write_manifest(out, Manifest("program", artifact.key, spec.to_json(), dataclasses.asdict(made["traits"])))
        largest = check_program(Artifact(out, "program", artifact.key), artifact)
    yield Finding("reload", f"runs in a fresh process, logits within {largest:.1e} of this one's")


def _verify_program(artifact: Artifact, source: Artifact | None) -> Finding:
    traits = _traits(artifact)
    if (lack := lacks(artifact)) is not None:
        if source is not None:
            _check_companions(artifact.path, source.path)
        return Finding("reload", f"NOT MEASURED: {lack}", is_measured=False)
    if source is not None:
        largest = check_program(artifact, source)
        return Finding("reload", f"runs in a fresh process, logits within {largest:.1e} of its checkpoint in eager")
    _fresh_logits(artifact, traits, probe(traits))
    return Finding("reload", "runs in a fresh process, logits finite; its checkpoint is not beside it to compare with")


def _neighbour(artifact: Artifact, manifest: Manifest) -> Artifact | None:
    """The artifact that this one was made from, where it lies beside it."""
    if len(manifest.lineage) < 2:
        return None
    key = manifest.lineage[-2]["key"]
    folder = artifact.path.absolute().parent / key
    return open_artifact(folder) if (folder / MANIFEST).is_file() else None


def _spec(artifact: Artifact) -> ModelSpec:
    manifest = read_manifest(artifact.path)
    try:
        if manifest.spec is not None:
            return ModelSpec.from_json(manifest.spec)
    except (KeyError, TypeError) as error:
        raise ConformanceError(f"{artifact.path}: the table in {MANIFEST} cannot be read ({error})") from error
    raise ConformanceError(f"{artifact.path}: {MANIFEST} holds no table of the model")


def _traits(artifact: Artifact) -> Traits:
    manifest = read_manifest(artifact.path)
    try:
        if manifest.traits is not None:
            return Traits(**manifest.traits)
    except TypeError as error:
        raise ConformanceError(f"{artifact.path}: the traits in {MANIFEST} cannot be read ({error})") from error
    raise ConformanceError(f"{artifact.path}: {MANIFEST} holds no traits: not a program")
