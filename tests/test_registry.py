"""Policies by name, by entry point and from a file, with their options."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

import pytest

from kernel.errors import UsageError
from kernel.sched import registry
from kernel.sched.adaptive import Adaptive
from kernel.sched.fine import Fine
from kernel.sched.policy import Limits

if TYPE_CHECKING:
    from pathlib import Path

LIMITS = Limits(size=2, replicas=1, boundaries=4)


def test_every_shipped_policy_can_be_made_and_says_what_it_guarantees() -> None:
    for name in registry.names():
        policy = registry.create(name, LIMITS)
        assert policy.name == name
        assert policy.guarantees.decode_bound in ("span", "epoch", "backlog")


def test_options_reach_the_config() -> None:
    fine = registry.create("fine:span=3", LIMITS)
    assert isinstance(fine, Fine)
    assert fine.config.span == 3
    adaptive = registry.create("adaptive:spans=1+2+5,pressures=2.5+7", LIMITS)
    assert isinstance(adaptive, Adaptive)
    assert adaptive.config.spans == (1, 2, 5)
    assert adaptive.config.pressures == (2.5, 7)
    with pytest.raises(UsageError, match="increasing"):
        registry.create("adaptive:spans=3+1", LIMITS)


def test_entry_points_are_found_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("mine", "kernel.sched.adaptive:Adaptive", registry.GROUP),
        EntryPoint("gone", "nowhere.at:All", registry.GROUP),
        EntryPoint("other", "kernel.inbox:Inbox", registry.GROUP),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.GROUP else [])
    assert isinstance(registry.create("mine", LIMITS), Adaptive)
    with pytest.raises(UsageError, match=r"entry point nowhere\.at:All does not load"):
        registry.create("gone", LIMITS)
    with pytest.raises(UsageError, match="is not a class with `plan` and `turn`"):
        registry.create("other", LIMITS)
    with pytest.raises(UsageError, match="did you mean mine"):
        registry.create("mime", LIMITS)


def test_a_file_gives_its_class_with_options(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from kernel.sched.fine import Fine\n\nclass Mine(Fine):\n    name = 'mine'\n")
    policy = registry.create(f"{file}:Mine:span=2", LIMITS)
    assert policy.name == "mine"
    assert policy.config.span == 2  # type: ignore[attr-defined]
