"""Statistics of a serving core, as Prometheus reads them. Names have vLLM's stems."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["Metrics"]

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0)


class Metrics:
    """Counts of a core. Times are in seconds.

    Args:
        model: name of the model, a label of each number.
        running, waiting, usage: asked when the metrics are read.

    Attributes:
        prompt_tokens, tokens: counters of tokens of prompts and of answers.
        first_token: from the arrival of a request to the first token of each of its sequences.
        between_tokens: from one token of a sequence to its next.
    """

    def __init__(
        self, model: str, running: Callable[[], int], waiting: Callable[[], int], usage: Callable[[], float]
    ) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        gauges: tuple[tuple[str, str, Callable[[], float]], ...] = (
            ("num_requests_running", "Sequences that have a row of the caches.", running),
            ("num_requests_waiting", "Sequences that wait for a row.", waiting),
            ("kv_cache_usage_perc", "Part of the caches that holds tokens; 1 is all.", usage),
        )
        for name, text, ask in gauges:
            Gauge(_name(name), text, ["model_name"], registry=self._registry).labels(model).set_function(ask)
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.tokens = self._counter("generation_tokens", "Tokens generated.")
        self.first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _FIRST)
        self.between_tokens = self._histogram("inter_token_latency_seconds", "One token to the next.", _BETWEEN)
        self._whole = self._histogram("e2e_request_latency_seconds", "Arrival to end of a sequence.", _WHOLE)
        self._ended = Counter(
            _name("request_success"), "Sequences ended.", ["model_name", "finished_reason"], registry=self._registry
        )

    def finished(self, reason: str, seconds: float) -> None:
        """Count the end of a sequence, so long after its request came."""
        self._ended.labels(self._model, reason).inc()
        self._whole.observe(seconds)

    def text(self) -> bytes:
        """All numbers in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(_name(name), text, ["model_name"], registry=self._registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(_name(name), text, ["model_name"], registry=self._registry, buckets=buckets)
        return histogram.labels(self._model)


def _name(stem: str) -> str:
    return f"trt_kvcache:{stem}"
