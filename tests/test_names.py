"""Names in the place of a model: of the hub, of weights, of other tools' files. Each gets one line with the way out."""

import json
import shutil
from pathlib import Path

import pytest
from commands import invoke
from decoders import DecoderConfig, write_decoder

EXPORT = "export it first: trt-kvcache export"
NAMES = {
    "plan org/absent": "org/absent: no such file; if it is a model of the hub, it is not in the cache at CACHE: "
    "download it by 'hf download org/absent', and give the name again",
    "export org/absent -o out/": "hf download org/absent",
    "generate org/chat --prompt Hello": f"org/chat: a checkpoint; {EXPORT} org/chat -o chat-onnx/",
    "plan plain/absent": "plain/absent: no such file; give the path of an .onnx file",  # the folder is there
    "plan weights/model.safetensors": "weights without a graph; export their folder: trt-kvcache export weights -o",
    "generate lone.safetensors --prompt x": "weights without a graph, and no config.json beside them; give the folder",
    "serve lone.pt": "weights without a graph, and no config.json beside them",
    "chat weights.gguf": f"weights.gguf: a checkpoint; {EXPORT} weights.gguf -o weights-onnx/",
    "generate trtllm --prompt x": "the folder of TensorRT-LLM (rank0.engine), whose files no other program reads",
    "serve openvino": "the folder of OpenVINO (openvino_model.xml)",
    "bench engines": "a folder with engines; give one of them: engines/a.engine",
    "plan many": "a folder with 2 models in folders of their own; give one of them, such as many/a",
    "plan web": "its 2 models lie in web/onnx; give one of them, such as web/onnx/model.onnx, and for texts "
    "--tokenizer web",
    "chat one": "its model lies in the folder onnx; give one/onnx/decoder.onnx, and for texts --tokenizer one",
    "plan pointer.onnx": "pointer.onnx is a pointer of Git LFS, and the file itself was not downloaded; run "
    "'git lfs pull' in the folder",
    "plan outside": "model.onnx.data is a pointer of Git LFS",
    "export shallow -o out/": "model.safetensors is a pointer of Git LFS",
    "generate adapter --prompt x": "an adapter (LoRA) of org/base, and no model; give its model, and",
    "export adapter -o out/": "an adapter (LoRA) of org/base, and no model",
    "plan engine": "engine: an engine; give the model that it was built from; 'trt-kvcache inspect engine' shows "
    "the engine's plan",
    "verify engine/model.engine": "an engine; give the model that it was built from",
    "build engine -o e/": "an engine; give the model that it was built from",
    "inspect plain": "the folder of a model, without an engine; build one: trt-kvcache build plain -o engine/",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("names")
    model = write_decoder(top / "model.onnx", DecoderConfig(layers=1, capacity=16, vocab=64))
    files = {
        "weights": ("config.json", "model.safetensors"),
        "shallow": ("config.json",),
        "trtllm": ("config.json", "rank0.engine"),
        "openvino": ("openvino_model.xml",),
        "engines": ("a.engine", "a.engine.json"),
        "engine": ("model.engine", "model.engine.json"),
        "many/a": ("config.json", "model.safetensors"),
        "many/b": ("model.onnx",),
        "web/onnx": ("model.onnx", "a_model.onnx"),
        "one/onnx": ("decoder.onnx",),
        "plain": ("model.onnx",),
        "outside": ("model.onnx",),
        "adapter": ("adapter_model.safetensors",),
        "cache/models--org--chat/snapshots/abc": ("config.json", "model.safetensors"),
        "cache/models--org--chat/refs": (),
        ".": ("lone.safetensors", "lone.pt", "weights.gguf"),
    }
    for place, names in files.items():
        (top / place).mkdir(parents=True, exist_ok=True)
        for name in names:
            (top / place / name).write_bytes(b"")
            if name.endswith(".onnx"):
                shutil.copy(model, top / place / name)
    (top / "cache/models--org--chat/refs/main").write_text("abc")
    (top / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    for pointer in ("pointer.onnx", "outside/model.onnx.data", "shallow/model.safetensors"):
        (top / pointer).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9000000\n")
    return top


@pytest.mark.parametrize("typed", NAMES)
def test_a_name_gets_what_it_is_and_the_way_out(typed: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_CACHE", "CACHE" if "absent" in typed else str(folder / "cache"))
    before = sorted(folder.rglob("*"))
    result = invoke(*typed.split(), code=None)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1), result.output
    assert NAMES[typed] in result.stderr
    assert sorted(folder.rglob("*")) == before


def test_a_name_of_the_hub_is_the_folder_in_its_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    places = {
        "HF_HUB_CACHE": "",
        "HF_HOME": "hub",
        "XDG_CACHE_HOME": "huggingface/hub",
        "HOME": ".cache/huggingface/hub",
    }
    for variable, below in places.items():
        home = folder / variable
        snapshot = home / below / "models--org--small" / "snapshots" / "1f"
        snapshot.mkdir(parents=True)
        shutil.copy(folder / "model.onnx", snapshot)
        (snapshot.parent.parent / "refs").mkdir()
        (snapshot.parent.parent / "refs" / "main").write_text("1f\n")
        with monkeypatch.context() as changed:
            changed.setenv(variable, str(home))
            result = invoke("plan", "org/small", code=None)
        shutil.rmtree(home)
        assert result.exit_code == 0, result.output
        assert "2 of 2 caches in place" in result.stdout
