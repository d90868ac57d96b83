"""config.json in both spellings, and everything wrong with one named at once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import UsageError
from kernel.topology import Role, World
from models import kv_bytes_per_token
from models.config import FAMILIES, Qwen3MoeConfig, parse_config, read_config
from models.weights.shards import check_split, shard

if TYPE_CHECKING:
    from pathlib import Path

HUB: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
REQUIRED = [
    "hidden_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_theta",
    "vocab_size",
]


def parse(raw: dict[str, Any]) -> Qwen3MoeConfig:
    config = parse_config(raw)
    assert isinstance(config, Qwen3MoeConfig)
    return config


def change(**fields: Any) -> dict[str, Any]:
    return {**HUB, **fields}


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in HUB.items() if name not in names}


def test_hub_spelling() -> None:
    assert parse(HUB) == Qwen3MoeConfig(
        model_type="qwen3_moe",
        vocab_size=151936,
        hidden_size=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=False,
        max_positions=40960,
        eos_token_ids=(151645,),
        dtype="bfloat16",
        experts=128,
        experts_per_token=8,
        expert_width=768,
        dense_layers=(),
        dense_width=0,
        norm_topk_prob=True,
        attention_bias=False,
    )


def test_both_spellings_are_one_config() -> None:
    renamed = without("num_experts", "rope_theta", "rope_scaling", "torch_dtype") | {
        "num_local_experts": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "dtype": "bfloat16",
    }
    assert parse(renamed) == parse(HUB) == parse(HUB | renamed)


def test_what_transformers_writes_and_understands(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig as Theirs

    theirs = Theirs(num_experts=16, num_experts_per_tok=4, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    theirs.save_pretrained(tmp_path)
    ours = read_config(tmp_path)
    assert isinstance(ours, Qwen3MoeConfig)
    assert (ours.experts, ours.experts_per_token, ours.rope_theta) == (16, 4, 5e5)
    for our_name, their_name in (
        ("vocab_size", "vocab_size"),
        ("layers", "num_hidden_layers"),
        ("kv_heads", "num_key_value_heads"),
        ("expert_width", "moe_intermediate_size"),
        ("norm_topk_prob", "norm_topk_prob"),
        ("rms_norm_eps", "rms_norm_eps"),
        ("max_positions", "max_position_embeddings"),
    ):
        assert getattr(ours, our_name) == getattr(theirs, their_name), our_name


@pytest.mark.parametrize("kind", [None, "llama", 7, ["qwen3_moe"]])
def test_unknown_family_lists_the_supported_ones(kind: object) -> None:
    with pytest.raises(UsageError, match=f"supported: {', '.join(sorted(FAMILIES))}$"):
        parse_config(change(model_type=kind))


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name}( \(or .*\))? is missing") as raised:
        parse_config(without(name))
    assert str(raised.value).count(" is missing") == 1


def test_all_missing_fields_are_named_at_once() -> None:
    with pytest.raises(UsageError) as raised:
        parse_config({"model_type": "qwen3_moe"}, "some/config.json")
    message = str(raised.value)
    assert message.startswith("some/config.json: ")
    assert "\n" not in message
    assert all(name in message for name in REQUIRED)
    assert "num_experts (or num_local_experts) is missing" in message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_theta": "10000"}, "rope_theta is '10000'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta 1000000.0 and rope_parameters.rope_theta 5.0 disagree"),
        ({"num_local_experts": 64}, "num_experts 128 and num_local_experts 64 disagree"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok 129 is more than the 128 experts"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is no multiple of num_key_value_heads 5"),
        ({"head_dim": 127}, "head_dim 127 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window is true: sliding-window attention is not supported"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"mlp_only_layers": [48]}, "mlp_only_layers [48] names a layer outside 0 .. 47"),
        ({"mlp_only_layers": [0], "intermediate_size": None}, "intermediate_size is missing"),
        ({"torch_dtype": "int8"}, "torch_dtype is 'int8'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_invalid_field_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_config(change(**fields))
    assert str(raised.value).startswith(f"config.json: {named}")
    assert ";" not in str(raised.value)


def test_problems_are_collected() -> None:
    with pytest.raises(UsageError, match=r"vocab_size is 0.*head_dim -2|head_dim is -2.*vocab_size is 0"):
        parse_config(change(vocab_size=0, head_dim=-2))


def test_head_dim_and_dense_layers() -> None:
    assert parse(without("head_dim")).head_dim == 64
    assert parse(change(decoder_sparse_step=2)).dense_layers == tuple(range(0, 48, 2))
    config = parse(change(mlp_only_layers=[1, 3]))
    assert (config.dense_layers, config.dense_width) == ((1, 3), 6144)


def test_unreadable_directories(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such directory"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"config\.json: No such file"):
        read_config(tmp_path)
    file = tmp_path / "config.json"
    for text, what in (
        ("{", "not JSON"), ("[" * 100_000, "not JSON"), ("[]", "not a JSON object"), ("\udcff", "not JSON"),
    ):  # fmt: skip
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(UsageError, match=what):
            read_config(tmp_path)
    file.write_text(json.dumps(HUB))
    assert read_config(tmp_path) == parse(HUB)


@pytest.mark.parametrize(
    ("world", "numbers"),
    [
        (World(3), "32 attention heads do not divide over attention TP 3"),
        (World(6), "4 KV heads neither divide over attention TP 6 nor divide it"),
        (World(256, 256, 256), "128 experts do not divide over EP 256"),
        (World(512, 512, 1), "768 expert columns do not divide over expert TP 512"),
    ],
    ids=str,
)
def test_a_world_that_cannot_hold_the_model(world: World, numbers: str) -> None:
    with pytest.raises(UsageError, match=numbers):
        check_split(parse(HUB), world)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32])
def test_shards_partition_heads_experts_and_columns(size: int) -> None:
    config = parse(HUB)
    divisors = [n for n in (1, 2, 4, 8, 16, 32) if size % n == 0]
    for world in (World(size, adp, ep) for adp in divisors for ep in divisors):
        parts = [shard(config, world, rank) for rank in range(size)]
        # Rectangles of experts by columns, and each corner unit once: 128 * 768 / size apiece.
        held = {(p.experts.start, p.columns.start) for p in parts}
        assert {len(p.experts) * len(p.columns) for p in parts} == {128 * 768 // size}
        assert held == {(e, c) for e in range(0, 128, 128 // world.ep) for c in range(0, 768, 768 // world.etp)}
        for group in world.groups[Role.ETP]:
            assert len({parts[rank].experts for rank in group}) == 1
        for replica in range(world.adp):
            mine = parts[replica * world.atp : (replica + 1) * world.atp]
            assert [p.leader for p in mine] == [True] + [False] * (world.atp - 1)
            assert [h for p in mine for h in range(32)[p.heads.slice]] == list(range(32))
            # Each query head finds its KV head here, and the local grouping is the global one.
            for p in mine:
                each = len(p.heads) // len(p.kv_heads)
                for local, head in enumerate(range(p.heads.start, p.heads.stop)):
                    assert p.kv_heads.start + local // each == head // 8
            assert sum(len(p.kv_heads) for p in mine) == max(4, world.atp)


@pytest.mark.parametrize(("size", "rows"), [(1, 10), (2, 5), (3, 4), (4, 3), (8, 2)])
def test_vocabulary_is_padded_to_equal_shards(size: int, rows: int) -> None:
    config = parse(change(vocab_size=10, num_attention_heads=24, num_key_value_heads=24, moe_intermediate_size=24))
    parts = [shard(config, World(size), rank) for rank in range(size)]
    assert {len(part.vocab) for part in parts} == {rows}
    assert [part.vocab.start for part in parts] == list(range(0, rows * size, rows))


def test_kv_bytes_per_token() -> None:
    config = parse(HUB)
    assert kv_bytes_per_token(config, World(1), "bfloat16") == 48 * 2 * 4 * 128 * 2
    assert kv_bytes_per_token(config, World(2)) == 48 * 2 * 2 * 128 * 4
    # Replicated from four ranks on.
    assert kv_bytes_per_token(config, World(4)) == kv_bytes_per_token(config, World(32)) == 48 * 2 * 128 * 4
    assert kv_bytes_per_token(config, World(4, 4)) == kv_bytes_per_token(config, World(1))
    with pytest.raises(UsageError, match="dtype int8"):
        kv_bytes_per_token(config, World(1), "int8")
