"""Sizes, limits and the choice of a substrate: DeepEP's own hints as the oracle, each refused rule by its name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import PackageMissing, PeersDiffer, UsageError, VersionMismatch
from kernel.exchange import choose, deep_ep
from kernel.exchange.shape import Shape, agree
from kernel.exchange.sizes import MIB, footprint, low_latency_bytes, low_latency_ctas, normal_bytes, residency
from kernel.topology import World

PAPER = Shape(ranks=8, experts=512, hidden=2560, topk=8, prefill_rows=4096, decode_rows=32)
PAIR = Shape(ranks=2, experts=64, hidden=2048, topk=8, prefill_rows=4096, decode_rows=64)


def test_memory_is_that_of_the_paper() -> None:
    whole = footprint(PAPER, num_sms=20, chunk=256)
    assert round(whole.low_latency / MIB, 1) == 325.0
    assert round(whole.normal / MIB, 2) == 140.16
    assert round(whole.total / MIB, 1) == 465.2


def test_memory_of_two_ranks_is_what_deep_ep_hinted_there() -> None:
    assert round(low_latency_bytes(PAIR) / MIB) == 65
    assert round(normal_bytes(PAIR.row_bytes, 2) / MIB) == 30


@pytest.mark.parametrize(
    ("experts", "ctas"), [(64, 64), (96, 96), (128, 128), (256, 128), (288, 96), (512, 128), (532, 107)]
)
def test_low_latency_grids_on_132_sms(experts: int, ctas: int) -> None:
    assert low_latency_ctas(experts, 132) == ctas


@given(st.integers(1, 2000), st.integers(1, 200), st.integers(0, 300))
def test_a_grid_fits_the_device_and_has_a_place_for_every_expert(experts: int, sms: int, rows: int) -> None:
    ctas = low_latency_ctas(experts, sms, rows)
    assert min(rows, sms) <= ctas <= sms
    assert ctas * -(-experts // sms) >= experts


def test_sms_of_both_phases_must_fit_together() -> None:
    assert residency(PAIR, sms=132, num_sms=20).used == 64 + 20 + 3
    residency(PAIR, sms=132, num_sms=20, nccl=32).check()
    with pytest.raises(UsageError, match=r"need 157 SMs of 132 \(128 of D's .* 20 of P \+ 9 .* --exchange-sms"):
        residency(PAPER, sms=132, num_sms=20).check()


REFUSED = {
    "hidden": (replace(PAIR, hidden=2304), {}, "hidden size 2304: its low-latency kernels are built for 2048"),
    "topk": (replace(PAIR, topk=12), {}, "top-12 rows"),
    "rows": (replace(PAIR, decode_rows=1028), {"queue_depth": 4096}, "1028 decode rows a rank: its message tags"),
    "granule": (replace(PAIR, decode_rows=33), {}, "must be a multiple of 4"),
    "depth": (replace(PAIR, decode_rows=512), {}, r"NVSHMEM_QP_DEPTH=1024: it needs 2 x \(rows \+ 1\) = 1026"),
    "fp8": (replace(PAIR, hidden=2560, fp8=True), {"num_sms": 20}, None),
    "fp8 hidden": (replace(PAIR, hidden=3072 - 512 + 256, fp8=True), {}, "hidden size 2816"),
    "ranks": (replace(PAIR, ranks=1), {}, "between 1 ranks of one host"),
    "hosts": (PAIR, {"hosts": 2}, "over 2 hosts with two buffers"),
    "float32": (replace(PAIR, itemsize=4), {}, "numbers of 4 bytes"),
    "wide": (replace(PAIR, hidden=8192, itemsize=4), {}, "rows of 32768 bytes"),
    "odd": (PAIR, {"num_sms": 7}, "over 7 SMs: a channel is two of them"),
    "namespace": (PAIR, {"num_sms": 130}, r"queue pairs P \[0, 130\).*\[0, 128\)"),
    "residency": (PAIR, {"nccl": 64}, "need 151 SMs of 132"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_each_rule_of_deep_ep_is_refused_by_name(what: str) -> None:
    shape, more, words = REFUSED[what]
    options = {"num_sms": 20, "sms": 132, **more}
    if words is None:
        deep_ep.check(shape, **options)
        return
    with pytest.raises(UsageError, match=words) as caught:
        deep_ep.check(shape, **options)
    assert "\n" not in str(caught.value)


def test_fp8_rows_must_be_packed_by_512(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_ep, "HIDDEN", (2304,))
    with pytest.raises(UsageError, match="FP8 rows of hidden size 2304"):
        deep_ep.check(replace(PAIR, hidden=2304, fp8=True), num_sms=20, sms=132)


def test_queue_pairs_are_disjoint_by_namespace_on_one_host_and_collide_across_hosts() -> None:
    deep_ep.check_queue_pairs(deep_ep.queue_pairs(PAPER, 12))
    with pytest.raises(UsageError, match=r"P \[0, 12\) of NVSHMEM and D \[0, 64\) of NVSHMEM overlap"):
        deep_ep.check_queue_pairs(deep_ep.queue_pairs(PAPER, 12, hosts=2))
    behind = deep_ep.QueuePairs("D", 12, 76, "NVSHMEM")
    deep_ep.check_queue_pairs((deep_ep.queue_pairs(PAPER, 12, hosts=2)[0], behind))


def test_shapes_that_nothing_can_exchange_are_refused() -> None:
    with pytest.raises(UsageError, match="10 experts over 4 ranks"):
        Shape(4, 10, 8, 2, 16, 16)
    with pytest.raises(UsageError, match="chooses 5 of 4 experts"):
        Shape(2, 4, 8, 5, 16, 16)
    with pytest.raises(UsageError, match="decode_rows=0"):
        Shape(2, 4, 8, 2, 16, 0)


@pytest.mark.parametrize("name", ["hidden", "topk", "experts", "prefill_rows", "decode_rows", "fp8"])
def test_peers_that_differ_are_named(name: str) -> None:
    agree(0, PAIR, [PAIR.encode()] * 2)
    changed = replace(PAIR, **{name: True if name == "fp8" else 2 * getattr(PAIR, name)})
    with pytest.raises(PeersDiffer, match=f"{name}=.*, rank 1 with {name}="):
        agree(0, PAIR, [PAIR.encode(), changed.encode()])


def test_peers_of_another_world_are_named() -> None:
    with pytest.raises(PeersDiffer, match="of 2 ranks, and 3 answered"):
        agree(0, PAIR, [PAIR.encode()] * 3)


def test_nvshmem_versions() -> None:
    deep_ep.check_versions((3, 4, 5), (3, 4, 5), "deep_ep")
    deep_ep.check_versions((3, 8, 0), (3, 4, 5), "deep_ep")
    for host in ((3, 3, 9), (4, 4, 5), (2, 11, 0)):
        with pytest.raises(VersionMismatch, match=r"cannot serve deep_ep, whose device code is of 3\.4\.5"):
            deep_ep.check_versions(host, (3, 4, 5), "deep_ep")


# -- the choice -----------------------------------------------------------------------------------------------------

EVERYTHING = frozenset({"torch", "deep_ep", "nvshmem.core", "symm_mem"})
GPUS = choose.Situation(World(4, 4, 4), "cuda", packages=EVERYTHING, experts=64)


@pytest.mark.parametrize(
    ("now", "substrate", "reason"),
    [
        (GPUS, "deepep", "best"),
        (replace(GPUS, packages=EVERYTHING - {"deep_ep"}), "symm", "no deepep: deep_ep is not installed"),
        (replace(GPUS, packages=frozenset({"torch"})), "nccl", "no symm: symm_mem is not installed"),
        (replace(GPUS, hosts=2), "nccl", "cannot hold the buffers of two phases across hosts"),
        (replace(GPUS, broken={"deepep": "hidden size 2304"}), "symm", "no deepep: hidden size 2304"),
        (replace(GPUS, world=World(4, 1, 4)), "none", "every rank has all rows already"),
        (replace(GPUS, world=World(4, 4, 2)), "none", "choose --ep 4, not 2"),
        (replace(GPUS, experts=0), "none", "no routed experts"),
        (replace(GPUS, experts=6), "none", "6 experts do not divide over 4 ranks"),
        (replace(GPUS, device="cpu"), "none", "ask for --exchange"),
    ],
)
def test_auto_takes_the_best_that_works_and_says_why(now: choose.Situation, substrate: str, reason: str) -> None:
    choice = choose.choose("auto", now)
    assert choice.substrate == substrate
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("asked", "now", "words"),
    [
        ("deepep", replace(GPUS, hosts=2), "stock DeepEP cannot hold the buffers of two phases across hosts"),
        ("symm", replace(GPUS, hosts=2), "one host alone"),
        ("shm", GPUS, "it moves CPU tensors"),
        ("shm", replace(GPUS, device="cpu", hosts=2), "choose gloo"),
        ("nccl", replace(GPUS, device="cpu"), "it moves GPU tensors"),
        ("gloo", replace(GPUS, world=World(4, 2, 2), device="cpu"), "choose --ep 4"),
        ("shm", replace(GPUS, world=World(1, 1, 1), device="cpu"), "choose local"),
        ("local", GPUS, "for one rank"),
        ("pigeon", GPUS, "choose one of auto, none"),
    ],
)
def test_what_was_asked_for_and_cannot_be_had_is_refused(asked: str, now: choose.Situation, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        choose.choose(asked, now)


@pytest.mark.parametrize(("package", "words"), [("deep_ep", "tokenspeed-deepep"), ("nvshmem.core", "nvshmem4py-cu13")])
def test_a_missing_package_is_named_with_what_to_install(package: str, words: str) -> None:
    with pytest.raises(PackageMissing, match=rf"needs {package}.*{words}"):
        choose.choose("deepep", replace(GPUS, packages=EVERYTHING - {package}))


@given(
    st.sampled_from(choose.CHOICES),
    st.builds(
        choose.Situation,
        st.sampled_from([World(1), World(2, 2, 2), World(4, 2, 4), World(4, 4, 2), World(8, 1, 8), World(16, 4, 16)]),
        st.sampled_from(["cpu", "cuda"]),
        st.integers(1, 2),
        st.sets(st.sampled_from(sorted(EVERYTHING))).map(lambda some: frozenset({"torch", *some})),
        st.sampled_from([0, 16, 64, 60]),
    ),
)
def test_whatever_is_chosen_can_be_had(asked: str, now: choose.Situation) -> None:
    try:
        choice = choose.choose(asked, now)
    except UsageError as error:
        assert (asked != "auto", "\n" in str(error)) == (True, False)  # noqa: PT017
        return
    assert choice.substrate == asked or asked == "auto"
    if choice.substrate == "none":
        assert choice.program == "none"
        return
    assert now.world.ep == now.world.size
    assert now.experts % now.world.size == 0
    assert (choice.substrate in ("nccl", "deepep", "symm")) == (now.device == "cuda") or choice.substrate == "local"
    if now.hosts > 1 and now.world.size > 1:
        assert choice.substrate in ("gloo", "nccl")
    assert set(choose.NEEDS.get(choice.substrate, ())) <= now.packages
