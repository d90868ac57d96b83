"""`turnstile rollout` and `turnstile compare`: every policy, every repeat, on one set of ranks, into one directory.

Everything that can be refused is refused before a rank starts. A short warm-up precedes the first run, so that no
policy pays for the ranks' first steps. Repeats go round the policies, so that a drifting machine favours none of them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import threading
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NoReturn

from kernel.errors import HangFound, TurnstileError, UsageError
from kernel.sched.policy import Limits
from models.config import read_config
from rollout import fingerprint, policies, resume
from rollout.args import TINY, Options, parse
from rollout.device import CPU_KV_TOKENS
from rollout.ending import Ending, asked_for, end_once
from rollout.progress import Progress
from rollout.ranks import exchange, gpus
from rollout.ranks.torchrun import place
from rollout.replay import Sink, replay
from rollout.report import campaign as campaign_report
from rollout.report import files as report_files
from rollout.runs import Campaign, runs_of
from rollout.stall import Stalled
from rollout.trace.read import read as read_trace
from rollout.trace.shape import Shape
from rollout.trace.trajectory import Turn, counted
from rollout.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from models.config import DecoderConfig
    from rollout.replay import Row
    from rollout.runs import Run
    from rollout.trace.trajectory import Trace, Trajectory

WARM_UP: Final = "warm-up"
"""Folder of the warm-up's record, which is taken away when the warm-up has ended well."""
WARM_UP_TOKENS: Final = 8
TORCHRUN_GRACE_S: Final = 2.0
TINY_EXPERTS: Final = 8
TINY_LAYERS: Final = 4
MOST_EVENTS: Final = 1 << 18
"""A record of this size takes 19 MB a rank."""


def main(command: str, argv: Sequence[str]) -> int:
    """Run `turnstile rollout` or `turnstile compare`; 0, or 1 when turns ended early. Raises TurnstileError."""
    options = parse(command, argv)
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError("the current directory is gone: change into one that is there, and start again") from None
    os.umask(0o077)  # what a run leaves is its user's
    source = read_trace(options.trace)
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for each in filter(asked_for, (signal.SIGTERM, signal.SIGHUP)):  # Ctrl-C, also before the loop handles them
            before[each] = signal.signal(each, end_once)
    try:
        campaign = prepare(options, source)
        try:
            return execute(campaign, source)
        finally:
            os.close(campaign.held)
    except KeyboardInterrupt:
        before = dict.fromkeys(before, signal.SIG_IGN)  # the process is ending as it was asked to
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def prepare(options: Options, source: Trace) -> Campaign:
    """Check everything and make the run's directory. Raises UsageError for whatever cannot be used."""
    trajectories = options.shape.apply(source.trajectories)
    config = None if options.model == TINY else read_config(options.model)
    layers = config.layers if config else TINY_LAYERS
    limits = Limits(options.world.size, options.world.adp, layers, options.prefill_tokens, options.rows)
    for policy in options.policies:
        policies.check(policy, limits)
    _fits(options, config, trajectories)
    exchange.resolve(
        options.device,
        config or SimpleNamespace(experts=TINY_EXPERTS),
        options.world,
        prefill_tokens=options.prefill_tokens,
        rows=options.rows,
    )
    if options.device.device == "cuda":
        gpus.check_host(options.world.size)
    if options.device.compiled:  # before there is a loop, under which Ctrl-C would wait for the compiler
        options.device.check_installed()
    told = fingerprint.of(Path(options.model)) if config else None
    made: list[Path] = []
    out = report_files.directory(options.out, resume=options.resume, made=made)
    held, fresh = -1, not config and not (out / "model").exists()
    try:
        held = report_files.hold(out, resume=options.resume)
        model = Path(options.model) if config else _tiny(out / "model", trajectories)
        config = config or read_config(model)
        title = options.shape.describe(source)
        sha = told or fingerprint.of(model)
        runs = runs_of(options.policies, options.repeat, out)
        return Campaign(options, out, model, config, title, trajectories, runs, sha, held, tuple(made))
    except BaseException:
        if held >= 0:
            os.close(held)
            if fresh:
                shutil.rmtree(out / "model", ignore_errors=True)
        report_files.remove(made)
        raise


def execute(campaign: Campaign, source: Trace) -> int:
    """Replay, then report; what was done is reported also when the run fails or is interrupted.

    Input that turns out to be unusable before the first turn is done leaves no run behind.
    """
    out = campaign.out
    try:
        loop_factory = _engine_part("uvloop", "new_event_loop")
        about = {**report_files.surroundings(), **_about(campaign, source)}
        if campaign.options.resume:
            _keep(campaign, about)
        report_files.write_json(out / "run.json", {**about, "status": "running"})
    except BaseException:
        if not campaign.options.resume:
            _clear(campaign)
        raise
    status = "failed"
    try:
        try:
            with Ending() as ending, asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(_replay_all(campaign, ending))
        except BaseExceptionGroup as group:
            _raise_first(group)
        status = "complete"
    except (KeyboardInterrupt, asyncio.CancelledError):
        status = "interrupted"
        done, asked = sum(len(run.rows) for run in campaign.runs), counted(campaign.trajectories)[0]
        raise KeyboardInterrupt(
            f"interrupted: {done} of {asked * len(campaign.runs)} turns are done and kept in {out}"
        ) from None
    except Stalled as error:
        raise _stalled(out, error) from None
    except UsageError:
        status = "failed" if campaign.options.resume or any(run.rows for run in campaign.runs) else "unusable"
        raise
    finally:
        if status == "unusable":
            _clear(campaign)
        else:
            measured = campaign_report.measure(campaign, records=status == "complete")
            try:
                if status != "failed":
                    _rows_again(campaign)
                report_files.write_json(out / "report.json", {"status": status, "slice": campaign.title, **measured})
                report_files.write_json(out / "run.json", {**about, "status": status})
            except OSError as error:
                if status == "complete":  # else what the run ended with is to be said, not this
                    raise TurnstileError(
                        f"{error.filename or out} cannot be written at the end of the run"
                        f" ({error.strerror}): see to room and rights, and to {out} being where it was, then go on with"
                        f" --out {out} --resume"
                    ) from None
    try:
        turns = {each.id: len(each.turns) for each in campaign.trajectories}
        campaign_report.draw(campaign.runs, turns, campaign.title, out)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted: the run is complete and kept in {out}, its figures are not: `turnstile plot {out}` draws"
            " them"
        ) from None
    except OSError as error:
        raise TurnstileError(
            f"{error.filename or out} cannot be written ({error.strerror}): the run is complete and"
            f" kept in {out}, its figures are not: see to room and rights, then `turnstile plot {out}` draws them"
        ) from None
    return campaign_report.show(campaign, measured)


def _rows_again(campaign: Campaign) -> None:
    """Write requests.jsonl again where somebody has removed it or cut it off while the run went on. Raises OSError."""
    path = campaign.out / "requests.jsonl"
    lines = [row.to_json().encode() + b"\n" for run in campaign.runs for row in run.rows]
    if (path.stat().st_size if path.is_file() else -1) != sum(map(len, lines)):
        report_files.write(path, b"".join(lines))
        print(
            f"turnstile: {path} was removed or changed while the run went on: its {len(lines)} turns are written again",
            file=sys.stderr,
        )


def _stalled(out: Path, error: Stalled) -> HangFound:
    """Show and keep the report about a run without progress; the line that it ends with."""
    print(error.report, file=sys.stderr, flush=True)
    report_files.write(out / "hang.txt", error.report.encode() + b"\n")
    if error.diagnosis is not None:
        report_files.write_json(out / "hang.json", error.diagnosis)
    return HangFound(
        f"{error} (--stall-timeout): the report is in {out / 'hang.txt'}; finished turns are kept, go on with"
        f" --out {out} --resume"
    )


def _clear(campaign: Campaign) -> None:
    """Leave nothing of a run that never began."""
    out = campaign.out
    for name in ("run.json", "requests.jsonl"):
        (out / name).unlink(missing_ok=True)
    made = [out / WARM_UP, *(run.folder / "record" for run in campaign.runs)]
    for folder in [*made, out / "model"] if campaign.options.model == TINY else made:
        shutil.rmtree(folder, ignore_errors=True)
    # Whatever else is in them was there before.
    report_files.remove([*(run.folder for run in campaign.runs if run.folder != out), *campaign.made])


def _keep(campaign: Campaign, about: dict[str, Any]) -> None:
    """Take over what the run in the directory has finished; requests.jsonl then holds that alone."""
    resume.check(campaign.out, about)
    path = campaign.out / "requests.jsonl"
    found = resume.kept(path, resume.rows(path), campaign.trajectories, campaign.config.vocab_size)
    for run in campaign.runs:
        run.rows.extend(found.get((run.policy, run.repeat), []))
    report_files.write(path, b"".join(row.to_json().encode() + b"\n" for run in campaign.runs for row in run.rows))
    about["resumed"] = sum(len(run.rows) for run in campaign.runs)


# -- before ---------------------------------------------------------------------------------------------------------


def _fits(options: Options, config: DecoderConfig | None, trajectories: Sequence[Trajectory]) -> None:
    longest = max(trajectories, key=lambda each: each.longest)
    positions = config.max_positions if config else None
    pool, named = options.kv_tokens, "--kv-tokens is"
    if pool is None and options.device.device == "cpu":
        pool, named = CPU_KV_TOKENS, "--kv-tokens by default is"
    for room, what in ((positions, "the model has positions"), (pool, named)):
        if room is not None and longest.longest > room:
            raise UsageError(
                f"trajectory {longest.id} grows to {longest.longest} tokens, but {what} {room}: lower --length-scale"
                f" (to about {options.shape.length_scale * room / longest.longest:.2g}) or --turns"
            )


def _tiny(path: Path, trajectories: Sequence[Trajectory]) -> Path:
    """A small random checkpoint with room for the longest trajectory."""
    write: Callable[..., Any] = _engine_part("models.tiny", "write_checkpoint")
    try:
        write(path, layers=TINY_LAYERS, max_positions=max(4096, *(each.longest for each in trajectories)))
    except Exception as error:  # safetensors has a class of its own for a full disk
        shutil.rmtree(path, ignore_errors=True)
        raise UsageError(
            f"--out {path.parent}: the tiny model cannot be written ({error}): choose another directory, on a disk with"
            " room"
        ) from error
    return path


def _about(campaign: Campaign, source: Trace) -> dict[str, Any]:
    options = campaign.options
    world, choice = exchange.resolve(
        options.device,
        campaign.config,
        options.world,
        prefill_tokens=options.prefill_tokens,
        rows=options.rows,
    )
    return {
        "world": {**asdict(world), "atp": world.atp, "etp": world.etp},
        "exchange": asdict(choice),
        "device": options.device.device,
        **({"device_options": asdict(options.device)} if options.device.device == "cuda" else {}),
        "policies": list(options.policies),
        "model": {"path": str(campaign.model), "type": campaign.config.model_type, "layers": campaign.config.layers},
        "model_sha256": campaign.fingerprint,
        "trace": {"name": source.name, "format": source.format, "sha256": source.sha256, **asdict(options.shape)},
        "slice": campaign.title,
        "repeat": options.repeat,
        "max_concurrency": options.max_concurrency,
        "kv_tokens": options.kv_tokens,
        "prefill_tokens": options.prefill_tokens,
        "rows": options.rows,
    }


def _engine_part(module: str, name: str) -> Any:
    """Something that needs the `engine` extra. Raises UsageError that names what is missing."""
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"this command needs the `engine` extra ({error.name} is not installed): pip install -e '.[engine]'"
        ) from None


# -- during ---------------------------------------------------------------------------------------------------------


async def _replay_all(campaign: Campaign, ending: Ending) -> None:
    options = campaign.options
    task = asyncio.current_task()
    assert task is not None
    engines: list[Any] = []
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        if not (engines and getattr(engines[0], "failed", False)):
            task.cancel()

    # torchrun ends all processes of a host as soon as one has failed: the reason is to be told then, and is on its way.
    grace_s = TORCHRUN_GRACE_S if place() is not None else 0.0
    ending.heard_by(
        lambda number: task.cancel() if number == signal.SIGINT else loop.call_later(grace_s, interrupt)
    )
    sink = Sink(campaign.out / "requests.jsonl", append=options.resume)
    engine_class: Callable[..., Any] = _engine_part("rollout.engine", "Engine")
    warm_up = campaign.out / WARM_UP
    try:
        with Progress(enabled=not options.json) as progress:
            async with Watch(campaign.out, enabled=options.live_check, abort=options.abort_on_cycle) as watch:
                await watch.follow(warm_up, options.policies[0])
                async with engine_class(
                    campaign.model,
                    options.world,
                    policy=options.policies[0],
                    device=options.device,
                    kv_tokens=options.kv_tokens,
                    prefill_tokens=options.prefill_tokens,
                    rows=options.rows,
                    record_events=_events(campaign),
                    rank_timeout_s=options.rank_timeout,
                    stall_timeout_s=options.stall_timeout,
                    out=warm_up,
                ) as engine:
                    engines.append(engine)
                    watch.attach(engine)
                    await _warm_up(engine, campaign)
                    for run in campaign.runs:
                        await _replay_run(engine, campaign, run, watch, progress, sink)
    finally:
        sink.close()
    if left := getattr(engines[0], "left", ()):  # a run that failed, or was interrupted, has a line of its own
        more = f", and {len(left) - 1} more" if len(left) > 1 else ""
        print(f"turnstile: a policy left {left[0]}{more}: ended with its rank", file=sys.stderr)


async def _replay_run(engine: Any, campaign: Campaign, run: Run, watch: Watch, progress: Progress, sink: Sink) -> None:
    """Replay what is left of one run."""
    options = campaign.options
    kept: dict[str, list[Row]] = {}
    for row in run.rows:
        kept.setdefault(row.trajectory, []).append(row)
    left = [each for each in campaign.trajectories if len(kept.get(each.id, ())) < len(each.turns)]
    if not left:
        return
    since = max((row.finished_ns for row in run.rows), default=0)
    label = run.policy if options.repeat == 1 else f"{run.policy}, repeat {run.repeat + 1}"
    progress.begin(label, counted(campaign.trajectories)[0] - len(run.rows))

    def done(row: Row) -> None:
        row = resume.later(row, since)
        run.rows.append(row)
        sink(row)
        progress.advance(row.output_tokens)

    await watch.follow(run.folder, run.policy)
    await engine.flush()
    await engine.use_policy(run.policy, record=run.folder)
    shutil.rmtree(campaign.out / WARM_UP, ignore_errors=True)
    await replay(
        engine,
        left,
        policy=run.policy,
        vocabulary=campaign.config.vocab_size,
        seed=options.shape.seed,
        repeat=run.repeat,
        max_concurrency=options.max_concurrency,
        done=done,
        kept=kept,
        since_ns=since,
    )


def _events(campaign: Campaign) -> int:
    """Events that a record must hold so that it keeps a whole run, where that is not too many.

    At worst every output token has a D iteration of its own and every request an epoch; a forward has at most six
    collectives a layer, of three events each, and a round a dozen events of its own.
    """
    requests, _, outputs = counted(campaign.trajectories)
    new = sum(turn.new_tokens for each in campaign.trajectories for turn in each.turns)
    layers, epochs = campaign.config.layers, requests + new // campaign.options.prefill_tokens
    forward = 3 * (6 * layers + 2) + 15
    need = outputs * forward + epochs * (forward + 15 * layers)
    return min(MOST_EVENTS, 1 << max(12, need.bit_length()))


async def _warm_up(engine: Any, campaign: Campaign) -> None:
    """One short turn on each replica, unrecorded."""
    some = replace(Shape(), turns=1).apply(campaign.trajectories[: campaign.options.world.adp])
    short = [
        replace(each, turns=(Turn(min(each.turns[0].new_tokens, WARM_UP_TOKENS), WARM_UP_TOKENS),))
        for each in some
    ]
    await replay(engine, short, policy="warm-up", vocabulary=campaign.config.vocab_size, done=lambda _: None)


def _raise_first(group: BaseExceptionGroup[BaseException]) -> NoReturn:
    """Raise what a person should see of several errors: input that cannot be used, else our first, else all."""
    ours = group.subgroup(TurnstileError)
    if ours is None:
        raise group
    usage = ours.subgroup(UsageError)
    error: BaseException = usage or ours
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    raise error from group
