"""Turnstile: prefill and decode of MoE rollouts on the same ranks at the same time, without deadlock.

from turnstile import Engine, SamplingParams, World, Policy, explore
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernel.request import SamplingParams
    from kernel.sched.planner import Planner
    from kernel.sched.policy import Policy
    from kernel.topology import World
    from rollout.engine import Completion, Engine, Session, TokenOutput
    from verify.testing import explore

__all__ = ["Completion", "Engine", "Planner", "Policy", "SamplingParams", "Session", "TokenOutput", "World", "explore"]

_HOMES = {
    "Completion": "rollout.engine",
    "Engine": "rollout.engine",
    "Planner": "kernel.sched.planner",
    "Policy": "kernel.sched.policy",
    "SamplingParams": "kernel.request",
    "Session": "rollout.engine",
    "TokenOutput": "rollout.engine",
    "World": "kernel.topology",
    "explore": "verify.testing",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that `import turnstile` costs nothing and needs nothing.
    if name not in _HOMES:
        raise AttributeError(f"module 'turnstile' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
