"""The collective program against the published table, and the route against its definition."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import UsageError
from kernel.program import EXCHANGING, Program, Site
from kernel.request import Phase
from kernel.topology import CUTS, EXCHANGES, Role, World

# (size, adp, ep, gather) -> P and D of one sparse layer, attention part | expert part. SGLang 0.5.15's sequences for
# Qwen3-MoE; `cross` rows are the paper's Figure 2.
TABLE = {
    (2, 1, 1, "flat"): ("AR[TP] | AR[TP]", "AR[TP] | AR[TP]"),
    (4, 1, 4, "flat"): ("AR[TP] | AR[TP]", "AR[TP] | AR[TP]"),
    (4, 1, 2, "flat"): ("AR[TP] | AR[EP] AR[ETP]", "AR[TP] | AR[EP] AR[ETP]"),
    (2, 2, 1, "flat"): ("AR[TP] | AR[TP]", "AG[TP] | RS[TP]"),
    (2, 2, 2, "flat"): ("AR[TP] | RSv[TP]", "AG[TP] | RSv[TP]"),
    (8, 8, 8, "cross"): ("AR[TP] | RSv[TP]", "AG[TP] | RSv[TP]"),
    (4, 2, 1, "flat"): ("AR[TP] | AR[TP]", "RS[ATP] AG[TP] | RS[TP] AG[ATP]"),
    (4, 2, 4, "flat"): ("AR[TP] | AR[TP]", "RS[ATP] AG[TP] | RS[TP] AG[ATP]"),
    (8, 2, 4, "flat"): ("AR[TP] | AR[EP] AR[ETP]", "RS[ATP] AG[TP] | RS[TP] AG[ATP]"),
    (4, 4, 2, "flat"): ("AR[TP] | AR[EP] AR[ETP]", "AG[TP] | RS[TP]"),
    (4, 2, 4, "cross"): ("AR[TP] | AR[TP]", "RS[ATP] AG[ADP] AG[ATP] | RS[ATP] RS[ADP] AG[ATP]"),
    # The corner of the variable reduce-scatter: e = d but attention-TP above 1 must not use it. Where EP and ADP, or
    # ATP and ETP, have the same members they are one communicator, named by the first.
    (4, 2, 2, "flat"): ("AR[TP] | AR[ADP] AR[ATP]", "RS[ATP] AG[TP] | RS[TP] AG[ATP]"),
}


def _text(program: Program, site: Site) -> str:
    return " ".join(f"{call.op}[{call.role}]" for call in program.at(site, 0))


@pytest.mark.parametrize("shape", TABLE, ids=str)
def test_layer_sequences_are_those_of_the_table(shape: tuple[int, int, int, str]) -> None:
    size, adp, ep, gather = shape
    world = World(size, adp, ep, gather, "paper")
    for phase, expected in zip((Phase.P, Phase.D), TABLE[shape], strict=True):
        program = Program(world, phase, 3)
        assert f"{_text(program, Site.GATHER)} | {_text(program, Site.SCATTER)}" == expected


def test_figure_two_groups() -> None:
    world = World(4, 2, 4, "cross", "paper")
    assert world.groups[Role.ADP] == ((0, 2), (1, 3))
    assert world.members(Role.ATP, 3) == (2, 3)


worlds = st.integers(1, 3).flatmap(
    lambda k: st.builds(
        World,
        st.just(2**k),
        st.sampled_from([2**i for i in range(k + 1)]),
        st.sampled_from([2**i for i in range(k + 1)]),
        st.sampled_from(["flat", "cross"]),
        st.sampled_from(["paper", "all", "none"]),
        st.sampled_from(CUTS),
        st.sampled_from(EXCHANGES),
    )
)


@given(worlds, st.sampled_from(Phase), st.integers(1, 5), st.data())
def test_segments_partition_the_forward(world: World, phase: Phase, layers: int, data: st.DataObject) -> None:
    program = Program(world, phase, layers)
    most = program.boundaries
    assert most == layers * (2 if world.cut == "sublayer" else 1) + (world.splits)
    assert world.layers(most) == layers
    cuts = sorted(data.draw(st.sets(st.integers(1, most - 1)))) if most > 1 else []
    ends = [0, *cuts, most]
    parts = [program.segment(start, end) for start, end in pairwise(ends)]
    assert tuple(chain.from_iterable(parts)) == program.calls


@pytest.mark.parametrize("phase", list(Phase))
def test_a_cut_inside_layers_parts_attention_from_experts(phase: Phase) -> None:
    program = Program(World(4, 2, 4, cut="sublayer"), phase, 3)
    for layer in range(3):
        first, second = program.segment(2 * layer, 2 * layer + 1), program.segment(2 * layer + 1, 2 * layer + 2)
        assert {call.site for call in first} == {Site.GATHER} | ({Site.EMBED} if layer == 0 else set())
        assert {call.site for call in second} == {Site.SCATTER} | ({Site.HEAD} if layer == 2 else set())
        assert {call.layer for call in (*first, *second)} <= {layer, -1}


SPLIT = {
    # (size, adp, ep): P and D of a layer in the middle. SGLang's sequences with DeepEP, where the all-gather that opens
    # a layer there closes the one before here: the same sequence.
    (2, 2, 2): ("notify[TP] | dispatch[TP] | combine[TP]", " | dispatch[TP] | combine[TP]"),
    (4, 4, 4): ("notify[TP] | dispatch[TP] | combine[TP]", " | dispatch[TP] | combine[TP]"),
    (4, 2, 4): (
        "RS[ATP] notify[TP] | dispatch[TP] | combine[TP] AG[ATP]",
        "RS[ATP] | dispatch[TP] | combine[TP] AG[ATP]",
    ),
    (8, 2, 8): (
        "RS[ATP] notify[TP] | dispatch[TP] | combine[TP] AG[ATP]",
        "RS[ATP] | dispatch[TP] | combine[TP] AG[ATP]",
    ),
    (4, 1, 4): ("AR[TP] |  | AR[TP]", "AR[TP] |  | AR[TP]"),
}


@pytest.mark.parametrize("shape", SPLIT, ids=str)
def test_sequences_of_an_expert_exchange_and_its_boundaries(shape: tuple[int, int, int]) -> None:
    """Boundary i+1 stands behind the notification of layer i and before its data; nothing of it is ever routed."""
    world = World(*shape, route="all", exchange="split")
    for phase, expected in zip((Phase.P, Phase.D), SPLIT[shape], strict=True):
        program = Program(world, phase, 3)
        found = [_text(program, site) for site in (Site.GATHER, Site.DISPATCH, Site.SCATTER)]
        assert " | ".join(found) == expected
        exchanging = [call for call in program.calls if call.op in ("notify", "dispatch", "combine")]
        assert not any(call.routed for call in exchanging)
        if phase is Phase.P and world.splits:
            for layer in range(3):
                before, behind = program.segment(layer, layer + 1), program.segment(layer + 1, layer + 2)
                assert before[-1] == next(c for c in exchanging if (c.op, c.layer) == ("notify", layer))
                assert behind[0] == next(c for c in exchanging if (c.op, c.layer) == ("dispatch", layer))
            assert [program.counts(i, i + 1) for i in range(4)] == [True, True, True, False]
        assert program.counts(0, 3) == (phase is Phase.P and world.splits)


@given(worlds, st.integers(1, 4), st.integers(0, 9), st.integers(1, 9))
def test_a_segment_waits_for_counts_exactly_where_it_notifies(
    world: World, layers: int, start: int, length: int
) -> None:
    program = Program(world, Phase.P, layers)
    end = min(program.boundaries, start + length)
    notifies = any(call.op == "notify" for call in program.segment(start, end)) if start < end else False
    if world.size > 1 and world.ep > 1:
        assert program.counts(start, end) == notifies or start >= end


@given(worlds)
def test_groups_partition_the_ranks(world: World) -> None:
    for role, groups in world.groups.items():
        assert sorted(chain.from_iterable(groups)) == list(range(world.size)), role
        assert len({len(group) for group in groups}) == 1
        assert world.groups[world.canonical(role)] == groups


@given(worlds, st.integers(1, 3))
def test_route_is_what_it_says(world: World, layers: int) -> None:
    decode, prefill = (Program(world, phase, layers) for phase in (Phase.D, Phase.P))
    assert not any(call.routed for call in decode.calls)
    crossing = {
        call.index
        for call in prefill.calls
        for mine in world.groups[call.role]
        for other in decode.calls
        for theirs in world.groups[other.role]
        if len(set(mine) & set(theirs)) >= 2
    }
    assert {call.index for call in prefill.registered} == crossing
    routed = {call.index for call in prefill.calls if call.routed}
    if world.route == "none":
        assert not routed
    elif world.route == "all":
        assert routed == {index for index in crossing if prefill.calls[index].op not in EXCHANGING}
    else:
        full = {c.index for c in prefill.calls if len(world.groups[c.role][0]) == world.size and c.op == "AR"}
        assert routed == full
        assert routed <= crossing


def test_an_unknown_cut_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--cut half: choose one of layer, sublayer"):
        World(2, cut="half")


@pytest.mark.parametrize(("size", "adp", "ep"), [(4, 3, 1), (4, 2, 3), (0, 1, 1), (6, 4, 2)])
def test_sizes_that_do_not_divide_are_refused_with_what_fits(size: int, adp: int, ep: int) -> None:
    with pytest.raises(UsageError, match=r"--world|--adp|--ep"):
        World(size, adp, ep)
