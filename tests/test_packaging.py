"""The wheel carries configs and plugins, and works from where it is unpacked; a source tree works as it is."""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

import pytest
from decoders import DecoderConfig, write_decoder

from trt_kvcache import __version__
from trt_kvcache.resources import resource_dir

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as it lies in site-packages."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


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
    """Archives leave out the symbolic link of a source tree."""
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


def in_environment(folder: Path, *words: str) -> str:
    """Run a program of a virtual environment, away from this source tree."""
    scripts = folder / ("Scripts" if os.name == "nt" else "bin")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(scripts / words[0]), *words[1:]]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_pip_installs_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """Into an environment of its own, which finds what the wheel needs in this one."""
    venv.create(tmp_path, symlinks=os.name != "nt")
    pip = [sys.executable, "-m", "pip", "--python", str(tmp_path), "install", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--no-compile", str(wheel)], capture_output=True, check=True, timeout=120)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(in_environment(tmp_path, "python", "-c", ask).strip())
    (site / "borrowed.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))
    where = in_environment(tmp_path, "python", "-c", "import trt_kvcache; print(trt_kvcache.__file__)")
    assert Path(where.strip()) == site / "trt_kvcache" / "__init__.py"
    assert in_environment(tmp_path, "trt-kvcache", "--version") == f"trt-kvcache {__version__}\n"


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_wheel_works_with_what_pip_installs_for_it(wheel: Path, version: str, tmp_path: Path) -> None:
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip(f"there is no Python {version} here")
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig())
    with tempfile.TemporaryDirectory() as name:  # 700 MB, which pytest would keep
        folder = Path(name)
        subprocess.run([python, "-m", "venv", folder], capture_output=True, check=True, timeout=120)
        in_environment(folder, "pip", "install", "--quiet", f"{wheel}[text,plugin,serve]")
        in_environment(folder, "pip", "check")
        assert "caches in place" in in_environment(folder, "trt-kvcache", "plan", str(model))
        assert "gives the numbers of the model as exported" in in_environment(
            folder, "trt-kvcache", "verify", str(model)
        )


@pytest.mark.slow
def test_the_commands_work_from_the_wheel(unpacked: Path, tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model.onnx", DecoderConfig())
    assert "caches in place" in run_unpacked(unpacked, "-m", "trt_kvcache", "plan", str(model))


def test_a_damaged_installation_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("trt_kvcache.resources._PACKAGE", tmp_path / "trt_kvcache")
    with pytest.raises(FileNotFoundError, match="reinstall trt-kvcache"):
        resource_dir("configs")
