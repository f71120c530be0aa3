"""The wheel carries configs and plugins, and works from where it is unpacked; a source tree works as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from decoders import DecoderConfig, write_decoder

from trt_kvcache.resources import resource_dir

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this source tree, as it lies in site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder / "dist")]
    subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    (wheel,) = (folder / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run_unpacked(unpacked: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=unpacked, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


@pytest.mark.parametrize("name", ["configs", "plugins"])
def test_a_source_tree_has_them_beside_the_package(name: str) -> None:
    assert resource_dir(name) == ROOT / name  # type: ignore[arg-type]
    assert files_in(ROOT / name)


@pytest.mark.parametrize("name", ["configs", "plugins"])
def test_a_wheel_has_them_inside_the_package(unpacked: Path, name: str) -> None:
    code = f"from trt_kvcache.resources import resource_dir; print(resource_dir({name!r}))"
    folder = Path(run_unpacked(unpacked, "-c", code).strip())
    assert folder == unpacked / "trt_kvcache" / name
    assert files_in(folder) == files_in(ROOT / name)


@pytest.mark.slow
def test_a_source_archive_gives_the_same_wheel(unpacked: Path, tmp_path: Path) -> None:
    """What archives leave out is the symbolic link of a source tree."""
    build = [sys.executable, "-m", "hatchling", "build", "--directory", str(tmp_path), "--target"]
    subprocess.run([*build, "sdist"], cwd=ROOT, capture_output=True, check=True, timeout=120)
    (archive,) = tmp_path.iterdir()
    shutil.unpack_archive(archive, tmp_path / "source", filter="data")
    (tree,) = (tmp_path / "source").iterdir()
    subprocess.run([*build, "wheel"], cwd=tree, capture_output=True, check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as made:
        assert set(made.namelist()) == files_in(unpacked)


def test_a_wheel_holds_the_package_and_its_metadata_only(unpacked: Path) -> None:
    names = {path.name for path in unpacked.iterdir()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"trt_kvcache"}
    (metadata,) = unpacked.glob("*.dist-info")
    assert (metadata / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert "trt-kvcache = trt_kvcache.__main__:main" in (metadata / "entry_points.txt").read_text()
    assert (unpacked / "trt_kvcache" / "py.typed").is_file()


def test_the_plugin_is_imported_from_the_wheel(unpacked: Path) -> None:
    code = "import trt_kvcache.plugins.source as s; print(s.__file__, len(s.family_source()))"
    file, size = run_unpacked(unpacked, "-c", code).split()
    assert Path(file) == unpacked / "trt_kvcache" / "plugins" / "source.py"
    assert int(size) > 5000


def test_the_plugin_is_imported_from_a_source_tree() -> None:
    from trt_kvcache.plugins import source

    assert Path(source.__file__).resolve() == ROOT / "plugins" / "source.py"


@pytest.mark.slow
def test_the_commands_work_from_the_wheel(unpacked: Path, tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig())
    assert "caches in place" in run_unpacked(unpacked, "-m", "trt_kvcache", "plan", str(model))


def test_a_damaged_installation_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("trt_kvcache.resources._PACKAGE", tmp_path / "trt_kvcache")
    with pytest.raises(FileNotFoundError, match="reinstall trt-kvcache"):
        resource_dir("configs")
