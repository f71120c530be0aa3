"""The model that a request names chooses the adapter; clients load and unload adapters where they may."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="Starlette is not installed (extra: serve)")
pytest.importorskip("prometheus_client", reason="prometheus-client is not installed (extra: serve)")

from adapters import Tiny, draw
from commands import invoke
from serve.asgi import Reply, ask

from trt_kvcache import DecodeSession, PlanOptions
from trt_kvcache.serve.service import Service

PROMPT, COUNT = [5, 17, 33, 70, 91], 6
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    tiny = Tiny("mobius/llama_dynamic_f32")
    for seed, name in enumerate(("ann", "bob")):
        tiny.merged(draw(tiny, folder / name, seed), folder / f"{name}.merged" / "model.onnx")
    draw(tiny, folder / "wide", 3, rank=9)
    draw(tiny, folder / "cut", 4)
    (folder / "cut" / "adapter_config.json").write_bytes(b'{"peft_type": "LO')
    return folder


@pytest.fixture(scope="module")
def model() -> Path:
    return Tiny("mobius/llama_dynamic_f32").path


def tokens_of(model: Path) -> list[int]:
    with DecodeSession.open(model, tokenizer=False, capacity=64) as session:
        return session.generate(PROMPT, max_new_tokens=COUNT, eos_token_id=()).tokens


@pytest.fixture(scope="module")
def wanted(folder: Path, model: Path) -> dict[str, list[int]]:
    names = ("ann", "bob")
    return {"tiny": tokens_of(model), **{name: tokens_of(folder / f"{name}.merged" / "model.onnx") for name in names}}


@pytest.fixture
def service(folder: Path, model: Path) -> Iterator[Service]:
    options = PlanOptions(capacity=64, lora_rank=4, lora_slots=1)
    with DecodeSession.open(model, tokenizer=False, adapters={"ann": folder / "ann"}, plan_options=options) as session:
        service = Service(session, "tiny", lora_folder=folder)
        yield service
        service.core.close()
        assert not session.cache.slots


def post(service: Service, body: Any, path: str = "/v1/completions", **how: Any) -> Reply:
    return asyncio.run(ask(service.app, path, body, **how))


def asked(name: str, **more: Any) -> dict[str, Any]:
    fields = {"prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": name, **fields, **more}


def test_the_model_chooses_the_adapter(service: Service, wanted: dict[str, list[int]]) -> None:
    for name in ("tiny", "ann"):
        answer = post(service, asked(name)).data
        assert answer["model"] == name
        assert answer["choices"][0]["token_ids"] == wanted[name]
    chunks = post(service, asked("ann", stream=True)).chunks
    assert {chunk["model"] for chunk in chunks} == {"ann"}
    refused = post(service, asked("bob"))
    assert (refused.status, refused.error["code"]) == (404, "model_not_found")
    assert refused.error["message"] == "there is no model 'bob'; this is 'tiny', with adapters 'ann'"


def test_models_list_adapters(service: Service) -> None:
    cards = post(service, None, "/v1/models").data["data"]
    assert [(card["id"], card.get("parent")) for card in cards] == [("tiny", None), ("ann", "tiny")]
    assert post(service, None, "/v1/models/ann").data["parent"] == "tiny"
    assert post(service, None, "/v1/models/bob").status == 404


def test_adapters_come_and_go(service: Service, wanted: dict[str, list[int]]) -> None:
    card = post(service, {"lora_name": "second", "lora_path": "bob"}, LOAD).data
    assert (card["id"], card["parent"]) == ("second", "tiny")
    assert post(service, asked("second")).data["choices"][0]["token_ids"] == wanted["bob"]
    assert post(service, {"lora_name": "second"}, UNLOAD).data["deleted"]
    assert post(service, asked("second")).status == 404
    assert post(service, {"lora_name": "second"}, UNLOAD).status == 404


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"lora_name": "x", "lora_path": "../.."}, 403, "adapters come from the server's own folder"),
        ({"lora_name": "x", "lora_path": "/etc"}, 403, "adapters come from the server's own folder"),
        ({"lora_name": "x", "lora_path": "\0"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "cut"}, 400, "adapter_config.json is not JSON"),
        ({"lora_name": "x", "lora_path": "x" * 300}, 400, "lora_path: no such folder"),
        ({"lora_name": "none"}, 400, "lora_path: no such folder"),
        ({"lora_name": "ann.merged"}, 400, "there is no adapter_config.json"),
        ({"lora_name": "wide"}, 400, "has a rank of 9, but the model takes a rank of at most 4"),
        ({"lora_name": "tiny", "lora_path": "ann"}, 400, "'tiny' is the model itself; give another name"),
        ({"lora_path": "ann"}, 400, "missing required field `lora_name`"),
        ({"lora_name": ""}, 400, "lora_name"),
    ],
)
def test_what_is_not_loaded(body: dict[str, Any], status: int, words: str, service: Service) -> None:
    refused = post(service, body, LOAD)
    assert refused.status == status
    assert words in refused.error["message"]
    assert "\n" not in refused.error["message"]
    assert post(service, asked("ann")).status == 200


def test_clients_may_load_nothing_unless_asked_for(folder: Path, model: Path) -> None:
    with DecodeSession.open(model, tokenizer=False, adapters={"ann": folder / "ann"}, capacity=64) as session:
        service = Service(session, "tiny")
        for path in (LOAD, UNLOAD):
            assert post(service, {"lora_name": "ann"}, path).status == 404
        service.core.close()


def test_rows_of_a_batch_name_their_adapter(
    folder: Path, model: Path, wanted: dict[str, list[int]], tmp_path: Path
) -> None:
    names = ("ann", "tiny", "bob", "ann", "cid")
    rows = [{"id": i, **asked(name)} for i, name in enumerate(names)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "answers.jsonl"
    command = [
        "batch",
        str(model),
        str(tmp_path / "rows.jsonl"),
        "-o",
        str(output),
        "--name",
        "tiny",
        "--capacity",
        "64",
    ]
    adapters = ["--lora", f"ann={folder / 'ann'}", "--lora", f"bob={folder / 'bob'}"]
    invoke(*command, *adapters)
    answers = [json.loads(line)["response"] for line in output.read_text().splitlines()]
    assert [answer["status_code"] for answer in answers] == [200] * 4 + [404]
    for name, answer in zip(names[:4], answers, strict=False):
        assert answer["body"]["model"] == name
        assert answer["body"]["choices"][0]["token_ids"] == wanted[name]


def test_a_journal_belongs_to_the_adapters(folder: Path, model: Path, tmp_path: Path) -> None:
    from trt_kvcache.serve.batch_job import RowRunner

    made = []
    for adapters in ({}, {"x": folder / "ann"}, {"x": folder / "bob"}, {"y": folder / "ann"}, {"x": folder / "ann"}):
        options = PlanOptions(capacity=64, lora_rank=4)
        with DecodeSession.open(model, tokenizer=False, adapters=adapters, plan_options=options) as session:
            runner = RowRunner(session, "tiny")
            made.append(runner.model)
            runner.close()
    assert made[1] == made[4]
    assert len(set(made)) == 4


def test_commands(folder: Path, model: Path, wanted: dict[str, list[int]]) -> None:
    prompt = ["--tokens", ",".join(map(str, PROMPT)), "--max-new-tokens", str(COUNT), "--ignore-eos", "--json"]
    for given in (str(folder / "ann"), f"x={folder / 'ann'}"):
        done = invoke("generate", model, *prompt, "--adapter", given)
        assert json.loads(done.stdout)["sequences"][0]["tokens"] == wanted["ann"]
    done = invoke("plan", model, "--capacity", "64", "--adapter", folder / "ann", code=None)
    assert "8 slots of rank 4 beside the model itself, in 14 products" in " ".join(done.stdout.split())
