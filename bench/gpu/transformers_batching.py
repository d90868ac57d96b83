"""transformers' continuous batching on one GPU: the load of `bench.gpu.roofline`'s decode part, the same configuration.

    python -m bench.gpu.transformers_batching --model bench/gpu/models/paper --rows 32 --context 1024 --tokens 96

Random weights made on the device. Prints one JSON object; the best of `--repetitions` runs after one that warms up.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any


def main() -> int:
    """Measure and print."""
    made = argparse.ArgumentParser(prog="python -m bench.gpu.transformers_batching")
    made.add_argument("--model", required=True, help="directory with a config.json")
    made.add_argument("--rows", type=int, default=32)
    made.add_argument("--context", type=int, default=1024)
    made.add_argument("--tokens", type=int, default=96)
    made.add_argument("--repetitions", type=int, default=2)
    made.add_argument("--device", default="cuda")
    made.add_argument("--attention", default="sdpa")
    made.add_argument("--blocks", type=int, default=192, help="of KV, 256 tokens each")
    made.add_argument("--batch-tokens", type=int, default=4096)
    made.add_argument("--ours", type=float, help="output tokens/s of `bench.gpu.roofline`, to be kept beside")
    given = made.parse_args()
    import torch
    import transformers
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    config = transformers.AutoConfig.from_pretrained(given.model)
    with torch.device(given.device):
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=given.attention
        )
    model.eval()
    vocabulary = config.vocab_size
    prompts = [
        [((1000 + row) * 7919 + at * 104729) % (vocabulary - 3) + 3 for at in range(given.context)]
        for row in range(given.rows)
    ]
    batching = ContinuousBatchingConfig(
        num_blocks=given.blocks, max_batch_tokens=given.batch_tokens, max_memory_percent=0.5
    )
    greedy = transformers.GenerationConfig(
        max_new_tokens=given.tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    seconds = []
    for _ in range(given.repetitions + 1):
        start = time.perf_counter()
        done = model.generate_batch(
            inputs=prompts, generation_config=greedy, continuous_batching_config=batching, progress_bar=False
        )
        seconds.append(time.perf_counter() - start)
        count = sum(len(each.generated_tokens) for each in done.values())
        if count != given.rows * given.tokens:
            print(f"{count} tokens where {given.rows * given.tokens} were asked for", file=sys.stderr)
            return 1
    best = min(seconds[1:])
    print(
        json.dumps(
            {
                "version": transformers.__version__,
                "output_tokens_s": given.rows * given.tokens / best,
                "seconds": seconds,
                "attention": given.attention,
                "arguments": {"rows": given.rows, "context": given.context, "tokens": given.tokens},
                "ours": given.ours,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
