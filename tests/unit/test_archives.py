"""Pinned archives: download, cache, checksums, members."""

import gzip
import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from draftpool.data.archives import cache_dir, fetch_archive, list_members, read_member
from draftpool.errors import DraftpoolError


def make_zip(path: Path, members: dict[str, bytes]) -> Path:
    """Write a zip archive; member names are taken as they are."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


class FakePip:
    """Stands in for ``subprocess.run``: puts one file into --dest, or fails."""

    def __init__(self, filename: str, content: bytes, error: str = ""):
        self.filename, self.content, self.error, self.commands = filename, content, error, []

    def __call__(self, command, **_):
        self.commands.append(command)
        if self.error:
            return subprocess.CompletedProcess(command, 1, "", self.error)
        (Path(command[command.index("--dest") + 1]) / self.filename).write_bytes(self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def wheel(tmp_path):
    """Return the bytes of a small wheel and the spec that pins them."""
    content = make_zip(tmp_path / "made.zip", {"toy/data.jsonl": b'{"a": 1}\n'}).read_bytes()
    spec = {
        "package": "toy-data",
        "version": "1.0",
        "filename": "toy_data-1.0-py3-none-any.whl",
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    return content, spec


def use_pip(monkeypatch, spec, content=b"", error=""):
    """Replace pip by a fake and return it."""
    fake = FakePip(spec["filename"], content, error)
    monkeypatch.setattr("draftpool.data.archives.subprocess.run", fake)
    return fake


def test_download_then_offline(tmp_path, monkeypatch, wheel):
    content, spec = wheel
    monkeypatch.setenv("DRAFTPOOL_PIP_ARGS", "--retries 1 --cert 'my file.pem'")
    pip = use_pip(monkeypatch, spec, content)
    path = fetch_archive(spec, tmp_path / "cache")
    assert path == tmp_path / "cache" / spec["filename"] and path.read_bytes() == content
    command = pip.commands[0]
    assert command[1:5] == ["-m", "pip", "download", "--no-deps"] and command[-1] == "toy-data==1.0"
    assert command[-5:-1] == ["--retries", "1", "--cert", "my file.pem"]
    # Offline from here on: the cache answers and pip is not called.
    offline = use_pip(monkeypatch, spec, error="ERROR: no network")
    assert fetch_archive(spec, tmp_path / "cache") == path
    assert offline.commands == []
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(".download-")] == []


def test_wrong_checksum_names_both_hashes(tmp_path, monkeypatch, wheel):
    _, spec = wheel
    use_pip(monkeypatch, spec, b"something else")
    with pytest.raises(DraftpoolError) as caught:
        fetch_archive(spec, tmp_path)
    text = str(caught.value)
    for part in (
        "toy-data==1.0",
        spec["sha256"],
        hashlib.sha256(b"something else").hexdigest(),
        spec["filename"],
        str(tmp_path),
    ):
        assert part in text
    assert not (tmp_path / spec["filename"]).exists()


def test_no_network_gives_pips_error_and_the_remedy(tmp_path, monkeypatch, wheel):
    _, spec = wheel
    use_pip(
        monkeypatch,
        spec,
        error="WARNING: Retrying\nERROR: No matching distribution found for toy-data\n[notice] new pip\n",
    )
    with pytest.raises(
        DraftpoolError,
        match=r"No matching distribution found.*put the file toy_data-1.0-py3-none-any.whl into",
    ):
        fetch_archive(spec, tmp_path)


def test_corrupt_cache_is_downloaded_once_more(tmp_path, monkeypatch, wheel):
    content, spec = wheel
    (tmp_path / spec["filename"]).write_bytes(b"cut off")
    pip = use_pip(monkeypatch, spec, content)
    assert fetch_archive(spec, tmp_path).read_bytes() == content
    assert len(pip.commands) == 1


def test_corrupt_cache_without_network_says_so(tmp_path, monkeypatch, wheel):
    _, spec = wheel
    (tmp_path / spec["filename"]).write_bytes(b"cut off")
    pip = use_pip(monkeypatch, spec, error="ERROR: no network")
    with pytest.raises(DraftpoolError, match="no network.*cached file is corrupt"):
        fetch_archive(spec, tmp_path)
    assert len(pip.commands) == 1


def test_another_file_than_the_pinned_one(tmp_path, monkeypatch, wheel):
    content, spec = wheel
    use_pip(monkeypatch, spec | {"filename": "toy_data-1.0-cp311-win.whl"}, content)
    with pytest.raises(
        DraftpoolError, match="toy_data-1.0-cp311-win.whl instead of toy_data-1.0-py3-none-any.whl"
    ):
        fetch_archive(spec, tmp_path)


def test_unwritable_cache(tmp_path, monkeypatch, wheel):
    _, spec = wheel
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DraftpoolError, match="toy-data==1.0.*DRAFTPOOL_CACHE"):
        fetch_archive(spec, tmp_path / "file" / "cache")
    monkeypatch.setenv("DRAFTPOOL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DraftpoolError, match="DRAFTPOOL_CACHE"):
        cache_dir()


def test_cache_dir_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTPOOL_CACHE", str(tmp_path / "a" / "b"))
    assert cache_dir() == tmp_path / "a" / "b" and cache_dir().is_dir()


@pytest.mark.parametrize(
    "key, value", [("package", "--index-url=x"), ("filename", "../x.whl"), ("version", None)]
)
def test_bad_spec(tmp_path, wheel, key, value):
    _, spec = wheel
    with pytest.raises(DraftpoolError, match=f"`{key}`"):
        fetch_archive(spec | {key: value}, tmp_path)


def test_members(tmp_path):
    path = make_zip(
        tmp_path / "a.zip", {"d/b.txt": b"b", "d/a.txt": b"a", "d/c.gz": gzip.compress(b"zipped"), "d/": b""}
    )
    assert list_members(path, "d/*.txt") == ["d/a.txt", "d/b.txt"]
    assert list_members(path, "*") == ["d/a.txt", "d/b.txt", "d/c.gz"]
    assert read_member(path, "d/a.txt") == b"a"
    assert read_member(path, "d/c.gz") == b"zipped"
    with pytest.raises(DraftpoolError, match="no member 'd/missing'"):
        read_member(path, "d/missing")


@pytest.mark.parametrize("name", ["../evil.txt", "/etc/passwd", "a/../../b", "..\\evil.txt", "C:\\evil.txt"])
def test_names_outside_the_archive_are_refused(tmp_path, name):
    path = make_zip(tmp_path / "a.zip", {name: b"x"})
    with pytest.raises(DraftpoolError, match="outside the archive"):
        read_member(path, name)
    with pytest.raises(DraftpoolError, match="outside the archive"):
        list_members(path, "*")


def test_damaged_archive(tmp_path):
    path = tmp_path / "a.zip"
    path.write_bytes(b"not a zip")
    with pytest.raises(DraftpoolError, match="not a zip archive"):
        list_members(path, "*")
    with pytest.raises(DraftpoolError, match="cannot read"):
        read_member(path, "x")
    bad_gzip = make_zip(tmp_path / "b.zip", {"x.gz": b"plain"})
    with pytest.raises(DraftpoolError, match="cannot read"):
        read_member(bad_gzip, "x.gz")
