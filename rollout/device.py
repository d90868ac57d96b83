"""Where ranks compute, and how: the options behind `--device`, checked together. Loads neither torch nor the driver."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from kernel.errors import UsageError
from kernel.exchange.choose import CHOICES
from models.config import DTYPES
from models.native import build as kernels
from models.native.compiler import compiler

if TYPE_CHECKING:
    from models.config import DecoderConfig

CPU_KV_TOKENS: Final = 1 << 15
"""Of a replica, where nobody says."""
DEVICES: Final = ("cpu", "cuda")
ATTENTIONS: Final = ("reference", "flashinfer", "flashinfer-fa2")
WEIGHTS: Final = ("checkpoint", "dummy")
QUANTIZATIONS: Final = ("fp8",)
LAUNCH_ORDERS: Final = ("stream", "implicit")
MODULES: Final = ("lazy", "eager")
HEAD_DIMS: Final = (64, 128, 256)
"""Head sizes that FlashInfer's kernels are built for."""
MOST_CONNECTIONS: Final = 32
GRAPH_STEPS: Final = ((64, 16), (256, 32))
"""Above 64 rows a D bucket every 16 rows, above 256 every 32: a graph for each is captured at start."""


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """What `--device` and the flags that belong to it say.

    device: cpu or cuda. dtype: element type of weights and KV (None: float32 on cpu, bfloat16 on cuda). attention:
    flashinfer, flashinfer-fa2 (without its kernels for one generation of GPUs alone) or reference (None: on cuda
    flashinfer where dtype and head size allow it). graphs: decode as CUDA
    graphs. weights: from the checkpoint, or `dummy`, random ones made on the device from config.json alone.
    quantization: fp8 weights. prefill_sms: SMs that prefill may use, as a green context (None: all). max_ctas: CTAs of
    one NCCL kernel. launch_order: how NCCL orders the kernels of several communicators, `implicit` sets
    NCCL_LAUNCH_ORDER_IMPLICIT=1. connections: CUDA_DEVICE_MAX_CONNECTIONS, hardware queues (both are the paper's
    process-wide controls, to compare with). modules: when CUDA loads kernels (CUDA_MODULE_LOADING); eager takes memory
    and seconds at start, and none later. quiet: fail the run when the device's allocator was called or a module loaded
    after the warm-up. compiled: decode on a CPU by kernels that the host's C++ compiler builds, once. exchange: how
    rows reach experts of other ranks, see `kernel.exchange.choose`; exchange_sms: SMs of DeepEP's prefill kernels.
    Raises UsageError for values that cannot be used, alone or together.
    """

    device: str = "cpu"
    dtype: str | None = None
    attention: str | None = None
    graphs: bool = True
    weights: str = "checkpoint"
    quantization: str | None = None
    prefill_sms: int | None = None
    max_ctas: int | None = None
    launch_order: str = "stream"
    connections: int | None = None
    modules: str = "lazy"
    quiet: bool = False
    compiled: bool = False
    exchange: str = "auto"
    exchange_sms: int | None = None

    def __post_init__(self) -> None:
        for flag, value, choices in (
            ("--device", self.device, DEVICES),
            ("--dtype", self.dtype, tuple(DTYPES)),
            ("--attention", self.attention, ATTENTIONS),
            ("--load-format", self.weights, WEIGHTS),
            ("--quantization", self.quantization, QUANTIZATIONS),
            ("--launch-order", self.launch_order, LAUNCH_ORDERS),
            ("--modules", self.modules, MODULES),
            ("--exchange", self.exchange, CHOICES),
        ):
            if value is not None and value not in choices:
                raise UsageError(f"{flag} {value}: choose {' or '.join(choices)}")
        for flag, number, most in (
            ("--prefill-sms", self.prefill_sms, None),
            ("--max-ctas", self.max_ctas, None),
            ("--connections", self.connections, MOST_CONNECTIONS),
            ("--exchange-sms", self.exchange_sms, None),
        ):
            if number is not None and (number < 1 or (most is not None and number > most)):
                raise UsageError(f"{flag} {number}: must be {'at least 1' if most is None else f'1 to {most}'}")
        if self.device == "cpu":
            self._refuse_on_cpu()
        elif self.exchange_sms is not None and self.exchange != "deepep":
            raise UsageError(f"--exchange-sms {self.exchange_sms} is for --exchange deepep: add that, or leave it out")
        elif self.compiled:
            raise UsageError("--compile applies to --device cpu only: on cuda decode is captured as graphs already")
        elif self.dtype == "float32" and self._flashes:
            raise UsageError(f"--attention {self.attention} has no float32: use --attention reference for it")
        elif self.dtype == "float32" and self.quantization is not None:
            raise UsageError(f"--quantization {self.quantization} computes in bfloat16: leave --dtype float32 out")

    @property
    def _flashes(self) -> bool:
        return self.attention is not None and self.attention.startswith("flashinfer")

    def _refuse_on_cpu(self) -> None:
        default = DeviceOptions.__dataclass_fields__
        for flag, name in (
            ("--graphs", "graphs"),
            ("--load-format", "weights"),
            ("--quantization", "quantization"),
            ("--prefill-sms", "prefill_sms"),
            ("--max-ctas", "max_ctas"),
            ("--launch-order", "launch_order"),
            ("--connections", "connections"),
            ("--modules", "modules"),
            ("--check-quiet", "quiet"),
            ("--exchange-sms", "exchange_sms"),
        ):
            if getattr(self, name) != default[name].default:
                raise UsageError(f"{flag} applies to --device cuda only: leave it out, or add --device cuda")
        if self._flashes:
            raise UsageError(f"--attention {self.attention} needs --device cuda: on a CPU there is only the reference")

    def resolved(self, config: DecoderConfig) -> DeviceOptions:
        """These options with nothing left open, for a model. Raises UsageError where they do not fit it."""
        cuda = self.device == "cuda"
        dtype = self.dtype or ("bfloat16" if cuda else "float32")
        fits = config.head_dim in HEAD_DIMS
        attention = self.attention
        if attention is None:
            attention = "flashinfer" if cuda and dtype == "bfloat16" and fits else "reference"
        elif self._flashes and not fits:
            known = ", ".join(map(str, HEAD_DIMS))
            raise UsageError(
                f"--attention {attention} has kernels for heads of {known} numbers, and this model's have"
                f" {config.head_dim}: use --attention reference"
            )
        return replace(self, dtype=dtype, attention=attention)

    def check_installed(self, build: bool = True) -> None:
        """Raise UsageError when something that the options need is not installed. build: what is to be built, here and
        now, however long that takes; else only that there is a compiler is seen to."""
        if self.compiled and build:
            kernels.library()
        elif self.compiled:
            compiler()
        if self._flashes and find_spec("flashinfer") is None:
            raise UsageError(
                f"--attention {self.attention}: flashinfer is not installed: pip install 'turnstile[cuda]', or use"
                " --attention reference"
            )

    def environment(self) -> dict[str, str]:
        """Variables that CUDA, NCCL and torch's use of it read once, when they start in a rank."""
        # A GPU that failed is ours to report: torch's watchdog of collectives would end the process with SIGABRT first.
        found = {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"} if self.device == "cuda" else {}
        if self.launch_order == "implicit":
            found["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
        if self.connections is not None:
            found["CUDA_DEVICE_MAX_CONNECTIONS"] = str(self.connections)
        if self.modules == "eager":
            found["CUDA_MODULE_LOADING"] = "EAGER"
        return found

    def buckets(self, rows: int, known: tuple[int, ...]) -> tuple[int, ...]:
        """Row counts that D pads to: `known`, and on cuda more of them up to `rows`, since each has its own graph."""
        if self.device == "cpu" or rows <= known[-1]:
            return known
        found, steps = list(known), dict(GRAPH_STEPS)
        while found[-1] < rows:
            step = max(width for above, width in steps.items() if found[-1] >= above)
            found.append(min(rows, found[-1] + step))
        return tuple(found)


def used_buckets(bucket: object, rows: int) -> tuple[int, ...]:
    """Every value that `Limits.bucket` can give for 1 to `rows` rows: the graphs to capture."""
    assert callable(bucket)
    return tuple(sorted({bucket(count) for count in range(1, rows + 1)}))
