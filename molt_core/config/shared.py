"""Sections that the RL and the SFT program share."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from molt_core.config.base import Section


class AdamConfig(Section):
    """AdamW."""

    lr: NonNegativeFloat = Field(1e-6, description="Peak learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="Decay of the two moments.")
    eps: PositiveFloat = Field(1e-8, description="Added to the denominator.")
    weight_decay: NonNegativeFloat = Field(0.0, description="Decoupled weight decay, on all parameters.")


class TrainedModelConfig(Section):
    """A model, its optimizer and its schedule."""

    model_name_or_path: str = Field("", description="Hugging Face checkpoint folder or name.")
    gradient_checkpoint: bool = Field(False, description="Recompute activations in the backward pass.")
    adam: AdamConfig = AdamConfig()
    lr_scheduler: str = Field("constant", description="Any Hugging Face scheduler name.")
    lr_warmup_ratio: float = Field(0.03, ge=0, le=1, description="Share of the optimizer steps spent warming up.")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="Lowest learning rate as a share of the peak.")
    max_norm: float = Field(1.0, description="Gradient clipping norm; 0 turns clipping off.")


class ModelConfig(TrainedModelConfig):
    """The model that a program trains, and the ranks that train it."""

    model_name_or_path: str = Field("", description="Hugging Face checkpoint folder or name. Required.")
    num_nodes: PositiveInt = Field(1, description="Nodes of the training group.")
    num_gpus_per_node: PositiveInt = Field(1, description="Training ranks per node: GPUs, or processes on CPU.")


class FsdpConfig(Section):
    """How the trainer shards and computes."""

    tp_size: PositiveInt = Field(1, description="Tensor-parallel size.")
    cp_size: PositiveInt = Field(1, description="Context-parallel size.")
    ep_size: PositiveInt = Field(1, description="Expert-parallel size.")
    param_dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto", description="Compute dtype; master weights are fp32. auto: bf16 on CUDA, fp32 on CPU."
    )
    attn_implementation: str = Field("sdpa", description="Attention backend of the training model.")
    trust_remote_code: bool = Field(False, description="Run code that comes with a checkpoint.")


class CheckpointConfig(Section):
    """Resumable checkpoints and the final export."""

    path: Path | None = Field(None, description="Folder of resumable checkpoints. Default: RUN_DIR/checkpoints.")
    save_steps: int = Field(-1, description="Save every N steps; -1 never.")
    max_num: int = Field(3, description="Newest checkpoints to keep; 0 or less keeps all.")
    load_enable: bool = Field(False, description="Resume from the newest complete checkpoint in ckpt.path.")
    output_dir: Path | None = Field(None, description="Final Hugging Face export. Default: RUN_DIR/hf.")
    disable_final_save: bool = Field(False, description="Skip the final export.")
    save_hf: bool = Field(False, description="Also export a Hugging Face checkpoint at every save.")


class LoggerConfig(Section):
    """Where metrics go."""

    run_name: str = Field("", description="Name of the run. Default: program and time.")
    run_dir: Path | None = Field(None, description="Folder of the run. Default: runs/RUN_NAME.")
    trackers: tuple[str, ...] = Field((), description="Tracker plugins, besides those that are always on.")
    tracker_args: dict[str, dict[str, Any]] = Field({}, description="Options of each tracker, by its name.")
    logging_steps: PositiveInt = Field(1, description="Log metrics every N steps.")
    num_rollouts: NonNegativeInt = Field(4, description="Rollouts written to rollouts.jsonl per step.")


class PluginsConfig(Section):
    """Which plugins are loaded."""

    disable: tuple[str, ...] = Field((), description="Plugins to leave out, by distribution or entry-point name.")
    autoload: bool = Field(True, description="Load every installed plugin; off: only those in plugins.only.")
    only: tuple[str, ...] = Field((), description="Plugins to load when autoload is off.")
