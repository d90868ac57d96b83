"""Which run.json `--resume` goes on with, those of earlier versions among them, which lack what came later."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.gpu.cells import Cell
from bench.gpu.store import Store
from kernel.errors import UsageError
from kernel.topology import World
from rollout import resume
from rollout.device import DeviceOptions
from rollout.trace.shape import Shape

if TYPE_CHECKING:
    from pathlib import Path

WORLD = World(2, 2, 2)
LATER = {
    "world": ("cut", "exchange"),
    "device_options": ("modules", "quiet", "compiled", "exchange", "exchange_sms"),
    "trace": ("context_scale", "turns"),
}
"""Fields that had been added when runs of earlier versions existed already."""


def about(world: World = WORLD, substrate: str = "none", **options: Any) -> dict[str, Any]:
    return {
        "world": {**asdict(world), "atp": world.atp, "etp": world.etp},
        "exchange": {"substrate": substrate, "reason": "asked for"},
        "device": "cuda",
        "device_options": asdict(DeviceOptions("cuda", **options)),
        "policies": ["normal"],
        "model": {"path": "m", "type": "qwen3_moe", "layers": 4},
        "model_sha256": "ab",
        "trace": {"name": "paper", "format": "paper", "sha256": "cd", **asdict(Shape())},
        "repeat": 1,
        "kv_tokens": None,
        "rows": 64,
    }


def written(folder: Path, run: dict[str, Any]) -> Path:
    (folder / "run.json").write_text(json.dumps({**run, "status": "failed"}))
    return folder


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_an_earlier_version_did_not_know_was_as_it_is_by_default(data: st.DataObject, tmp_path: Path) -> None:
    run = about()
    for name, keys in LATER.items():
        for key in data.draw(st.sets(st.sampled_from(keys)), name):
            del run[name][key]
    for key in data.draw(st.sets(st.sampled_from(["exchange", "model_sha256"]))):
        del run[key]
    resume.check(written(tmp_path, run), about())


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (about(World(2, 2, 2, exchange="split"), "deepep", exchange="deepep"),
         "has world.exchange 'none', and this command says 'split'"),
        (about(World(2, 2, 2, cut="sublayer")), "has world.cut 'layer', and this command says 'sublayer'"),
        (about(modules="eager"), "has device_options.modules 'lazy', and this command says 'eager'"),
        ({**about(), "model": {"path": "m", "type": "qwen3_moe", "layers": 5}},
         "has model.layers 4, and this command says 5"),
    ],
)  # fmt: skip
def test_what_differs_from_an_earlier_version_s_run_is_named(now: dict[str, Any], says: str, tmp_path: Path) -> None:
    run = about()
    for name, keys in LATER.items():
        for key in keys:
            del run[name][key]
    del run["exchange"], run["model_sha256"]
    with pytest.raises(UsageError) as refused:
        resume.check(written(tmp_path, run), now)
    assert f"--resume: the run in {tmp_path} {says}" in str(refused.value)


def test_one_exchange_is_not_gone_on_with_over_another(tmp_path: Path) -> None:
    """Both have the same program; and `auto` goes on with what it came to."""
    split = World(2, 2, 2, exchange="split")
    written(tmp_path, about(split, "nccl", exchange="nccl"))
    with pytest.raises(UsageError, match="has exchange 'nccl', and this command says 'deepep'"):
        resume.check(tmp_path, about(split, "deepep", exchange="deepep"))
    written(tmp_path, about(exchange="none"))
    resume.check(tmp_path, {**about(), "device_options": asdict(DeviceOptions("cuda", exchange="none"))})


def test_a_campaign_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    now = {"world": asdict(WORLD), "device": asdict(DeviceOptions("cuda")), "shape": asdict(Shape()), "rows": 64}
    before = json.loads(json.dumps(now))
    del before["world"]["exchange"], before["device"]["exchange"], before["shape"]["context_scale"]
    Store(tmp_path / "before", before, Cell)
    Store(tmp_path / "now", now, Cell, [tmp_path / "before"])
    other = {**now, "device": asdict(DeviceOptions("cuda", exchange="nccl"))}
    with pytest.raises(UsageError, match="before: its cells were measured with device"):
        Store(tmp_path / "other", other, Cell, [tmp_path / "before"])
