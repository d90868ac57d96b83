"""The shipped policies keep what they claim, each guarantee by itself, and one execution of a scenario shows it."""

from __future__ import annotations

from itertools import product

import pytest

from kernel.topology import World
from verify.blame import Certainty, Class
from verify.explore.certify import OTHERS
from verify.explore.policy import Report, Scope, check
from verify.explore.result import Conclusion

WORLDS = [World(2, 1, 1), World(2, 2, 2), World(3, 3, 1), World(4, 2, 2), World(4, 2, 1, gather="flat"), World(4, 4, 4)]
ORDERED = ["normal", "global_complete", "global_enqueue", "fine", "fine:span=2", "fine:span=3", "lean", "adaptive"]
RULES = {"deadlock_free", "epochs_complete", "decode_bound", OTHERS}


def judged(policy: str, world: World, segments: int = 2, rounds: int = 3, **more: object) -> Report:
    return check(Scope(policy, world, segments, rounds, **more), explained=False)  # type: ignore[arg-type]


def assert_proved_at_once(report: Report) -> None:
    for rule, result in report.guarantees.items():
        assert result.verdict is Conclusion.PROVED, (rule, result)
    assert set(report.guarantees) == RULES
    assert report.executions == report.scenarios, "a protocol whose order is fixed needs one execution a scenario"
    assert report.proved


@pytest.mark.parametrize("policy", ORDERED)
def test_each_guarantee_is_proved_by_one_execution(policy: str) -> None:
    assert_proved_at_once(judged(policy, World(2, 2, 2), segments=2))
    assert_proved_at_once(judged(policy, World(4, 2, 2), segments=3))


@pytest.mark.grid
@pytest.mark.parametrize(("policy", "world"), list(product(ORDERED, WORLDS)), ids=str)
def test_each_guarantee_is_proved_in_every_scope(policy: str, world: World) -> None:
    for segments in (1, 2, 3):
        assert_proved_at_once(judged(policy, world, segments))


@pytest.mark.parametrize("policy", ["fine", "fine:span=3", "lean", "adaptive", "global_enqueue", "normal"])
def test_cuts_inside_layers_change_no_verdict(policy: str) -> None:
    assert_proved_at_once(judged(policy, World(2, 2, 2, cut="sublayer"), segments=1))
    assert_proved_at_once(judged(policy, World(2, 2, 1, cut="sublayer"), segments=2))


def test_a_cut_inside_layers_lets_decode_pass_twice_as_often() -> None:
    """A bound counts boundaries, so half of the computation waits for it: one layer of two segments cannot keep one."""
    world = World(2, 2, 2, cut="sublayer")
    assert judged("fine:span=2", world, segments=1, bound=2).proved
    assert judged("fine:span=2", world, segments=2, bound=1).cls is Class.STARVATION
    assert judged("global_enqueue", world, segments=1, bound=1).cls is Class.STARVATION
    assert judged("global_enqueue", World(2, 2, 2), segments=1, bound=1).proved


def test_lean_with_a_longer_span_too() -> None:
    for span in (2, 3):
        assert_proved_at_once(judged(f"lean:span={span}", World(2, 2, 2), segments=3))


# -- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [1, 3, "epoch"])
def test_normal_has_no_finite_bound(bound: int | str) -> None:
    """Its own claim, the backlog, is proved; asked for less, endless arrivals starve D."""
    report = judged("normal", World(2, 2, 2), bound=bound)
    assert report.verdict is Conclusion.REFUTED
    assert report.cls is Class.STARVATION
    assert report.certainty is Certainty.CERTAIN
    refuted = {rule for rule, result in report.guarantees.items() if result.verdict is not Conclusion.PROVED}
    assert refuted == {"decode_bound"}, "the other guarantees are judged by themselves"


def test_a_bound_is_exact() -> None:
    """A span of two keeps a bound of two segments, and not of one."""
    world = World(2, 2, 2)
    assert judged("fine:span=2", world, segments=3, bound=2).proved
    assert judged("fine:span=2", world, segments=3, bound=1).cls is Class.STARVATION
    assert judged("global_enqueue", world, segments=3, bound="epoch").proved
    assert judged("global_enqueue", world, segments=3, bound=2).cls is Class.STARVATION


# -- room on the device -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fine", "fine:span=2", "lean", "global_enqueue"])
def test_with_everything_routed_any_capacity_is_proved(policy: str) -> None:
    """One stream holds all that could cross (T3), so that room for one kernel suffices."""
    for world in (World(2, 2, 2, route="all"), World(4, 2, 2, route="all")):
        assert_proved_at_once(judged(policy, world, capacity=1))


@pytest.mark.parametrize("policy", ["fine", "fine:span=3", "lean", "global_enqueue", "global_complete"])
def test_the_papers_route_needs_room_for_one_kernel_of_each_phase(policy: str) -> None:
    """With attention TP the registered set has members that the paper's route leaves on P's stream (T2')."""
    world = World(4, 2, 2, route="paper")
    assert_proved_at_once(judged(policy, world, capacity=2))
    tight = judged(policy, world, capacity=1)
    assert tight.verdict is Conclusion.REFUTED
    assert (tight.cls, tight.certainty) == (Class.CYCLE, Certainty.CONDITIONAL)


def test_a_consistent_order_without_the_route_is_conditional() -> None:
    """Paper section 7, RQ3: hosts that agree on the order do not order two streams of a device."""
    world = World(2, 2, 2, route="none")
    assert judged("fine", world, capacity=2).proved
    tight = judged("fine", world, capacity=1)
    assert (tight.verdict, tight.cls) == (Conclusion.REFUTED, Class.CYCLE)
    assert tight.certainty is Certainty.CONDITIONAL


def test_unordered() -> None:
    """Proved at width, conditional at capacity 1, and on one stream certain."""
    for world in (World(2, 2, 2), World(4, 2, 2)):
        assert judged("unordered", world).proved
        tight = judged("unordered", world, capacity=1)
        assert (tight.cls, tight.certainty) == (Class.CYCLE, Certainty.CONDITIONAL)
    for route in ("paper", "all"):
        shared = judged("unordered", World(2, 2, 2, route=route))
        assert (shared.verdict, shared.cls) == (Conclusion.REFUTED, Class.CYCLE)
        assert shared.certainty is Certainty.CERTAIN


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_any_depth_of_the_launch_queue_is_proved(depth: int, graphs: bool) -> None:
    for policy in ("fine", "lean", "global_enqueue"):
        assert_proved_at_once(judged(policy, World(2, 2, 2), depth=depth, graphs=graphs))


@pytest.mark.slow
def test_a_large_scope_takes_one_execution() -> None:
    """8 ranks x 40 segments x 41 iterations."""
    from verify.trial.family import family

    world = World(8, 2, 8, route="paper")
    scenarios = [each for each in family(world, "fine", 40, 41) if each.name == "P meets D after 1"]
    report = check(Scope("fine", world, 40, 41), scenarios=scenarios, explained=False)
    assert_proved_at_once(report)
    assert report.executions == 1
