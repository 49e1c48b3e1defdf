"""One vLLM engine: token ids in, sampled ids with log-probs and policy versions out."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from molt_core.rollout.actors import EngineDiedError

if TYPE_CHECKING:
    from molt_core.config.rl import VllmConfig

logger = logging.getLogger("molt")


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What to sample. Every field is sent, so nothing is filled in from a checkpoint's generation config.

    ``top_k`` -1 and ``top_p`` 1 sample from the whole distribution; ``temperature`` 0 is greedy.
    """

    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """What was sampled: per id its log-prob under the sampling distribution, and the policy version that sampled it.

    A sampled stop token is part of ``ids``. ``finish_reason``: "stop", or "length" when cut by ``max_tokens``.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Everything that starts an engine. ``max_len``: longest prompt plus completion in tokens."""

    model: str
    device: Literal["cpu", "cuda"]
    dtype: str
    max_len: int
    seed: int = 0
    tensor_parallel_size: int = 1
    enforce_eager: bool = True
    gpu_memory_utilization: float = 0.85
    kv_cache_gib: int = 1
    max_num_seqs: int = 256
    enable_prefix_caching: bool = False
    cpu_threads: int = 1
    trust_remote_code: bool = False

    @classmethod
    def from_config(
        cls,
        config: VllmConfig,
        *,
        model: str,
        device: Literal["cpu", "cuda"],
        max_len: int,
        seed: int = 0,
        trust_remote_code: bool = False,
    ) -> EngineSettings:
        """Resolve what depends on the device: dtype and eager mode."""
        on_cpu = device == "cpu"
        auto_dtype = "float32" if on_cpu else "bfloat16"
        return cls(
            model=model,
            device=device,
            dtype=auto_dtype if config.dtype == "auto" else config.dtype,
            max_len=max_len,
            seed=seed,
            tensor_parallel_size=config.tensor_parallel_size,
            enforce_eager=on_cpu if config.enforce_eager is None else config.enforce_eager,
            gpu_memory_utilization=config.gpu_memory_utilization,
            kv_cache_gib=config.kv_cache_gib,
            max_num_seqs=config.max_num_seqs,
            enable_prefix_caching=config.enable_prefix_caching,
            cpu_threads=config.cpu_threads,
            trust_remote_code=trust_remote_code,
        )

    def environment(self) -> dict[str, str]:
        """Variables that must be set before vLLM is imported: quiet, no usage statistics, no core pinning.

        Without pinning, engines and trainer ranks that share a machine are spread by the operating system; vLLM's own
        choice would put every engine on the same cores.
        """
        # vLLM's warnings on CPU are about things that a run cannot change.
        level = os.environ.get("VLLM_LOGGING_LEVEL", "ERROR" if self.device == "cpu" else "WARNING")
        variables = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": level}
        if self.device == "cpu":
            variables |= {
                "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                # With one worker, in the engine core's own process: a start and a hop per step less.
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if self.tensor_parallel_size > 1 else "0",
                "OMP_NUM_THREADS": str(self.cpu_threads),
            }
        return variables

    def engine_args(self) -> dict[str, Any]:
        """Arguments of vLLM's ``AsyncEngineArgs``."""
        args = {
            "model": self.model,
            "skip_tokenizer_init": True,
            "dtype": self.dtype,
            "max_model_len": self.max_len,
            "seed": self.seed,
            "tensor_parallel_size": self.tensor_parallel_size,
            "distributed_executor_backend": "uni" if self.tensor_parallel_size == 1 else "mp",
            "enforce_eager": self.enforce_eager,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_num_seqs": self.max_num_seqs,
            "enable_prefix_caching": self.enable_prefix_caching,
            "trust_remote_code": self.trust_remote_code,
            # Log-probs of the distribution that was sampled from, temperature included.
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "worker_extension_cls": "molt_core.rollout.refit.WeightReceiver",
            "disable_log_stats": True,
            "enable_log_requests": False,
            "use_tqdm_on_load": False,
        }
        if self.device == "cpu":
            # A prompt split over two steps makes vLLM 0.32 rewind the generator of a request with a seed, and a CPU
            # generator cannot be rewound: the engine would die. So a step always takes whole prompts.
            args |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(self.max_len, 4096)}
        return args


class Engine:
    """A running vLLM engine. Needs an event loop and ``settings.environment()`` in the process environment."""

    def __init__(self, settings: EngineSettings) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.settings = settings
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings.engine_args()))
        self._version = 0
        self._request_ids = itertools.count()

    async def generate(self, request: EngineRequest) -> Completion:
        """Sample one completion; a cancelled call aborts its request.

        Raises EngineDiedError when the engine is gone, ValueError for a request that it refuses.
        """
        from vllm.inputs import tokens_input

        last = None
        with _death_translated():
            stream = self._llm.generate(
                tokens_input(list(request.prompt_ids)),
                _sampling_params(request),
                request_id=str(next(self._request_ids)),
            )
            async with contextlib.aclosing(stream):
                async for output in stream:
                    last = output
        if last is None or not last.finished:
            raise RuntimeError("the engine ended a request without a result")
        return _completion(last.outputs[0])

    async def pause(self) -> None:
        """Stop sampling; requests keep their place and their KV cache, new ones wait."""
        with _death_translated():
            # What pause_generation does, without the 20 ms that it sleeps for the caller's convenience.
            await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Go on sampling."""
        with _death_translated():
            await self._llm.resume_generation()

    async def load_weights(self, chunk_refs: Sequence[Any], version: int) -> None:
        """Replace all weights of the paused engine; sampled tokens carry ``version`` from here on.

        ``chunk_refs``: Ray object references of, or directly, lists of (checkpoint name, numpy array or torch tensor).
        Raises WeightsIncompleteError when a parameter was not replaced or a tensor has no place in the model.
        """
        from molt_core.rollout.refit import send_to_workers

        with _death_translated():
            await send_to_workers(self._llm.collective_rpc, chunk_refs)
            if self.settings.enable_prefix_caching:
                # Of running requests too: blocks of the old weights would go on being shared otherwise.
                await self._llm.reset_prefix_cache(reset_running_requests=True)
            await self._llm.update_weight_version(str(version))
        self._version = version

    async def version(self) -> int:
        """The policy version of the weights."""
        return self._version

    async def num_unfinished(self) -> int:
        """Requests that are sampled or wait."""
        return self._llm.get_num_unfinished_requests()

    async def check_health(self) -> None:
        """Returns when the engine is alive, raises EngineDiedError otherwise."""
        with _death_translated():
            await self._llm.check_health()

    async def shutdown(self) -> None:
        """End the engine's processes."""
        self._llm.shutdown()


@contextlib.contextmanager
def _death_translated() -> Iterator[None]:
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise EngineDiedError(f"the vLLM engine died: {error}") from error


def _sampling_params(request: EngineRequest) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        max_tokens=request.max_tokens,
        min_tokens=0,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        seed=request.seed,
        stop=None,
        stop_token_ids=list(request.stop_token_ids),
        # Only the ids given above end a turn; what a checkpoint calls its end token is the chat template's business.
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def _completion(output: Any) -> Completion:
    """From vLLM's result; log-probs are one per id because the request asked for the sampled token's alone."""
    ids = tuple(output.token_ids)
    versions: list[int] = []
    for span in output.weight_versions or ():
        version = 0 if span.version == "default" else int(span.version)
        versions += [version] * (span.end - span.start)
    logprobs = tuple(output.logprobs.logprobs) if ids else ()
    if not len(ids) == len(logprobs) == len(versions):
        raise RuntimeError(f"the engine gave {len(logprobs)} log-probs and {len(versions)} versions for {len(ids)} ids")
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"the engine ended a request with {output.finish_reason!r}")
    return Completion(ids, logprobs, tuple(versions), output.finish_reason)
