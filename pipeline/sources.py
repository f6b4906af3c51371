"""Where models come from: a folder, a .gguf file, a wheel on PyPI, the hub. What comes out is a folder of safetensors.

Only `pypi:` and hub ids use the network, and only for what is not there yet. Pickle files and code are never taken.
Leaves out the folder's own format (model.py) and GGUF's (gguf_file.py). Torch and transformers are imported where
values and tokenizers are converted, so `describe` and `source_key` do without.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from strop import gguf_file
from strop.artifact import MANIFEST, hash_file, hash_json, open_artifact
from strop.errors import UserError
from strop.families import build_spec
from strop.gguf_file import Gguf, read_gguf
from strop.model import (
    COMPANIONS,
    CONFIG,
    STORED_AS,
    TOKENIZERS,
    companions,
    make_spec,
    read_config,
    read_spec,
    save_checkpoint,
    stored_tensors,
    tensor_bytes,
    write_config,
)
from strop.safetensors_file import (
    INDEX,
    WEIGHTS,
    Piece,
    Stored,
    locate,
    read_json,
    weight_files,
    write_json,
    write_tensors,
)
from strop.spec import DType, ModelSpec
from strop.wheel import open_wheel

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""(label, done, total), called now and then."""
HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w./-]+))?")
HUB_FILES = ("model*.safetensors", "*.json", *COMPANIONS)
NUM_CONNECTIONS = 8
ALLOWED = "a folder, a .gguf file, pypi:name==version, or a hub id owner/name[@revision]"


@dataclass(frozen=True)
class Place:
    """A source that is on this machine.

    Attributes:
        name: What the user wrote.
        path: A folder or a .gguf file.
        identity: What its content follows from, JSON.
        licences: Licence files that lie elsewhere.
    """

    name: str
    path: Path
    identity: Mapping[str, Any] = field(default_factory=dict)
    licences: tuple[Path, ...] = ()


def no_progress(label: str, done: int, total: int) -> None:
    """A `Progress` that says nothing."""


def fetch(
    source: str, dtype: DType, out: Path, progress: Progress = no_progress, wheels: Path | None = None
) -> ModelSpec:
    """Bring a model into a checkpoint folder: safetensors, config, tokenizer, chat template, licence.

    GGUF weights are dequantized. An output matrix that equals the embedding is stored once, as tied.

    Args:
        source: Folder, .gguf file, `pypi:name==version` or hub id.
        dtype: Of the unquantized tensors in `out`.
        out: An empty folder.
        progress: Called with tensors done.
        wheels: Where packages are kept; None: a temporary folder.

    Returns:
        The table of what was written.

    Raises:
        UserError: No such source, a damaged one, one that strop does not know or takes, or no network for it.
    """
    with _located(source, wheels, is_checked=True) as place:
        spec, note = _describe(place, dtype)
        log.info("fetch %s", note)
        if place.path.is_dir():
            progress("fetch", 0, 1)
            save_checkpoint(out, spec, place.path, ())
            progress("fetch", 1, 1)
        else:
            _convert(read_gguf(place.path), spec, out, progress)
        for path in place.licences:
            shutil.copyfile(path, out / path.name)
    return spec


def describe(source: str, dtype: DType, wheels: Path | None = None) -> tuple[ModelSpec, str]:
    """What `fetch` would give, from headers alone; and a line on what the source is.

    A package that is not in `wheels` yet is downloaded, of a hub model only headers and small files.

    Raises:
        UserError: As `fetch`.
    """
    if (hub := _hub_id(source)) is not None:
        folder = _download(source, *hub, patterns=("*.json", *COMPANIONS))
        try:
            weight_files(folder)
        except UserError:
            return _describe_remote(source, folder, hub, dtype)
    with _located(source, wheels) as place:
        return _describe(place, dtype)


def source_key(source: str, dtype: DType, wheels: Path | None = None) -> str:
    """sha256 (64 hex digits) of what a fetched model follows from: content, not paths; and the dtype.

    Raises:
        UserError: As `fetch`.
    """
    if (hub := _hub_id(source)) is not None:
        commit = _download(source, *hub, patterns=(CONFIG,)).name
        return hash_json({"hub": hub[0], "commit": commit, "dtype": dtype})
    with _located(source, wheels) as place:
        identity = dict(place.identity) or _identity(place.path)
    return hash_json({**identity, "dtype": dtype})


def _identity(path: Path) -> dict[str, Any]:
    if path.is_file():
        return {"gguf": hash_file(path)}
    if (path / MANIFEST).is_file():
        return {"artifact": open_artifact(path).key}
    read_config(path)
    files = [path / CONFIG, *weight_files(path), *companions(path)]
    return {"files": {x.name: hash_file(x) for x in files}}


@contextlib.contextmanager
def _located(source: str, wheels: Path | None, *, is_checked: bool = False) -> Iterator[Place]:
    """A source on this machine, downloaded if need be; `is_checked`: a package's hash is compared again."""
    if source.startswith("pypi:"):
        with contextlib.ExitStack() as stack:
            folder = wheels or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="strop-wheels-")))
            wheel = open_wheel(source, folder, is_checked=is_checked)
            is_named = wheel.model.is_dir() or "general.license" in read_gguf(wheel.model).metadata
            identity = {"package": wheel.requirement, "wheel": wheel.sha256}
            yield Place(source, wheel.model, identity, wheel.licences if is_named else ())
    elif (hub := _hub_id(source)) is not None:
        yield Place(source, _download(source, *hub, patterns=HUB_FILES))
    else:
        path = Path(source).expanduser()
        if not source or not path.exists():
            raise UserError(f"model source {source!r}: no such file or folder; allowed: {ALLOWED}")
        if path.is_file() and path.suffix != ".gguf":
            raise UserError(f"model source {source!r}: not a .gguf file; allowed: {ALLOWED}")
        yield Place(source, path)


# What a source holds.


def _describe(place: Place, dtype: DType) -> tuple[ModelSpec, str]:
    if place.path.is_dir():
        return _describe_folder(place, dtype)
    gguf = read_gguf(place.path)
    if "tokenizer.ggml.tokens" not in gguf.counts:
        raise UserError(f"{place.path}: has no tokenizer")
    try:
        spec = build_spec(gguf_file.config(gguf), gguf_file.headers(gguf), dtype)
    except UserError as error:
        raise UserError(f"{place.name}: {error}") from error
    tied = "; its output matrix equals the embedding and is stored once" if gguf.is_retied else ""
    return spec, f"{place.name} (GGUF, {' and '.join(gguf.types())}, dequantized to {dtype}{tied})"


def _describe_folder(place: Place, dtype: DType) -> tuple[ModelSpec, str]:
    folder = place.path
    if not (folder / CONFIG).is_file() and (found := sorted(x.name for x in folder.glob("*.gguf"))):
        raise UserError(
            f"{folder}: not a model folder, {CONFIG} is missing; for its GGUF file write {folder / found[0]}"
        )
    spec = read_spec(folder, dtype)
    stored = locate(folder)
    _check_tokenizer(folder, spec)
    is_retied = not spec.is_tied and spec.head.quantization is None and _is_same(
        stored.get(f"{spec.head.name}.weight"), stored.get(f"{spec.embedding}.weight")
    )  # fmt: skip
    types = sorted({x.dtype for x in stored.values()})
    tied = "; its output matrix equals the embedding and is stored once" if is_retied else ""
    return dataclasses.replace(spec, is_tied=spec.is_tied or is_retied), (
        f"{place.name} (safetensors, {' and '.join(types)}{tied})"
    )


def _is_same(one: Stored | None, other: Stored | None) -> bool:
    """Whether two tensors hold the same bytes. Different ones end the comparison early."""
    if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    step = 2**22
    starts = range(0, one.size_bytes, step)
    return all(one.read(i, step) == other.read(i, step) for i in starts)


def _check_tokenizer(folder: Path, spec: ModelSpec) -> None:
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise UserError(f"{folder}: has no tokenizer; allowed: {', '.join(TOKENIZERS)}")
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    content = read_json(path)
    model = content.get("model") if isinstance(content, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict | list):
        raise UserError(f"{path}: damaged, it has no vocabulary")
    # Added tokens are not counted: some models (gemma3) name one past their embedding, which text never gives.
    last = max(vocabulary.values(), default=0) if isinstance(vocabulary, dict) else len(vocabulary) - 1
    if last >= spec.vocab_size:
        raise UserError(
            f"{path}: another model's tokenizer, its tokens go up to {last}, the model knows {spec.vocab_size}"
        )


# GGUF.


def _convert(gguf: Gguf, spec: ModelSpec, out: Path, progress: Progress) -> None:
    """Write a GGUF file's model as a folder."""
    names = gguf_file.tensor_names(gguf)
    done = iter(range(1, len(names) + 1))

    def read(hub: str, dtype: str) -> memoryview:
        import torch

        values = tensor_bytes(torch.from_numpy(gguf_file.load(gguf, names[hub])), dtype)
        progress("fetch", next(done), len(names))
        return values

    pieces = {
        hub: Piece(dtype, shape, partial(read, hub, dtype)) for hub, (dtype, shape) in stored_tensors(spec).items()
    }
    write_tensors(out, pieces)
    write_config(out, spec, gguf_file.config(gguf))
    write_json(out / "generation_config.json", _generation_config(gguf))
    _convert_tokenizer(gguf, out)
    named = [str(gguf.metadata[key]) for key in _LICENCE_KEYS if key in gguf.metadata]
    if named:
        (out / "LICENSE").write_text(
            f"The model's GGUF file names this licence: {', '.join(named)}\n", encoding="utf-8"
        )


_LICENCE_KEYS = ("general.license", "general.license.name", "general.license.link")


def _generation_config(gguf: Gguf) -> dict[str, Any]:
    """Special tokens, and as ends of text both the end of text and the end of a chat turn."""
    ids = {key: gguf.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "padding")}
    ends = [x for x in dict.fromkeys((ids["eos"], ids["eot"])) if x is not None]
    found = {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": ids["padding"],
    }
    return {key: value for key, value in found.items() if value is not None}


def _convert_tokenizer(gguf: Gguf, out: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    # Not AutoTokenizer: it first parses every key of the file with a much slower reader, to the same result. In a
    # folder of its own: tokenizer files that lie beside it would win over what is in it.
    with tempfile.TemporaryDirectory(prefix="strop-gguf-") as alone:
        (Path(alone) / gguf.path.name).symlink_to(gguf.path.absolute())
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(alone, gguf_file=gguf.path.name, local_files_only=True)
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise UserError(f"{gguf.path}: its tokenizer cannot be converted ({str(error).splitlines()[0]})") from error
    tokenizer.save_pretrained(out)


# The hub.


def _hub_id(source: str) -> tuple[str, str | None] | None:
    """(owner/name, revision) where a source can only be a hub id."""
    match = HUB_ID.fullmatch(source)
    if match is None or source.endswith(".gguf") or Path(source).exists():
        return None
    return match[1], match[2]


def _download(source: str, name: str, revision: str | None, *, patterns: tuple[str, ...]) -> Path:
    """The folder in the hub's cache, complete as far as `patterns` go. Without network, what was cached before."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from tqdm.auto import tqdm  # type: ignore[import-untyped]  # no types in the package

    class Bar(tqdm):  # type: ignore[misc]  # as above
        """Seen on a terminal only."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": None})

    wanted = list(patterns)
    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=wanted, ignore_patterns=["*/*"], tqdm_class=Bar
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise _unreachable(source, error) from error
    return Path(folder)


def _unreachable(source: str, error: Exception) -> UserError:
    why = next((x.strip() for x in str(error).splitlines() if x.strip()), type(error).__name__)
    return UserError(f"model source {source!r}: no such folder here, and the hub does not give it ({why})")


def _describe_remote(source: str, folder: Path, hub: tuple[str, str | None], dtype: DType) -> tuple[ModelSpec, str]:
    """As `_describe_folder` for a hub model whose weights are not here; whether it can be tied is not known yet."""
    from huggingface_hub import parse_safetensors_file_metadata
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError

    files = (
        [WEIGHTS] if not (folder / INDEX).is_file() else sorted(set(read_json(folder / INDEX)["weight_map"].values()))
    )
    try:
        with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
            parse = partial(parse_safetensors_file_metadata, hub[0], revision=hub[1])
            found = list(pool.map(parse, files))
    except (HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError, OSError) as error:
        raise _unreachable(source, error) from error
    tensors = {name: (info.dtype, tuple(info.shape)) for file in found for name, info in file.tensors.items()}
    try:
        spec = make_spec(read_config(folder), tensors, dtype)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    _check_tokenizer(folder, spec)
    types = sorted({kind for kind, _ in tensors.values()} & set(STORED_AS.values()))
    return spec, f"{source} (safetensors, {' and '.join(types)}, not downloaded yet)"
