"""What the ranks of bench/gpu/hazard.py share: how one starts and ends, and the kernel that takes SMs away."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

OCCUPY: Final = """
extern "C" __global__ void occupy(volatile int* stop, int* resident, int limit_ms) {
    extern __shared__ char held[];
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    if (threadIdx.x == 0) {
        held[0] = 1;
        atomicAdd_system(resident, 1);
        do {
            __nanosleep(2000);
            asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        } while (*stop == 0 && now - begin < (unsigned long long)limit_ms * 1000000ull);
    }
    __syncthreads();
}
"""


def begin() -> dict[str, Any]:
    """This rank's configuration. The process dies with its parent."""
    config: dict[str, Any] = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != config["parent"]:
        os._exit(1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    return config


def end(report: dict[str, Any]) -> NoReturn:
    """Report, and leave at once: what hangs on the GPU must not hold the interpreter's end."""
    print(json.dumps(report), flush=True)
    os._exit(0)


class Occupier:
    """Holds all but `free` SMs of the current GPU until `release`, or for limit_s at most.

    Each of its CTAs takes an SM's shared memory, so that nothing else with shared memory fits beside it.
    """

    def __init__(self, free: int, limit_s: float) -> None:
        import torch

        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.ctas, self._limit_ms = gpu.multi_processor_count - free, int(limit_s * 1e3)
        self._shared = int(gpu.shared_memory_per_block_optin)
        self._kernel: Any = torch.cuda._compile_kernel(OCCUPY, "occupy")
        self._kernel.set_shared_memory_config(self._shared)
        self._stop = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._resident = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._stream: Any = torch.cuda.Stream()

    def hold(self) -> None:
        """Take the SMs; returns when all of them are held. Raises RuntimeError when they are not, within 5 s."""
        args = [self._stop, self._resident, self._limit_ms]
        self._kernel(
            grid=(self.ctas, 1, 1), block=(1024, 1, 1), args=args, shared_mem=self._shared, stream=self._stream
        )
        until = time.monotonic() + 5
        while int(self._resident[0]) < self.ctas:
            if time.monotonic() > until:
                raise RuntimeError(f"only {int(self._resident[0])} of {self.ctas} SMs could be occupied")
            time.sleep(0.001)

    @property
    def held(self) -> bool:
        """Whether it still runs."""
        return not self._stream.query()

    def release(self) -> None:
        """Let go, and wait until it has ended."""
        self._stop.fill_(1)
        self._stream.synchronize()
