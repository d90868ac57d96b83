"""Loading: who reads what, both layouts of experts and of files, and everything that does not fit in one message."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import models
from kernel.errors import UsageError
from kernel.topology import World
from models.config import Qwen3MoeConfig, read_config
from models.tiny import write_checkpoint
from models.weights.checkpoint import Checkpoint
from models.weights.qwen3_moe import Weights, read_weights
from models.weights.shards import shard

if TYPE_CHECKING:
    from pathlib import Path

WORLDS = [World(*w) for w in ((1,), (2,), (2, 2, 2), (2, 2, 1), (4, 2, 4), (4, 1, 1), (4, 2, 2), (4, 4, 2))]


def read(path: Path, world: World, rank: int, dtype: torch.dtype = torch.float32) -> tuple[Weights, int]:
    """The weights of a rank and how many numbers were read for them."""
    config = read_config(path)
    assert isinstance(config, Qwen3MoeConfig)
    with Checkpoint(path) as checkpoint:
        weights = read_weights(checkpoint, config, world, rank, dtype)
        return weights, checkpoint.elements


def equal(one: Weights, other: Weights) -> bool:
    pairs = zip(one.tensors(), other.tensors(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def rewrite(path: Path, change: Any) -> None:
    """Change the tensors of a checkpoint in place."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def reconfigure(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny", layers=2, dense_layers=(0,), attention_bias=True)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_each_rank_reads_its_slices_and_together_the_whole(world: World, path: Path) -> None:
    """Every number of a split tensor is read once a copy that the world keeps, and nothing else is read."""
    config = read_config(path)
    assert isinstance(config, Qwen3MoeConfig)
    tensors = load_file(path / "model.safetensors")
    expected = 0
    for name, tensor in tensors.items():
        copies = float(world.size)
        if ".experts." in name or ("mlp" in name and "gate.weight" not in name):
            copies = 1
        elif any(part in name for part in ("q_proj", "o_proj.weight", "embed_tokens", "lm_head")):
            copies = world.adp
        elif "o_proj.bias" in name:
            copies = world.adp  # leaders alone add it
        elif "k_proj" in name or "v_proj" in name:
            copies = world.adp * max(1, world.atp // config.kv_heads)
        expected += int(copies * tensor.numel())
    ranks = [read(path, world, rank) for rank in range(world.size)]
    # q_norm and k_norm are read once and kept for each head.
    assert sum(elements for _, elements in ranks) == expected
    widest = 2 * config.layers * (config.heads + config.kv_heads) * config.head_dim
    for weights, elements in ranks:
        kept = sum(tensor.numel() for tensor in weights.tensors())
        assert elements <= kept <= elements + widest
        for tensor in weights.tensors():
            # Its own memory, not a view that would keep the file's.
            assert tensor.untyped_storage().nbytes() == tensor.numel() * 4


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_slices_are_those_of_the_shard(world: World, path: Path) -> None:
    config = read_config(path)
    assert isinstance(config, Qwen3MoeConfig)
    t, d, base = load_file(path / "model.safetensors"), config.head_dim, "model.layers.1"
    for rank in range(world.size):
        weights, part = read(path, world, rank)[0], shard(config, world, rank)
        layer, width = weights.layers[1], len(part.columns)
        assert torch.equal(weights.embed, t["model.embed_tokens.weight"][part.vocab.slice])
        assert torch.equal(weights.head.t(), t["lm_head.weight"][part.vocab.slice])
        q, k = len(part.heads) * d, len(part.kv_heads) * d
        heads = t[f"{base}.self_attn.q_proj.weight"].view(-1, d, config.hidden_size)[part.heads.slice]
        assert torch.equal(layer.attention.qkv.t()[:q].view_as(heads), heads)
        values = t[f"{base}.self_attn.v_proj.bias"].view(-1, d)[part.kv_heads.slice]
        assert layer.attention.qkv_bias is not None
        assert torch.equal(layer.attention.qkv_bias[q + k :].view_as(values), values)
        assert (layer.attention.out_bias is not None) == part.leader
        for local, expert in enumerate(range(part.experts.start, part.experts.stop)):
            mlp = f"{base}.mlp.experts.{expert}"
            assert torch.equal(layer.experts.up[local][:width], t[f"{mlp}.gate_proj.weight"][part.columns.slice])
            assert torch.equal(layer.experts.up[local][width:], t[f"{mlp}.up_proj.weight"][part.columns.slice])
            assert torch.equal(layer.experts.down[local].t(), t[f"{mlp}.down_proj.weight"][:, part.columns.slice])
        plain = weights.layers[0].experts
        assert plain.router is None
        assert torch.equal(plain.down[0].t(), t["model.layers.0.mlp.down_proj.weight"][:, part.dense.slice])


def test_fused_and_single_experts_and_both_in_one_file(tmp_path: Path) -> None:
    single = write_checkpoint(tmp_path / "single", layers=2)
    fused = write_checkpoint(tmp_path / "fused", layers=2, fused=True)
    mixed = write_checkpoint(tmp_path / "mixed", layers=2)
    stacked = load_file(fused / "model.safetensors")

    def fuse_one_layer(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.1.mlp.experts.")]:
            del tensors[name]
        tensors.update({name: t for name, t in stacked.items() if name.startswith("model.layers.1.mlp.experts.")})

    rewrite(mixed, fuse_one_layer)
    assert stacked["model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 64, 64)
    for world in (World(1), World(4, 2, 2)):
        for rank in range(world.size):
            expected, elements = read(single, world, rank)
            for other in (fused, mixed):
                found, read_elements = read(other, world, rank)
                assert equal(found, expected)
                assert read_elements == elements


def test_several_files_with_an_index(path: Path) -> None:
    expected = [read(path, World(2, 2, 2), rank)[0] for rank in range(2)]
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    where: dict[str, str] = {}
    for number in range(3):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[number::3]}, path / file)
        where |= dict.fromkeys(names[number::3], file)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    assert all(equal(read(path, World(2, 2, 2), rank)[0], expected[rank]) for rank in range(2))

    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UsageError, match=r"files that are not there: model-00002-of-00003\.safetensors"):
        Checkpoint(path)
    index.write_text("{}")
    with pytest.raises(UsageError, match="no weight_map"):
        Checkpoint(path)


@pytest.mark.parametrize(("size", "rows"), [(4, 3), (8, 2)])
def test_vocabulary_that_does_not_divide_is_padded_with_zeros(size: int, rows: int, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, vocab=10, layers=1, heads=8, kv_heads=8)
    table = load_file(path / "model.safetensors")["lm_head.weight"]
    parts = [read(path, World(size), rank)[0].head.t() for rank in range(size)]
    assert [tuple(part.shape) for part in parts] == [(rows, 64)] * size
    assert torch.equal(torch.cat(parts)[:10], table)
    assert not torch.cat(parts)[10:].any()


def test_a_tied_head_is_the_embedding_and_a_stored_one_is_ignored(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, layers=1, tied=True)
    weights, elements = read(path, World(2), 1)
    assert weights.head.data_ptr() == weights.embed.data_ptr()
    assert torch.equal(weights.head.t(), weights.embed)
    rewrite(path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(256, 64)}))
    again, same = read(path, World(2), 1)
    assert equal(again, weights)
    assert same == elements


def test_types_are_converted(path: Path) -> None:
    rewrite(path, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    half, whole = read(path, World(1), 0, torch.bfloat16)[0], read(path, World(1), 0)[0]
    assert {t.dtype for t in half.tensors()} == {torch.bfloat16}
    assert all(torch.equal(a.float(), b) for a, b in zip(half.tensors(), whole.tensors(), strict=True))


def test_missing_extra_and_misshapen_tensors_are_all_listed(path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(64, 32)
        tensors["model.layers.1.mlp.gate.weight"] = torch.zeros(8, 64, dtype=torch.int8)
        tensors["model.layers.2.input_layernorm.weight"] = torch.zeros(64)
        tensors["lm_head.bias"] = torch.zeros(256)

    rewrite(path, spoil)
    with pytest.raises(UsageError) as raised:
        read(path, World(1), 0)
    found = str(raised.value).removeprefix(f"{path} does not fit its config.json: ").split("; ")
    assert found == [
        "missing model.layers.1.mlp.experts.3.up_proj.weight [32, 64]",
        "missing model.norm.weight [64]",
        "misshapen model.layers.0.self_attn.q_proj.weight [64, 32], not [64, 64]",
        "model.layers.1.mlp.gate.weight has type I8, not one of BF16, F16, F32",
        "unexpected lm_head.bias [256]",
        "unexpected model.layers.2.input_layernorm.weight [64]",
    ]


def test_half_a_fused_layer_names_the_other_half(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, layers=1, fused=True)
    rewrite(path, lambda tensors: tensors.pop("model.layers.0.mlp.experts.down_proj"))
    with pytest.raises(UsageError, match=r": missing model\.layers\.0\.mlp\.experts\.down_proj \[8, 64, 32\]$"):
        read(path, World(1), 0)


def test_files_that_are_no_checkpoint(path: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UsageError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        Checkpoint(empty)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UsageError, match="not a safetensors file"):
        Checkpoint(path)


def test_load_refuses_what_it_cannot_hold(path: Path) -> None:
    sizes: dict[str, Any] = {"blocks": 4, "block_size": 4, "slots": 2}
    with pytest.raises(UsageError, match="4 attention heads do not divide over attention TP 8"):
        models.load(path, World(8), 0, **sizes)
    with pytest.raises(UsageError, match="8 experts do not divide over EP 16"):
        models.load(path, World(16, 16, 16), 0, **sizes)
    for name in sizes:
        with pytest.raises(UsageError, match=f"{name}=0"):
            models.load(path, World(1), 0, **{**sizes, name: 0})
    with pytest.raises(UsageError, match="dtype float16: choose one of float32, bfloat16"):
        models.load(path, World(1), 0, dtype=torch.float16, **sizes)
    reconfigure(path, model_type="mixtral")
    with pytest.raises(UsageError, match="model_type 'mixtral' is not supported; supported: qwen3_moe"):
        models.load(path, World(1), 0, **sizes)


def test_the_pool_has_the_promised_size(path: Path) -> None:
    config = read_config(path)
    for world in (World(1), World(2), World(4)):
        model: Any = models.load(path, world, 0, blocks=6, block_size=8, slots=3, dtype=torch.bfloat16)
        assert model.pool.storage.nbytes == 6 * 8 * models.kv_bytes_per_token(config, world, "bfloat16")
        assert model.pool.keys.shape == model.pool.values.shape == (2, 6, 8, max(1, 2 // world.atp), 16)
        assert model.slots.shape == (3,)
