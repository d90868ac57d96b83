"""A policy that hangs, and why nobody sees it in its code: each rank decides by its own clock.

`turnstile check examples/stuck/impatient.py:Impatient` refuses it. On real ranks it works until one rank finds a round
slow that the other did not.
"""

import time

from kernel.sched.fine import Fine
from kernel.sched.policy import Gate, Guarantees


class Impatient(Fine):
    """As `fine`; but after a slow round it lets D finish on the device before it meets the others."""

    guarantees = Guarantees(deadlock_free=False)
    usual = last = 0.0

    async def turn(self, gate: Gate) -> None:
        """See `kernel.sched.policy.Policy`."""
        took, self.last = time.monotonic() - self.last, time.monotonic()
        slow, self.usual = took > 1.5 * self.usual > 0, 0.9 * self.usual + 0.1 * took
        if not gate.p_active:
            gate.launch_decode()
            return
        await gate.reached()
        if slow and gate.d_ready:
            gate.launch_decode()
            await gate.drained()
        await gate.rendezvous("pre-d")
        if not (slow and gate.d_ready):
            gate.launch_decode()
        await gate.rendezvous("post-d")
        gate.release(gate.plan.span)
