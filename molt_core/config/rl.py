"""The configuration of ``molt train``."""

from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from molt_core.config.base import Section
from molt_core.config.shared import (
    AdamConfig,
    CheckpointConfig,
    FsdpConfig,
    LoggerConfig,
    ModelConfig,
    PluginsConfig,
    TrainedModelConfig,
)


class ActorConfig(ModelConfig):
    """The policy that is trained and sampled."""

    loss_mode: str = Field("ppo", description="Policy loss, by plugin name.")
    loss_args: dict[str, Any] = Field({}, description="Options of the policy loss.")
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "prompt-mean-token-mean"] = Field(
        "token-mean", description="How token losses become one number per optimizer step. A sequence is a segment."
    )
    loss_agg_norm: PositiveFloat | None = Field(
        None,
        description="What seq-mean-token-sum also divides by. Default: rollout.max_new_tokens, or else data.max_len.",
    )
    freezing_steps: NonNegativeInt = Field(0, description="First steps in which only the critic is trained.")
    entropy_coef: float = Field(0.0, description="Entropy bonus; positive encourages entropy.")
    eps_clip_low_high: tuple[NonNegativeFloat, PositiveFloat] | None = Field(
        None, description="Shorthand for the loss option of this name."
    )
    dual_clip: float | None = Field(None, description="Shorthand for the loss option of this name.")


class CriticAdamConfig(AdamConfig):
    """AdamW."""

    lr: NonNegativeFloat = Field(5e-6, description="Peak learning rate.")


class CriticConfig(TrainedModelConfig):
    """The value model of estimators that need values; it lives in the actor's ranks."""

    model_name_or_path: str = Field("", description="Checkpoint of its backbone. Default: the actor's.")
    adam: CriticAdamConfig = CriticAdamConfig()
    value_clip: NonNegativeFloat = Field(
        0.2, description="A value gains nothing by moving further than this from its old one in a step; 0: no clip."
    )
    max_epochs: PositiveInt | None = Field(
        None, description="Passes over each step's rollouts. Default: train.max_epochs."
    )


class DataConfig(Section):
    """Prompts."""

    prompt_dataset: Path | None = Field(None, description="JSONL file with one prompt row per line. Required.")
    max_samples: PositiveInt | None = Field(None, description="Use only the first N rows.")
    max_len: PositiveInt = Field(2048, description="Context: prompt and everything after it, in tokens.")
    max_prompt_len: PositiveInt | None = Field(
        None, description="Longest first prompt in tokens. Default: max_len - 1."
    )
    overflow: Literal["drop", "truncate_left", "error"] = Field("drop", description="What to do with longer prompts.")
    chat_template: str = Field("default", description="Chat-template adapter, by plugin name.")
    shuffle: bool = Field(True, description="Shuffle the prompts of each episode with train.seed.")


class EnvConfig(Section):
    """The environment."""

    model_config = ConfigDict(allow_inf_nan=True)

    name: str = Field(
        "single-turn",
        description="Environment plugin, `./file.py:Class` or `module:Class`. The default asks and gives no reward.",
    )
    args: dict[str, Any] = Field({}, description="Options of the environment.")
    max_turns: PositiveInt = Field(16, description="Model calls per rollout; more is truncation.")
    turn_timeout: PositiveFloat = Field(60.0, description="Seconds that one reset or step may take.")
    rollout_timeout: PositiveFloat = Field(
        1800.0, description="Seconds that one rollout may take, generation included."
    )
    retries: NonNegativeInt = Field(1, description="How often a rollout that failed is run again.")


class RewardConfig(Section):
    """The reward."""

    model_config = ConfigDict(allow_inf_nan=True)

    name: str | None = Field(None, description="Reward plugin; none: the environment's own reward.")
    args: dict[str, Any] = Field({}, description="Options of the reward.")
    timeout: PositiveFloat = Field(60.0, description="Seconds that one scoring may take.")
    retries: NonNegativeInt = Field(1, description="How often a failed scoring is repeated.")
    clip_range: tuple[float, float] = Field(
        (-10.0, 10.0), description="Rewards are clamped to it, before they are shaped for the estimator."
    )
    overlong_max: PositiveInt | None = Field(
        None,
        description="Soft penalty on length: -1 for this many sampled tokens or more. Default: none.",
    )
    overlong_buffer: PositiveInt | None = Field(
        None, description="The penalty grows from 0 to -1 over this many tokens before reward.overlong_max."
    )
    stop_properly: float = Field(
        1.0,
        ge=0,
        le=1,
        description="The reward of a truncated rollout is multiplied by it, a negative one too; 1 turns it off.",
    )


class AdvantageConfig(Section):
    """Advantages and the train/rollout correction."""

    estimator: str = Field("reinforce_baseline", description="Advantage estimator, by plugin name.")
    args: dict[str, Any] = Field({}, description="Options of the estimator.")
    is_correction_level: Literal["off", "token", "seq", "geo"] = Field(
        "token", description="Unit of the importance correction between rollout and training policy."
    )
    is_correction_mode: Literal["mask", "clip", "trunc"] = Field("trunc", description="What happens out of the band.")
    is_correction_threshold: tuple[NonNegativeFloat, PositiveFloat] = Field(
        (0.5, 5.0),
        description="LOW HIGH. Gating ratio: the band of the ratio, trainer to engine. Gating binary_kl and tv: LOW is "
        "0 and HIGH the largest divergence, such as 0.005.",
    )
    is_correction_gating: Literal["ratio", "binary_kl", "tv"] = Field(
        "ratio",
        description="What mode mask decides by: the ratio of the level's unit, or a divergence between engine and "
        "current policy, which is the mean over the tokens of a sequence at any level. Weights are those of tokens.",
    )


class KlConfig(Section):
    """KL of the policy to a reference."""

    init_coef: NonNegativeFloat = Field(
        0.0, description="KL coefficient; 0: no KL, or 1 where the estimator needs a reference."
    )
    use_loss: bool | None = Field(
        None,
        description="KL as a loss term; off: as a reward. Default: on, but off where the estimator needs a reference.",
    )
    estimator: Literal["k1", "k2", "k3"] | None = Field(
        None, description="KL per token. Default: k3 as a loss, k1 as a reward."
    )
    ref: Literal["reference", "rollout"] = Field(
        "reference", description="KL to the reference model, or (as a loss) to the policy that sampled."
    )
    target: PositiveFloat | None = Field(
        None, description="KL per token that the coefficient is steered to. Default: the coefficient is fixed."
    )
    horizon: PositiveInt = Field(10000, description="Rollouts over which the coefficient moves by the error.")


class AlgoConfig(Section):
    """The algorithm."""

    model_config = ConfigDict(allow_inf_nan=True)

    advantage: AdvantageConfig = AdvantageConfig()
    kl: KlConfig = KlConfig()
    dynamic_filtering_enable: bool = Field(
        False, description="Replace groups whose metric does not vary, and incomplete ones."
    )
    dynamic_filtering_metric: str = Field("reward", description="`reward`, or a key of the environment's info.")
    dynamic_filtering_range: tuple[float, float] | None = Field(
        None, description="LOW HIGH: also replace groups whose mean of the metric is not strictly between them."
    )
    dynamic_filtering_max_tries: PositiveInt = Field(
        20,
        description="Batches' worth of groups that may be replaced for one batch, filtered or with too few scored "
        "rollouts, before the run stops with an error.",
    )


class RefConfig(Section):
    """The reference model."""

    model_name_or_path: str | None = Field(None, description="Default: the actor's checkpoint.")


class VllmConfig(Section):
    """The rollout engines."""

    num_engines: PositiveInt = Field(1, description="vLLM engines.")
    tensor_parallel_size: PositiveInt = Field(1, description="GPUs per engine.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Engine dtype. auto: bfloat16 on CUDA, float32 on CPU."
    )
    enforce_eager: bool | None = Field(None, description="Default: on for CPU, off for CUDA.")
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1, description="Share of GPU memory for the engine.")
    kv_cache_gib: PositiveInt = Field(1, description="KV cache on CPU, in GiB.")
    max_num_seqs: PositiveInt = Field(256, description="Sequences decoded at once per engine.")
    enable_prefix_caching: bool = Field(False, description="Share the KV of equal prefixes; cleared at every refit.")
    cpu_threads: PositiveInt = Field(1, description="Threads per engine on CPU.")


class RolloutConfig(Section):
    """Sampling."""

    batch_size: PositiveInt = Field(8, description="Prompts (groups) per step.")
    n_samples_per_prompt: PositiveInt = Field(8, description="Rollouts per prompt.")
    vllm_generate_batch_size: PositiveInt | None = Field(
        None, description="Groups in flight. Default: rollout.batch_size."
    )
    max_new_tokens: PositiveInt | None = Field(None, description="Tokens per turn. Default: what the context leaves.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature.")
    top_p: float = Field(1.0, gt=0, le=1, description="Must be 1 for training.")
    top_k: int = Field(-1, description="Must be -1 for training.")
    num_runners: PositiveInt = Field(1, description="Processes that run environments.")


class TrainConfig(Section):
    """The loop and the optimizer steps."""

    batch_size: PositiveInt | None = Field(
        None, description="Rollouts per optimizer step. Default: all of a step. Must divide batch_size x n_samples."
    )
    max_tokens_per_gpu: PositiveInt = Field(16384, description="Padded tokens per micro-batch.")
    micro_batch_size: PositiveInt | None = Field(None, description="Rows per micro-batch, instead of a token budget.")
    max_epochs: PositiveInt = Field(1, description="Passes over each step's rollouts.")
    num_episodes: PositiveInt = Field(1, description="Passes over the prompts.")
    max_steps: PositiveInt | None = Field(None, description="Stop after this many steps.")
    seed: int = Field(42, description="Seed of prompt order, sampling and initialisation.")
    async_queue_size: PositiveInt = Field(1, description="Batches that generation may run ahead of training.")
    force_sync_mode: bool = Field(False, description="Strictly on-policy: nothing is in flight across a refit.")
    max_staleness: NonNegativeInt | None = Field(
        None, description="Oldest policy version trained, in updates behind. Default: async_queue_size, 0 in sync mode."
    )
    cpu_threads: PositiveInt = Field(1, description="Threads per training rank on CPU.")
    ray_address: str | None = Field(None, description="Ray cluster to join, such as `auto`. Default: start one.")


class EvalConfig(Section):
    """Held-out evaluation."""

    dataset: Path | None = Field(None, description="JSONL file of held-out prompts.")
    steps: int = Field(-1, description="Evaluate every N steps; -1: only where asked below.")
    at_start: bool = Field(False, description="Evaluate before the first step.")
    at_end: bool = Field(True, description="Evaluate after the last step.")
    temperature: NonNegativeFloat | None = Field(None, description="Default: rollout.temperature; 0 is greedy.")
    n_samples_per_prompt: PositiveInt = Field(1, description="Rollouts per held-out prompt.")
    max_new_tokens: PositiveInt | None = Field(None, description="Default: rollout.max_new_tokens.")
    max_samples: PositiveInt | None = Field(None, description="Use only the first N rows.")


class RLConfig(Section):
    """Everything that ``molt train`` can be told."""

    device: Literal["auto", "cuda", "cpu"] = Field("auto", description="Where to run. auto: CUDA if there is any.")
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    critic: CriticConfig = CriticConfig()
    data: DataConfig = DataConfig()
    env: EnvConfig = EnvConfig()
    reward: RewardConfig = RewardConfig()
    algo: AlgoConfig = AlgoConfig()
    vllm: VllmConfig = VllmConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    fsdp: FsdpConfig = FsdpConfig()
    eval: EvalConfig = EvalConfig()
    ckpt: CheckpointConfig = CheckpointConfig()
    logger: LoggerConfig = LoggerConfig()
    plugins: PluginsConfig = PluginsConfig()
