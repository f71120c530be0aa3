"""Attempts with hostile files. Each takes random numbers and an empty folder, and returns a word for the counts."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from decoders import write_decoder
from hostile import texts
from hostile.files import NO_FILES, damaged, edited
from hostile.held import LIMITS, Fell, refused, run
from hostile.models import SMALL, spoil, write_model
from runtime.tokenizers_in_code import byte_level
from sample_plans import sample_manifest, sample_plan

from trt_kvcache import DecodeSession, Tokenizer
from trt_kvcache.decoding import CpuOptions
from trt_kvcache.engine.manifest import encode_manifest
from trt_kvcache.files import identify


def models(rng: random.Random, folder: Path) -> str:
    """Models by `plan`, `rewrite`, `verify` and `generate`."""
    path = folder / "model.onnx"
    write_model(path, rng)
    way = spoil(path, rng)
    # A session runs a model until a signal ends it, see tests/cli/test_signals.py.
    command = rng.choice(["plan", "plan", "rewrite", "verify", *([] if "endless" in way else ["generate"])])
    if command == "generate":
        arguments = ["--tokens", "1,2,3", "--max-new-tokens", "3", "--capacity", "16"]
        arguments = arguments if rng.random() < 0.5 else arguments[:-2]
        run("generate", path, *arguments)
        return way
    capacity = ["--capacity", "16"] if rng.random() < 0.7 else []
    more = {"rewrite": ["-o", folder / "out" / "model.onnx"], "verify": ["--tokens", "2"], "plan": ["--json"]}[command]
    (folder / "out").mkdir()
    status, _ = run(command, path, *LIMITS, *capacity, *more)
    if command == "rewrite" and status and any((folder / "out").iterdir()):
        raise Fell("files are left")
    return way


def manifests(rng: random.Random, folder: Path) -> str:
    engine = folder / "model.engine"
    engine.write_bytes(b"engine" * 100)
    good = encode_manifest(sample_manifest(sample_plan(rng.choice([1, 2])), identify(engine)))
    place = folder / "model.engine.json"
    way = rng.choice(["edited", "damaged", "none"])
    if way == "edited":
        place.write_text(json.dumps(edited(rng, json.loads(good))))
    elif way == "damaged":
        place.write_bytes(damaged(rng, good))
    else:
        rng.choice(NO_FILES)(place)
    run("inspect", engine, *(["--json"] if rng.random() < 0.3 else []), passes=way in ("edited", "damaged"))
    return way


def caches(rng: random.Random, folder: Path) -> str:
    """Saved caches: refused, or what was saved."""
    model = write_decoder(folder / "model.onnx", SMALL)
    prompt = [rng.randrange(SMALL.vocab) for _ in range(rng.randint(1, 8))]
    with DecodeSession.open(model, max_batch=2, cpu=CpuOptions(threads=1)) as session:
        slot = session.cache.acquire()
        session.update({slot: prompt})
        session.cache.save(folder / "saved", [slot])
        wanted = session.update({slot: [1]})[slot]
        content = (folder / "saved").read_bytes()
        if rng.random() < 0.1:
            (folder / "saved").unlink()
            rng.choice(NO_FILES)(folder / "saved")
        elif rng.random() < 0.3:  # the metadata, which say lengths
            size = int.from_bytes(content[:8], "little")
            header = json.dumps(edited(rng, json.loads(content[8 : 8 + size]))).encode()
            (folder / "saved").write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
        else:
            (folder / "saved").write_bytes(damaged(rng, content))
        names = refused(lambda: session.cache.load(folder / "saved"))
        if names is None:
            if session.cache.slots != (slot,):
                raise Fell(f"slots after a refused file: {session.cache.slots}")
            return "refused"
        for name in names.values():
            if session.cache.tokens(name) != prompt or not np.array_equal(session.update({name: [1]})[name], wanted):
                raise Fell("another cache than was saved")
        return "loaded"


def configs(rng: random.Random, folder: Path) -> str:
    """Settings: roles, generation configs, those of tokenizers, genai_config.json."""
    model = folder / "model.onnx"
    write_decoder(model, SMALL)
    name = rng.choice(["roles.yaml", "generation_config.json", "tokenizer_config.json", "genai_config.json"])
    good: dict[str, Any] = {
        "generation_config.json": {"eos_token_id": [1, 2], "bos_token_id": 0, "suppress_tokens": [3], "top_p": 0.5},
        "tokenizer_config.json": {"eos_token": "</s>", "bos_token": {"content": "<s>"}, "chat_template": "{{ 1 }}"},
        "genai_config.json": {
            "model": {"decoder": {"filename": "model.onnx"}, "encoder": {"filename": "e.onnx"}, "eos_token_id": 2}
        },
    }
    if rng.random() < 0.15:
        rng.choice(NO_FILES)(folder / name)
    elif name == "roles.yaml":
        (folder / name).write_bytes(texts.roles(rng))
    else:
        (folder / name).write_text(json.dumps(edited(rng, good[name])))
    if name == "roles.yaml":
        run("plan", model, *LIMITS, "--config", folder / name)
    elif name == "tokenizer_config.json":
        byte_level().save(str(folder / "tokenizer.json"))
        made = refused(lambda: Tokenizer.load(folder))
        if made is not None:
            refused(lambda: made.render_chat([{"role": "user", "content": "hi"}]))
            refused(lambda: (made.eos_token_id, made.vocab_size))
    else:
        explicit = (
            ["--generation-config", folder / name] if name.startswith("generation") and rng.random() < 0.5 else []
        )
        run("generate", model, "--tokens", "1,2", "--max-new-tokens", "2", *explicit)
    return name
