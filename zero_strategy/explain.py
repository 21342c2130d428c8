"""What torch's errors about sharded tensors and lost ranks mean, and what to do.

A step may fail deep inside torch, in the forward, in the backward or in a callback's hook, with
words about DTensors and storages. The strategy cannot foresee these, but it can say what they
come from: a note is added to the exception, which stays the one that torch raised.
"""

import re

_USED_WHILE_SHARDED = (
    "zero_strategy: a parameter of a unit is whole only inside that unit's forward, and was used "
    "elsewhere.\n"
    "- A block is called by another method, or a part of it alone: go through the block's "
    "forward(), or name the smaller class in ZeroStrategy(blocks=[...]).\n"
    "- A penalty on self.parameters(): use the optimizer's weight_decay, or add its gradient to "
    "the shards in on_before_optimizer_step, for an L2 penalty "
    "`p.grad.add_(p.detach(), alpha=2 * weight)`.\n"
    "- The module is called outside a step: `with trainer.strategy.inference():`, on every rank."
)
_READ_AS_WHOLE = (
    "zero_strategy: the values of a sharded tensor were read as if this rank held them all. For "
    "gradient norms use trainer.strategy.grad_norm, also in on_before_optimizer_step, and "
    "p.grad.norm() for one parameter; for other values tensor.full_tensor(). Each is a collective: "
    "every rank must call it."
)
_NO_SHARDED_VERSION = (
    "zero_strategy: torch has no version of this operation for sharded tensors. In an optimizer "
    "use foreach=True in place of fused=True; element by element work on tensor.to_local(); "
    "otherwise call tensor.full_tensor() first, on every rank."
)
_NOT_IN_THE_GRAPH = (
    "zero_strategy: if this is a parameter of a unit, it was read outside the unit's forward, "
    "where it is a shard that the graph does not know. Differentiate by inputs or activations."
)

_RANK_LEFT = (
    "zero_strategy: another rank left the run, so that this one waits for nobody. What ended it is "
    "in that rank's own output: an exception, a kill for want of memory, or an exit that the other "
    "ranks did not take. Ranks must leave together."
)

_NOTES = {
    # Of gloo and of NCCL's watch.
    r"[Cc]onnection closed by peer|[Cc]onnection reset by peer|remote process exited": _RANK_LEFT,
    # A loss that became a DTensor meets plain tensors, or a reduction over the ranks.
    r"mixed torch\.Tensor and DTensor|Operator c10d\..* sharding strategy": _USED_WHILE_SHARDED,
    r"data is not allocated yet|not supported for tensor subclasses": _READ_AS_WHOLE,
    r"appears to not have been used in the graph": _NOT_IN_THE_GRAPH,
    r"have a sharding strategy|Sharding propagation|require placement changes": _NO_SHARDED_VERSION,
}


def explain(error: BaseException) -> None:
    """Add a note to an exception of torch that needs one; leaves any other alone."""
    text = str(error)
    for pattern, note in _NOTES.items():
        if re.search(pattern, text):
            error.add_note(note)
            return
