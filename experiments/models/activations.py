"""Bytes that a decoder keeps for its backward pass, from its shape alone.

Counted for the fused attention kernels, which keep queries, keys, values, their output and one
log-sum per query and head; with the scores written out it would be far more.
"""

from __future__ import annotations

from zero_strategy.experiments.models.gpt import GPTConfig
from zero_strategy.experiments.models.loss import CHUNK_VALUES
from zero_strategy.planning.job import Activations

_FP32_BYTES, _INT64_BYTES = 4, 8
# Of the loss's chunk, values in fp32 at once: the log-softmax and one temporary.
_LOSS_COPIES = 2


def activations(config: GPTConfig, *, batch_size: int, seq_len: int, itemsize: int) -> Activations:
    """Return what one micro-batch of a `GPT` with `token_loss` holds.

    Args:
        config: the decoder's shape.
        batch_size: rows.
        seq_len: tokens of a row.
        itemsize: bytes of a value in the compute dtype.
    """
    num_tokens = batch_size * seq_len
    inner = block_bytes(config, num_tokens=num_tokens, itemsize=itemsize)
    inputs = itemsize * num_tokens * config.hidden_size
    # Gradients beside what is kept are widest where the SwiGLU's product is taken apart: that of
    # the product and of both factors, when the product itself is no longer held.
    working = itemsize * num_tokens * (config.hidden_size + 2 * config.intermediate_size)
    per_block = inputs if config.recompute else inner
    return Activations(
        kept_bytes=config.num_layers * per_block,
        unit_bytes=working + (inner if config.recompute else 0),
        loss_bytes=head_bytes(config, num_tokens=num_tokens, itemsize=itemsize)
        + _loss_bytes(config.vocab_size, num_tokens, itemsize),
    )


def block_bytes(config: GPTConfig, *, num_tokens: int, itemsize: int) -> int:
    """Return what one block keeps, its input included, without recompute."""
    hidden, width = config.hidden_size, config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    values = (
        2 * hidden  # the input and its norm
        + width + 2 * kv_width  # qkv, of which the values are used as they are
        + width + kv_width  # queries and keys, rotated
        + width  # what attention gives
        + 2 * hidden  # the stream between the layers and its norm
        + 2 * config.intermediate_size  # gate and up
        + 2 * config.intermediate_size  # silu of the gate, and the product
    )  # fmt: skip
    # Per token the norms' two inverse roots, and attention's log-sums.
    sums = _FP32_BYTES * (2 + config.num_heads)
    return num_tokens * (itemsize * values + sums)


def head_bytes(config: GPTConfig, *, num_tokens: int, itemsize: int) -> int:
    """Return what lies between the last block and the loss, logits included."""
    values = 2 * config.hidden_size + config.vocab_size
    # The loss keeps its targets and one value per token.
    return num_tokens * (itemsize * values + 2 * _FP32_BYTES + _INT64_BYTES)


def _loss_bytes(vocab_size: int, num_tokens: int, itemsize: int) -> int:
    """The gradient of the logits, and the chunk in which it is made."""
    values = vocab_size * num_tokens
    rows = max(1, CHUNK_VALUES // vocab_size)
    chunk = vocab_size * min(rows, num_tokens)
    return itemsize * values + _LOSS_COPIES * _FP32_BYTES * chunk
