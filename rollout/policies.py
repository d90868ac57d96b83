"""Policies that a command names, tried before anything starts.

One from outside is imported and made in a child process that is watched, as `turnstile check` does: whether it loops,
waits for something, or leaves the process, the command ends with a line about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel.errors import UsageError
from kernel.sched import registry

if TYPE_CHECKING:
    from kernel.sched.policy import Limits


def check(spec: str, limits: Limits, seconds: float | None = None) -> None:
    """Raise UsageError for a policy that cannot be used. seconds: for its import to end (None: `SILENCE_S`)."""
    outside = ".py:" in spec or registry.split(spec)[0] in registry.names()
    if registry.shipped(spec) or not outside:
        registry.create(spec, limits)
        return
    from verify.trial.findings import Finding
    from verify.trial.supervise import SILENCE_S, supervised

    seconds = SILENCE_S if seconds is None else seconds
    ends = f"policy {spec} ends its process while it is imported or made"
    found = supervised(lambda beat: bool(registry.create(spec, limits)), seconds, ends)
    if isinstance(found, Finding):
        raise UsageError(
            f"policy {spec}: {found.where} does not return while the policy is imported or made (for {seconds:g} s):"
            " it waits or loops there, and an import must do neither"
        )


def spec(policy: str, config: dict[str, Any] | None) -> str:
    """A policy spec with its options written into it. Raises UsageError for what is no text."""
    if not isinstance(policy, str):
        raise UsageError(f"policy={policy!r}: must be a name or path/file.py:Class, as text")
    if not config:
        return policy
    options = ",".join(
        f"{key}={'+'.join(map(str, value)) if isinstance(value, list | tuple) else value}"
        for key, value in config.items()
    )
    return f"{policy}:{options}"
