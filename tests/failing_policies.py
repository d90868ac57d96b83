"""Policies that fail or break a rule, each in a way of its own, as the text of a policy file."""

from __future__ import annotations

POLICIES = """
    import asyncio
    import dataclasses
    import itertools
    import json
    import os
    import signal
    import sys
    import time

    from kernel.sched.fine import Fine
    from kernel.sched.policy import ALL

    class LocalPlan(Fine):
        name = "local_plan"

        def plan(self, views, memory):
            plan, memory = super().plan(views, memory)
            return dataclasses.replace(plan, span=plan.span + os.getpid()), memory

    class LocalMemory(Fine):
        name = "local_memory"

        def remember(self, now, plan):
            return (os.getpid(),)

    class EarlyRelease(Fine):
        name = "early_release"

        async def turn(self, gate):
            gate.release(ALL)
            gate.launch_decode()

    class NoLaunch(Fine):
        name = "no_launch"

        async def turn(self, gate):
            gate.release(ALL)
            await gate.completed()

    class Twice(Fine):
        name = "twice"

        async def turn(self, gate):
            await super().turn(gate)
            if gate.d_ready:
                gate.launch_decode()

    class Broken(Fine):
        name = "broken"

        async def turn(self, gate):
            raise ZeroDivisionError("in my turn")

    class NoSpan(Fine):
        name = "no_span"

        def span(self, now):
            return None

    class SpanZero(Fine):
        name = "span_zero"

        def span(self, now):
            return 0

    class NoPlan(Fine):
        name = "no_plan"

        def plan(self, views, memory):
            super().plan(views, memory)

    class PlanOfText(Fine):
        name = "plan_of_text"

        def plan(self, views, memory):
            plan, memory = super().plan(views, memory)
            return dataclasses.replace(plan, span="a"), memory

    class PlanOfRows(Fine):
        name = "plan_of_rows"

        def plan(self, views, memory):
            plan, memory = super().plan(views, memory)
            return dataclasses.replace(plan, decode=5), memory

    class PlanOfBucket(Fine):
        name = "plan_of_bucket"

        def plan(self, views, memory):
            plan, memory = super().plan(views, memory)
            return dataclasses.replace(plan, bucket=10**9), memory

    class PlanOfRound(Fine):
        name = "plan_of_round"

        def plan(self, views, memory):
            plan, memory = super().plan(views, memory)
            return dataclasses.replace(plan, round=plan.round + 7), memory

    class Leaves(Fine):
        name = "leaves"

        async def turn(self, gate):
            sys.exit(0)

    class LeavesLater(Fine):
        name = "leaves_later"

        async def turn(self, gate):
            async def leave():
                await asyncio.sleep(0)
                sys.exit(0)

            self.task = asyncio.ensure_future(leave())
            await super().turn(gate)

    class LeavesPlan(Fine):
        name = "leaves_plan"

        def decode_now(self, now):
            sys.exit("bye")

    class Odd(BaseException):
        pass

    class Interrupts(Fine):
        name = "interrupts"

        async def turn(self, gate):
            raise KeyboardInterrupt

    class Bases(Fine):
        name = "bases"

        async def turn(self, gate):
            raise Odd("hm")

    class Mute(Exception):
        def __str__(self):
            raise ValueError("str")

        __repr__ = __str__

    class Mutes(Fine):
        name = "mutes"

        async def turn(self, gate):
            raise Mute

    class MutesPlan(Fine):
        name = "mutes_plan"

        def decode_now(self, now):
            raise Mute

    class Halves(Fine):
        name = "halves"

        async def turn(self, gate):
            raise ValueError("half \\ud800" + "z" * 600)

    class BasesPlan(Fine):
        name = "bases_plan"

        def decode_now(self, now):
            raise Odd("plan")

    class InterruptsLater(Fine):
        name = "interrupts_later"

        async def turn(self, gate):
            async def end():
                await asyncio.sleep(0)
                raise KeyboardInterrupt

            self.task = asyncio.ensure_future(end())
            await super().turn(gate)

    async def fails():
        await asyncio.sleep(0)
        raise ValueError("in my task")

    class Drops(Fine):
        name = "drops"

        async def turn(self, gate):
            asyncio.ensure_future(fails())
            await super().turn(gate)

    class Calls(Fine):
        name = "calls"

        async def turn(self, gate):
            asyncio.get_running_loop().call_soon(self.failing)
            await super().turn(gate)

        def failing(self):
            raise ValueError("in my callback")

    class Holds(Fine):
        name = "holds"

        async def turn(self, gate):
            self.task = getattr(self, "task", None) or asyncio.ensure_future(fails())
            await super().turn(gate)

    class LooksAfter(Fine):
        name = "looks_after"

        async def turn(self, gate):
            try:
                await asyncio.ensure_future(fails())
            except ValueError:
                pass
            await asyncio.gather(fails(), return_exceptions=True)
            await super().turn(gate)

    class Stops(Fine):
        name = "stops"

        async def turn(self, gate):
            asyncio.get_running_loop().stop()
            await super().turn(gate)

    class CancelsAll(Fine):
        name = "cancels_all"

        async def turn(self, gate):
            for task in asyncio.all_tasks():
                task.cancel()
            await super().turn(gate)

    class Cancels(Fine):
        name = "cancels"

        async def turn(self, gate):
            raise asyncio.CancelledError

    class Plain(Fine):
        name = "plain"

        def turn(self, gate):
            return None

    class Yields(Fine):
        name = "yields"

        async def turn(self, gate):
            yield 1

    class Releases(Fine):
        name = "releases"

        async def turn(self, gate):
            gate.launch_decode()
            gate.release("x")

    class Library(Fine):
        name = "library"

        async def turn(self, gate):
            json.loads("{")

    class Spins(Fine):
        name = "spins"

        async def turn(self, gate):
            while True:
                pass

    class Sleeps(Fine):
        name = "sleeps"

        async def turn(self, gate):
            time.sleep(1000)

    class SpinsInC(Fine):
        name = "spins_in_c"

        def decode_now(self, now):
            sum(itertools.repeat(0))

    class OneDies(Fine):
        name = "one_dies"

        async def turn(self, gate):
            if gate._rank.rank == 1 and gate.plan.round > 5:
                os.kill(os.getpid(), signal.SIGKILL)
            await super().turn(gate)

    class Dies(Fine):
        name = "dies"

        def plan(self, views, memory):
            if memory.epoch >= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().plan(views, memory)
"""
