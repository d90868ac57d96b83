"""`patient` is proved for every schedule of its scenarios, and does what it is for: fewer epochs for the same work."""

from functools import partial

import pytest
from patient import Patient, PatientConfig

from turnstile import World, explore
from verify.sim.arrivals import trajectories
from verify.sim.simulation import Engine, simulate


@explore(world=World(2, adp=2, ep=2), segments=(1, 2), rounds=2)
def test_patient_keeps_what_it_claims() -> type[Patient]:
    return Patient


@pytest.mark.parametrize("patience", [0, 9])
@explore(rounds=2)
def test_however_patient(patience: int) -> partial[Patient]:
    return partial(Patient, config=PatientConfig(patience=patience))


def epochs(patience: int) -> int:
    """How many prefill epochs the same users cost."""

    class Counting(Patient):
        def plan(self, views, memory):  # noqa: ANN001, ANN202
            plan, after = super().plan(views, memory)
            started.add(plan.activate)
            return plan, after

    started: set[int] = set()
    users = trajectories(8, 3, seed=1, wait_ns=(0, 2_000_000))
    config = PatientConfig(patience=patience)
    outcome = simulate(
        World(2), "patient", users, Engine(), make_policy=lambda _, limits: Counting(limits, config), log=False
    )
    assert all(turn.finish == "length" for turn in outcome.turns.values())
    return len(started - {-1})


def test_patience_saves_epochs() -> None:
    assert epochs(patience=8) < epochs(patience=0)
