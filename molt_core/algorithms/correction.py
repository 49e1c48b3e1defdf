"""Correction of the mismatch between the policy that sampled (rollout) and the policy that is trained.

Both log-probs are of the sampling distribution, that is after temperature; a log-prob divided by the temperature is
not one. Importing this module is light, so that launch checks can use it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from molt_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

LEVELS = ("off", "token", "seq", "geo")
MODES = ("mask", "clip", "trunc")
GATINGS = ("ratio", "binary_kl", "tv")
MAX_LOG_RATIO = 30.0
"""Exponents are clamped to this on both sides; e**30 is still finite in every training dtype."""
_PROBABILITY_FLOOR = 1e-6


def check_correction(level: str, mode: str, threshold: tuple[float, float], gating: str = "ratio") -> None:
    """Refuse a correction that cannot work, before anything is started. Raises ConfigError."""
    if gating not in GATINGS:
        raise ConfigError(f"the correction gating {gating!r} does not exist; write one of {', '.join(GATINGS)}")
    if level not in LEVELS:
        raise ConfigError(f"the correction level {level!r} does not exist; write one of {', '.join(LEVELS)}")
    if level == "off":
        return
    if mode not in MODES:
        raise ConfigError(f"the correction mode {mode!r} does not exist; write one of {', '.join(MODES)}")
    low, high = threshold
    if not (math.isfinite(low) and math.isfinite(high) and 0 <= low < high):
        raise ConfigError(f"the correction band {low} {high} is empty; write LOW HIGH with 0 <= LOW < HIGH")
    if level in ("seq", "geo") and mode != "mask":
        raise ConfigError(
            f"correction level {level!r} decides about whole sequences and only works with mode 'mask', not {mode!r}; "
            "change the mode to 'mask' or the level to 'token'"
        )
    if gating != "ratio" and mode != "mask":
        raise ConfigError(f"the gating {gating!r} masks whole sequences; change the mode {mode!r} to 'mask'")


def log_ratio(new: Tensor, old: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """new - old clamped to ±30, and where it exists at all, (B, L) each.

    Off the mask, and where the difference is NaN, the ratio is 0 and has no gradient; the second tensor is true on
    exactly those masked tokens whose difference is not NaN.
    """
    import torch

    difference = torch.where(mask, new, 0.0) - torch.where(mask, old, 0.0)
    exists = mask & ~difference.isnan()
    return torch.where(exists, difference, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), exists


def correct(
    logprobs_old: Tensor,
    behaviour: Tensor | None,
    mask: Tensor,
    level: str,
    mode: str = "trunc",
    threshold: tuple[float, float] = (0.5, 5.0),
    gating: str = "ratio",
    logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights that multiply the token losses, (B, L) without gradient, 0 off the mask; and metrics.

    ``logprobs_old``: (B, L), the training policy before the update; ``behaviour``: (B, L), the engine's at sampling,
    may be None for level "off"; ``mask``: (B, L) bool. With x = clamp(logprobs_old - behaviour, ±30), w = exp(x):

    - the unit ratio u is w for level "token", exp(clamp(Σ_t x, ±30)) of the row for "seq", exp(mean_t x) for "geo";
    - mode "mask": w where low <= u <= high, else 0; "clip": clamp(w, low, high); "trunc": min(w, high);
    - level "off": 1;
    - gating "binary_kl" or "tv", in mode "mask" at any level: w for all tokens of the rows that :func:`gate` admits by
      their ``logprobs`` (those of the current policy, (B, L); the old ones if None) with the threshold high, else 0.

    What decides about rows ("seq", "geo", a gate) does not bound the weights of their tokens, which are up to e^30.

    A token whose ratio is NaN cannot be corrected and gets weight 0, at level "off" excepted. Denominators do not
    change: what is dropped still counts. Metrics: ``is_filter_ratio``, the share out of the band, (B, L) for tokens,
    (B,) for rows; ``is_weight``, the weight, (B, L); ``is_nonfinite_ratio``, the share of NaN, (B, L); ``vllm_kl``,
    behaviour - logprobs_old, (B, L); with a gate also its ``gate_divergence``, (B,). Sources: arXiv 2505.24298
    (token), 2507.18071 (geo).
    """
    import torch

    check_correction(level, mode, threshold, gating)
    if level == "off":
        return mask.to(torch.float32), {}
    assert behaviour is not None, "a correction needs the engine's log-probs"
    with torch.no_grad():
        low, high = threshold
        x, exists = log_ratio(logprobs_old.float(), behaviour.float(), mask)
        weights = torch.where(exists, x.exp(), 0.0)
        metrics = {"is_nonfinite_ratio": (mask & ~exists).float(), "vllm_kl": -x}
        if gating == "ratio":
            unit = _unit_ratio(x, mask, level)
            outside = unit > high if mode == "trunc" else (unit < low) | (unit > high)
        else:
            current = logprobs_old if logprobs is None else logprobs
            admitted, gated = gate(current.float(), behaviour.float(), mask, gating, high)
            outside = ~admitted
            metrics["gate_divergence"] = gated["gate_divergence"]
        metrics["is_filter_ratio"] = outside.float()
        if mode == "mask":
            weights = torch.where(outside if outside.dim() == 2 else outside[:, None], 0.0, weights)
        else:
            weights = torch.where(exists, weights.clamp(low if mode == "clip" else None, high), 0.0)
        return weights, metrics | {"is_weight": weights}


def _unit_ratio(x: Tensor, mask: Tensor, level: str) -> Tensor:
    """The ratio that the band is compared with: (B, L) for tokens, (B,) for rows."""
    if level == "token":
        return x.exp()
    total = x.sum(-1)
    if level == "geo":
        total = total / mask.sum(-1).clamp(min=1)
    return total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def gate(
    logprobs: Tensor, behaviour: Tensor, mask: Tensor, kind: str, threshold: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Which sequences are close enough to the policy to be trained, (B,) bool; and metrics.

    ``logprobs``: (B, L), the current policy; ``behaviour``: (B, L); ``mask``: (B, L) bool. With p and q the current
    and the behaviour probability of a sampled token, both clamped to [1e-6, 1 - 1e-6], its divergence is

    - binary_kl: q log(q/p) + (1-q) log((1-q)/(1-p));
    - tv: |p - q|.

    A sequence is admitted if the mean over its action tokens is at most ``threshold``; one with a NaN log-prob is not,
    one without an action token is. Metrics, (B,): ``gate_divergence`` (0 where NaN), ``gate_rejected``.
    """
    import torch

    assert kind in ("binary_kl", "tv"), f"unknown gate {kind!r}"
    with torch.no_grad():
        p, q = (
            torch.where(mask, x, 0.0).double().exp().clamp(_PROBABILITY_FLOOR, 1 - _PROBABILITY_FLOOR)
            for x in (logprobs, behaviour)
        )
        binary_kl = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
        divergence = binary_kl if kind == "binary_kl" else (p - q).abs()
        mean = torch.where(mask, divergence, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)
        admitted = mean <= threshold
        return admitted, {"gate_divergence": mean.nan_to_num().float(), "gate_rejected": (~admitted).float()}
