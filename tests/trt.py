"""Parse and build with TensorRT for RTX directly: no rewriting, no child process, TensorRT's own words kept."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import tensorrt_rtx as trt

Ranges = Mapping[str, tuple[int, int, int]]
DEFAULT_RANGE = (1, 2, 4)
"""Minimum, optimum and maximum of a dynamic dimension that `build` is told nothing about."""


class Log(trt.ILogger):
    """Keeps what TensorRT reports as an error."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.errors: list[str] = []

    def log(self, severity: trt.ILogger.Severity, message: str) -> None:
        if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
            self.errors.append(message)


@dataclass
class Parsed:
    """A parsed network. The builder and the parser are kept because the network lives only as long as they do."""

    log: Log
    builder: trt.Builder
    network: trt.INetworkDefinition
    parser: trt.OnnxParser
    ok: bool
    words: str

    def layers(self, kind: trt.LayerType) -> list[Any]:
        """All layers of one type, cast to the class that has their own properties."""
        classes = {
            trt.LayerType.ATTENTION_INPUT: trt.IAttentionInputLayer,
            trt.LayerType.KV_CACHE_UPDATE: trt.IKVCacheUpdateLayer,
        }
        found = [layer for i in range(self.network.num_layers) if (layer := self.network.get_layer(i)).type == kind]
        for layer in found:
            layer.__class__ = classes.get(kind, layer.__class__)
        return found

    def attentions(self) -> list[trt.IAttention]:
        return [layer.attention for layer in self.layers(trt.LayerType.ATTENTION_INPUT)]

    def updates(self) -> list[trt.IKVCacheUpdateLayer]:
        """Every cache update layer in the network."""
        return self.layers(trt.LayerType.KV_CACHE_UPDATE)


@dataclass(frozen=True)
class Outcome:
    """The end of a model's way: ``stage`` is ``"parse"`` or ``"build"`` for a failure there, else ``"built"``."""

    stage: str
    words: str = ""
    size: int = 0

    def __str__(self) -> str:
        return self.stage if self.stage == "built" else f"{self.stage}: {self.words}"


def parse(model: onnx.ModelProto | bytes, path: str = "") -> Parsed:
    """Parse `model`; external data is looked up in the folder of `path`."""
    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    ok = parser.parse(model if isinstance(model, bytes) else model.SerializeToString(), path)
    words = "\n".join(parser.get_error(i).desc() for i in range(parser.num_errors))
    return Parsed(log, builder, network, parser, ok, words)


def build(
    model: onnx.ModelProto | bytes,
    ranges: Ranges | Sequence[Ranges] | None = None,
    patch: Callable[[trt.INetworkDefinition], object] | None = None,
    path: str = "",
) -> Outcome:
    """Parse and build `model`. `ranges` gives (min, opt, max) per symbol of a dynamic dimension; several: profiles."""
    parsed = parse(model, path)
    if not parsed.ok:
        return Outcome("parse", parsed.words)
    if patch is not None:
        patch(parsed.network)
    return build_parsed(parsed, ranges)


def build_parsed(parsed: Parsed, ranges: Ranges | Sequence[Ranges] | None = None) -> Outcome:
    """Build a parsed network with one profile per mapping of `ranges`."""
    config = parsed.builder.create_builder_config()
    for profile in ranges if isinstance(ranges, Sequence) else [ranges or {}]:
        _add_profile(parsed, config, profile)
    engine = parsed.builder.build_serialized_network(parsed.network, config)
    if engine is None:
        return Outcome("build", "\n".join(parsed.log.errors))
    return Outcome("built", size=engine.nbytes)


def _add_profile(parsed: Parsed, config: trt.IBuilderConfig, ranges: Ranges) -> None:
    profile = parsed.builder.create_optimization_profile()
    dynamic = False
    for i in range(parsed.network.num_inputs):
        tensor = parsed.network.get_input(i)
        if -1 not in tuple(tensor.shape):
            continue
        dynamic = True
        names = [tensor.get_dimension_name(axis) for axis in range(len(tensor.shape))]
        dims = [
            (size, size, size) if size != -1 else ranges.get(name, DEFAULT_RANGE)
            for size, name in zip(tensor.shape, names, strict=True)
        ]
        profile.set_shape(tensor.name, *(tuple(d[k] for d in dims) for k in range(3)))
    if dynamic:
        config.add_optimization_profile(profile)


def decomposable(network: trt.INetworkDefinition) -> None:
    """Let TensorRT split every attention that no fused kernel covers."""
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True
