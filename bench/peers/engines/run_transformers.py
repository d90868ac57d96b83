"""transformers' continuous batching. `run_transformers.py CHECKPOINT ROWS`."""

from __future__ import annotations

import sys

from answer import channel, serve


def main() -> None:
    """Load, then answer."""
    checkpoint = sys.argv[1]
    send = channel()
    import torch
    import transformers
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    torch.set_num_threads(2)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    batching = ContinuousBatchingConfig(num_blocks=1024, max_batch_tokens=2048, max_memory_percent=0.2)

    def generate(prompts: list[list[int]], tokens: int, sessions: list[int] | None) -> list[list[int]]:
        greedy = transformers.GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        done = model.generate_batch(
            inputs=prompts, generation_config=greedy, continuous_batching_config=batching, progress_bar=False
        )
        ordered = sorted(done.values(), key=lambda each: int(each.request_id.rsplit("_", 1)[1]))
        return [list(each.generated_tokens) for each in ordered]

    serve(send, {"version": transformers.__version__, "dtype": "bfloat16", "reuse": "none"}, generate)


if __name__ == "__main__":
    main()
