"""`overlap` runs well everywhere until a device has no room: the checker shows the schedule in which it hangs."""

import random

from overlap import Overlap

from turnstile import World, explore
from verify.trial.enact import attempt
from verify.trial.family import family

WORLD = World(2, adp=2, ep=2)


def test_running_it_shows_nothing() -> None:
    for number, scenario in enumerate(family(WORLD, "overlap", 2, 2)):
        draws = random.Random(number)
        choose = lambda options, draws=draws: draws.randrange(len(options))  # noqa: E731
        assert attempt(scenario, lambda _, limits: Overlap(limits), choose=choose).clean


def test_with_room_for_a_kernel_of_each_phase_it_is_proved() -> None:
    explore(Overlap, world=WORLD, capacity=2, rounds=2).assert_proved()


def test_on_a_full_device_it_hangs() -> None:
    explored = explore(Overlap, world=WORLD, capacity=1, segments=1, rounds=2)
    assert (explored.verdict, explored.cls, explored.certainty) == ("refuted", "cycle", "conditional")
    assert "holds the only slot" in str(explored.counterexample)
    assert "selective stream route" in str(explored.counterexample)
