"""Builds an engine from the graph of standard operators, and opens one. Leaves out which library, and running it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from strop.artifact import write_atomically
from strop.errors import UserError
from strop.export._onnx import layout
from strop.export._tensorrt.facts import PROFILES, Facts
from strop.spec import ModelSpec

log = logging.getLogger(__name__)

TIMING_CACHE = "{library}-{version}-{capability}.timing"
Shape = tuple[int, ...]


def shapes(spec: ModelSpec, facts: Facts, profile: int) -> dict[str, tuple[Shape, Shape, Shape]]:
    """Smallest, usual and largest shape of every input under a profile.

    Args:
        spec: The table of the model.
        facts: What the engine is for.
        profile: Index in `PROFILES`.
    """
    most = facts.most_tokens(profile)
    usual = most if PROFILES[profile] == "prefill" else 1
    seen = min(facts.context, max(usual, facts.context // 4))
    # Rows, new tokens of each, places of the cache that are looked at, rows of logits.
    sizes = ((1, 1, 1, 1), (1, usual, seen, 1), (facts.max_batch, most, facts.context, most))
    found: dict[str, tuple[Shape, Shape, Shape]] = {}

    def put(name: str, *shape: Shape) -> None:
        found[name] = shape[0], shape[1], shape[2]

    put("ids", *((b, k) for b, k, _, _ in sizes))
    put("positions", *((b, k) for b, k, _, _ in sizes))
    put("lengths", *((b,) for b, _, _, _ in sizes))
    put("logit_rows", *((b, n) for b, _, _, n in sizes))
    for window in layout.windows(spec):
        put(layout.mask_name(window), *((b, 1, k, t) for b, k, t, _ in sizes))
    for i, layer in enumerate(spec.layers):
        if layer.kv_from_layer is None:
            for part in ("keys", "values"):
                shape = (layer.num_kv_heads, facts.context, layer.head_dim)
                put(f"past_{part}_{i}", *((b, *shape) for b, _, _, _ in sizes))
    return found


def build(library: Any, spec: ModelSpec, model: Path, facts: Facts, cache: Path | None) -> bytes:
    """Build an engine with a profile for prompts and one for decoding.

    Args:
        library: `tensorrt` or `tensorrt_rtx`.
        spec: The table of the model.
        model: Its graph of standard operators, with keys and values of fixed length.
        facts: What the engine is for.
        cache: Folder where timings of kernels are kept, which only `tensorrt` takes; None: nowhere.

    Returns:
        The engine, serialized.

    Raises:
        UserError: The parser or the builder refuses the network: its own words, in one line.
    """
    logger = _logger(library)
    builder = library.Builder(logger)
    network = builder.create_network(_strongly_typed(library))
    parser = library.OnnxParser(network, logger)
    if not parser.parse_from_file(str(model)):
        reasons = _first([str(parser.get_error(i)) for i in range(parser.num_errors)])
        raise UserError(f"{facts.library} {facts.version} cannot parse the network: {reasons}")
    _allow_decomposition(library, network)
    config = builder.create_builder_config()
    config.clear_flag(library.BuilderFlag.TF32)  # float32 means float32
    for profile in range(len(PROFILES)):
        ranges = builder.create_optimization_profile()
        for name, (smallest, usual, largest) in shapes(spec, facts, profile).items():
            ranges.set_shape(name, smallest, usual, largest)
        config.add_optimization_profile(ranges)
    if facts.library == "tensorrt_rtx":  # tensorrt builds for the GPU that it times kernels on
        config.num_compute_capabilities = len(facts.compute_capabilities)
        for index, capability in enumerate(facts.compute_capabilities):
            name = f"SM{capability.replace('.', '')}"
            config.set_compute_capability(getattr(library.ComputeCapability, name), index)
    timings = _timings(config, facts, cache)
    log.info("%s %s builds an engine of %d layers", facts.library, facts.version, network.num_layers)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise UserError(f"{facts.library} {facts.version} cannot build the engine: {logger.reasons()}")
    if timings is not None:
        timings.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(timings, bytes(config.get_timing_cache().serialize()))
    return bytes(engine)


def deserialize(library: Any, path: Path) -> Any:
    """The engine of a file that `facts.check` let pass.

    Raises:
        UserError: The library refuses it.
    """
    logger = _logger(library)
    engine = library.Runtime(logger).deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise UserError(f"{path}: {library.__name__} {library.__version__} cannot load it: {logger.reasons()}")
    return engine


def _strongly_typed(library: Any) -> int:
    """Flags of a network whose types are those of the graph. From TensorRT 11 on there is no other kind."""
    flag = getattr(library.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _allow_decomposition(library: Any, network: Any) -> None:
    """Let attention fall back to several kernels where no fused one has its widths and type: float32 has none."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == library.LayerType.ATTENTION_INPUT:
            layer.__class__ = library.IAttentionInputLayer  # the binding gives the base class
            layer.attention.decomposable = True


def _timings(config: Any, facts: Facts, cache: Path | None) -> Path | None:
    """Give the builder what it measured of kernels before; where what it measures now is to be kept, or None.

    tensorrt_rtx times nothing when it builds: a cache would only make it look for a GPU.
    """
    if cache is None or facts.library != "tensorrt":
        return None
    name = TIMING_CACHE.format(
        library=facts.library, version=facts.version, capability="+".join(facts.compute_capabilities)
    )
    known = (cache / name).read_bytes() if (cache / name).is_file() else b""
    # Timings of another GPU are not taken, whatever the file's name says.
    if not config.set_timing_cache(config.create_timing_cache(known), False):
        config.set_timing_cache(config.create_timing_cache(b""), False)
    return cache / name


def _logger(library: Any) -> Any:
    """What the library logs to: errors are kept, the rest is for `--verbose`."""

    class Log(library.ILogger):  # type: ignore[misc]  # the library has no types
        """Attributes: errors, in the order they came."""

        def __init__(self) -> None:
            library.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            """Called by the library, from any thread."""
            if severity in (library.ILogger.ERROR, library.ILogger.INTERNAL_ERROR):
                self.errors.append(message)
            log.debug("%s: %s", library.__name__, message)

        def reasons(self) -> str:
            """The errors in one line."""
            return _first(self.errors)

    return Log()


def _first(messages: list[str]) -> str:
    """The first of them in one line, and how many there are."""
    if not messages:
        return "it does not say why"
    more = f", and {len(messages) - 1} more" if len(messages) > 1 else ""
    return " ".join(messages[0].split()) + more
