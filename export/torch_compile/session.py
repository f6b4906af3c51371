"""Runs a package: compiled pieces, and between them torch's attention over the cache. Nothing is compiled here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.artifact import hash_file, read_manifest
from strop.errors import UserError
from strop.export.torch_compile import layout
from strop.export.torch_compile.pieces import Half, Head, dequantize
from strop.layers import CacheStep, cache_slots, rotary
from strop.machine import describe_machine
from strop.program import Cache, Forward, Logits, Program, Step, Traits
from strop.safetensors_file import locate, read_json
from strop.spec import ModelSpec


def load(path: Path, spec: ModelSpec, traits: Traits) -> CompiledProgram:
    """Open a program. Sets torch's threads for the whole process.

    Args:
        path: Folder of the package.
        spec: The table that it was compiled from.
        traits: As the export returned them; threads may differ.

    Raises:
        UserError: A file is missing or damaged, or it was compiled for another torch or processor.
    """
    _check_facts(path)
    torch.set_num_threads(traits.threads)
    return CompiledProgram(path, spec, traits)


def _check_facts(path: Path) -> None:
    package = path / layout.PACKAGE
    if not package.is_file():
        raise UserError(f"{path}: not a torch_compile program, {layout.PACKAGE} is missing")
    listed = read_manifest(path).files.get(layout.PACKAGE)
    if listed is not None and listed["sha256"] != hash_file(package):
        raise UserError(f"{package}: its content is not what the manifest lists, and it is code: not loaded")
    facts = read_json(path / layout.FACTS)
    if not isinstance(facts, dict) or facts.keys() != {"torch", "isa"}:
        raise UserError(f"{path / layout.FACTS}: damaged, it must say torch and isa")
    if facts["torch"] != torch.__version__:
        raise UserError(f"{package}: compiled for torch {facts['torch']}, here is {torch.__version__}: export it again")
    missing = sorted(set(facts["isa"]) - set(describe_machine()["isa"]))
    if missing:
        raise UserError(f"{package}: compiled for a processor with {', '.join(missing)}: export it again on this one")


@dataclass(frozen=True)
class _Piece:
    """A compiled function with the tensors of one layer."""

    loader: Any
    tensors: list[Tensor]

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        found: list[Tensor] = self.loader.boxed_run([*inputs, *self.tensors])
        return found


class CompiledProgram(Program):
    """A package in memory; weights are mapped from its files."""

    def __init__(self, path: Path, spec: ModelSpec, traits: Traits) -> None:
        from safetensors import safe_open

        self.spec, self.traits = spec, traits
        self.dtype: torch.dtype = getattr(torch, traits.dtype)
        self.tensors: dict[str, Tensor] = {}
        for file in sorted({x.file for x in locate(path).values()}):
            with safe_open(file, framework="pt") as opened:
                self.tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
        self.one, self.many = (self._pieces(str(path / layout.PACKAGE), suffix) for suffix in ("one", "many"))
        self.slots = cache_slots(spec)
        self.ropes = list(dict.fromkeys(x.rope for x in spec.layers if x.rope is not None))

    def allocate(self, batch: int, max_tokens: int) -> Cache:
        """See `Program.allocate`."""
        owners = [x for x in self.spec.layers if x.kv_from_layer is None]
        shapes = [(batch, x.num_kv_heads, max_tokens, x.head_dim) for x in owners for _ in ("keys", "values")]
        return [torch.zeros(shape, dtype=self.dtype) for shape in shapes]

    def bind(self, cache: Cache) -> Forward:
        """See `Program.bind`."""
        positions = torch.arange(cache[0].shape[2])[None]
        tables = [rotary(x, torch.tensor(x.inv_freq), positions, self.dtype) for x in self.ropes]

        @torch.inference_mode()
        def forward(step: Step) -> Logits:
            rows, width = step.ids.shape
            run = self.one if rows * width == 1 else self.many
            ids, places, lengths = (torch.tensor(y) for y in (step.ids, step.positions, step.lengths))
            mask = None if step.mask is None else torch.tensor(step.mask)
            context = CacheStep(cache, lengths, places, mask)
            turns = [[table[:, :, places.flatten()] for table in pair] for pair in tables]
            x = self._embed(ids, places).view(1, rows * width, -1)
            for index, layer in enumerate(self.spec.layers):
                turn = [] if layer.rope is None else turns[self.ropes.index(layer.rope)]
                q, *kv = (_by_row(y, rows) for y in run.before[index](x, *turn))
                k, v = kv or (None, None)
                heads = context.attend(layer, self.slots[index])(q, k, v)
                x = run.after[index](x, heads.transpose(1, 2).reshape(1, rows * width, -1))[0]
            x = x.view(rows, width, -1)
            if step.logit_rows.shape[1] < width:
                x = x.gather(1, torch.tensor(step.logit_rows)[:, :, None].expand(-1, -1, x.shape[2]))
            head = self.one.head if x.shape[0] * x.shape[1] == 1 else self.many.head
            logits: Logits = head(x.reshape(1, -1, x.shape[2]))[0].view(*x.shape[:2], -1).numpy()
            return logits

        return forward

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """(B, K, H)."""
        form = layout.packing(self.spec.head)
        head = self.spec.head.name
        table = self.tensors.get(f"{self.spec.embedding}.weight", self.tensors.get(f"{head}.weight"))
        if table is not None:
            x = F.embedding(ids, table)
        else:
            assert form is not None, "a tied head is dense or packed"
            parts = (self.tensors.get(f"{head}.{name}") for name in ("codes", "scales", "offsets"))
            codes, scales, offsets = (None if part is None else part[ids.flatten()] for part in parts)
            assert codes is not None
            assert scales is not None
            x = dequantize(form, codes, scales, offsets).to(self.dtype).view(*ids.shape, -1)
        if self.spec.embedding_scale != 1.0:
            x = x * torch.tensor(self.spec.embedding_scale, dtype=x.dtype)
        learned = self.tensors.get(f"{self.spec.position_embedding}.weight")
        return x if learned is None else x + F.embedding(positions, learned)

    def _pieces(self, package: str, suffix: str) -> _Pieces:
        """The functions of the package for one token or for more, each with its layer's tensors."""
        loaders: dict[str, Any] = {}

        def piece(name: str, names: list[str]) -> _Piece:
            if missing := [x for x in names if x not in self.tensors]:
                raise UserError(f"{Path(package).parent}: damaged, its weights lack {missing[0]}")
            if name not in loaders:
                loaders[name] = torch._C._aoti.AOTIModelPackageLoader(package, f"{name}.{suffix}", True, 1, -1)
            return _Piece(loaders[name], [self.tensors[x] for x in names])

        halves: dict[str, list[_Piece]] = {"before": [], "after": []}
        for layer, kind in zip(self.spec.layers, layout.kinds(self.spec), strict=True):
            for name, found in halves.items():
                parts = Half(layer, self.dtype, is_before=name == "before").tensors
                found.append(piece(f"{name}.{kind}", [layout.stored_name(layer, x) for x in parts]))
        places = {"norm": self.spec.final_norm.name, "head": self.spec.head.name}
        ends = (x.partition(".") for x in Head(self.spec, self.dtype).tensors)
        head = piece("head", [f"{places[module]}.{kind}" for module, _, kind in ends])
        return _Pieces(halves["before"], halves["after"], head)


@dataclass(frozen=True)
class _Pieces:
    """What runs a step: a list entry for each layer."""

    before: list[_Piece]
    after: list[_Piece]
    head: _Piece


def _by_row(x: Tensor, rows: int) -> Tensor:
    """(1, heads, B · K, D) -> (B, heads, K, D)."""
    if rows == 1:
        return x
    return x.view(x.shape[1], rows, -1, x.shape[3]).transpose(0, 1)
