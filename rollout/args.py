"""The arguments of `turnstile rollout` and `turnstile compare`, and their defaults. Loads neither torch nor uvloop."""

from __future__ import annotations

import argparse
import difflib
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from kernel.errors import UsageError
from kernel.exchange.choose import CHOICES
from kernel.sched.policy import MOST_ROWS
from kernel.topology import CUTS, GATHERS, ROUTES, World
from models.config import DTYPES
from rollout.device import ATTENTIONS, DEVICES, LAUNCH_ORDERS, MODULES, QUANTIZATIONS, WEIGHTS, DeviceOptions
from rollout.ranks.pulse import RANK_TIMEOUT_S
from rollout.stall import STALL_TIMEOUT_S
from rollout.trace.read import PAPER_TRACE
from rollout.trace.shape import Shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROLLOUT: Final = "rollout"
COMPARE: Final = "compare"
COMPARED: Final = ("normal", "global_complete", "global_enqueue", "fine", "adaptive")
TINY: Final = "tiny"

DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **asdict(World()),
        "policy": None,
        "span": None,
        "model": TINY,
        "trace": PAPER_TRACE,
        "fraction": 1.0,
        "turns": None,
        "length_scale": 1.0,
        "time_scale": 1.0,
        "seed": 0,
        "repeat": 1,
        "max_concurrency": None,
        **asdict(DeviceOptions()),
        "kv_tokens": None,
        "prefill_tokens": 512,
        "rows": 64,
        "out": None,
        "resume": False,
        "live_check": False,
        "abort_on_cycle": False,
        "stall_timeout": STALL_TIMEOUT_S,
        "rank_timeout": RANK_TIMEOUT_S,
        "json": False,
        "demo": False,
    }
)
DEMO: Final[Mapping[str, Any]] = MappingProxyType(
    {
        # The paper's crossed shape (section 2) at the size of a laptop: 16 conversations, 64 turns, at most 81 new
        # tokens and 17 more of context each, so that a policy takes a few hundred decode iterations.
        "size": 4,
        "adp": 2,
        "ep": 4,
        "fraction": 0.125,
        "turns": 4,
        "length_scale": 0.05,
        "time_scale": 0.01,
        "prefill_tokens": 128,
    }
)


@dataclass(frozen=True, slots=True)
class Options:
    """What one command was asked to do, checked. `model` is a checkpoint directory or `tiny`."""

    command: str
    world: World
    policies: tuple[str, ...]
    model: str
    trace: str
    shape: Shape
    repeat: int
    max_concurrency: int | None
    device: DeviceOptions
    kv_tokens: int | None
    prefill_tokens: int
    rows: int
    out: Path | None
    resume: bool
    live_check: bool
    abort_on_cycle: bool
    stall_timeout: float
    rank_timeout: float
    json: bool


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line and an exception."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message}; see `{self.prog} --help`")

    def parse(self, argv: Sequence[str]) -> dict[str, Any]:
        """The arguments that were given, by name. Raises UsageError, with the nearest flags for an unknown one."""
        known, unknown = self.parse_known_args(argv)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
            near = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"see `{self.prog} --help`"
            raise UsageError(f"unknown argument {unknown[0]!r}: {hint}")
        return vars(known)


def parser(command: str) -> Parser:
    """The parser of `turnstile rollout` or `turnstile compare`; arguments that are not given leave no trace in it."""
    about = {
        ROLLOUT: "Replay a trace of multi-turn trajectories on real ranks and report what it took.",
        COMPARE: "Replay the same trace under several scheduling policies, on ranks that stay up, side by side.",
    }
    made = Parser(
        prog=f"turnstile {command}",
        description=about[command],
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        epilog="Exit codes: 0 done, 1 the run failed, 2 unusable input, 130 interrupted, by Ctrl-C, SIGTERM or SIGHUP"
        " (what is done is kept).",
    )
    _ranks(made)
    _device(made)
    _policies(made, command)
    _workload(made)
    _engine(made)
    output = made.add_argument_group("output")
    output.add_argument(
        "--out", type=_directory, metavar="DIR", help="directory of the run (default: runs/<UTC time>)"
    )
    output.add_argument(
        "--resume", action="store_true", help="go on with the unfinished run in --out DIR: what is finished stays"
    )
    output.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    faults = made.add_argument_group("faults")
    for flag, default, what in (
        ("--stall-timeout", STALL_TIMEOUT_S, "end a run that makes no progress for so long, and report why"),
        ("--rank-timeout", RANK_TIMEOUT_S, "give up a rank that does not answer for so long, and the run with it"),
    ):
        what += f", 0 for never (default: {default:g}); exit code 1, --resume goes on with it"
        faults.add_argument(flag, type=float, metavar="S", help=what)
    live = made.add_argument_group("live check")
    live.add_argument(
        "--live-check",
        action="store_true",
        help="watch the ranks' records in a process beside the run, and report on standard error, as `turnstile hang`"
        " does, as soon as it is certain that ranks wait for each other in a ring, or for one that has ended",
    )
    live.add_argument(
        "--abort-on-cycle",
        action="store_true",
        help="the same, and end the run then: exit code 1, the report in DIR/hang.txt; --resume goes on with it",
    )
    return made


def _ranks(made: Parser) -> None:
    ranks = made.add_argument_group("ranks")
    for flag, name, what in (
        ("--world", "size", "number of ranks"),
        ("--adp", "adp", "attention data parallelism: replicas that own requests"),
        ("--ep", "ep", "expert parallelism: ranks that hold different experts"),
    ):
        ranks.add_argument(flag, dest=name, type=int, metavar="N", help=f"{what} (default: {DEFAULTS[name]})")
    for flag, choices, what in (
        ("--gather", GATHERS, "how decode collects all replicas' rows"),
        ("--route", ROUTES, "prefill collectives that run on decode's stream"),
        ("--cut", CUTS, "where prefill stops for decode: between layers, or before their experts' sums too"),
    ):
        ranks.add_argument(flag, choices=choices, help=f"{what} (default: {DEFAULTS[flag[2:]]})")


def _device(made: Parser) -> None:
    device = made.add_argument_group("device")
    device.add_argument("--device", choices=DEVICES, help="where the ranks compute, one GPU a rank (default: cpu)")
    for flag, name, choices, what in (
        ("--dtype", "dtype", tuple(DTYPES), "of weights and KV (default: float32 on cpu, bfloat16 on cuda)"),
        ("--attention", "attention", ATTENTIONS, "kernels (default: on cuda flashinfer where it fits, else reference)"),
        ("--load-format", "weights", WEIGHTS, "checkpoint, or random weights made on the GPU from config.json alone"),
        ("--quantization", "quantization", QUANTIZATIONS, "of the weights (default: none)"),
        ("--modules", "modules", MODULES, "eager: CUDA loads all kernels at start, lazy: each at its first use"),
        ("--launch-order", "launch_order", LAUNCH_ORDERS, "implicit: NCCL orders communicators by the host's launches"),
        ("--exchange", "exchange", CHOICES, "of rows between experts (default: auto, which is none so far)"),
    ):
        device.add_argument(flag, dest=name, choices=choices, help=what)
    device.add_argument("--graphs", type=_on, metavar="on|off", help="decode as CUDA graphs (default: on)")
    device.add_argument(
        "--compile",
        dest="compiled",
        action="store_true",
        help="compute on a CPU by kernels that this host's C++ compiler builds, once (default: torch's operations)",
    )
    for flag, name, what in (
        ("--prefill-sms", "prefill_sms", "SMs that prefill may use (default: all)"),
        ("--max-ctas", "max_ctas", "thread blocks of one NCCL kernel (default: NCCL's choice)"),
        ("--exchange-sms", "exchange_sms", "SMs of prefill's DeepEP kernels (default: 20)"),
        ("--connections", "connections", "CUDA_DEVICE_MAX_CONNECTIONS of the ranks (default: the driver's)"),
    ):
        device.add_argument(flag, dest=name, type=int, metavar="N", help=what)
    device.add_argument(
        "--check-quiet",
        dest="quiet",
        action="store_true",
        help="fail a run in which the device's allocator was called, or a module loaded, after the warm-up",
    )


def _on(text: str) -> bool:
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither on nor off")
    return text == "on"


def _policies(made: Parser, command: str) -> None:
    default = "fine" if command == ROLLOUT else " ".join(COMPARED)
    policies = made.add_argument_group("policy")
    policies.add_argument(
        "--policy",
        action="append",
        metavar="POLICY",
        help=f"a name, `name:key=value,...` or path/file.py:Class; may be given several times (default: {default})",
    )
    policies.add_argument("--span", type=int, metavar="K", help="segments a round of `fine` where it names no span")
    if command == COMPARE:
        policies.add_argument(
            "--demo", action="store_true", help="a small run with good defaults: 4 ranks, 16 conversations, tiny model"
        )


def _workload(made: Parser) -> None:
    workload = made.add_argument_group("workload")
    for flag, kind, metavar, what in (
        ("--trace", str, "FILE", "JSONL trace, plain or gzip, or `paper` (default: paper, which ships with turnstile)"),
        ("--fraction", float, "F", "share of the trajectories, the first ones (default: 1)"),
        ("--turns", int, "N", "at most N turns of each trajectory (default: all)"),
        ("--length-scale", float, "F", "factor on new and output tokens, each at least 1 (default: 1)"),
        ("--time-scale", float, "F", "factor on waits between turns, 0 for none (default: 1)"),
        ("--seed", int, "N", "of the prompts' token ids (default: 0)"),
        ("--repeat", int, "N", "runs of each policy; reports medians and interquartile ranges (default: 1)"),
        ("--max-concurrency", int, "N", "trajectories in progress at once (default: all)"),
    ):
        workload.add_argument(flag, type=kind, metavar=metavar, help=what)


def _engine(made: Parser) -> None:
    engine = made.add_argument_group("engine")
    engine.add_argument(
        "--model", metavar="DIR", help="checkpoint directory, or `tiny`: a small random one is made (default: tiny)"
    )
    for flag, what in (
        ("--kv-tokens", "KV pool of a replica, in tokens (default: the engine's choice)"),
        ("--prefill-tokens", f"new tokens of a replica in one prefill epoch (default: {DEFAULTS['prefill_tokens']})"),
        ("--rows", f"running requests of a replica (default: {DEFAULTS['rows']})"),
    ):
        engine.add_argument(flag, type=int, metavar="N", help=what)


def parse(command: str, argv: Sequence[str]) -> Options:
    """The options of one command. Raises UsageError (and SystemExit for --help)."""
    given = parser(command).parse(argv)
    values = {**DEFAULTS, **(DEMO if given.get("demo") else {}), **given}
    for name in ("repeat", "prefill_tokens", "rows", "kv_tokens", "max_concurrency", "span"):
        if values[name] is not None and values[name] < 1:
            raise UsageError(f"--{name.replace('_', '-')} {values[name]}: must be at least 1")
    if values["rows"] > MOST_ROWS:
        raise UsageError(f"--rows {values['rows']}: must be at most {MOST_ROWS}")
    if values["resume"] and values["out"] is None:
        raise UsageError("--resume goes on with the run in a directory: name it with --out DIR")
    for name in ("stall_timeout", "rank_timeout"):
        if not (values[name] == 0 or 0.1 <= values[name] <= 1e6):
            raise UsageError(
                f"--{name.replace('_', '-')} {values[name]:g}: must be 0 for never, or 0.1 to 1000000 seconds"
            )
    default = ("fine",) if command == ROLLOUT else COMPARED
    return Options(
        command=command,
        world=World(values["size"], values["adp"], values["ep"], values["gather"], values["route"], values["cut"]),
        policies=_specs(tuple(values["policy"] or default), values["span"]),
        model=values["model"],
        trace=values["trace"],
        shape=Shape(values["fraction"], values["turns"], values["length_scale"], values["time_scale"], values["seed"]),
        repeat=values["repeat"],
        max_concurrency=values["max_concurrency"],
        device=DeviceOptions(**{name: values[name] for name in asdict(DeviceOptions())}),
        kv_tokens=values["kv_tokens"],
        prefill_tokens=values["prefill_tokens"],
        rows=values["rows"],
        out=values["out"],
        resume=values["resume"],
        live_check=values["live_check"] or values["abort_on_cycle"],
        abort_on_cycle=values["abort_on_cycle"],
        stall_timeout=values["stall_timeout"],
        rank_timeout=values["rank_timeout"],
        json=values["json"],
    )


def _directory(text: str) -> Path:
    """A directory's name; an empty one, as an unset variable leaves it, would mean the current directory."""
    if not text.strip():
        raise UsageError("--out is empty: name a directory (`.` for this one), or leave it out for runs/<UTC time>")
    return Path(text)


def _specs(policies: tuple[str, ...], span: int | None) -> tuple[str, ...]:
    """The policies as the engine is given them: `--span` is written into a plain `fine`."""
    for policy in policies:
        if policies.count(policy) > 1:
            raise UsageError(f"--policy {policy} is given twice: use --repeat to run a policy several times")
    if span is None:
        return policies
    if "fine" not in policies:
        raise UsageError(f"--span {span} applies to `--policy fine`, which is not among {', '.join(policies)}")
    return tuple(f"fine:span={span}" if policy == "fine" else policy for policy in policies)
