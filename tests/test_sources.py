"""Folders and hub models come in whole, retied and in the asked dtype; what cannot come in is one line."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from references import VOCAB_SIZE, tiny_folder, tiny_gguf, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from strop.artifact import Manifest, write_manifest
from strop.errors import UserError
from strop.model import Weights, load_tokenizer, read_headers, read_spec, stored_tensors
from strop.safetensors_file import INDEX, WEIGHTS
from strop.sources import describe, fetch, source_key

COMMIT = "c0ffee" + "0" * 34


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_folder_comes_in_as_the_asked_dtype(shard: str, dtype: str, tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", "qwen3", dtype="bfloat16", shard=shard)
    (tmp_path / "out").mkdir()
    spec = fetch(str(source), dtype, tmp_path / "out")  # type: ignore[arg-type]  # parametrized
    assert spec == describe(str(source), dtype)[0] == read_spec(tmp_path / "out")  # type: ignore[arg-type]  # as above
    assert read_headers(tmp_path / "out") == stored_tensors(spec)
    with Weights(source) as before, Weights(tmp_path / "out") as after:
        for name in after.names():
            assert torch.equal(after.load(name), before.load(name).to(getattr(torch, dtype)))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == getattr(torch, dtype)
    assert load_tokenizer(tmp_path / "out").chat_template == tiny_tokenizer().chat_template


def test_a_head_equal_to_the_embedding_is_stored_once(tmp_path: Path) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    model.save_pretrained(tmp_path / "source")
    tiny_tokenizer().save_pretrained(tmp_path / "source")
    (tmp_path / "out").mkdir()
    spec = fetch(str(tmp_path / "source"), "float32", tmp_path / "out")
    assert spec.is_tied
    assert spec == describe(str(tmp_path / "source"), "float32")[0] == read_spec(tmp_path / "out")
    assert "lm_head.weight" not in read_headers(tmp_path / "out")
    assert "equals the embedding" in describe(str(tmp_path / "source"), "float32")[1]
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits, model(ids).logits)


def test_tensors_that_the_family_does_not_have_stay_out(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = tiny_folder(tmp_path / "source")
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file({**load_file(source / WEIGHTS), **buffer}, source / WEIGHTS)
    (tmp_path / "out").mkdir()
    spec = fetch(str(source), "float32", tmp_path / "out")
    assert read_headers(tmp_path / "out") == stored_tensors(spec)


def test_progress_ends_where_it_should(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    path = tiny_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    (tmp_path / "out").mkdir()
    fetch(str(path), "float32", tmp_path / "out", lambda *call: calls.append(call))
    assert [done for _, done, _ in calls] == list(range(1, calls[-1][2] + 1))


def remove(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink() for name in names]


def foreign_tokenizer(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {f"more{i}": i for i in range(len(content["model"]["vocab"]), VOCAB_SIZE + 1)}
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("config.json"), r"config\.json is missing"),
        (remove(WEIGHTS), "has no weights"),
        (lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"), "only pickle files"),
        (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-9]), "truncated"),
        (lambda f: (f / WEIGHTS).rename(f / "other.safetensors"), "has no weights"),
        (remove("tokenizer.json"), "has no tokenizer"),
        (foreign_tokenizer, f"another model's tokenizer, its tokens go up to {VOCAB_SIZE}"),
        (lambda f: (f / "tokenizer.json").write_text("[]"), "no vocabulary"),
        (
            lambda f: [(f / "model.gguf").touch(), (f / "config.json").unlink()],
            r"for its GGUF file write .*model\.gguf",
        ),
        (lambda f: (f / INDEX).write_text("{") and (f / WEIGHTS).unlink(), "not JSON"),
    ],
)
def test_bad_folders_give_one_line(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source")
    damage(source)
    with pytest.raises(UserError, match=message) as caught:
        describe(str(source), "float32")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["/not/there", "./not/there", "not-there", "x.gguf", "a/b.gguf", "", "https://x/y"])
def test_what_is_not_there_is_one_line(source: str) -> None:
    with pytest.raises(UserError, match=r"no such file or folder; allowed: a folder, a \.gguf file"):
        describe(source, "float32")


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(UserError, match=r"not a \.gguf file"):
        describe(str(tmp_path / "model.bin"), "float32")


def test_the_key_follows_from_content_not_from_the_place(tmp_path: Path) -> None:
    one, two = (str(tiny_folder(tmp_path / name)) for name in ("one", "two"))
    key = source_key(one, "float32")
    assert len(key) == 64
    assert source_key(two, "float32") == key
    assert source_key(one, "bfloat16") != key
    assert source_key(str(tiny_folder(tmp_path / "three", seed=1)), "float32") != key
    (tmp_path / "two" / "README.md").write_text("Not part of the model.")
    assert source_key(two, "float32") == key
    (tmp_path / "two" / "generation_config.json").write_text("{}")
    assert source_key(two, "float32") != key


def test_an_artifact_is_known_by_its_key(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "one")
    write_manifest(folder, Manifest("checkpoint", "1" * 64, read_spec(folder).to_json()))
    key = source_key(str(folder), "float32")
    write_manifest(folder, Manifest("checkpoint", "2" * 64, read_spec(folder).to_json()))
    assert source_key(str(folder), "float32") != key


def test_the_key_of_a_gguf_file_is_its_content(tmp_path: Path) -> None:
    one, two = (str(tiny_gguf(tmp_path / name, tiny_model("llama"))) for name in ("one.gguf", "two.gguf"))
    assert source_key(one, "float32") == source_key(two, "float32")


# The hub: a server that answers for one model, me/tiny.


def serve(folder: Path) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            place, name = self.path.split("?")[0], self.path.split("?")[0].rsplit("/", 1)[1]
            if place.startswith("/api/models/me/tiny/tree/"):
                files = [
                    {"type": "file", "path": x.name, "size": x.stat().st_size, "oid": "0"} for x in folder.iterdir()
                ]
                self.answer(json.dumps(files).encode())
            elif place.startswith("/api/models/me/tiny"):
                files = [{"rfilename": x.name} for x in folder.iterdir()]
                self.answer(json.dumps({"id": "me/tiny", "sha": COMMIT, "siblings": files}).encode())
            elif place.startswith("/me/tiny/resolve/") and (folder / name).is_file():
                self.answer((folder / name).read_bytes())
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound" if "/resolve/" in place else "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def answer(self, content: bytes) -> None:
            etag, total = hashlib.sha256(content).hexdigest()[:40], len(content)
            span = self.headers.get("Range")
            self.send_response(206 if span else 200)
            if span:
                first, last = span.removeprefix("bytes=").split("-")
                content = content[int(first) : int(last) + 1 if last else None]
                self.send_header("Content-Range", f"bytes {span}/{total}")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{etag}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[ThreadingHTTPServer, Callable[[str], str]]]:
    """A hub with one model, and what runs Python where that is the hub and nothing is cached yet."""
    folder = tiny_folder(tmp_path / "hub", shard="20KB")
    (folder / "evil.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    server = serve(folder)
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "cache"),
    }
    start = "import sys; from pathlib import Path; from strop.sources import *; from strop.errors import UserError\n"

    def run(code: str) -> str:
        done = subprocess.run([sys.executable, "-c", start + code], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout

    yield server, run
    server.shutdown()
    server.server_close()


def test_a_hub_model_comes_in_without_code_and_pickles(
    hub: tuple[ThreadingHTTPServer, Callable[[str], str]], tmp_path: Path
) -> None:
    server, run = hub
    describing = "print(describe('me/tiny', 'float32')[1]); assert 'torch' not in sys.modules"
    assert run(describing) == "me/tiny (safetensors, F32, not downloaded yet)\n"
    (tmp_path / "out").mkdir()
    run(f"fetch('me/tiny', 'bfloat16', Path({str(tmp_path / 'out')!r}))")
    assert read_spec(tmp_path / "out") == describe(str(tmp_path / "hub"), "bfloat16")[0]
    assert not [x for x in (tmp_path / "cache").rglob("*") if x.suffix in (".py", ".bin")]
    key = run("print(source_key('me/tiny', 'float32'))")
    server.shutdown()
    server.server_close()
    assert run(describing) == "me/tiny (safetensors, F32)\n"
    assert run("print(source_key('me/tiny', 'float32'))") == key


def test_a_hub_out_of_reach_is_one_line(hub: tuple[ThreadingHTTPServer, Callable[[str], str]]) -> None:
    server, run = hub
    code = (
        "for call in (describe, source_key):\n"
        "    try: call('me/none', 'float32')\n"
        "    except UserError as error: print(str(error))"
    )
    assert run(code).count("the hub does not give it (404") == 2
    server.shutdown()
    server.server_close()
    lines = run(code).splitlines()
    assert len(lines) == 2
    assert all("the hub does not give it" in line for line in lines)
