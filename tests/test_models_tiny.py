"""Tiny checkpoints: the same bytes always, readable by everybody, and worth listening to."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from kernel.errors import UsageError
from kernel.topology import World
from models.tiny import write_checkpoint
from tests.tiny import Team

if TYPE_CHECKING:
    from pathlib import Path


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def test_bytes_follow_from_the_arguments(tmp_path: Path) -> None:
    one, same = write_checkpoint(tmp_path / "a"), write_checkpoint(str(tmp_path / "deep" / "b"))
    assert files(one) == files(same)
    assert set(files(one)) == {"config.json", "model.safetensors"}
    other = write_checkpoint(tmp_path / "c", seed=1)
    assert files(one)["config.json"] == files(other)["config.json"]
    a, b = (load_file(path / "model.safetensors") for path in (one, other))
    assert a.keys() == b.keys()
    assert not any(torch.equal(a[name], b[name]) for name in a)


def test_weights_are_the_same_on_every_machine(tmp_path: Path) -> None:
    """A digest written down here: goldens made on one machine hold on all others."""
    tensors = load_file(write_checkpoint(tmp_path) / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].numpy().tobytes())
    assert digest.hexdigest() == "7899689bb98bfef0f5e593a92134cd2c2ca119739eaa1aacf05515eecf89296c"


def test_weights_are_noise_of_the_intended_size(tmp_path: Path) -> None:
    tensors = load_file(write_checkpoint(tmp_path) / "model.safetensors")
    for name, std in (("model.embed_tokens.weight", 0.3), ("lm_head.weight", 1 / 8)):
        assert tensors[name].std().item() == pytest.approx(std, rel=0.02)
        assert tensors[name].mean().abs() < 0.02 * std
    rows = torch.cat([t.flatten()[:1000] for t in tensors.values() if t.numel() >= 1000]).view(-1, 1000)
    correlation = torch.corrcoef(rows) - torch.eye(len(rows))
    assert correlation.abs().max() < 0.2, "two tensors got the same numbers"


@pytest.mark.parametrize("fields", [{}, {"fused": True}, {"tied": True, "attention_bias": True, "dense_layers": (1,)}])
def test_transformers_finds_every_tensor(fields: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = write_checkpoint(tmp_path, layers=2, **fields)
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert {name: list(found) for name, found in loaded[1].items() if found} == {}


@pytest.mark.parametrize(
    "fields",
    [{}, {"seed": 1}, {"seed": 2, "tied": True}, {"layers": 2, "dense_layers": (0,)}, {"vocab": 1000, "hidden": 96}],
    ids=str,
)
def test_greedy_text_holds_many_tokens(fields: dict[str, Any], tmp_path: Path) -> None:
    team = Team(write_checkpoint(tmp_path, **fields), World(1), blocks=200)
    contexts = [team.admit(0, [7 * n, n, 200 - n], 70) for n in range(8)]
    team.prefill(contexts)
    for _ in range(63):
        team.decode(contexts)
    assert min(len({sampled.token for sampled in context.drawn}) for context in contexts) >= 20
    assert len({tuple(context.tokens[3:]) for context in contexts}) == 8


@pytest.mark.parametrize("name", ["vocab", "hidden", "layers", "heads", "kv_heads", "experts", "top_k", "expert_width"])
def test_sizes_below_one_are_refused(name: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {name: 0}
    with pytest.raises(UsageError, match=f"{name}=0"):
        write_checkpoint(tmp_path, **sizes)


def test_neither_torch_nor_transformers_is_needed(tmp_path: Path) -> None:
    """Nor to read the config back and to size a KV pool."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers'), None));"
        "import models, models.tiny; from kernel.topology import World;"
        f"path = models.tiny.write_checkpoint({str(tmp_path)!r});"
        "print(models.kv_bytes_per_token(models.read_config(path), World(1)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(4 * 2 * 2 * 16 * 4), "")
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3_moe"
