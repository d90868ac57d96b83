"""Check a certificate file by itself: `python -m verify.certificate FILE`. Shares no code with what wrote it.

The file lists what stands in every device queue and an index of every instance. Valid means: the index increases along
every queue and every edge, members of a communicator number its instances alike, and each member calls each of them,
in streams of the same names where names are roles. That is all that a common order is.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def check(path: str) -> str:
    """What is wrong with the certificate at `path`, "" if nothing. Raises OSError, ValueError, KeyError or TypeError
    for a file that is none."""
    index: dict[int, int] = {}
    owner: dict[int, int] = {}
    called: dict[int, dict[int, list[str]]] = {}
    with open(path, encoding="utf-8") as lines:
        head: dict[str, Any] = json.loads(next(lines))
        if head["certificate"] != 1:
            raise ValueError(f"format {head['certificate']}")
        for line in map(json.loads, lines):
            if "communicator" in line:
                if len(set(line["sequence"])) < len(line["instances"]):
                    return f"a number of communicator {head['communicators'][line['communicator']][0]} is used twice"
                index.update(zip(line["instances"], line["index"], strict=True))
                owner.update(dict.fromkeys(line["instances"], line["communicator"]))
            elif "queue" in line:
                last = -1
                for n in line["calls"]:
                    if index[n] <= last:
                        return f"rank {line['rank']} queue {line['queue']}: index {index[n]} follows index {last}"
                    last = index[n]
                    called.setdefault(n, {}).setdefault(line["rank"], []).append(line["queue"])
            elif index[line["before"]] >= index[line["after"]]:
                return f"rank {line['rank']}, {line['reason']}: index {index[line['after']]} does not come later"
    for n in index.keys() - set(head["open"]):
        name, members = head["communicators"][owner[n]]
        if set(members) != set(called.get(n, ())):
            return f"an instance of {name} lacks members {sorted(set(members) ^ set(called.get(n, ())))}"
        if head["roles"] and len({tuple(sorted(streams)) for streams in called[n].values()}) > 1:
            return f"an instance of {name} stands in different streams of its members: {called[n]}"
    return ""


def main(arguments: list[str]) -> int:
    """0: valid, 1: not valid, 2: no certificate."""
    try:
        wrong = check(*arguments)
    except (OSError, ValueError, KeyError, TypeError, StopIteration, AttributeError, IndexError) as error:
        said = f"{type(error).__name__} {error}"
        print(f"not a certificate: {said}: give a file that a certificate was written to", file=sys.stderr)
        return 2
    print(f"not valid: {wrong}" if wrong else "valid")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
