"""The plugin in TensorRT's real registry: types, shapes, aliases, launches and refusals, with the real bindings.

What the builder would do is stood in for (see describe_operators.py); the bindings, their checks and the registry are
TensorRT's own.
"""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from real_bindings import NEWEST, OLDEST, ask

from trt_kvcache.importer.cache_plan import UpdateForm, UpdateMode
from trt_kvcache.plugins.operators import OPERATORS, Operator
from trt_kvcache.plugins.spec import arguments

SCRIPT = Path(__file__).with_name("describe_operators.py")
SIZES = {"B": 3, "S": 5, "T": 11, "B1": 4}
PACKED = UpdateForm.PACKED_NHD

Input = tuple[str, list[Any]]


def inputs_of(
    operator: Operator,
    dtype: str = "int8",
    source: str = "float16",
    index: str = "int64",
    scales: int = 4,
    heads: int = 4,
) -> list[Input]:
    """Inputs of a layer with open batch and update length: head sizes 64 and 32, capacity 128."""
    made: list[Input] = []
    for name in operator.inputs:
        kind, _, i = name.rpartition("_")
        size = 64 if i == "0" else 32
        update = source if operator.quantized else dtype
        shapes: dict[str, Input] = {
            "cache": (dtype, ["B", heads, 128, size]),
            "update": (update, ["T", heads, size] if operator.form is PACKED else ["B", heads, "S", size]),
            "write": (index, ["B"]),
            "scale": ("float", [scales]),
        }
        made.append(shapes[kind] if kind else (index, ["B1" if operator.form is PACKED else "B"]))
    return made


def case(operator: Operator, **options: Any) -> dict[str, Any]:
    return {"name": operator.name, "inputs": inputs_of(operator, **options)}


def value(expression: str | int) -> int:
    """An expression of the stand-in builder, for `SIZES`."""
    return int(eval(str(expression), {}, dict(SIZES)))


class Answers:
    """One process's answers, each asked once."""

    def __init__(self, folder: Path, version: str, aliases: bool) -> None:
        self.cases = [case(o) for o in OPERATORS.values()]
        question = {"declare_aliases": aliases, "cases": self.cases}
        self.all = ask(version, SCRIPT, question, folder)
        self.by_name = {c["name"]: a for c, a in zip(self.cases, self.all["cases"], strict=True)}


@pytest.fixture(scope="module", params=itertools.product((OLDEST, NEWEST), (False, True)), ids=str)
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    version, aliases = request.param
    made = Answers(tmp_path_factory.mktemp("stubs"), version, aliases)
    assert made.all["version"] == version
    return made


@pytest.mark.few(2)
def test_every_operator_is_in_the_registry(answers: Answers) -> None:
    assert answers.all["registered"] == list(OPERATORS)
    assert len(OPERATORS) == 16
    assert "already registered in this process" in answers.all["again"]


def test_operators_are_described(answers: Answers) -> None:
    """Outputs are like their caches; there are no attributes to get in a wrong order."""
    for name, operator in OPERATORS.items():
        answer = answers.by_name[name]
        assert "error" not in answer, answer
        assert answer["fields"] == 0
        assert answer["types"] == ["int8"] * operator.caches
        assert answer["outputs"] == len(answer["types"])
        shapes = [[value(d) for d in s] for s in answer["shapes"]]
        assert shapes == [[3, 4, 128, 64], [3, 4, 128, 32]][: operator.caches]
        assert answer["formats"] == ["TensorFormat.LINEAR"]
        assert answer["io_types"] == [dtype for dtype, _ in inputs_of(operator)] + answer["types"]
        assert answer["tactics"] == []
        assert answer["serialized"] == 0


def test_aliases_are_declared_as_asked(answers: Answers, request: pytest.FixtureRequest) -> None:
    _, declared = request.node.callspec.params["answers"]
    for name, operator in OPERATORS.items():
        expected = {str(i): i if declared and i < operator.caches else -1 for i in range(len(operator.outputs))}
        assert answers.by_name[name]["aliases"] == expected


def test_launches(answers: Answers) -> None:
    """One kernel per operator, int32 extra arguments in the kernel's order, a grid sized to the update."""
    for name, operator in OPERATORS.items():
        answer = answers.by_name[name]
        types = {n: t for n, (t, _) in zip(operator.inputs, inputs_of(operator), strict=True)}
        config = operator.config(types, per_head=True)
        assert answer["kernel"] == config.name
        assert answer["ptx"] == f"// {config.name}"
        names = arguments(config).scalars
        scalars = {n: value(v) for n, (v, _) in zip(names, answer["scalars"], strict=True)}
        assert {kind for _, kind in answer["scalars"]} == {"SymInt32"}
        packed = operator.form is PACKED
        expected = {
            "batch": 3, "heads": 4, "capacity": 128, "length": 11 if packed else 5,
            "row_bytes_0": 64, "row_bytes_1": 32, "index_bytes": 8, "length_bytes": 8, "scale_step": 1,
        }  # fmt: skip
        assert scalars == {n: expected[n] for n in names}
        launch = {n: value(v) for n, (v, _) in answer["launch"].items()}
        assert launch["grid_x"] >= operator.caches
        assert launch["grid_x"] % operator.caches == 0
        assert launch["block_x"] % 32 == 0
        assert {n: v for n, v in launch.items() if n not in ("grid_x", "block_x")} == {
            "grid_y": 1, "grid_z": 1, "block_y": 1, "block_z": 1, "shared_mem": 0
        }  # fmt: skip
        assert re.search("T" if packed else "B.*S", str(answer["launch"]["grid_x"][0])), "a grid sized to the update"
        assert isinstance(answer["launch"]["block_x"][0], int)


PLAIN, QUANTIZED = Operator(), Operator(quantized=True)
PAIR = Operator(mode=UpdateMode.CIRCULAR, caches=2)
RAGGED, QUANTIZED_PAIR = Operator(PACKED), Operator(caches=2, quantized=True)


def replaced(operator: Operator, index: int, change: Input, **options: Any) -> dict[str, Any]:
    made = case(operator, **options)
    made["inputs"][index] = change
    return made


REFUSED = {
    "cache_0 has 3 dimensions; it must have 4": replaced(PLAIN, 0, ("int8", ["B", 128, 256])),
    "update_0 has 3 dimensions; it must have 4": replaced(PLAIN, 1, ("int8", ["T", 4, 64])),
    "write_indices has 2 dimensions; it must have 1": replaced(PLAIN, 2, ("int64", ["B", 1])),
    "update_0 is float16 and cache_0 int8; they must have one type": replaced(PLAIN, 1, ("float16", ["B", 4, "S", 64])),
    "write_indices is float; expected int32 or int64": case(PLAIN, index="float"),
    "the two caches differ in type, int8 and float8e4m3fn": {
        "name": PAIR.name,
        "inputs": [
            (("int8", "float8e4m3fn")[i % 2], shape) if i < 4 else (dtype, shape)
            for i, (dtype, shape) in enumerate(inputs_of(PAIR))
        ],
    },
    "cache_0 is uint8; expected one of float, float16,": case(PLAIN, dtype="uint8"),
    "cache_0 is bool; expected one of float, float16,": case(PLAIN, dtype="bool"),
    "quantization from 'int32'": case(QUANTIZED, source="int32"),
    "quantization to 'float16'": case(QUANTIZED, dtype="float16"),
    "scale_0 has 3 values; it must have 1, or one for each of the 4 heads": case(QUANTIZED, scales=3),
    "scale_0 is float16; scales are float32": replaced(QUANTIZED, 3, ("float16", [4])),
    "hold 63 elements of 4 bits and do not end at a full byte": {
        "name": PLAIN.name,
        "inputs": [("int4", ["B", 4, 128, 63]), ("int4", ["B", 4, "S", 63]), ("int64", ["B"])],
    },
    "hold ? elements of 4 bits and do not end at a full byte": {
        "name": PLAIN.name,
        "inputs": [("int4", ["B", 4, 128, "H"]), ("int4", ["B", 4, "S", "H"]), ("int64", ["B"])],
    },
    # The kernel has the sizes of the cache only: whatever disagrees would be read beyond its end.
    "update_0 is [?, 8, ?, 64] and cache_0 is [?, 4, 128, 64]; they must be [B, N, S_new, H_0] and [B, N, S_max,": (
        replaced(PLAIN, 1, ("int8", ["B", 8, "S", 64]))
    ),
    "update_0 is [?, 4, 32] and cache_0 is [?, 4, 128, 64]; they must be [T, N, H_0]": (
        replaced(RAGGED, 1, ("int8", ["T", 4, 32]))
    ),
    "cache_1 is [?, 4, 64, 32] and cache_0 is [?, 4, 128, 64]": replaced(PAIR, 1, ("int8", ["B", 4, 64, 32])),
    "update_1 is [?, 4, 3, 32] and update_0 is [?, 4, 2, 64]": {
        "name": PAIR.name,
        "inputs": [(d, [{"S": 2 + (i == 3)}.get(n, n) for n in s]) for i, (d, s) in enumerate(inputs_of(PAIR))],
    },
    "write_indices is [2] and cache_0 is [3, 4, 128, 64]; they must be [B] and": {
        "name": PLAIN.name,
        "inputs": [("int8", [3, 4, 128, 64]), ("int8", [3, 4, "S", 64]), ("int64", [2])],
    },
    "lengths is [3] and cache_0 is [3, 4, 128, 64]; they must be [B + 1] and": {
        "name": RAGGED.name,
        "inputs": [("int8", [3, 4, 128, 64]), ("int8", ["T", 4, 64]), ("int64", [3]), ("int64", [3])],
    },
    "the scales of the two caches have 4 and 1 values; both must have the same number": replaced(
        QUANTIZED_PAIR, 6, ("float", [1])
    ),
    # One scale or several is decided when the engine is built.
    "the number of values in scale_0 must be fixed, but one of them is dynamic": replaced(
        QUANTIZED, 3, ("float", ["K"])
    ),
    "the number of heads and the number of values in scale_0 must be fixed": {
        "name": QUANTIZED.name,
        "inputs": [("int8", ["B", "N", 128, 64]), ("float16", ["B", "N", "S", 64]), ("int64", ["B"]), ("float", [4])],
    },
}


def test_what_no_kernel_takes_is_refused_by_name(tmp_path: Path) -> None:
    answer = ask(NEWEST, SCRIPT, {"declare_aliases": False, "cases": list(REFUSED.values())}, tmp_path)
    for words, given, found in zip(REFUSED, REFUSED.values(), answer["cases"], strict=True):
        assert found.get("error", "").startswith((f"{given['name']}: ", "quantization ")), (words, found)
        assert words in found["error"]
    assert not answer["compiled"]
    assert answer["refused"] == [found["error"] for found in answer["cases"]]


DTYPES = {
    "float": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8e4m3fn": 1, "int32": 4, "int64": 8, "int4": 0.5,
    "float4e2m1": 0.5,
}  # fmt: skip


def test_every_type_is_moved_as_bytes(tmp_path: Path) -> None:
    cases = [case(PLAIN, dtype=dtype, index="int32") for dtype in DTYPES]
    answer = ask(NEWEST, SCRIPT, {"declare_aliases": False, "cases": cases}, tmp_path)
    kernels = set()
    for dtype, found in zip(DTYPES, answer["cases"], strict=True):
        assert "error" not in found, found
        assert found["types"] == [dtype]
        scalars = [v for v, _ in found["scalars"]]
        assert scalars[4] == 64 * DTYPES[dtype]
        assert scalars[5] == 4
        kernels.add(found["kernel"])
    assert len(kernels) == 1


def test_scales_per_tensor(tmp_path: Path) -> None:
    cases = [case(QUANTIZED, scales=1), case(QUANTIZED, scales=4), case(QUANTIZED, scales=1, heads=1)]
    answer = ask(NEWEST, SCRIPT, {"declare_aliases": False, "cases": cases}, tmp_path)
    steps = [found["scalars"][-1][0] for found in answer["cases"]]
    assert steps == [0, 1, 0]


@pytest.mark.slow
def test_arguments_arrive_in_the_order_of_the_compiled_kernel(tmp_path: Path) -> None:
    """TensorRT passes input pointers, int32 arguments, output pointers: the parameters of the PTX's entry are those."""
    cases = [case(o) for o in OPERATORS.values() if o.mode is UpdateMode.CIRCULAR]
    question = {"declare_aliases": False, "cases": cases, "arch": "sm_90"}
    answer = ask(NEWEST, SCRIPT, question, tmp_path)
    for given, found in zip(cases, answer["cases"], strict=True):
        assert "error" not in found, found
        operator = OPERATORS[given["name"]]
        (entry,) = re.findall(rf"\.entry {found['kernel']}\((.*?)\)", found["ptx"], re.DOTALL)
        kinds = re.findall(r"\.param \.([a-z]\d+)", entry)
        pointers, scalars = len(operator.inputs), len(found["scalars"])
        assert kinds == ["u64"] * pointers + ["u32"] * scalars + ["u64"] * len(operator.outputs)
