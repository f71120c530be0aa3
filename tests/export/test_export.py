"""Exporters are found, run and reported; stand-ins write small models where the real ones are not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from commands import invoke
from decoders import DecoderConfig, write_decoder
from foreign_decoders import make_foreign

from trt_kvcache import PlanOptions, plan_model
from trt_kvcache.compare import twin
from trt_kvcache.compare.checkpoint import save_logits
from trt_kvcache.compare.exported_model import Exported
from trt_kvcache.errors import InvalidModelError, OptionError, OutputError, UnsupportedModelError
from trt_kvcache.export import run as exporting
from trt_kvcache.export import twins
from trt_kvcache.export.reason import failure_reason
from trt_kvcache.export.run import EXPORTERS, Exporter, export_checkpoint, installed
from trt_kvcache.model_paths import is_checkpoint

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a script of a POSIX shell")
TOKENIZER = '{"made": "for a test"}'


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 64}))
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.json").write_text(TOKENIZER)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that stand-ins copy, and the logits that transformers would compute if the good one is right."""
    folder = tmp_path_factory.mktemp("made")
    onnx.save(make_foreign("concat", DecoderConfig(layers=1)), folder / "good.onnx")
    onnx.save(make_foreign("concat", DecoderConfig(layers=1, seed=1)), folder / "wrong.onnx")
    (folder / "refused.onnx").write_text("no model")
    runner = Exported(folder / "good.onnx", plan_model(folder / "good.onnx", PlanOptions(capacity=64)))
    save_logits(folder / "logits.npz", twins.decode_exported(runner, **twin.DECODE))
    tokens = np.random.default_rng(0).integers(0, 256, 12).tolist()
    save_logits(folder / "tokens.npz", twins.decode_exported(runner, [tokens], [[7, 3, 1, 1]]))
    (folder / "decode.json").write_text(json.dumps(twin.DECODE))
    # In the places of the scripts that need torch: they copy what is above.
    (folder / "twin.py").write_text(
        "import json, shutil, sys, pathlib\n"
        "if sys.argv[1] == 'explain':\n"
        "    sys.exit(pathlib.Path(sys.argv[2], 'settings.json').write_text(json.dumps(['sliding_window'])) * 0)\n"
        "shutil.copytree(sys.argv[1], sys.argv[2])\n"
        f"for name in ('decode.json', 'logits.npz'): shutil.copy({str(folder)!r} + '/' + name, sys.argv[2])\n"
    )
    (folder / "checkpoint.py").write_text(
        f"import shutil, sys; shutil.copy({str(folder)!r} + '/tokens.npz', sys.argv[3])"
    )
    return folder


@pytest.fixture
def stand_ins(made: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Exporters that copy a model, or fail: by name what each does."""
    does = dict.fromkeys(EXPORTERS, "good")
    copy = "import shutil, sys; print('copying'); shutil.copy(sys.argv[1] + '/{}.onnx', sys.argv[2] + '/model.onnx')"
    is_twin = "'twin-' in sys.argv[2]"
    code = {
        **{name: copy.format(name) for name in ("good", "wrong", "refused")},
        "fail": "import sys; open(sys.argv[2] + '/half.onnx', 'w'); sys.exit('a word\\nno such architecture')",
        "nothing": "",
        "environment": "import os, sys; sys.exit(os.environ['HF_HUB_OFFLINE'] + os.environ['TRANSFORMERS_OFFLINE'])",
        "warns": f"{copy.format('good')}; import warnings; warnings.warn('whole'); warnings.warn('x', FutureWarning)",
        "endless": "import time; time.sleep(100)",
        "wrong and endless": f"{copy.format('wrong')}; import time; {is_twin} or time.sleep(100)",
        "fails on twins": f"{copy.format('good')}; {is_twin} and sys.exit('too small')",
        "right on twins": f"import sys, shutil; n = 'good' if {is_twin} else 'wrong'; "
        "shutil.copy(sys.argv[1] + f'/{n}.onnx', sys.argv[2] + '/model.onnx')",
    }

    def stand_in(name: str, real: Exporter) -> Exporter:
        def command(_: str, folder: str, dtype: str, int4: bool) -> list[str]:
            return ["-c", code[does[name]], str(made), folder, dtype, str(int4)]

        return Exporter(real.modules, command, real.dtypes, real.install, real.int4)

    monkeypatch.setattr(exporting, "EXPORTERS", {n: stand_in(n, e) for n, e in EXPORTERS.items()})
    monkeypatch.setattr(exporting, "installed", lambda *_: list(does))
    monkeypatch.setattr(twins.twin_script, "__file__", str(made / "twin.py"))
    monkeypatch.setattr(twins.checkpoint_script, "__file__", str(made / "checkpoint.py"))
    return does


def test_a_checkpoint_becomes_a_model_with_its_texts(
    checkpoint: Path, tmp_path: Path, stand_ins: dict[str, str]
) -> None:
    output = tmp_path / "new" / "onnx"
    result = invoke("export", checkpoint, "-o", output)
    assert {path.name for path in output.iterdir()} == {"model.onnx", "tokenizer.json", "config.json"}
    assert (output / "tokenizer.json").read_text() == TOKENIZER
    assert result.stderr.startswith(f"running mobius: {sys.executable} -c ")
    assert len(result.stderr.splitlines()) == 1
    lines = result.stdout.splitlines()
    assert lines[0] == f"{output}: 2 of 2 caches in place (opset 24)"
    assert lines[-1] == f"next       trt-kvcache build {output} -o onnx-engine/"
    assert "capacity   64 tokens (default; --capacity)" in lines
    again = invoke("export", checkpoint, "-o", output, code=None)
    assert again.stderr == f"error: {output}: the folder is not empty; give a new one\n"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_next_exporter_follows_one_that_fails(checkpoint: Path, tmp_path: Path, stand_ins: dict[str, str]) -> None:
    stand_ins.update(mobius="fail", genai="refused")
    told: list[str] = []
    assert export_checkpoint(checkpoint, tmp_path / "out", told=told.append).exporter == "torch"
    assert [line.split(":")[0] for line in told] == [
        "running mobius", "failed, mobius", "running genai", "genai's model is not compared with the checkpoint",
        "failed, genai", "running torch", "the model is torch's",
    ]  # fmt: skip
    assert told[1] == "failed, mobius: no such architecture; trying genai"
    assert "model.onnx" in told[4]
    assert names(tmp_path / "out") == {"model.onnx", "tokenizer.json", "config.json"}
    stand_ins.update(torch="nothing", genai="environment", optimum="fail")
    with pytest.raises(UnsupportedModelError) as refused:
        export_checkpoint(checkpoint, tmp_path / "never" / "out")
    said = "mobius: no such architecture; genai: 11; torch: it wrote no model; try another exporter"
    assert said.replace("another ", "another --") in refused.value.message
    assert not (tmp_path / "never").exists()
    with pytest.raises(
        UnsupportedModelError, match="genai: 11; leave out .*int4, which no other exporter writes, or a"
    ):
        export_checkpoint(checkpoint, tmp_path / "never", int4=True)


WRONG = (
    "it writes another model than the checkpoint: on a small twin, logits differ from transformers' from token 0 of a "
    "text on, by up to "
)


def test_an_exporter_that_writes_another_model_is_not_taken(
    checkpoint: Path, tmp_path: Path, stand_ins: dict[str, str]
) -> None:
    """A named one is refused, with what it leaves out and an exporter that is right; auto goes on."""
    stand_ins.update(mobius="wrong and endless", genai="wrong")
    told: list[str] = []
    assert export_checkpoint(checkpoint, tmp_path / "out", told=told.append).exporter == "torch"
    assert [line.split(":")[0] for line in told] == [
        "failed, mobius", "failed, genai", "running torch", "the model is torch's",
    ]  # fmt: skip
    assert told[0].startswith(f"failed, mobius: {WRONG}")
    assert told[0].endswith(" of the largest; it leaves out sliding_window; trying genai")
    with pytest.raises(UnsupportedModelError) as refused:
        export_checkpoint(checkpoint, tmp_path / "never", exporter="genai")
    message = refused.value.message
    assert message.startswith(f"{checkpoint} is not exported: genai: {WRONG}")
    assert message.endswith(" of the largest; it leaves out sliding_window; use torch, which is right")
    assert not (tmp_path / "never").exists()
    stand_ins.update(dict.fromkeys(stand_ins, "wrong"))
    with pytest.raises(UnsupportedModelError, match="leaves out sliding_window; try another exporter, or a later"):
        export_checkpoint(checkpoint, tmp_path / "never", exporter="torch")
    with pytest.raises(UnsupportedModelError, match=r"mobius: it writes another .*; genai: it .*; torch: it writes"):
        export_checkpoint(checkpoint, tmp_path / "never")


def test_what_is_not_compared_is_said(
    checkpoint: Path, tmp_path: Path, stand_ins: dict[str, str], made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def export(name: str, **more: Any) -> list[str]:
        told.clear()
        made = export_checkpoint(checkpoint, tmp_path / name, exporter="genai", told=told.append, **more)
        assert made.exporter == "genai"
        return told[1:]

    assert export("all") == []
    assert export("int4", int4=True) == [
        "the weights are not compared with the checkpoint's: they were rounded to 4 bits"
    ]
    stand_ins["genai"] = "fails on twins"
    assert export("twins") == ["genai's model is not compared with the checkpoint: it fails on a small twin: too small"]
    stand_ins["genai"] = "warns"
    assert export("warnings") == ["genai warns: whole"]
    (made / "no_twin.py").write_text("import sys; sys.exit('no such family')")
    monkeypatch.setattr(twins.twin_script, "__file__", str(made / "no_twin.py"))
    monkeypatch.setattr(twins.checkpoint_script, "__file__", str(made / "no_twin.py"))
    stand_ins["genai"] = "good"
    assert export("family") == [
        "genai's model is not compared with the checkpoint: it has no twin: no such family",
        "the weights are not compared with the checkpoint's: transformers does not run it: no such family",
    ]
    monkeypatch.setattr(exporting, "free_memory", lambda: 10**9)
    assert export("memory")[1] == (
        "the weights are not compared with the checkpoint's: that takes 2 GB of memory, and 1 GB are free"
    )


def test_other_weights_than_the_checkpoints_are_not_taken(
    checkpoint: Path, tmp_path: Path, stand_ins: dict[str, str]
) -> None:
    stand_ins["mobius"] = "right on twins"
    with pytest.raises(UnsupportedModelError, match="mobius writes other weights than the checkpoint's: logits differ"):
        export_checkpoint(checkpoint, tmp_path / "out", exporter="mobius")
    assert not (tmp_path / "out").exists()
    assert export_checkpoint(checkpoint, tmp_path / "out").exporter == "genai"


def test_an_exporter_that_takes_too_long_is_ended(
    checkpoint: Path, tmp_path: Path, stand_ins: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "_MINUTES", (0.02, 0))
    monkeypatch.setattr(twins, "_SECONDS", 1.0)
    stand_ins["mobius"] = "endless"
    told: list[str] = []
    assert export_checkpoint(checkpoint, tmp_path / "out", told=told.append).exporter == "genai"
    assert told[1] == "failed, mobius: it took more than 1 s, and was ended; trying genai"


def test_a_chosen_exporters_model_stays_where_the_plan_is_refused(
    checkpoint: Path, tmp_path: Path, stand_ins: dict[str, str]
) -> None:
    stand_ins["torch"] = "refused"
    with pytest.raises(InvalidModelError):
        export_checkpoint(checkpoint, tmp_path / "out", exporter="torch")
    assert names(tmp_path / "out") == {"model.onnx", "tokenizer.json", "config.json"}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["mobius", "genai", "torch"]),
        ({"dtype": "bfloat16"}, ["mobius", "torch"]),
        ({"dtype": "float32"}, ["mobius", "genai", "torch", "optimum"]),
        ({"int4": True}, ["genai"]),
        ({"exporter": "mobius"}, ["mobius"]),
    ],
)
def test_exporters_that_fit(
    options: dict[str, Any], names: list[str], checkpoint: Path, tmp_path: Path, stand_ins: dict[str, str]
) -> None:
    stand_ins.update(dict.fromkeys(stand_ins, "fail"))
    told: list[str] = []
    with pytest.raises(UnsupportedModelError):
        export_checkpoint(checkpoint, tmp_path / "out", told=told.append, **options)
    assert [line.split()[1].rstrip(":") for line in told if line.startswith("running")] == names


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, r"no exporter for float16 is installed; pip install torch transformers onnxscript \(it takes most"),
        ({"exporter": "mobius"}, "float16 is installed: mobius is missing; pip install mobius-onnx"),
        ({"int4": True}, "no exporter for float16 with weights of 4 bits is installed; pip install onnxruntime-genai"),
        ({"exporter": "optimum"}, "optimum does not write float16 on a CPU; use mobius or genai or torch"),
        (
            {"dtype": "bfloat16", "int4": True},
            "no exporter writes bfloat16 with weights of 4 bits on a CPU; dtype float16 "
            "by genai, dtype float32 by genai",
        ),
        ({"dtype": "bfloat16", "int4": True, "exporter": "torch"}, "4 bits on a CPU; leave out int4"),
        (
            {"exporter": "torch", "int4": True},
            "torch does not write float16 with weights of 4 bits on a CPU; use genai",
        ),
        ({"dtype": "int8"}, "dtype is 'int8'; it must be one of float16, bfloat16, float32"),
        ({"exporter": "keras"}, "exporter is 'keras'; it must be one of auto, mobius, genai, torch, optimum"),
        ({"python": "/no/python"}, "/no/python: this interpreter does not run: "),
    ],
)
def test_what_is_missing_is_said(
    options: dict[str, Any], said: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "python" not in options:
        monkeypatch.setattr(exporting, "installed", lambda *_: [])
    with pytest.raises(OptionError, match=said):
        export_checkpoint(checkpoint, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_no_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    write_decoder(tmp_path / "model.onnx", DecoderConfig(layers=1))
    for folder in (tmp_path, tmp_path / "nothing"):
        assert not is_checkpoint(folder)
        with pytest.raises(InvalidModelError, match="not a checkpoint; give a folder with config.json and weights"):
            export_checkpoint(folder, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(OutputError, match="the folder is not empty; give a new one"):
        export_checkpoint(checkpoint, tmp_path / "full")


def test_a_gguf_file_becomes_a_checkpoint_first(
    tmp_path: Path, stand_ins: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a script that the exporter's interpreter runs; the checkpoint goes when the model is there."""
    script, file = tmp_path / "from_gguf.py", tmp_path / "small.gguf"
    script.write_text(
        "import json, pathlib, sys\n"
        "if open(sys.argv[1]).read() != 'GGUF': sys.exit('no GGUF: the first bytes are others')\n"
        "folder = pathlib.Path(sys.argv[2])\n"
        "(folder / 'config.json').write_text(json.dumps({'max_position_embeddings': 64, 'dtype': sys.argv[3]}))\n"
    )
    file.write_text("GGUF")
    monkeypatch.setattr(exporting, "from_gguf", SimpleNamespace(__file__=str(script), MODULES=("json", "no_module")))
    with pytest.raises(OptionError, match=r"small.gguf: transformers reads .*, and no_module is missing; pip install"):
        export_checkpoint(file, tmp_path / "out")
    monkeypatch.setattr(exporting.from_gguf, "MODULES", ("json",))
    made = export_checkpoint(file, tmp_path / "out", dtype="float32")
    assert (made.exporter, made.plan.options.capacity) == ("mobius", 64)
    assert names(tmp_path / "out") == {"model.onnx", "config.json"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    file.write_text("other")
    result = invoke("export", file, "-o", tmp_path / "never", code=None)
    assert result.stderr.splitlines()[-1] == (
        f"error: {file} is not read: no GGUF: the first bytes are others; give the checkpoint that it was made of"
    )
    assert not (tmp_path / "never").exists()
    planned = invoke("plan", file, code=None)
    assert planned.stderr == f"error: {file}: a checkpoint; export it first: trt-kvcache export {file} -o small-onnx/\n"


def test_installed_asks_the_interpreter(tmp_path: Path) -> None:
    (tmp_path / "mobius.py").touch()
    code = "from trt_kvcache.export.run import installed; print(installed())"
    path = os.pathsep.join([str(tmp_path), str(Path(exporting.__file__).parents[2])])
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert "'mobius'" in found.stdout
    assert set(installed()) <= set(EXPORTERS)


REAL = os.environ.get("TRT_KVCACHE_EXPORTERS", "")
"""An interpreter with real exporters, where the tests' own has none."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch", "mobius", "genai"])
def test_real_exporters(name: str, tmp_path: Path) -> None:
    """A random checkpoint; the plan takes every cache in place, in float16."""
    python = REAL or sys.executable
    if name not in installed(python):
        pytest.skip(f"{name} is not installed")
    tests = Path(__file__).parents[1]
    write = "import sys, pathlib, exporters.checkpoints as c; c.write('llama', pathlib.Path(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": str(tests), "HF_HUB_OFFLINE": "1"}
    subprocess.run([python, "-c", write, str(tmp_path / "ck")], check=True, capture_output=True, env=environment)
    words = ["export", str(tmp_path / "ck"), "-o", str(tmp_path / "out"), "--exporter", name, "--python", python]
    result = invoke(*words)
    assert "4 of 4 caches in place" in result.stdout
    assert "float16 [" in result.stdout


@pytest.mark.slow
def test_a_real_exporter_that_drops_windows(tmp_path: Path) -> None:
    """mobius-onnx writes Mistral without its windows, and torch with them."""
    python = REAL or sys.executable
    if not {"mobius", "torch"} <= {*installed(python)}:
        pytest.skip("mobius-onnx or torch is not installed")
    write = "import sys, pathlib, exporters.checkpoints as c; c.write('mistral', pathlib.Path(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
    subprocess.run([python, "-c", write, str(tmp_path / "ck")], check=True, capture_output=True, env=environment)
    with pytest.raises(UnsupportedModelError, match="it leaves out sliding_window; use torch, which is right"):
        export_checkpoint(tmp_path / "ck", tmp_path / "out", exporter="mobius", python=python)
    assert not (tmp_path / "out").exists()


def test_optimum_does_not_lose_the_base_of_rotary_embeddings(tmp_path: Path) -> None:
    """transformers 4, which it wants, passes over what transformers 5 writes."""
    for name, text in {
        "transformers.py": "__version__ = '4.57.6'",
        "optimum/exporters/onnx.py": "def main_export(checkpoint, folder, **how):\n    print('exports', folder)",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    config = tmp_path / "config.json"
    command = [sys.executable, str(Path(exporting.__file__).with_name("with_optimum.py")), str(tmp_path), "made"]

    def run(**fields: Any) -> tuple[int, str, str]:
        config.write_text(json.dumps(fields))
        done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    new = {"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}
    code, out, error = run(**new)
    assert (code, out) == (1, "")
    assert "the installed 4.57.6 does not read its rope_parameters" in failure_reason(error)
    assert run(**new, rope_theta=1e5) == run(rope_theta=1e5) == run() == (0, "exports made\n", "")
