"""Attention over kept keys and values is attention over the pool, whatever joins, leaves or takes over in between."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel.request import Row
from models.attention.lanes import Kept
from models.attention.pool import KVPool
from models.attention.reference import Batch, attend

K, DIM, HEADS, SIZE, BLOCKS = 2, 8, 4, 4, 8
"""Of the pool, and blocks of a turn."""


@dataclass
class Decoding:
    """A turn that decodes."""

    request: int
    slot: int
    at: int

    def row(self) -> Row:
        blocks = tuple(range(self.slot * BLOCKS, (self.slot + 1) * BLOCKS))
        return Row(self.slot, None, self.at, blocks, None, self.request)


class Scene:
    """A pool full of noise, and turns that come and go."""

    def __init__(self, most_bytes: int = 1 << 20) -> None:
        self.pool = KVPool(2, 6 * BLOCKS, K, SIZE, DIM, torch.float32, "cpu")
        self.random = torch.Generator().manual_seed(1)
        self.pool.storage.normal_(generator=self.random)
        self.kept = Kept(self.pool, most_bytes)
        self.turns: list[Decoding] = []
        self.requests = 0
        self.gathered: list[bool] = []

    def join(self, slot: int, at: int) -> None:
        """A turn begins to decode; its context has been written by prefill."""
        if all(turn.slot != slot for turn in self.turns):
            self.requests += 1
            self.pool.storage[:, slot * BLOCKS : (slot + 1) * BLOCKS].normal_(generator=self.random)
            self.turns.append(Decoding(self.requests, slot, at))

    def leave(self, index: int) -> None:
        """A turn ends."""
        if self.turns:
            self.turns.pop(index % len(self.turns))

    def iterate(self) -> None:
        """One iteration in both ways."""
        self.turns = [turn for turn in self.turns if turn.at < BLOCKS * SIZE]
        rows = [turn.row() for turn in self.turns]
        if not rows:
            return
        plain = Batch(rows, self.pool)
        lanes = self.kept.begin(rows)
        kept = Batch(rows, self.pool, lanes=lanes)
        assert kept.cells.tolist() == plain.cells.tolist()
        for layer in range(2):
            kv = torch.randn(len(rows), 2 * K, DIM, generator=self.random)
            q = torch.randn(len(rows), HEADS, DIM, generator=self.random)
            self.pool.write(layer, plain.cells, kv)
            expected = attend(q, kv, self.pool, layer, plain)
            assert torch.allclose(attend(q, kv, self.pool, layer, kept), expected, atol=1e-5)
        self.gathered.append(lanes is None or lanes.gather)
        for turn in self.turns:
            turn.at += 1


STEP = st.one_of(
    st.tuples(st.just("join"), st.integers(0, 5), st.integers(0, BLOCKS * SIZE - 1)),
    st.tuples(st.just("leave"), st.integers(0, 5)),
    st.tuples(st.just("iterate")),
)


@given(st.lists(STEP, max_size=40))
def test_kept_and_read_are_the_same(steps: list[tuple[str, int]]) -> None:
    scene = Scene()
    for what, *arguments in steps:
        getattr(scene, what)(*arguments)
        if what != "iterate":
            scene.iterate()


def test_what_has_not_changed_is_not_gathered_again() -> None:
    scene = Scene()
    scene.join(0, 3)
    scene.join(1, 9)
    for _ in range(8):
        scene.iterate()
    scene.join(2, 0)
    scene.iterate()
    scene.iterate()
    assert scene.gathered == [True] + [False] * 7 + [True, False]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_turn_that_takes_over_slot_blocks_and_position_is_another(ahead: int) -> None:
    scene = Scene()
    scene.join(3, 5)
    scene.iterate()
    scene.leave(0)
    scene.join(3, 5 + ahead)
    scene.iterate()
    assert scene.gathered == [True, True]


def test_beyond_its_bytes_nothing_is_kept() -> None:
    scene = Scene(most_bytes=4 * 2 * 2 * K * 4 * SIZE * DIM)
    scene.join(0, 0)
    scene.iterate()
    scene.iterate()
    assert scene.gathered == [True, False]
    scene.join(1, 30)
    scene.iterate()
    scene.iterate()
    assert scene.gathered == [True, False, True, True]


def test_rows_of_nobody_are_not_kept() -> None:
    scene = Scene()
    assert scene.kept.begin([Row(0, None, 3, (0,), None)]) is None
