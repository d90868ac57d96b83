"""Our engine: `python -m bench.peers.engines.ours CHECKPOINT ROWS [KEY=VALUE ...]`.

Keys: dtype, policy, threads, ranks, adp, compiled (0 or 1).
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kernel.request import SamplingParams
from kernel.topology import World
from rollout.engine import Engine, versions

if TYPE_CHECKING:
    from rollout.turns import Session

sys.path.insert(0, str(Path(__file__).parent))
from answer import channel, serve


def main() -> None:
    """Load, then answer."""
    checkpoint, rows = sys.argv[1], int(sys.argv[2])
    options = dict(each.split("=", 1) for each in sys.argv[3:])
    ranks, adp = int(options.get("ranks", 1)), int(options.get("adp", 1))
    send = channel()
    loop = asyncio.new_event_loop()
    engine = Engine(
        checkpoint, World(ranks, adp), policy=options.get("policy", "fine"), dtype=options.get("dtype", "bfloat16"),
        threads=int(options.get("threads", 1)), kv_tokens=512 * rows, prefill_tokens=512 * 16, rows=rows,
        compiled=options.get("compiled") == "1",
    )  # fmt: skip
    loop.run_until_complete(engine.__aenter__())
    kept: dict[int, Session] = {}

    async def turn(prompt: list[int], tokens: int, session: Session) -> list[int]:
        done = await session.generate(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
        return list(done.tokens)

    async def all_turns(prompts: list[list[int]], tokens: int, sessions: list[int] | None) -> list[list[int]]:
        if sessions is None:
            held = [engine.session() for _ in prompts]
        else:
            held = [kept.get(number) or kept.setdefault(number, engine.session()) for number in sessions]
        found = await asyncio.gather(*(turn(p, tokens, s) for p, s in zip(prompts, held, strict=True)))
        for session in held if sessions is None else ():
            await session.close()
        return list(found)

    about = {"version": versions()["turnstile"], "dtype": options.get("dtype", "bfloat16"), "reuse": "by token"}
    serve(send, about, lambda *asked: loop.run_until_complete(all_turns(*asked)))
    loop.run_until_complete(engine.__aexit__(None, None, None))


if __name__ == "__main__":
    main()
