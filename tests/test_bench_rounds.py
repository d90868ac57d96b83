"""What benches derive from records, marks and rows, on ones that were written by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from bench import bench_decode, bench_host, bench_memory, bench_scale, stretch_policy, stretches, switch_policy
from bench.rounds import Call, Round, alike, decode_only, rounds, traffic
from kernel.errors import PolicyError
from kernel.journal import Journal, groups
from kernel.program import Program
from kernel.record import Recorder, read, ring_path
from kernel.request import Phase
from kernel.sched.policy import Limits, Plan
from kernel.topology import World
from rollout.replay import Row

if TYPE_CHECKING:
    from pathlib import Path

WORLD = World(2, 2, 2)
PROGRAM = Program(WORLD, Phase.D, 3)


class Life:
    """One rank's record, round by round."""

    def __init__(self, folder: Path) -> None:
        self.now = 0
        self.path = ring_path(folder, 0)
        named = groups([PROGRAM], 0)
        self.journal = Journal(Recorder(self.path, rank=0, groups=named, clock=lambda: self.now))
        self.round = 0

    def next(self, ms: float, rows: int = 4, prefill: bool = False, size: int = 8, mark: str = "") -> None:
        """A round of this length, of which a quarter is spent in its exchange."""
        self.journal.plan(Plan(self.round), 0)
        if prefill:
            self.journal.permit(0, 1)
        self.journal.submitted(f"D {self.round}", Phase.D, PROGRAM.calls, 4, rows, size)
        if mark:
            self.journal.mark(mark)
        self.now += int(0.75e6 * ms)
        self.journal.exchange("end", leaves=False)
        self.now += int(0.25e6 * ms)
        self.journal.exchange("end", leaves=True)
        self.round += 1

    def read(self) -> list[Round]:
        self.journal.close()
        return rounds(read(self.path).events)


def test_decode_only_rounds_are_the_longest_stretch_without_prefill(tmp_path: Path) -> None:
    life = Life(tmp_path)
    for at in range(30):
        life.next(2, prefill=at == 0 or at == 8)
    for _ in range(5):
        life.next(9, rows=3)
    found = decode_only(life.read(), 4, settle=3)
    assert [one.number for one in found] == list(range(12, 27))
    assert {one.took_ns for one in found} == {2_000_000}
    assert {one.waited_ns for one in found} == {500_000}
    assert alike(found)
    assert sum(found[0].calls.values()) == len(PROGRAM.calls) == 6


def test_bytes_are_rows_of_all_members_times_what_a_row_holds(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.next(1)
    (one,) = life.read()
    assert traffic(one.calls, hidden=64, vocabulary=1000, width=4) == 6 * 8 * 64 * 4
    one.calls[Call("AG", "D.ATP", 8, head=True)] += 1
    assert traffic(one.calls, hidden=64, vocabulary=1000, width=4) == 6 * 8 * 64 * 4 + 8 * 1000 * 4


@pytest.mark.parametrize("odd", ["size", "exchange", "calls"])
def test_one_round_that_differs_is_seen(tmp_path: Path, odd: str) -> None:
    life = Life(tmp_path)
    for at in range(6):
        if odd == "exchange" and at == 4:
            life.journal.round = life.round
            life.journal.exchange("pre-d", leaves=False)
            life.journal.exchange("pre-d", leaves=True)
        life.next(1, size=9 if odd == "size" and at == 4 else 8)
    found = life.read()
    if odd == "calls":
        found[4].calls.subtract({next(iter(found[4].calls)): 1})
    assert alike(found[:4])
    assert not alike(found)


def test_stretches_with_and_without_the_exchange_go_by_the_marks(tmp_path: Path) -> None:
    life = Life(tmp_path)
    for at in range(20):
        stretch, offset = divmod(at - 4, 4)
        mark = (bench_decode.OFF if stretch % 2 else bench_decode.ON) if at >= 4 and offset == 0 and stretch < 4 else ""
        life.next(3 if at >= 4 and stretch % 2 == 0 else 2, mark=mark)
    found = bench_decode.stretches(life.read())
    assert [[one.number for one in each] for each in found[bench_decode.ON]] == [[4, 5, 6, 7], [12, 13, 14, 15]]
    assert bench_decode.ms(found[bench_decode.ON][0]) == 3
    assert bench_decode.ms(found[bench_decode.OFF][1][:4]) == 2


def marks(scale: int = 1) -> list[tuple[str, int]]:
    plain = {"loop cpu": 500, "stream cpu": 3100, "forward cpu": 3000, "forward wall": 4000, "round wall": 5000}
    parts = {"loop plan": 120, "loop record": 60, "stream record": 30, "stream forward": 2900, "loop record x": 0}
    told = [(f"host plain {name} ns", 1000 * 50 * us * scale) for name, us in plain.items()]
    for name, us in list(parts.items())[:4]:
        told += [(f"host parts {name} ns", 1000 * 50 * us * scale), (f"host parts {name} calls", 50 * 3)]
    return [("longest loop gap, ns", 7), *told, ("host missing kernel.gone:Thing call", 1)]


def test_host_time_is_the_loop_s_and_the_stream_s_less_the_forward() -> None:
    found = bench_host.told(marks(), 50)
    assert (found["outside_us"], found["loop_us"], found["stream_us"], found["gap_us"]) == (600, 500, 100, 1000)
    parts = {(row["thread"], row["part"]): row["us"] for row in found["parts"]}
    assert parts == {
        ("loop", "plan"): 120, ("loop", "record"): 60, ("loop", "rest"): 320,
        ("stream", "record"): 30, ("stream", "rest"): 70,
    }  # fmt: skip
    assert found["missing"] == ["kernel.gone:Thing call"]
    together = bench_host.middle([bench_host.told(marks(scale), 50) for scale in (1, 2, 9)])
    assert together["outside_us"]["median"] == 1200
    assert next(row["us"] for row in together["parts"] if row["part"] == "plan") == 240
    with pytest.raises(SystemExit, match="told nothing"):
        bench_host.told([("longest loop gap, ns", 7)], 50)


def test_memory_is_judged_by_its_aim() -> None:
    assert bench_memory.anonymous("VmRSS:\t 9 kB\nRssAnon:\t   12 kB\nRssFile:\t 3 kB\n") == 12 * 1024
    fits, over = (bench_memory.verdict(peak, 100_000_000) for peak in (720_000_000, 720_000_001))
    assert fits["met"] is True
    assert over["met"] is False
    assert fits["beyond_shards_mb"] == 620


def test_makespans_are_those_of_each_repeat() -> None:
    def row(policy: str, repeat: int, released: float, finished: float) -> Row:
        filler: dict[str, Any] = dict.fromkeys(
            ("turn", "request", "prompt_tokens", "new_tokens", "cached_tokens", "asked_tokens", "output_tokens"), 1
        )
        return Row(
            policy=policy, repeat=repeat, trajectory="t", finish_reason="length", wait_ms=0.0, token_ns=(),
            released_ns=int(released * 1e9), submitted_ns=0, finished_ns=int(finished * 1e9), **filler,
        )  # fmt: skip

    rows = [row("fine", 1, 1, 4), row("normal", 0, 0.5, 2), row("fine", 0, 0, 2), row("fine", 0, 1, 5)]
    assert bench_scale.makespans(rows) == {"fine": [5, 3], "normal": [1.5]}


class Fakes:
    """As much of a rank and its gate as the policy of bench_decode.py looks at."""

    def __init__(self, asks: bool) -> None:
        self.asks, self.marks, self.real = asks, list[str](), 0
        self.ports = SimpleNamespace(rendezvous=self)
        self._journal = SimpleNamespace(mark=lambda text, _: self.marks.append(f"{self.round} {text}"))
        self.rank, self.p_active, self.round, self._rank = 0, False, 0, self

    @property
    def plan(self) -> Plan:
        return Plan(self.round, decode=(4, 4) if self.round >= 2 else (4, 3))

    def launch_decode(self) -> None:
        pass

    async def exchange(self, tag: str, payload: bytes) -> list[bytes]:
        self.real += 1
        return [payload, b"other"]

    async def play(self, rounds: int) -> str:
        """One letter a round: asked the others, or itself."""
        policy = switch_policy.Switch(
            Limits(2, 2, 4), switch_policy.SwitchConfig(rows=4, settle=3, length=5, pairs=2)
        )
        said = ""
        for self.round in range(rounds):
            await policy.turn(self)  # type: ignore[arg-type]
            if self.asks:
                answers = await self.ports.rendezvous.exchange("end", b"mine")
                said += {b"other": "o", b"mine": "i"}[answers[1]]
        return said


async def test_the_exchange_is_left_out_in_every_other_stretch() -> None:
    fakes = Fakes(asks=True)
    assert await fakes.play(30) == "oo" + "ooo" + "ooooo" + "iiiii" + "ooooo" + "iiiii" + "ooooo"
    assert fakes.marks == [
        "5 exchange on", "10 exchange off", "15 exchange on", "20 exchange off", "25 exchange on",
    ]  # fmt: skip
    assert fakes.real == 20


async def test_a_rank_that_no_longer_asks_its_ports_is_not_taken_for_one_without_exchanges() -> None:
    with pytest.raises(PolicyError, match="only 0 of 5 exchanges could be left out"):
        await Fakes(asks=False).play(30)


class Ledger:
    """As much of a rank's journal and its gate as the policy of stretches looks at."""

    def __init__(self) -> None:
        self._recorder, self.now, self.marks = "the record", "the record", list[tuple[str, int]]()
        self._journal, self._rank, self.p_active, self.plan = self, self, False, Plan(0, decode=(4, 4))

    def _open(self, recorder: object) -> None:
        self.now = "the record" if recorder == "the record" else "none"

    def mark(self, text: str, number: int) -> None:
        assert self.now == "the record", "a mark that nobody keeps"
        self.marks.append((text, number))

    def launch_decode(self) -> None:
        pass


async def test_stretches_take_turns_in_having_what_is_measured() -> None:
    """Each pair in the other order than the one before, and none of it is left at the end."""
    config = stretch_policy.StretchConfig(stretch_policy.RECORD, rows=4, settle=3, length=5, pairs=3)
    policy, ledger, had = stretch_policy.Stretch(Limits(2, 2, 4), config), Ledger(), ""
    for round_ in range(2, 40):
        ledger.plan = Plan(round_, decode=(4, 4))
        await policy.turn(ledger)  # type: ignore[arg-type]
        had += "w" if ledger.now == "the record" else "-"
    assert had == "www" + ("wwwww" + "-----") + ("-----" + "wwwww") + ("wwwww" + "-----") + "wwwww"
    assert [text for text, _ in ledger.marks].count(stretch_policy.WITH) == 3
    with_, without = stretches.pairs(ledger.marks)
    assert len(with_) == len(without) == 3
    assert all(ns > 0 for ns in with_ + without)
    with pytest.raises(SystemExit, match="1 and 0 stretches"):
        stretches.pairs([(stretch_policy.WITH, 7)])
