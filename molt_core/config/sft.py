"""The configuration of ``molt sft``."""

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt

from molt_core.config.base import Section
from molt_core.config.shared import (
    CheckpointConfig,
    FsdpConfig,
    LoggerConfig,
    ModelConfig,
    PluginsConfig,
)


class SftDataConfig(Section):
    """Conversations."""

    dataset: Path | None = Field(None, description="JSONL file of conversations. Required.")
    messages_key: str = Field("messages", description="Column with the list of messages.")
    max_len: PositiveInt = Field(2048, description="Longer conversations are cut on the right.")
    max_samples: PositiveInt | None = Field(None, description="Use only the first N rows.")
    chat_template: str = Field("default", description="Chat-template adapter, by plugin name.")
    train_on_last_turn_only: bool = Field(False, description="Supervise only the last assistant message.")


class SftTrainConfig(Section):
    """The optimizer steps."""

    batch_size: PositiveInt = Field(64, description="Conversations per optimizer step.")
    max_tokens_per_gpu: PositiveInt = Field(16384, description="Padded tokens per micro-batch.")
    micro_batch_size: PositiveInt | None = Field(None, description="Rows per micro-batch, instead of a token budget.")
    max_epochs: PositiveInt = Field(1, description="Passes over the conversations.")
    max_steps: PositiveInt | None = Field(None, description="Stop after this many optimizer steps.")
    seed: int = Field(42, description="Seed of the data order.")
    cpu_threads: PositiveInt = Field(1, description="Threads per training rank on CPU.")
    ray_address: str | None = Field(None, description="Ray cluster to join, such as `auto`. Default: start one.")


class SFTConfig(Section):
    """Everything that ``molt sft`` can be told."""

    device: Literal["auto", "cuda", "cpu"] = Field("auto", description="Where to run. auto: CUDA if there is any.")
    model: ModelConfig = ModelConfig()
    data: SftDataConfig = SftDataConfig()
    train: SftTrainConfig = SftTrainConfig()
    fsdp: FsdpConfig = FsdpConfig()
    ckpt: CheckpointConfig = CheckpointConfig()
    logger: LoggerConfig = LoggerConfig()
    plugins: PluginsConfig = PluginsConfig()
