"""What strop uses of TensorRT's Python interface, over onnxruntime and the memory of the CPU.

As strict as the library where strop could go wrong: shapes outside of a profile, inputs without a shape or an address,
caches that are not one buffer for input and output. An engine is the model's files, and says what it was built with.
"""

from __future__ import annotations

import ctypes
import io
import json
import tempfile
import zipfile
from collections.abc import Mapping
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

__version__ = "0.1.2"
ComputeCapability = Enum("ComputeCapability", [f"SM{x}" for x in (75, 80, 86, 89, 120, 121)])
LayerType = Enum("LayerType", ["ATTENTION_INPUT", "OTHER"])
BuilderFlag = Enum("BuilderFlag", ["TF32"])
NetworkDefinitionCreationFlag = IntEnum("NetworkDefinitionCreationFlag", {"STRONGLY_TYPED": 1})
OPERATORS: set[str] | None = None
"""What the parser knows; None: everything."""
KERNELS: tuple[str, ...] = ("attention",)
DTYPES: Mapping[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}
Shape = tuple[int, ...]


class ILogger:
    """Severities, of which only their order in the enum means something."""

    ERROR, INTERNAL_ERROR, WARNING = range(3)


class IAttentionInputLayer:
    """Of an attention, which may be decomposed or not."""

    def __init__(self) -> None:
        self.type = LayerType.ATTENTION_INPUT
        self.attention = self
        self.decomposable = False


class Network:
    """A model that a parser read."""

    def __init__(self, flags: int) -> None:
        self.flags, self.path, self.num_layers = flags, Path(), 0
        self.layers: list[IAttentionInputLayer] = []

    def get_layer(self, index: int) -> IAttentionInputLayer:
        return self.layers[index]


class OnnxParser:
    """Takes what onnxruntime takes."""

    def __init__(self, network: Network, logger: ILogger) -> None:
        self.network = network
        self.errors: list[str] = []

    @property
    def num_errors(self) -> int:
        return len(self.errors)

    def get_error(self, index: int) -> str:
        return self.errors[index]

    def parse_from_file(self, path: str) -> bool:
        import onnx

        model = onnx.load(path, load_external_data=False)
        assert self.network.flags == 1 << NetworkDefinitionCreationFlag.STRONGLY_TYPED
        if OPERATORS is not None:
            self.errors = [f"no importer\nfor {x.op_type}" for x in model.graph.node if x.op_type not in OPERATORS]
        self.network.path = Path(path)
        self.network.layers = [IAttentionInputLayer() for node in model.graph.node if node.op_type == "Attention"]
        self.network.num_layers = len(self.network.layers)
        return not self.errors


class Profile:
    """Ranges of shapes."""

    def __init__(self) -> None:
        self.ranges: dict[str, tuple[Shape, Shape, Shape]] = {}

    def set_shape(self, name: str, smallest: Shape, usual: Shape, largest: Shape) -> None:
        for low, middle, high in zip(smallest, usual, largest, strict=True):
            assert low <= middle <= high, name
        self.ranges[name] = smallest, usual, largest


class Config:
    """What a builder is told."""

    def __init__(self) -> None:
        self.profiles: list[Profile] = []
        self.capabilities: dict[int, str] = {}
        self.num_compute_capabilities = 0
        self.has_tf32 = True
        self.timings: Timings | None = None

    def clear_flag(self, flag: BuilderFlag) -> None:
        self.has_tf32 = flag != BuilderFlag.TF32

    def add_optimization_profile(self, profile: Profile) -> None:
        self.profiles.append(profile)

    def set_compute_capability(self, capability: Enum, index: int) -> None:
        self.capabilities[index] = capability.name

    def create_timing_cache(self, content: bytes) -> Timings:
        return Timings(content)

    def set_timing_cache(self, cache: Timings, ignores_mismatch: bool) -> bool:
        self.timings = None if cache.content == b"of another GPU" else cache
        return self.timings is not None

    def get_timing_cache(self) -> Timings:
        assert self.timings is not None
        return self.timings


class Timings:
    """Of kernels."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def serialize(self) -> bytes:
        return self.content + b"+"


class Builder:
    """Packs a model with what it was told."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def create_network(self, flags: int) -> Network:
        return Network(flags)

    def create_builder_config(self) -> Config:
        return Config()

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Network, config: Config) -> bytes | None:
        if not all(x.decomposable for x in network.layers) or not KERNELS:
            self.logger.log(ILogger.ERROR, "no kernel\nfor attention")
            return None
        told = {
            "profiles": [x.ranges for x in config.profiles],
            "capabilities": list(config.capabilities.values()),
            "tf32": config.has_tf32,
        }
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as file:
            for name in ("model.onnx", "model.onnx.data"):
                file.writestr(zipfile.ZipInfo(name), (network.path.parent / name).read_bytes())
            file.writestr(zipfile.ZipInfo("told.json"), json.dumps(told))
        return content.getvalue()


class Runtime:
    """Opens an engine."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def deserialize_cuda_engine(self, content: bytes) -> Engine | None:
        if not zipfile.is_zipfile(io.BytesIO(content)):
            self.logger.log(ILogger.ERROR, "magic tag\ndoes not match")
            return None
        return Engine(content)


class Engine:
    """A model in onnxruntime."""

    def __init__(self, content: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(io.BytesIO(content)) as file:
            file.extractall(folder)
            self.told = json.loads((Path(folder) / "told.json").read_text())
            options = onnxruntime.SessionOptions()
            options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
            self.session = onnxruntime.InferenceSession(str(Path(folder) / "model.onnx"), options)

    def create_execution_context(self) -> Context:
        return Context(self)


class Context:
    """Shapes and addresses of one run after another."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.ranges: dict[str, list[list[int]]] = {}
        self.shapes: dict[str, Shape] = {}
        self.addresses: dict[str, int] = {}
        self.runs: list[dict[str, Shape]] = []

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self.ranges = self.engine.told["profiles"][profile_index]
        return True

    def set_input_shape(self, name: str, shape: Shape) -> bool:
        smallest, _, largest = self.ranges[name]
        self.shapes[name] = shape
        return all(low <= x <= high for low, x, high in zip(smallest, shape, largest, strict=True))

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.addresses[name] = memory
        return name in self.ranges or name in {x.name for x in self.engine.session.get_outputs()}

    def execute_async_v3(self, stream_handle: int) -> bool:
        binding = self.engine.session.io_binding()
        for x in self.engine.session.get_inputs():
            binding.bind_input(x.name, "cpu", 0, DTYPES[x.type], self.shapes[x.name], self.addresses[x.name])
        for x in self.engine.session.get_outputs():
            if x.name == "logits":
                shape = (*self.shapes["logit_rows"], x.shape[2])
            elif self.addresses[x.name] != self.addresses[f"past_{x.name}"]:
                return False
            else:
                shape = self.shapes[f"past_{x.name}"]
            # Whatever was there before must not matter.
            if x.name == "logits":
                ctypes.memset(self.addresses[x.name], 255, 4 * int(np.prod(shape)))
            binding.bind_output(x.name, "cpu", 0, DTYPES[x.type], shape, self.addresses[x.name])
        self.engine.session.run_with_iobinding(binding)
        self.runs.append(dict(self.shapes))
        return True
