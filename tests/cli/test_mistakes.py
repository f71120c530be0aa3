"""Typical mistakes: each is answered with one line that says what to do, and no trace."""

import json
import re
import shutil
from pathlib import Path

import pytest
from commands import invoke
from decoders import DecoderConfig, write_decoder
from typer.testing import CliRunner

from trt_kvcache.cli.app import app

EXPORT = "checkpoint: a checkpoint; export it first: trt-kvcache export checkpoint -o checkpoint-onnx/"
NO_MODEL = "no such file; give the path of an .onnx file"
MISTAKES = {
    # paths
    "plan modle.onnx": NO_MODEL,
    "verify modle.onnx": NO_MODEL,
    "serve modle.onnx": NO_MODEL,
    "plugins modle.onnx": NO_MODEL,
    "plan empty": "a directory without an .onnx file; give the path of an .onnx file",
    "plan two": "2 models may be the decoder (a.onnx, b.onnx); give the path of an .onnx file",
    "plan broken.onnx": "text, not a binary ONNX model; give the path of an .onnx file",
    "plan weights.gguf": "a checkpoint; export it first: trt-kvcache export weights.gguf -o weights-onnx/",
    "plan checkpoint": EXPORT,
    "build checkpoint -o e/": EXPORT,
    "generate checkpoint --prompt Hello": EXPORT,
    "chat checkpoint": EXPORT,
    "verify checkpoint": EXPORT,
    "bench checkpoint": EXPORT,
    "export missing -o out/": "not a checkpoint; give a folder with config.json and weights",
    "export model.onnx -o out/": "not a checkpoint; give a folder with config.json and weights",
    "generate missing.engine --tokens 1": "no such file; check the path",
    "generate model.engine --tokens 1": "an engine needs the manifest that 'trt-kvcache build' wrote beside it",
    "inspect model.engine": "an engine needs the manifest that 'trt-kvcache build' wrote beside it",
    "inspect model.onnx": "this is a model, which has no manifest; give an engine, or use 'trt-kvcache plan'",
    "inspect empty": "a folder; give the path of an engine",
    "check missing.engine": "no such file; check the path",
    "bench missing.json": "missing.json: cannot be read: No such file or directory",
    "bench model.onnx --compare old.json": "not JSON of 'trt-kvcache bench'",
    "plan model.onnx --config missing.yaml": "give a YAML file",
    "plan model.onnx --html no/such/plan.html": "no such folder",
    "verify model.onnx --inputs data.npz": "cannot be read as an .npz file",
    # flags of other tools
    "build model.onnx -o e --fp16": "export it in float16 or bfloat16",
    "build --onnx=model.onnx --saveEngine=e": "the model or engine is the argument, without a flag",
    "build model.onnx -o e --dtype=float16": "there is no --dtype: an engine computes in the types of the model",
    "build model.onnx -o e --memPoolSize workspace:4": "there is no --memPoolSize: give --workspace SIZE, such as",
    "build model.onnx -o e --max-batch-size 4": "give --max-batch N",
    "generate model.onnx --tokens 1 --max-tokens 5": "give --max-new-tokens N",
    "generate model.onnx --max_tokens 9": "there is no --max_tokens: give --max-new-tokens N",
    "generate model.onnx --max_new_tokens 9": "--max_new_tokens is written --max-new-tokens",
    "chat model.onnx --max-model-len 9": "there is no --max-model-len: give --capacity TOKENS",
    "serve model.onnx --tensor-parallel-size 2": "leave it out",
    "doctor --verbose": "leave it out; only build has it",
    # values
    "serve model.onnx --host 0.0.0.0": "give --api-key-file FILE, or --no-api-key to allow it",
    "plan model.onnx --capacity many": "--capacity is many; give a whole number",
    "generate model.onnx --tokens 1 --top-p most": "--top-p is most; give a number",
    "build model.onnx -o e --max-batch 4000000": "--max-batch is 4000000; it must be at most 65536",
    "plan model.onnx --capacity 4k": "--capacity is 4k; write 4096",
    "plan model.onnx --capacity=1.5K": "--capacity is 1.5K; write 1536",
    "plan model.onnx --capacity 99": "the model fixes its cache length at 16: leave the option out",
    "plan model.onnx --window-chunk 4": "has no effect without --sliding circular; add that",
    "plan model.onnx --calibrate ids.jsonl": "has no effect without --cache-dtype; add that, or leave --calibrate out",
    "plan model.onnx --cache-dtype int8 --calibrate no.txt": "--calibrate no.txt cannot be read: No such file",
    "plan model.onnx --cache-dtype int8 --calibrate empty.txt": "empty.txt is empty; give a prompt in each line",
    "plan model.onnx --cache-dtype int8 --calibrate ids.jsonl": "line 2: Expected `str | array`, got `int`",
    "build model.onnx -o e --workspace 4": "give a unit, as in 4GiB",
    "build model.onnx -o e --compute-capabilities a100": "must have the form sm80",
    "verify model.onnx --chunks 5;3": "is not a list of token counts such as 5,3",
    "bench model.onnx --lengths 4;16": "give numbers with commas between them",
    "generate model.onnx": "nothing to continue; give --prompt",
    "generate model.onnx --prompt Hello": "give --tokenizer, or ids with --tokens",
    "generate model.onnx --tokens a,b": "is not a list of token ids such as 1,15,7",
    "generate model.onnx --tokens 99 --json": "the model has 0 to 63",
    "generate model.onnx --tokens ,": "prompt 0 is empty",
    "generate model.onnx --tokens 1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8": "17 tokens",
    "generate model.onnx --prompt x --tokenizer none.json": "none.json cannot be read",
    "generate model.onnx --tokens 1 --temperature 0 --sample": "for the most probable token do not sample",
    "generate model.onnx --tokens 1 --num-beams 4 --temperature .7": "--num-beams 4 cannot be combined with "
    "--temperature 0.7, which draws tokens; drop one of them",
    "generate model.onnx --tokens 1 --chat-template-kwargs {}": "are for a chat; add --chat",
    "chat model.onnx --chat-template-kwargs [1]": "--chat-template-kwargs is '[1]'; give a JSON object",
    "generate model.onnx --tokens 1 --top-p 2 --json": "--top-p is 2.0; supported: above 0 and at most 1",
    "generate model.onnx --tokens 1 --logit-bias 7": "'7' is not ID=BIAS",
    "generate model.onnx --tokens 1 --eos 3 --ignore-eos": "use one of them",
    "generate model.onnx --tokens 1 --prefix-cache much": "size 'much' is not a number of bytes",
    "generate model.onnx --tokens 1 --prefix-cache 10": "--prefix-cache is 10 bytes, but a block of 32 tokens takes",
    "generate model.onnx --tokens 1 --num-beams 99": "--num-beams 99 needs as many rows, and 8 of 8 are free",
    "generate model.onnx --tokens 1 --seed 3": "add --sample, or leave it out",
    "generate model.onnx --tokens 1 --device cuda": "a GPU runs only engines; build an engine with 'trt-kvcache build'",
    "chat model.onnx": "--tokenizer",
}
"""Commands as typed, and words of their answers; exit code 1."""

RULED_OUT = {
    "plan": "Missing argument 'MODEL'",
    "plna model.onnx": "Did you mean 'plan'?",
    "plan model.onnx --xyzzy": "No such option",
    "rewrite model.onnx": "Missing option '--output' / '-o'",
    "plan model.onnx --capacity 0": "greater than or equal to 1",
    "build model.onnx -o e --max-batch 0": "greater than or equal to 1",
    "verify model.onnx --batch 0": "greater than or equal to 1",
    "serve model.onnx --port 99999": "less than or equal to 65535",
    "plan model.onnx --target cuda": "'--target': 'cuda' is not one of 'tensorrt', 'tensorrt-rtx'",
    "export checkpoint -o e --dtype int8": "'--dtype': 'int8' is not one of 'float16', 'bfloat16', 'float32'",
    "deploy model.onnx": "'model.onnx' is not one of 'triton'",
}
"""Commands that ``--help`` rules out; exit code 2."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    for name in ("empty", "two", "checkpoint"):
        (folder / name).mkdir()
    model = write_decoder(folder / "model.onnx", DecoderConfig(layers=1, capacity=16, vocab=64))
    for name in ("model.engine", "two/a.onnx", "two/b.onnx"):
        shutil.copy(model, folder / name)
    (folder / "checkpoint" / "config.json").write_text('{"model_type": "llama"}')
    (folder / "checkpoint" / "model.safetensors").touch()
    (folder / "broken.onnx").write_text("no model")
    (folder / "weights.gguf").write_bytes(b"GGUF")
    (folder / "data.npz").write_bytes(b"PK")
    (folder / "old.json").write_text("{}")
    (folder / "empty.txt").write_text("\n")
    (folder / "ids.jsonl").write_text('[1, 2]\n{"prompt": 3}\n')
    return folder


@pytest.mark.parametrize("typed", [*MISTAKES, *RULED_OUT])
def test_a_mistake_is_answered_with_what_to_do(typed: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    result = invoke(*typed.split(), code=None)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.stdout == ""
    if typed in MISTAKES:
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert result.stderr.startswith("error: ")
        assert MISTAKES[typed] in result.stderr
    else:
        *usage, last = result.stderr.splitlines()
        assert result.exit_code == 2
        assert last.startswith("Error: ")
        assert RULED_OUT[typed] in last
        assert any("--help' for help" in line for line in usage)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("generate model.onnx -m x", "without a flag"),
        ("generate model.onnx --n-predict 4", "--max-new-tokens N"),
        ("generate model.onnx --temp 0.7", "--temperature T"),
        ("generate model.onnx --repeat-penalty 1.1", "--repetition"),
        ("generate model.onnx --ctx-size 99", "--capacity TOKENS"),
        ("generate model.onnx -ngl 99", "leave it out"),
        ("generate model.onnx --model-draft x", "--draft MODEL"),
        ("generate model.onnx -fa", "chooses its kernels"),
        ("generate model.onnx --cache-type-k q8_0", "--cache-dtype int8"),
        ("generate model.onnx -cnv", "trt-kvcache chat"),
        ("generate model.onnx --file x", "--prompt-file FILE"),
        ("generate model.onnx --mirostat 2", "this way of sampling is not supported"),
        ("generate model.onnx --grammar-file x", "--grammar FILE"),
        ("generate model.onnx --guided-json x", "--json-schema"),
        ("generate model.onnx --max_beam_width 4", "--num-beams N"),
        ("generate model.onnx --input_text x", "--prompt TEXT"),
        ("generate model.onnx --do-sample", "--sample"),
        ("generate model.onnx --torch_dtype float16", "types of the model"),
        ("generate model.onnx --trust-remote-code", "code that comes with a model"),
        ("chat model.onnx --system-prompt x", "--system"),
        ("chat model.onnx --num-beams 3", "only generate has beam search"),
        ("chat model.onnx --logprobs", "generate shows"),
        ("serve model.onnx --served-model-name x", "--name NAME"),
        ("serve model.onnx --api-key x", "--api-key-file FILE"),
        ("serve model.onnx --enable-prefix-caching", "--prefix-cache SIZE"),
        ("serve model.onnx -np 4", "--max-batch N"),
        ("serve model.onnx --kv-cache-dtype fp8", "--cache-dtype int8"),
        ("serve model.onnx --enforce-eager", "leave it out"),
        ("serve model.onnx --chat-template x", "beside the model"),
        ("serve model.onnx --jinja", "by the chat template"),
        ("serve model.onnx --max-num-seqs 8", "--max-batch N"),
        ("serve model.onnx --gpu-memory-utilization 0.9", "determine the memory"),
        ("serve model.onnx --swap-space 4", r"max_sequences=N"),
        ("bench model.onnx --iterations 9", "--repeats N"),
        ("bench model.onnx --warmUp 200", "--warmup N"),
        ("bench model.onnx --useCudaGraph", "CUDA graphs are on"),
        ("bench model.onnx --n-prompt 512", "--lengths N"),
        ("build model.onnx -o e --useDLACore 0", "only on a GPU"),
        ("build model.onnx -o e --stripWeights", "--strip-plan"),
        ("build model.onnx -o e --tp_size 2", "for one GPU"),
        ("build model.onnx -o e --builderOptimizationLevel 3", "--opt-level N"),
        ("export checkpoint -o e --task text-generation", "run it by hand"),
        ("export checkpoint -o e --precision int4", "--int4"),
        ("build model.onnx -o e --precision int4", "weights of 4 bits"),
        ("build model.onnx -o e -e cuda", "for NVIDIA GPUs"),
        ("serve model.onnx -p 8000", "--port N"),
        ("batch model.onnx -i rows.jsonl", "the file is the argument"),
        ("score model.onnx --text hi", "score MODEL FILE"),
        ("export -m checkpoint -o e", "the checkpoint is the argument"),
        ("generate model.onnx -f x", "--prompt-file FILE"),
        ("generate model.onnx -t 4", "one thread for each core"),
        ("generate model.onnx --threads 4", "one thread for each core"),
        ("bench model.onnx -t 4", "--threads N"),
        ("generate model.onnx -no-cnv", "leave it out"),
        ("generate model.onnx -e cuda", "--device cuda"),
        ("generate model.onnx --quiet", "leave it out"),
        ("serve model.onnx -v", "leave it out"),
        ("serve model.onnx --log-level debug", "leave it out"),
        ("generate model.onnx --num-return-sequences 2", "--prompt"),
        ("generate model.onnx --stream", "leave it out"),
        ("verify model.onnx --atol 1e-3", "verify measures rounding"),
    ],
)
def test_flags_of_other_tools_get_a_hint(typed: str, hint: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    result = invoke(*typed.split(), code=None)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1), result.output
    assert re.match(r"error: there is no -\S+: ", result.stderr)
    assert hint in result.stderr


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("run model.onnx", "there is no command 'run': give trt-kvcache chat MODEL"),
        ("list", "trt-kvcache plan model.onnx"),
        ("ls", "trt-kvcache plan model.onnx"),
        ("ps", "/metrics"),
        ("pull a/b", "hf download NAME"),
        ("show model.onnx", "trt-kvcache plan MODEL"),
        ("create x", "trt-kvcache export CHECKPOINT"),
        ("convert model.onnx", "trt-kvcache export CHECKPOINT"),
        ("quantize model.onnx", "--int4"),
        ("completion", "--install-completion"),
        ("perplexity model.onnx", "trt-kvcache score MODEL"),
        ("tokenize x", "/tokenize"),
        ("embed x", "no embeddings"),
        ("benchmark x", "trt-kvcache bench MODEL"),
        ("--onnx=model.onnx --saveEngine=e", "--onnx needs a command before it, such as trt-kvcache build MODEL"),
        ("-m model.onnx -p hi", "-m needs a command before it"),
        ("inspect model model.onnx", "trt-kvcache plan shows a model"),
        ("verify model.onnx b.onnx", "--rewritten FILE"),
        ("export checkpoint out", "give -o out"),
        ("plan https://huggingface.co/a/b", "give hf download a/b, and then the name or the folder"),
        ("chat hf.co/a/b", "give hf download a/b"),
    ],
)
def test_other_habits_get_a_hint(typed: str, hint: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    result = invoke(*typed.split(), code=None)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1), result.output
    assert hint in result.stderr


@pytest.mark.parametrize("typed", ["help", "help plan", "version", "-V"])
def test_help_and_version_are_commands_too(typed: str) -> None:
    words = typed.split()
    same = ["--version"] if words[0] in ("version", "-V") else [*words[1:], "--help"]
    result, wanted = invoke(*words, code=None), invoke(*same, code=None)
    assert (result.exit_code, result.stdout) == (0, wanted.stdout)


def test_options_come_from_a_file_and_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TRT_KVCACHE_SCORE_TOKENS", "1,2,3")
    (folder.parent / "options.toml").write_text('[generate]\nmax-new-tokens = 3\ntokens = ["1,2"]\njson = true\n')

    def generated(*more: str) -> int:
        result = invoke("--options", "../options.toml", "generate", "model.onnx", *more)
        (sequence,) = json.loads(result.stdout)["sequences"]
        return len(sequence["tokens"])

    assert generated() == 3
    assert generated("--max-new-tokens", "2") == 2
    monkeypatch.setenv("TRT_KVCACHE_GENERATE_MAX_NEW_TOKENS", "4")
    assert generated() == 4
    for text, said in {
        "[generat]\nx = 1": "'generat' is no command with options; give [export]",
        "x = 1": "'x' is no command with options",
        "[generate]\nmax-tokens = 1": "generate has no option 'max_tokens'; its options: ",
        "[": "cannot be read",
    }.items():
        (folder.parent / "options.toml").write_text(text)
        result = invoke("--options", "../options.toml", "generate", "model.onnx", code=None)
        assert (result.exit_code, result.stdout, said in result.stderr) == (1, "", True), result.output


def test_a_prompt_is_an_argument_or_comes_through_a_pipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    said = "text needs a tokenizer"  # so it was taken for a prompt
    assert said in invoke("generate", "model.onnx", "Hello", code=None).stderr
    assert said in CliRunner().invoke(app, ["generate", "model.onnx"], input="Hello\n").stderr
    assert "nothing to continue" in CliRunner().invoke(app, ["generate", "model.onnx"], input="\n").stderr


@pytest.mark.parametrize(("typed", "same"), [("--device gpu", "--device cuda"), ("--device=gpu", "--device cuda")])
def test_names_of_other_tools_are_taken(typed: str, same: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    how = ["generate", "model.onnx", "--tokens", "1"]
    given, wanted = (invoke(*how, *words.split(), code=None) for words in (typed, same))
    assert (given.exit_code, given.stderr) == (wanted.exit_code, wanted.stderr) == (1, wanted.stderr)
