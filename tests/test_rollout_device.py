"""What is asked of GPUs before there is one: options, counting, memory, errors in one line, quietness, last words."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import DeviceFault, RankLost, TurnstileError, UsageError
from kernel.exchange.shape import Shape
from kernel.exchange.sizes import GRANULE, WORKSPACE, exchange_bytes, footprint, heap_bytes
from kernel.record import Kind
from kernel.request import Phase
from kernel.sched.policy import Limits
from kernel.topology import World
from models.config import parse_config
from rollout import cli
from rollout.args import parse
from rollout.device import DeviceOptions, used_buckets
from rollout.ranks import exchange, faults, gpus, last_words, memory
from rollout.ranks.quiet import GRAIN, Quiet, Reading

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
PAPER = {
    "model_type": "qwen3_moe", "vocab_size": 32768, "hidden_size": 2560, "num_hidden_layers": 42,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 64, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768,
}  # fmt: skip
CONFIG = parse_config(PAPER)
CUDA = DeviceOptions("cuda").resolved(CONFIG)
ONE = World()
PAIR = World(2, 2, 2)


class Driver:
    """libcuda with GPUs of these sizes; start: what cuInit gives."""

    def __init__(self, *sizes: int, start: int = 0) -> None:
        self.sizes, self.start = sizes, start

    def cuInit(self, flags: int) -> int:
        return self.start

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = len(self.sizes)
        return 0

    def cuDeviceGet(self, out: Any, index: int) -> int:
        out._obj.value = index
        return 0

    def cuDeviceTotalMem_v2(self, out: Any, device: Any) -> int:
        out._obj.value = self.sizes[device.value]
        return 0


def test_gpus_are_counted_and_measured_without_torch() -> None:
    assert gpus.visible(Driver(141 * GIB, 80 * GIB)) == (141 * GIB, 80 * GIB)


@pytest.mark.parametrize(
    ("driver", "says"),
    [
        (Driver(start=100), "the driver shows no GPU (CUDA_VISIBLE_DEVICES=): use --device cpu"),
        (Driver(), "the driver shows no GPU"),
        (Driver(GIB, start=803), "cuInit gives 803"),
    ],
)
def test_a_host_without_a_gpu_is_told_so(driver: Driver, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError) as caught:
        gpus.visible(driver)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "DRIVER", "libnothing-of-the-kind.so.1")
    with pytest.raises(UsageError, match=r"no NVIDIA driver \(libnothing-of-the-kind\.so\.1\): use --device cpu"):
        gpus.visible()


def test_a_world_with_more_ranks_than_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus.check_count(2, 2)
    with pytest.raises(UsageError, match=r"--world 4 --device cuda needs 4 GPUs, one a rank, and 2 are visible: lower"):
        gpus.check_count(4, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(UsageError, match=r"and 1 is visible \(CUDA_VISIBLE_DEVICES=1\)"):
        gpus.check_count(2, 1)


def test_a_build_of_torch_for_cpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "version", lambda name: "2.11.0+cpu")
    with pytest.raises(UsageError, match=r"torch 2\.11\.0\+cpu is a build for CPUs: install a build for CUDA"):
        gpus.check_host(1)
    monkeypatch.setattr(gpus, "version", lambda name: "2.11.0+cu130")
    gpus.check_torch()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--device", "tpu"], "--device"),
        (["--graphs", "off"], "--graphs applies to --device cuda only"),
        (["--graphs", "maybe"], "'maybe' is neither on nor off"),
        (["--load-format", "dummy"], "--load-format applies to --device cuda only"),
        (["--quantization", "fp8"], "--quantization applies to --device cuda only"),
        (["--modules", "eager"], "--modules applies to --device cuda only"),
        (["--check-quiet"], "--check-quiet applies to --device cuda only"),
        (["--launch-order", "implicit"], "--launch-order applies to --device cuda only"),
        (["--attention", "flashinfer"], "--attention flashinfer needs --device cuda"),
        (["--device", "cuda", "--dtype", "float32", "--attention", "flashinfer"], "flashinfer has no float32"),
        (["--device", "cuda", "--dtype", "float32", "--quantization", "fp8"], "fp8 computes in bfloat16"),
        (["--device", "cuda", "--dtype", "float16"], "--dtype"),
        (["--device", "cuda", "--connections", "33"], "--connections 33: must be 1 to 32"),
        (["--device", "cuda", "--max-ctas", "0"], "--max-ctas 0: must be at least 1"),
        (["--rows", "9999999999"], "--rows 9999999999: must be at most 65536"),
        (["--device", "cuda", "--prefill-sms", "-4"], "--prefill-sms -4: must be at least 1"),
    ],
)
def test_flags_that_do_not_fit_together_are_one_line_and_exit_code_2(
    argv: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["rollout", *argv]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err
    assert not list(tmp_path.iterdir())


def test_without_gpus_cuda_is_refused_before_a_directory_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def visible() -> tuple[int, ...]:
        raise UsageError("--device cuda: the driver shows no GPU: use --device cpu here")

    monkeypatch.setattr(gpus, "check_torch", lambda: None)
    monkeypatch.setattr(gpus, "visible", visible)
    assert cli.main(["compare", "--demo", "--device", "cuda", "--out", str(tmp_path / "run")]) == 2
    assert capfd.readouterr() == ("", "turnstile: --device cuda: the driver shows no GPU: use --device cpu here\n")
    monkeypatch.setattr(gpus, "visible", lambda: (GIB, GIB))
    assert cli.main(["compare", "--demo", "--device", "cuda", "--out", str(tmp_path / "run")]) == 2
    assert "--world 4 --device cuda needs 4 GPUs" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_is_left_open_follows_from_the_device_and_the_model() -> None:
    assert (CUDA.dtype, CUDA.attention) == ("bfloat16", "flashinfer")
    cpu = DeviceOptions().resolved(CONFIG)
    assert (cpu.dtype, cpu.attention) == ("float32", "reference")
    assert DeviceOptions("cuda", dtype="float32").resolved(CONFIG).attention == "reference"
    small = parse_config({**PAPER, "head_dim": 16})
    assert DeviceOptions("cuda").resolved(small).attention == "reference"
    with pytest.raises(UsageError, match="heads of 64, 128, 256 numbers, and this model's have 16"):
        DeviceOptions("cuda", attention="flashinfer").resolved(small)


def test_options_of_the_command_line_reach_the_ranks() -> None:
    argv = ["--device", "cuda", "--graphs", "off", "--launch-order", "implicit", "--connections", "1", "--check-quiet"]
    options = parse("rollout", argv).device
    assert options == DeviceOptions("cuda", graphs=False, launch_order="implicit", connections=1, quiet=True)
    quiet = {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
    assert options.environment() == quiet | {"NCCL_LAUNCH_ORDER_IMPLICIT": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert DeviceOptions("cuda").environment() == quiet
    assert DeviceOptions("cpu").environment() == {}
    eager = parse("rollout", ["--device", "cuda", "--modules", "eager"]).device
    assert eager.environment() == quiet | {"CUDA_MODULE_LOADING": "EAGER"}
    assert parse("compare", ["--demo"]).device == DeviceOptions()


def test_flashinfer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout import device

    monkeypatch.setattr(device, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'turnstile\[cuda\]', or use --attention reference"):
        CUDA.check_installed()
    DeviceOptions("cuda", dtype="float32").resolved(CONFIG).check_installed()


@given(st.integers(1, 700), st.sampled_from([1, 2, 4, 8]))
def test_every_row_count_has_a_bucket_and_a_graph(rows: int, granule: int) -> None:
    known = Limits(1, 1, 1).buckets
    assert DeviceOptions().buckets(rows, known) == known
    buckets = CUDA.buckets(rows, known)
    assert buckets[: len(known)] == known
    assert buckets == tuple(sorted(set(buckets)))
    limits = Limits(8, 1, 42, rows=rows, granule=granule, buckets=buckets)
    used = used_buckets(limits.bucket, rows)
    assert all(limits.bucket(count) in used and limits.bucket(count) >= count for count in range(1, rows + 1))
    assert len(used) <= 9 + (max(0, rows - 64) + 15) // 16, "a graph for each of them takes memory and time"


def test_weights_are_counted_as_the_checkpoint_holds_them(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    from models import read_config
    from models.tiny import write_checkpoint

    for options in ({}, {"tied": True}, {"dense_layers": (1,)}):
        path = write_checkpoint(tmp_path / str(len(options)) / "-".join(options), **options)  # type: ignore[arg-type]
        tensors = safetensors.load_file(path / "model.safetensors")
        counted = memory.weight_bytes(read_config(path), World(), DeviceOptions(dtype="float32"))
        held = sum(tensor.nbytes for tensor in tensors.values())
        assert counted == pytest.approx(held, rel=0.02)
        assert memory.weight_bytes(read_config(path), World(2, 1, 2), DeviceOptions(dtype="float32")) < held * 0.7


def test_the_kv_pool_takes_what_the_gpu_has_left() -> None:
    def tokens(gib: int, world: World = ONE, asked: int | None = None, **options: Any) -> int:
        made = DeviceOptions("cuda", **options).resolved(CONFIG)
        return memory.kv_tokens(CONFIG, world, made, gib * GIB, prefill_tokens=2048, block_size=16, asked=asked)

    each = 2 * 42 * 4 * 128 * 2
    weights = memory.weight_bytes(CONFIG, World(), CUDA)
    assert 31 * GIB < weights < 36 * GIB
    found = tokens(80)
    assert found % 16 == 0
    assert found * each + weights < 80 * GIB * 0.92 < found * each + weights + 8 * GIB
    assert tokens(80, quantization="fp8") > found
    assert tokens(80, World(2, 1, 2)) > 2 * found, "each rank has half of the weights and of the heads"
    assert tokens(640) == 1 << 20
    assert tokens(80, asked=4096) == 4096
    with pytest.raises(UsageError, match=r"--kv-tokens 10000000 takes .* GiB a rank beside .* at most \d+ fit"):
        tokens(80, asked=10_000_000)
    with pytest.raises(UsageError, match=r"this model does not fit: .* use more ranks"):
        tokens(32)


def test_an_expert_exchange_takes_its_memory_from_the_kv_pool() -> None:
    """By the formulas: P's 35 MiB and D's 80 MiB at two ranks lie in granules of 512 MiB, beside two workspaces."""
    pool = partial(memory.kv_tokens, CONFIG, PAIR, CUDA, 64 * GIB, prefill_tokens=2048, block_size=16)
    each = 2 * 42 * 4 * 128 * 2
    shape = Shape(2, CONFIG.experts, CONFIG.hidden_size, CONFIG.experts_per_token, 2048, 64)
    wanted = {"substrate": "deepep", "reason": "", "shape": asdict(shape)}
    taken = exchange.reserved(wanted, CUDA)
    buffers = footprint(shape)
    assert taken >= buffers.total + 2 * WORKSPACE
    assert GIB < taken < 1.2 * GIB
    assert abs((pool() - pool(exchange=taken)) * each - taken) < 16 * each, "to a block"
    assert exchange.reserved({"substrate": "nccl", "reason": "", "shape": asdict(shape)}, CUDA) == 0
    assert exchange.reserved({"substrate": "none", "reason": ""}, CUDA) == 0
    fewer = DeviceOptions("cuda", exchange="deepep", exchange_sms=4).resolved(CONFIG)
    assert exchange.reserved(wanted, fewer) < taken
    says = r"beside .* of weights, 1\.1 GiB for the expert exchange and .* at most \d+ fit"
    with pytest.raises(UsageError, match=says):
        pool(exchange=taken, asked=pool(exchange=0))


@pytest.mark.parametrize("decode_rows", [1, 64, 200])
def test_symmetric_memory_is_what_its_buffers_ask_for(decode_rows: int) -> None:
    torch = pytest.importorskip("torch")
    from kernel.comm.exchange.symm import SymmetricLatency

    class Counted:
        rank, taken = 0, 0

        def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
            made = torch.empty(shape, dtype=dtype)
            self.taken += made.nbytes
            return made

    shape, counted = Shape(2, 16, 2560, 8, 64, decode_rows), Counted()
    spread: Any = counted
    SymmetricLatency(shape, spread, torch.bfloat16)
    assert heap_bytes(counted.taken) == exchange_bytes("symm", shape)
    assert heap_bytes(counted.taken) - GRANULE in range(counted.taken, counted.taken + GRANULE)


async def test_the_engine_leaves_the_exchange_its_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two GPUs that hold the weights, and hardly more."""
    from rollout import engine

    pytest.importorskip("torch")
    (tmp_path / "config.json").write_text(json.dumps(PAPER))
    monkeypatch.setattr(gpus, "check_host", lambda ranks: (48 * GIB, 64 * GIB))
    monkeypatch.setattr(exchange, "_installed", lambda _: True)
    monkeypatch.setattr(DeviceOptions, "check_installed", lambda *_, **__: None)
    made = {}
    for asked in ("none", "nccl", "deepep"):
        options = DeviceOptions("cuda", weights="dummy", exchange=asked)
        made[asked] = engine.Engine(tmp_path, PAIR, device=options, rows=64, prefill_tokens=2048)
    each = 2 * 42 * 4 * 128 * 2
    assert made["none"].kv_tokens == made["nccl"].kv_tokens
    taken = exchange.reserved(made["deepep"]._settings["exchange"], made["deepep"].options)
    assert abs((made["none"].kv_tokens - made["deepep"].kv_tokens) * each - taken) < 16 * each, "to a block"


def test_errors_of_the_gpu_are_one_line() -> None:
    torch = pytest.importorskip("torch")
    text = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1 is free"
    found = faults.explained(torch.OutOfMemoryError(text), 3, "while it loaded the model")
    assert isinstance(found, DeviceFault)
    assert str(found) == (
        "rank 3 ran out of GPU memory while it loaded the model (2.50 GiB more asked for, of 139.80 GiB in all): lower"
        " --kv-tokens, --prefill-tokens or --rows, or use more ranks"
    )
    fault = faults.explained(RuntimeError("CUDA error: unspecified launch failure\nmore\nlines"), 1, "while it served")
    assert "rank 1: the GPU failed while it served: CUDA error: unspecified launch failure; its context" in str(fault)
    assert "\n" not in str(fault)
    assert faults.explained(RuntimeError("shapes differ"), 1, "") is None
    assert faults.explained(RankLost("rank 2 has gone"), 1, "") is None
    assert "NCCL failed" in str(faults.explained(torch.distributed.DistBackendError("NCCL error: remote"), 1, "here"))


def test_quietness_names_what_broke_it() -> None:
    now = Reading(10, 1, 0, 4, 500 << 20, frozenset({"torch"}))
    readings = iter([now, now])
    Quiet(0, lambda: next(readings)).check()
    later = Reading(12, 1, 1, 5, now.outside + GRAIN + (2 << 20), frozenset({"torch", "triton.compiler"}))
    readings = iter([now, later])
    with pytest.raises(TurnstileError) as caught:
        Quiet(1, lambda: next(readings)).check()
    for what in (
        "rank 1 was not quiet", "2 calls to allocate device memory", "1 retries", "1 calls to allocate pinned",
        "6 MiB of device memory taken outside", "modules imported: triton.compiler",
    ):  # fmt: skip
        assert what in str(caught.value)
    assert "free device memory" not in str(caught.value)


def event(kind: Kind, phase: Phase | None, site: str) -> Any:
    return SimpleNamespace(kind=kind, phase=phase, site=site)


def test_a_lost_rank_s_record_says_what_was_in_flight() -> None:
    events = [
        event(Kind.SUBMIT, Phase.D, "D 8"),
        event(Kind.SUBMIT, Phase.P, "P e3 [0,4)"),
        event(Kind.WORK_FINISH, Phase.D, "D 8"),
        event(Kind.SUBMIT, Phase.D, "D 9"),
        event(Kind.PLAN, None, ""),
        event(Kind.SUBMIT, Phase.P, "P e3 [4,8)"),
    ]
    assert last_words.clause(events) == " with P e3 [0,4) and D 9 in flight"
    assert last_words.clause(events[:1]) == " with D 8 in flight"
    assert last_words.clause(events[:1] + events[2:3]) == " with nothing of P or D in flight"
    assert last_words.clause([]) == last_words.of("", 0) == last_words.of("/nowhere", 0) == ""
