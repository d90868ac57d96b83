"""`turnstile compare` end to end: real ranks, a tiny model, a small slice of the packaged trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from kernel.record import read_run
from rollout.replay import read_rows
from rollout.report.lanes import common
from verify.intervals import intervals

for needed in ("torch", "uvloop", "numpy", "safetensors", "matplotlib"):
    pytest.importorskip(needed)

ROOT = Path(__file__).parents[1]


def test_two_policies_do_the_same_work_on_ranks_that_stay_up(tmp_path: Path) -> None:
    out = tmp_path / "run"
    slice_ = ("--fraction", "0.04", "--turns", "3", "--length-scale", "0.03", "--time-scale", "0.001")
    done = subprocess.run(
        [
            sys.executable, "-m", "turnstile", "compare", *slice_, "--world", "2", "--adp", "2", "--ep", "2",
            "--policy", "global_complete", "--policy", "fine:span=2", "--prefill-tokens", "32",
            "--out", str(out), "--json",
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    policies = {policy.pop("policy"): policy for policy in json.loads(done.stdout)["policies"]}
    assert list(policies) == ["global_complete", "fine:span=2"]
    rows = defaultdict(list)
    for row in read_rows(out / "requests.jsonl"):
        rows[row.policy].append(row)
    for name, metrics in policies.items():
        assert metrics["completed"] == len(rows[name]) == 15
        assert metrics["failed"] == 0
        # Only whole blocks of kept KV are reused, and with this pool nothing is evicted.
        later = [row for row in rows[name] if row.turn]
        # The trace's retained context, less the last token of the turn before, whose KV nothing has written.
        assert all(row.cached_tokens == row.prompt_tokens - row.new_tokens - 1 for row in later)
        assert all(row.cached_tokens == 0 for row in rows[name] if row.turn == 0)
        for key in ("decode_wait_ms", "permit_wait_ms", "rendezvous_ms"):
            assert metrics[f"mean_{key}"] is not None
        assert 0 <= metrics["pd_overlap_ratio"] <= 1
    shapes = [sorted((r.trajectory, r.turn, r.prompt_tokens, r.output_tokens) for r in rows[name]) for name in rows]
    assert shapes[0] == shapes[1]
    for name in ("global_complete", "fine-span=2"):
        assert sorted(path.name for path in (out / name / "record").iterdir()) == ["rank0.ring", "rank1.ring"]
        for recording in read_run(out / name).values():
            found = intervals(recording)
            for phase, label in (("D", "decode"), ("P", "permit")):
                work = [(one.start_ns, one.end_ns) for one in found if one.lane == phase]
                waits = [(one.start_ns, one.end_ns) for one in found if (one.lane, one.label) == ("wait", label)]
                assert work
                assert waits
                assert common(work, waits) == 0, "nothing waits while it works"
        assert (out / f"lanes-{name}.png").stat().st_size > 10_000
