"""The rows of `checkpoint_faults`, and what in them is not as it must be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from zero_strategy.experiments.benchmarks.faults_damage import SPOILS
from zero_strategy.experiments.benchmarks.result import OURS, Findings, Row

LONGEST_SAVE_S = 5.0
LONGEST_RESTART_S = 20.0
_TOLD = 3
"""Lines of what went wrong that are shown."""


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """Adds rows of one number each to findings."""

    findings: Findings

    def add(self, metric: str, unit: str, value: float, note: str) -> None:
        """Add a number of which nothing is asked."""
        self.findings.rows.append(Row.of(OURS, metric, unit, [value], note))

    def add_exact(
        self,
        metric: str,
        unit: str,
        value: float,
        wanted: float,
        note: str,
        lines: Sequence[str] = (),
    ) -> None:
        """Add a number that must be a certain one; `lines` say what went wrong."""
        self.add(metric, unit, value, note)
        if value != wanted or lines:
            self.findings.broken.append(f"{metric} = {value:g}: must be {wanted:g}")
            self.findings.broken += lines[:_TOLD]

    def add_limited(self, metric: str, value_s: float, limit_s: float, note: str) -> None:
        """Add seconds that have a limit."""
        if math.isfinite(value_s):
            self.add(metric, "s", value_s, note)
        else:
            self.findings.rows.append(Row.failed(OURS, metric, "s", "it never came"))
        if not value_s <= limit_s:
            self.findings.broken.append(f"{metric} = {value_s:g} s: must be at most {limit_s:g} s")


def kills(rows: Rows, found: dict[str, Any]) -> None:
    """Add what `faults_kill.kills` found."""
    count = sum(found["kills"].values())
    each = ", ".join(f"{name}: {n}" for name, n in found["kills"].items())
    rows.add(
        "kills",
        "cases",
        count,
        f"SIGKILL of a rank that saves, in the foreground or the background, before or after "
        f"{found['points']} calls of the system and more where the attempt before it died, or "
        f"at a random time; situation x ranks: {each}",
    )
    rows.add_exact(
        "kills: previous checkpoint loads",
        "%",
        _percent(count - len(found["lost"]), count),
        100.0,
        "what had been saved before, or the complete next one under its name, with every bit",
        found["lost"],
    )
    rows.add_exact(
        "kills: torn loads",
        "cases",
        len(found["torn"]),
        0,
        "loads of values that were never saved together",
        found["torn"],
    )


def damages(rows: Rows, found: dict[str, Any]) -> None:
    """Add what `faults_damage.damages` found."""
    outcomes = found["outcomes"]
    count = sum(outcomes.values())
    detected, equal = outcomes.get("detected", 0), outcomes.get("equal", 0)
    ways = ", ".join(SPOILS)
    rows.add(
        "damaged",
        "cases",
        count,
        f"checkpoints of 1 and 2 ranks; bytes of shards and manifest: {ways}; files: of another "
        "step or rank, missing, empty, twice, a link, a folder",
    )
    rows.add_exact(
        "damaged: detected or value-equal",
        "%",
        _percent(detected + equal, count),
        100.0,
        f"{detected} refused with the checkpoint's name, {equal} with every value as it was saved",
        found["unnamed"],
    )
    rows.add_exact(
        "damaged: silent",
        "cases",
        len(found["silent"]),
        0,
        "loads without an error of other values",
        found["silent"],
    )


def disks(rows: Rows, found: dict[str, Any]) -> None:
    """Add what `faults_disk.faults` found."""
    count = found["faults"]
    rows.add(
        "disk faults",
        "cases",
        count,
        "ENOSPC, EIO, EDQUOT in each call that writes, on either of 2 ranks, in the foreground "
        "and the background; half a write and then a full disk, a write of nothing, a limit of "
        "the system on a file's size",
    )
    rows.add_exact(
        "disk faults: raised on all ranks",
        "%",
        _percent(found["raised"], count),
        100.0,
        "the save raises on both ranks",
    )
    rows.add_limited(
        "disk faults: slowest error",
        found["slowest_s"],
        LONGEST_SAVE_S,
        f"from the begin of a save to the error on the last rank; of {count} cases",
    )
    rows.add_exact(
        "disk faults: earlier checkpoint intact",
        "%",
        _percent(count + found["short"] - len(found["broken"]), count + found["short"]),
        100.0,
        "every bit of it, under the name that was saved to",
        found["broken"],
    )
    if found["short"]:
        rows.add_exact(
            "disk faults: short writes completed",
            "%",
            _percent(found["written"], found["short"]),
            100.0,
            "a system that takes at most 97 bytes at a time loses none",
        )


def reshapes(rows: Rows, found: dict[str, Any]) -> None:
    """Add what `faults_reshape.reshapes` found."""
    same, pairs = found["same"], found["pairs"]
    rows.add(
        "reshape: pairs",
        "cases",
        len(pairs),
        f"saved with each of {', '.join(found['strategies'])} on 1 to {found['ranks']} ranks, "
        "taken up on each number of ranks with these in turn; tied, frozen and odd weights, one "
        "with fewer rows than ranks, a buffer, two groups, AdamW, bf16-mixed",
    )
    equal = sum(not lines for lines in pairs.values())
    rows.add_exact(
        "reshape: bit-equal",
        "%",
        _percent(equal, len(pairs)),
        100.0,
        f"weights, buffers, moments, step counts and groups; {sum(same.values())} of "
        f"{len(same)} saves also hold each bit of what the running module showed",
        [f"{pair}: {lines[0]}" for pair, lines in pairs.items() if lines]
        + [f"{name}: differs from the run" for name, fine in same.items() if not fine],
    )


def resumes(rows: Rows, found: dict[str, Any]) -> None:
    """Add what `faults_resume.run` found."""
    rows.add(
        "resume: cases",
        "cases",
        found["cases"],
        f"{found['cases'] // 2} random steps in the middle of epochs, with 0 and 2 loader "
        "workers; zero3 on one rank; dropout, noise of numpy and Python, a schedule",
    )
    rows.add_exact(
        "resume: bit-equal",
        "%",
        _percent(found["bit_equal"], found["cases"]),
        100.0,
        "losses, samples and weights of the run that was not interrupted",
    )


def restarts(rows: Rows, found: dict[str, Any]) -> None:
    """Add what `faults_restart.run` found."""
    rows.add("restarts", "cases", found["cases"], "SIGKILL of a rank of two under torchrun, zero3")
    rows.add_exact(
        "restarts: recovered",
        "%",
        _percent(found["recovered"], found["cases"]),
        100.0,
        "went on from the last checkpoint, and ended with each step's figures and all weights "
        "of the undisturbed run",
    )
    rows.add_limited(
        "restarts: slowest first resumed step",
        found["slowest_s"],
        LONGEST_RESTART_S,
        f"from the kill to the first step after it; of {found['cases']}",
    )


def crafted(rows: Rows, found: dict[str, Any]) -> None:
    """Add what `faults_hostile.hostile` found."""
    accepted = found["accepted"]
    rows.add(
        "crafted: checkpoints",
        "cases",
        found["checkpoints"],
        "manifests of ours and files of torch, Lightning, DCP and DeepSpeed made to harm",
    )
    rows.add(
        "crafted: configurations",
        "cases",
        found["configurations"],
        "tags, interpolations, targets to call, anchors, sizes, paths",
    )
    rows.add_exact(
        "crafted: executed",
        "cases",
        len(found["executed"]),
        0,
        f"events of an audit hook: code, imports, processes, writes; {len(accepted)} were "
        "accepted, all others refused with a ValueError",
        found["executed"] + [f"{name}: accepted" for name in accepted],
    )


def _percent(part: int, whole: int) -> float:
    return 100.0 * part / whole
