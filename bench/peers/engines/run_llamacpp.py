"""llama.cpp through its low-level batches. `run_llamacpp.py CHECKPOINT ROWS`; a GGUF copy is written beside it.

All prompts go through one batch, then one batch of a token each per step. float32: its CPU kernels for bfloat16 are
slower.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

from answer import channel, serve


def convert(checkpoint: Path) -> Path:
    """The checkpoint as GGUF, with a tokenizer that is never asked."""
    import gguf
    import numpy as np
    from safetensors.numpy import load_file

    out = checkpoint / "model.gguf"
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    w = gguf.GGUFWriter(str(out), "qwen3moe")
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_block_count(config["num_hidden_layers"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(config["num_attention_heads"])
    w.add_head_count_kv(config["num_key_value_heads"])
    w.add_key_length(config["head_dim"])
    w.add_value_length(config["head_dim"])
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    w.add_rope_freq_base(config["rope_theta"])
    w.add_expert_count(config["num_experts"])
    w.add_expert_used_count(config["num_experts_per_tok"])
    w.add_expert_feed_forward_length(config["moe_intermediate_size"])
    w.add_file_type(gguf.LlamaFileType.ALL_F32)
    w.add_vocab_size(config["vocab_size"])
    names = [f"<{n}>" for n in range(config["vocab_size"])]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list(names)
    w.add_token_types([gguf.TokenType.CONTROL] * len(names))
    w.add_token_merges(["Ġ Ġ"])
    w.add_bos_token_id(0)
    w.add_eos_token_id(1)

    def put(name: str, value: Any) -> None:
        w.add_tensor(f"{name}.weight", np.ascontiguousarray(value, dtype=np.float32))

    put("token_embd", tensors["model.embed_tokens.weight"])
    put("output_norm", tensors["model.norm.weight"])
    put("output", tensors["lm_head.weight"])
    for n in range(config["num_hidden_layers"]):
        base, block = f"model.layers.{n}", f"blk.{n}"
        put(f"{block}.attn_norm", tensors[f"{base}.input_layernorm.weight"])
        put(f"{block}.ffn_norm", tensors[f"{base}.post_attention_layernorm.weight"])
        for short, name in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("output", "o_proj"),
                            ("q_norm", "q_norm"), ("k_norm", "k_norm")):  # fmt: skip
            put(f"{block}.attn_{short}", tensors[f"{base}.self_attn.{name}.weight"])
        put(f"{block}.ffn_gate_inp", tensors[f"{base}.mlp.gate.weight"])
        for short, name in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")):
            each = [tensors[f"{base}.mlp.experts.{e}.{name}.weight"] for e in range(config["num_experts"])]
            put(f"{block}.ffn_{short}_exps", np.stack(each))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return out


def main() -> None:
    """Load, then answer."""
    checkpoint, rows = Path(sys.argv[1]), int(sys.argv[2])
    send = channel()
    path = convert(checkpoint)
    import llama_cpp as ll
    import numpy as np

    ll.llama_backend_init()
    silent = ll.llama_log_callback(lambda *_: None)  # held as long as the library may call it
    ll.llama_log_set(silent, ctypes.c_void_p(0))
    model = ll.llama_model_load_from_file(str(path).encode(), ll.llama_model_default_params())
    params = ll.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 512 * rows, 512 * rows, 512, rows
    params.n_threads = params.n_threads_batch = 2
    params.kv_unified = True
    context = ll.llama_init_from_model(model, params)
    vocabulary = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
    memory = ll.llama_get_memory(context)
    batch = ll.llama_batch_init(512 * rows, 0, 1)

    def put(token: int, position: int, sequence: int, drawn: bool) -> None:
        at = batch.n_tokens
        batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
        batch.seq_id[at][0], batch.logits[at] = sequence, drawn
        batch.n_tokens += 1

    def drawn(at: int) -> int:
        logits = ll.llama_get_logits_ith(context, at)
        return int(np.ctypeslib.as_array(logits, shape=(vocabulary,)).argmax())

    def generate(prompts: list[list[int]], tokens: int, sessions: list[int] | None) -> list[list[int]]:
        ll.llama_memory_clear(memory, True)
        batch.n_tokens, ends = 0, []
        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                put(token, position, sequence, position == len(prompt) - 1)
            ends.append(batch.n_tokens - 1)
        out: list[list[int]] = [[] for _ in prompts]
        for step in range(tokens):
            if ll.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
            for sequence, at in enumerate(ends):
                out[sequence].append(drawn(at))
            batch.n_tokens, ends = 0, list(range(len(prompts)))
            for sequence, prompt in enumerate(prompts):
                put(out[sequence][-1], len(prompt) + step, sequence, True)
        return out

    serve(send, {"version": ll.__version__, "dtype": "float32", "reuse": "none here"}, generate)


if __name__ == "__main__":
    main()
