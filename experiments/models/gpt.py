"""A Llama-shaped decoder: RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases.

Plain single-device code. Sharding, offload and precision are applied from outside, so this file is
what every strategy is compared against. Projections that read the same input are one matrix
(`qkv`, `gate_up`), because one large product is faster than several small ones.

Shape letters: B batch, T time, H hidden, V vocabulary, N query heads, K key-value heads,
D head dim, I intermediate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zero_strategy.experiments.models.rotary import Rotary, rotate
from zero_strategy.experiments.rules import Rule, above_zero, at_least, broken

INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """Shape of a `GPT`.

    Attributes:
        vocab_size: number of token ids the model reads and predicts.
        num_layers: number of blocks.
        hidden_size: width of the residual stream; must divide by num_heads into an even head dim.
        num_heads: query heads.
        num_kv_heads: key-value heads; must divide num_heads.
        intermediate_size: width of the SwiGLU inner layer.
        max_seq_len: longest sequence, in tokens; sizes the rotary table.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square inside RMSNorm.
        tied: one matrix serves as token embedding and as output head.
        recompute: keep only block inputs and run each block again in the backward pass.
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    max_seq_len: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = False
    recompute: bool = False

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    def problems(self, path: str = "model") -> list[str]:
        """Return every broken rule, one line each."""
        counts = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "intermediate_size")
        sizes = [
            *at_least(self, 1, *counts, "max_seq_len"),
            *at_least(self, 2, "vocab_size"),
            *above_zero(self, "rope_theta", "norm_eps"),
        ]
        if not all(rule.holds for rule in sizes):
            return broken(path, self, sizes)
        heads, width = self.num_heads, 2 * self.num_heads
        nearest = max(1, round(self.hidden_size / width)) * width
        return broken(
            path,
            self,
            [
                Rule(
                    "hidden_size",
                    self.hidden_size % width == 0,
                    f"a multiple of 2 * num_heads = {width}, rotary halves need an even head dim",
                    f"Use {nearest}.",
                ),
                Rule(
                    "num_kv_heads",
                    heads % self.num_kv_heads == 0,
                    f"a divisor of num_heads = {heads}",
                    f"Use {heads}.",
                ),
            ],
        )


class RMSNorm(nn.Module):
    """Scale each vector to unit mean square, then by a learned weight, (H,)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        nn.init.ones_(self.weight)

    def forward(self, x_BTH: Tensor) -> Tensor:
        """Return the normalized input, same shape and dtype."""
        return F.rms_norm(x_BTH, self.weight.shape, self.weight, self.eps)


class Linear(nn.Linear):
    """A bias-free linear map whose weight is drawn from a normal distribution."""

    def __init__(self, in_features: int, out_features: int, std: float = INIT_STD) -> None:
        self.std = std  # set first: nn.Linear's constructor ends by calling reset_parameters
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weight."""
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """A token embedding drawn like every other matrix of the model."""

    def reset_parameters(self) -> None:
        """Draw the weight."""
        nn.init.normal_(self.weight, std=INIT_STD)


class Attention(nn.Module):
    """Causal grouped-query self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = (config.num_heads, config.num_kv_heads)
        self.head_dim = config.head_dim
        width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self.qkv = Linear(config.hidden_size, width + 2 * kv_width)
        self.out = Linear(width, config.hidden_size, residual_std(config))

    def forward(self, x_BTH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix each position with those before it; returns (B, T, H)."""
        num_heads, num_kv_heads = self.heads
        qkv = self.qkv(x_BTH).unflatten(-1, (-1, self.head_dim))
        qk, v_BTKD = qkv.split((num_heads + num_kv_heads, num_kv_heads), dim=-2)
        # Queries and keys turn by the same angles: one rotation serves both.
        q_BTND, k_BTKD = rotate(qk, cos, sin).split(self.heads, dim=-2)
        mixed_BNTD = F.scaled_dot_product_attention(
            q_BTND.transpose(1, 2),
            k_BTKD.transpose(1, 2),
            v_BTKD.transpose(1, 2),
            is_causal=True,
            enable_gqa=num_heads != num_kv_heads,
        )
        return self.out(mixed_BNTD.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """The gated feed-forward layer: down(silu(gate x) * up x)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size)
        self.down = Linear(config.intermediate_size, config.hidden_size, residual_std(config))

    def forward(self, x_BTH: Tensor) -> Tensor:
        """Transform each position by itself; returns (B, T, H)."""
        gate_BTI, up_BTI = self.gate_up(x_BTH).chunk(2, dim=-1)
        return self.down(F.silu(gate_BTI) * up_BTI)


class Block(nn.Module):
    """One decoder layer: attention, then feed-forward, each normalized first and added back."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.recompute = config.recompute
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = SwiGLU(config)

    def forward(self, x_BTH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the updated residual stream, (B, T, H)."""
        if self.recompute and torch.is_grad_enabled():
            # Inside the block, so that hooks of a sharded block run once per pass, outside the
            # repeated part. Nothing here draws random numbers, so no generator state is kept.
            return checkpoint(
                self._transform, x_BTH, cos, sin, use_reentrant=False, preserve_rng_state=False
            )
        return self._transform(x_BTH, cos, sin)

    def _transform(self, x_BTH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BTH = x_BTH + self.attention(self.attention_norm(x_BTH), cos, sin)
        return x_BTH + self.feed_forward(self.feed_forward_norm(x_BTH))


class GPT(nn.Module):
    """The whole decoder, from token ids to logits.

    Every module that owns parameters or buffers has a `reset_parameters` that does its whole
    initialization. A model built on the meta device, moved with `to_empty` and reset in the order
    of `modules()` therefore equals one built directly at the same seed.

    Args:
        config: the shape.

    Raises:
        ValueError: lists every rule of the shape that is broken.

    Example:
        >>> logits_BTV = GPT(config)(token_BT)
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if problems := config.problems():
            raise ValueError("\n".join(problems))
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.max_seq_len, config.head_dim, config.rope_theta)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = Linear(config.hidden_size, config.vocab_size)
        if config.tied:
            # The embedding takes the head's matrix, not the reverse: the head is drawn last in
            # either order of building, so both orders leave the same values.
            self.embed.weight = self.head.weight

    def forward(self, token_BT: Tensor) -> Tensor:
        """Predict the next token at every position.

        Args:
            token_BT: token ids, (B, T), int64 in [0, vocab_size), T at most max_seq_len.

        Returns:
            Logits, (B, T, V), in the dtype of the head's product.

        Raises:
            ValueError: T is larger than max_seq_len.
        """
        seq_len = token_BT.shape[1]
        if seq_len > self.config.max_seq_len:
            raise ValueError(
                f"token_BT.shape[1] = {seq_len}: must be at most model.max_seq_len = "
                f"{self.config.max_seq_len}. Cut the sequences, or raise model.max_seq_len."
            )
        x_BTH = self.embed(token_BT)
        if x_BTH.dtype == matmul_dtype(x_BTH):
            # Parameters come in the compute dtype. Autocast has nothing to cast then, but would
            # widen each norm's input, whose kernel computes in fp32 anyway: two passes over memory
            # for the same numbers.
            with torch.autocast(x_BTH.device.type, enabled=False):
                return self._decode(x_BTH)
        return self._decode(x_BTH)

    def _decode(self, x_BTH: Tensor) -> Tensor:
        cos, sin = self.rotary(x_BTH.shape[1], matmul_dtype(x_BTH))
        for layer in self.layers:
            x_BTH = layer(x_BTH, cos, sin)
        return self.head(self.norm(x_BTH))

    def flops_per_token(self, seq_len: int) -> float:
        """Return model FLOPs per trained token: forward and backward, nothing counted twice.

        A matrix of P entries costs 2P forward and 4P backward. Attention multiplies each query
        with its (T + 1) / 2 visible keys on average, and as many values. Norms, rotations and
        the embedding lookup are left out.

        Args:
            seq_len: sequence length T, in tokens.
        """
        config = self.config
        width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        per_layer = config.hidden_size * (2 * width + 2 * kv_width + 3 * config.intermediate_size)
        matrices = config.num_layers * per_layer + config.hidden_size * config.vocab_size
        attention = config.num_layers * width * (seq_len + 1)
        return 6.0 * (matrices + attention)


def residual_std(config: GPTConfig) -> float:
    """Return the spread for matrices that add to the residual stream, which sums 2 per layer.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
    """
    return INIT_STD / math.sqrt(2 * config.num_layers)


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a matrix product of `x` has here, which autocast may change."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
