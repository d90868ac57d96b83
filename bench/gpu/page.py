"""docs/results.md from the JSON files in bench/results/gpu: what was measured, and which claims of the paper were not.

    python -m bench.gpu.page                  writes docs/results.md

Reads ladder*.json (`bench.gpu.ladder`), rate*.json (`bench.gpu.rate`), roofline*.json (`bench.gpu.roofline`),
hazard*.json (`bench/gpu/hazard.py`), exchange*.json (`bench.gpu.exchange`), transformers*.json
(`bench.gpu.transformers_batching`) and findings.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.gpu import ladder_report, rate_report
from bench.gpu.cells import DECODE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

HOUSE: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = HOUSE / "bench" / "results" / "gpu"
PAGE: Final = HOUSE / "docs" / "results.md"

RATES: Final = "DeepEP: request rate end to end (7: RQ4)"
NOT_RUN: Final = (
    ("Makespan against SGLang (7: RQ2, RQ5)", "no other engine was installed on the host"),
    ("Eight and sixteen GPUs: EP8/ADP8, EP8/ADP2, two nodes (7: table 2, table 6)", "the host has two GPUs"),
    ("Checkpoints of 512 experts, the live training runs", "they are not public; the model here has random weights"),
    ("GSM8K exact answers, with and without multiplexing", "random weights answer nothing; equal tokens are tested"),
    (RATES, "the exchange alone has been measured"),
    ("Multi-token prediction", "not implemented"),
    ("Residency at 23 and 24 CTAs an SM (7: table 4)", "the hazard's occupier limits free SMs instead"),
)
"""The paper's claims that no file here speaks about, and why."""
UNLESS: Final = {RATES: "rate"}
"""Claims of these that files of a kind speak about, where there is one."""


def page(files: dict[str, dict[str, Any]], remarks: str = "") -> str:
    """The whole page; files by name. remarks: what people made of them, Markdown."""
    parts = [
        "# Results on GPUs",
        "",
        "Written by `python -m bench.gpu.page` from the files in `bench/results/gpu`; how they were measured is in"
        " [bench/gpu/README.md](../bench/gpu/README.md). Section numbers are the paper's.",
        "",
    ]
    made = {
        "exchange": partial(_experiments, "Two expert exchanges at once"),
        "hazard": partial(_experiments, "The hazard"),
        "ladder": _ladder,
        "rate": _rate,
        "roofline": _roofline,
        "transformers": _transformers,
    }
    for name, found in sorted(files.items()):
        kind = next((kind for kind in made if name.startswith(kind)), None)
        if kind is not None:
            parts += [*made[kind](name, found), ""]
    if len(parts) == 4:
        parts += ["Nothing has been measured yet.", ""]
    elif remarks:
        parts[4:4] = [remarks.strip(), ""]
    kinds = {name.partition("-")[0].partition(".")[0] for name in files}
    open_ = [[claim, why] for claim, why in NOT_RUN if UNLESS.get(claim) not in kinds]
    parts += ["## Claims of the paper that were not run", "", *_markdown([["claim", "why not"], *open_])]
    return "\n".join(parts) + "\n"


def _setting(found: dict[str, Any]) -> str:
    """What was measured, and where."""
    settings = found["settings"]
    world, shape, device = settings["world"], settings["shape"], settings["device"]
    return (
        f"World {world['size']}, ADP {world['adp']}, EP {world['ep']}{_cut(world)}{_sms(device)}; model"
        f" `{settings['model']}`, weights {device['weights']}{_plus(device['quantization'])};"
        f" {shape['fraction']:g} of the trace `{settings['trace']}`, lengths x {shape['length_scale']:g}, new tokens x"
        f" {shape.get('context_scale', 1):g} besides, {shape.get('turns') or 'all'} turns; {settings['rows']} rows and"
        f" {settings['prefill_tokens']} prefill tokens a replica. {_where(found.get('about', []))}"
    )


def _rate(name: str, found: dict[str, Any]) -> Iterator[str]:
    yield f"## Request rates over expert exchanges (`{name}`)"
    yield ""
    yield _setting(found)
    for weights in dict.fromkeys(group["weights"] for group in found["groups"]):
        words = rate_report.name_of(weights)
        yield from ("", f"### {words[0].upper()}{words[1:]}", "", "No added wait; medians [interquartile range].", "")
        yield from _markdown(rate_report.rows(found["groups"], weights))
    yield from ("", "### Ratios", "", "Of medians; `none` has collectives in place of an exchange.", "")
    yield from _markdown(rate_report.ratio_rows(found["ratios"]))


def _ladder(name: str, found: dict[str, Any]) -> Iterator[str]:
    yield f"## The ordering ladder (`{name}`)"
    yield ""
    yield _setting(found)
    for workload, wait in dict.fromkeys((group["workload"], group["wait"]) for group in found["groups"]):
        what = "Decode only" if workload == DECODE else "No added wait" if wait == 0 else f"Recorded waits x {wait:g}"
        yield from ("", f"### {what}", "", "Medians [interquartile range]; totals in ms a rank.", "")
        yield from _markdown(ladder_report.rows(found["groups"], workload, wait))
    yield from ("", "### Aims", "", f"The best span at no wait: `{found['best']}`.", "")
    yield from _markdown(ladder_report.aim_rows(found["aims"]))


def _roofline(name: str, found: dict[str, Any]) -> Iterator[str]:
    peak, decode, prefill = found["peaks"], found["decode"], found["prefill"]
    yield f"## Against the device's own limits (`{name}`)"
    yield ""
    yield (
        f"Measured in the same minute: a copy moves {peak['bytes_s'] / 1e12:.2f} TB/s, a bfloat16 product of"
        f" 8192 x 8192 does {peak['flops_s'] / 1e12:.0f} TFLOP/s. {_where([found.get('about', {})])}"
    )
    yield ""
    yield from _markdown(
        [
            ["what", "time", "share of the limit", "aim"],
            [
                f"decode iteration, {decode['rows']} rows, {decode['bytes'] / 1e9:.1f} GB",
                f"{decode['device_s'] * 1e3:.2f} ms",
                f"{found['ratios']['decode_of_bandwidth']:.2f}",
                "0.60",
            ],
            [
                "the same, from start to start",
                f"{decode['step_s'] * 1e3:.2f} ms",
                f"{found['ratios']['decode_step_of_bandwidth']:.2f}",
                "-",
            ],
            [
                f"prefill of {prefill['tokens']} tokens, {prefill['flops'] / 1e12:.1f} TFLOP",
                f"{prefill['device_s'] * 1e3:.1f} ms",
                f"{found['ratios']['prefill_of_matmul']:.2f}",
                "0.50",
            ],
        ]
    )


def _transformers(name: str, found: dict[str, Any]) -> Iterator[str]:
    asked, ours = found["arguments"], found["ours"]
    yield f"## Against transformers' continuous batching (`{name}`)"
    yield ""
    yield (
        f"GPUs of one host, the same configuration and load: {asked['rows']} prompts of {asked['context']} tokens,"
        f" {asked['tokens']} tokens each, prefills included. transformers {found['version']} with"
        f" `{found['attention']}` attention: {found['output_tokens_s']:,.0f} output tokens/s, the best of"
        f" {len(found['seconds']) - 1} runs; Turnstile: {ours:,.0f}, one run"
        f" ({ours / found['output_tokens_s']:.1f} times)."
    )


def _experiments(title: str, name: str, found: dict[str, Any]) -> Iterator[str]:
    yield f"## {title} (`{name}`)"
    yield ""
    experiments = found.get("experiments", found)
    lines = [["experiment", "as expected", "what was seen"]]
    for title, each in experiments.items():
        if isinstance(each, dict):
            seen = {key: value for key, value in each.items() if isinstance(value, int | float | str | bool)}
            expected = seen.pop("ok", seen.pop("expected", "-"))
            told = [str(seen.pop("say"))] if "say" in seen else []
            lines.append([title, str(expected), ", ".join(told + [f"{key} {value}" for key, value in seen.items()])])
    yield from _markdown(lines)


def _cut(world: dict[str, Any]) -> str:
    cut = world.get("cut", "layer")
    return "" if cut == "layer" else f", boundaries at each {cut}"


def _sms(device: dict[str, Any]) -> str:
    return f", prefill on {device['prefill_sms']} SMs" if device.get("prefill_sms") else ""


def _plus(quantization: str | None) -> str:
    return f", {quantization}" if quantization else ""


def _where(abouts: Iterable[dict[str, Any]]) -> str:
    for about in abouts:
        versions, gpus = about.get("versions", {}), about.get("gpus") or ["CPU"]
        software = ", ".join(f"{key} {value}" for key, value in versions.items() if key in ("python", "torch"))
        commit = f", commit {about['commit'][:12]}" if about.get("commit") else ""
        return f"{len(gpus)} x {gpus[0]}; {software}; {about.get('started', '')}{commit}."
    return ""


def _markdown(lines: Sequence[Sequence[str]]) -> list[str]:
    head, *body = [[word.replace("|", "\\|") for word in line] for line in lines]
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body)]


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The results in a folder, by file name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def findings(folder: Path) -> str:
    """What people made of them; "" where nothing is written."""
    path = folder / "findings.md"
    return path.read_text() if path.is_file() else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page."""
    made = argparse.ArgumentParser(prog="python -m bench.gpu.page")
    made.add_argument("--results", type=Path, default=RESULTS)
    made.add_argument("--out", type=Path, default=PAGE)
    given = made.parse_args(argv)
    given.out.write_text(page(read(given.results), findings(given.results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
