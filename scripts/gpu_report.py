"""The results of `scripts/gpu_check` as Markdown, for the README."""

from __future__ import annotations

from typing import Any


def table(part: dict[str, Any]) -> str:
    """Everything in one file of results."""
    gpu = part["gpu"]
    title = f"{part['backend']} {part['version']}" if part["version"] else "cache-update kernel"
    lines = [f"### {gpu['name']} (compute capability {gpu['compute_capability']}), {title}", ""]
    lines += _answers(part) + _measured(part) + _kernels(part) + _choice(part)
    for name in part:
        if name.endswith("_tests") or name == "sanitizer":
            counts = ", ".join(f"{part[name][k]} {k}" for k in ("passed", "failed", "skipped"))
            lines += [f"{name.replace('_', ' ').capitalize()}: {counts}.", ""]
    for step in part["steps"]:
        if step["status"] != "ok":
            last = step.get("ended_at") or (step.get("output", "").strip().splitlines() or [""])[-1]
            lines += [f"Step {step['step']}: {step['status']}{': ' + last if last else ''}", ""]
    return "\n".join(lines)


def _answers(part: dict[str, Any]) -> list[str]:
    answers = part.get("answers", {})
    lines = []
    runs = answers.get("runs", {})
    if "error" in runs:
        lines += [f"{part['backend']} does not run on this GPU. It says:", "", f"> {runs['error']}", ""]
    if answers:
        lines += ["| question | answer |", "| --- | --- |"]
        lines += [f"| {name.replace('_', ' ')} | {_answer(answer)} |" for name, answer in answers.items()]
        if part.get("asking"):
            lines += [f"| {part['asking'].replace('_', ' ')} | the process ended here |"]
        lines += [""]
    for engine in part.get("engines", []):
        said = engine.get("error") or f"opens in {engine['open_s']:.2f} s and runs"
        lines += [f"Built elsewhere, {engine['engine']}: {said}", ""]
    return lines


def _answer(answer: dict[str, Any]) -> str:
    more = {k: v for k, v in answer.items() if k not in ("yes", "error", "reported")}
    words = answer.get("error") or ", ".join(f"{k.replace('_', ' ')} {_short(v)}" for k, v in more.items())
    text = ("yes" if answer.get("yes") else "no") + (f": {words}" if words else "")
    return text.replace("|", "\\|")


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k} {_short(v)}" for k, v in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _measured(part: dict[str, Any]) -> list[str]:
    lines = []
    if part.get("decode"):
        copy = part["copy_gb_per_s"]
        lines += [f"Copy within the GPU: {copy:.0f} GB/s.", ""]
        lines += ["| decode: capacity | position | span | graphs | ms per token | at first | GB/s read | of a copy |"]
        lines += ["| ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |"]
        lines += [
            f"| {r['capacity']} | {r['position']} | {r['span']} | {'on' if r['graphs'] == 'on' else 'off'} | "
            f"{r['ms']:.3f} | {r['ms_at_first']:.1f} | {r['gb_per_s']:.0f} | {100 * r['gb_per_s'] / copy:.0f} % |"
            for r in part["decode"]
        ]
        lines += [""]
    if part.get("prefill"):
        lines += ["| prefill: capacity | tokens | ms | tokens/s |", "| ---: | ---: | ---: | ---: |"]
        lines += [
            f"| {r['capacity']} | {r['length']} | {r['ms']:.3f} | {r['tokens_per_s']:.0f} |" for r in part["prefill"]
        ]
        lines += [""]
    if part.get("batches"):
        lines += ["| batch: capacity | sequences | ms per step | tokens/s | ms, best tokens alone |"]
        lines += ["| ---: | ---: | ---: | ---: | ---: |"]
        lines += [
            f"| {r['capacity']} | {r['batch']} | {r['ms']:.3f} | {r['tokens_per_s']:.0f} | {r['ms_best']:.3f} |"
            for r in part["batches"]
        ]
        lines += [""]
    if part.get("weights"):
        lines += [
            "| batch of one: capacity | weights of decode | engine | ms per token |",
            "| ---: | --- | ---: | ---: |",
        ]
        lines += [
            f"| {r['capacity']} | {r['decode_weights']} | {r['engine_bytes'] / 1e6:.0f} MB | {r['ms']:.3f} |"
            for r in part["weights"]
        ]
        lines += [""]
    return lines


def _kernels(part: dict[str, Any]) -> list[str]:
    bench = part.get("bench")
    if bench is None:
        return []
    lines = [f"Copy within the GPU: {bench['copy_bytes_per_second'] / 1e9:.0f} GB/s; an empty kernel: "
             f"{bench['empty_kernel_us']:.2f} us.", ""]  # fmt: skip
    lines += ["| update of K and V | 4,096 tokens | of a copy | 1 token | over an empty kernel |"]
    lines += ["| --- | ---: | ---: | ---: | ---: |"]
    for k in (*bench["kernels"], *bench["peers"]):
        cells = (k["error"], "", "", "") if "error" in k else (
            f"{k['large_us']:.1f} us", f"{k['copy_ratio']:.0%}", f"{k['one_token_us']:.2f} us",
            f"{k['over_empty_us']:.2f} us",
        )  # fmt: skip
        lines += [f"| {k['name']} | {' | '.join(cells)} |"]
    if bench["targets"]:
        lines += ["", f"Targets: {', '.join(f'{k} {v}' for k, v in bench['targets'].items())}."]
    return [*lines, ""]


def _choice(part: dict[str, Any]) -> list[str]:
    if "choice" not in part:
        return []
    lines = ["| choice of tokens: scores | | vocabulary | batch | host ms | GPU ms | |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | --- |"]
    for row in part["choice"]["rows"]:
        cells = ("", "", "", "", "", row["error"]) if "error" in row else (
            row["way"], row["vocab"], row["batch"], f"{row['host_ms']:.3f}", f"{row['gpu_ms']:.3f}",
            "the same tokens" if row["same"] else "other tokens",
        )  # fmt: skip
        lines += [f"| {row['logits']} | {' | '.join(map(str, cells))} |"]
    return [*lines, ""]
