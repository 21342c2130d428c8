"""TensorBoard: a few panels, and a custom-scalars layout that puts what belongs together."""

from typing import Any, final

from torch.utils.tensorboard import SummaryWriter

from zero_strategy.telemetry.events import Done, Event, RunFacts, Save, Step, Validation

# The phases as they pile up: each line is drawn at the sum of the phases up to it, so the space
# between two lines is the time of the upper one. Numbers keep the order in the legend.
_STACK = (
    ("1_data", "data_ms"),
    ("2_forward", "forward_ms"),
    ("3_backward", "backward_ms"),
    ("4_exposed_communication", "exposed_comm_ms"),
    ("5_optimizer", "optimizer_ms"),
)

# Tags are regular expressions that must match from the start.
_LAYOUT: dict[str, dict[str, list[Any]]] = {
    "Learning": {
        "Loss": ["Multiline", ["Learning/loss$", "Learning/val_loss$"]],
        "Validation bits per byte": ["Multiline", ["Learning/val_bits_per_byte$"]],
        "Gradient norm": ["Multiline", ["Learning/grad_norm$"]],
        "Learning rate": ["Multiline", ["Learning/lr$"]],
    },
    "Speed": {
        "Step time, stacked (ms)": ["Multiline", ["Speed/stacked_ms/"]],
        "Tokens per second per rank": ["Multiline", ["Speed/tokens_per_s$"]],
        "MFU": ["Multiline", ["Speed/mfu$"]],
        "Exposed communication, share of step": ["Multiline", ["Speed/exposed_share$"]],
    },
    "Memory": {
        "Peak per rank, measured and planned (GiB)": [
            "Multiline",
            ["Memory/peak_gib$", "Memory/planned_gib$"],
        ],
    },
    "Health": {
        "Rank skew (ms)": ["Multiline", ["Health/rank_skew_ms$"]],
        "Skipped steps": ["Multiline", ["Health/skipped_steps$"]],
        "Blocked by a checkpoint (s)": ["Multiline", ["Health/save_blocking_s$"]],
    },
}
_TIERS: dict[str, list[Any]] = {
    "Copies per link, mean over the step, and its ceiling (GB/s)": [
        "Multiline",
        ["Tiers/to_host_gb_per_s$", "Tiers/to_device_gb_per_s$", "Tiers/ceiling_gb_per_s$"],
    ],
    "Exposed: waits for weights, and for room for gradients (ms)": [
        "Multiline",
        ["Tiers/exposed_ms$", "Tiers/slot_wait_ms$"],
    ],
    "Exposed, share of step": ["Multiline", ["Tiers/exposed_share$"]],
    "Most chunks waiting for a pass": ["Multiline", ["Tiers/waiting_chunks$"]],
    "Chunks redone per step": ["Multiline", ["Tiers/redone_chunks$"]],
    "Passes per step, by lane": ["Multiline", ["Tiers/(cpu|stream)_passes$"]],
    "State in host memory, share": ["Multiline", ["Tiers/host_share$"]],
}


@final
class Board:
    """Writes events to TensorBoard.

    Args:
        writer: the Trainer's own where it has one, so that a run is one run there too.
        facts: what is known at the start. The panel "Tiers" is laid out under offload alone.
    """

    def __init__(self, writer: SummaryWriter, facts: RunFacts) -> None:
        self._writer = writer
        self._link_bytes_per_s = facts.link_bytes_per_s
        writer.add_custom_scalars(_LAYOUT | ({"Tiers": _TIERS} if facts.offload else {}))

    def write(self, event: Event) -> None:
        """Write the scalars of an event; figures that are absent leave a gap."""
        match event:
            case Step():
                self._scalars(_step_scalars(event), event.step)
                if event.host_share is not None:
                    self._scalars(_tier_scalars(event, self._link_bytes_per_s), event.step)
                if event.tokens is not None and event.loss is not None:
                    self._writer.add_scalar("Learning/loss_by_tokens", event.loss, event.tokens)
            case Validation():
                self._scalars(
                    {
                        "Learning/val_loss": event.loss,
                        "Learning/val_bits_per_byte": event.bits_per_byte,
                    },
                    event.step,
                )
            case Save():
                self._scalars({"Health/save_blocking_s": event.blocking_s}, event.step)
            case Done():
                # Whoever writes after this, the Trainer's tests say, opens it again.
                self._writer.close()
        self._writer.flush()

    def _scalars(self, scalars: dict[str, float | None], step: int) -> None:
        for tag, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(tag, value, step)


def _step_scalars(step: Step) -> dict[str, float | None]:
    planned = step.planned_bytes
    return {
        "Learning/loss": step.loss,
        "Learning/grad_norm": step.grad_norm,
        "Learning/lr": step.lr,
        "Learning/tokens": step.tokens,
        "Speed/tokens_per_s": step.tokens_per_s,
        "Speed/mfu": step.mfu,
        "Speed/step_ms": step.step_ms,
        "Speed/exposed_share": step.exposed_share,
        **_stacked(step),
        "Memory/peak_gib": step.memory_bytes / 2**30,
        "Memory/planned_gib": None if planned is None else planned / 2**30,
        "Health/rank_skew_ms": step.rank_skew_ms,
        "Health/skipped_steps": step.skipped_steps,
    }


def _tier_scalars(step: Step, link_bytes_per_s: float | None) -> dict[str, float | None]:
    def gb_per_s(num_bytes: float | None) -> float | None:
        return num_bytes / step.step_ms / 1e6 if num_bytes is not None and step.step_ms else None

    return {
        "Tiers/to_host_gb_per_s": gb_per_s(step.offload_down_bytes),
        "Tiers/to_device_gb_per_s": gb_per_s(step.offload_up_bytes),
        "Tiers/ceiling_gb_per_s": None if link_bytes_per_s is None else link_bytes_per_s / 1e9,
        "Tiers/exposed_ms": step.offload_exposed_ms,
        "Tiers/exposed_share": step.offload_exposed_share,
        "Tiers/slot_wait_ms": step.offload_slot_wait_ms,
        "Tiers/waiting_chunks": step.offload_waiting,
        "Tiers/redone_chunks": step.offload_redone,
        "Tiers/cpu_passes": step.offload_cpu_passes,
        "Tiers/stream_passes": step.offload_stream_passes,
        "Tiers/host_share": step.host_share,
    }


def _stacked(step: Step) -> dict[str, float | None]:
    height, layers = 0.0, {}
    for name, field in _STACK:
        height += getattr(step, field) or 0.0
        layers[f"Speed/stacked_ms/{name}"] = height
    return layers
