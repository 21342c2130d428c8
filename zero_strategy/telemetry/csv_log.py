"""CSV files that survive a crash and continue after it."""

import csv
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import final

from zero_strategy.telemetry.events import Event, Step, Validation

STEP_COLUMNS = tuple(f.name for f in dataclasses.fields(Step) if f.name != "eta_s")
VALIDATION_COLUMNS = tuple(f.name for f in dataclasses.fields(Validation) if f.name != "others")


@final
class CsvLog:
    """Writes log steps to `metrics.csv` and validations to `validation.csv`.

    Args:
        folder: where the files lie.
        after_step: rows of later steps belong to a run that is being repeated; they are dropped.

    Raises: ValueError: a file has other columns.
    """

    def __init__(self, folder: Path, *, after_step: int) -> None:
        self._steps = CsvFile(folder / "metrics.csv", STEP_COLUMNS, after_step=after_step)
        self._validations = CsvFile(
            folder / "validation.csv", VALIDATION_COLUMNS, after_step=after_step
        )
        self.dropped_rows = self._steps.dropped_rows + self._validations.dropped_rows

    def write(self, event: Event) -> None:
        """Append a row for a log step or a validation."""
        if isinstance(event, Step):
            self._steps.append(event)
        elif isinstance(event, Validation):
            self._validations.append(event)


class CsvFile:
    """One file; every row is on its way to the disk when `append` returns.

    Args:
        path: the file; made if absent.
        columns: its header; the first must be `step`.
        after_step: rows of later steps are dropped.

    Raises: ValueError: the file has other columns.
    """

    def __init__(self, path: Path, columns: Sequence[str], *, after_step: int) -> None:
        self._path = path
        self._columns = tuple(columns)
        rows = self._read()
        kept = [row for row in rows if len(row) == len(columns) and int(row[0]) <= after_step]
        self.dropped_rows = len(rows) - len(kept)
        self._rewrite(kept)

    def append(self, record: Step | Validation) -> None:
        """Add a row and flush it."""
        row = [_cell(getattr(record, name)) for name in self._columns]
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerow(row)

    def _read(self) -> list[list[str]]:
        if not self._path.exists():
            return []
        with self._path.open(newline="", encoding="utf-8") as file:
            header, *rows = list(csv.reader(file)) or [[]]
        if header and tuple(header) != self._columns:
            raise ValueError(
                f"{self._path}: its columns are those of another version ({', '.join(header)}). "
                "Move the file away, or choose another folder."
            )
        return rows

    def _rewrite(self, rows: list[list[str]]) -> None:
        beside = self._path.with_name(self._path.name + ".new")
        with beside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([self._columns, *rows])
            file.flush()
            os.fsync(file.fileno())
        # A crash before this line leaves the old file whole, one after it the new.
        beside.replace(self._path)


def read_columns(path: Path) -> dict[str, list[float | None]]:
    """Read a file of `CsvLog`.

    Returns: column name -> values by row; None for an empty cell. Empty if there is no file.
    """
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = [row for row in reader if None not in row.values()]
    return {
        name: [float(row[name]) if row[name] else None for row in rows]
        for name in reader.fieldnames or ()
    }


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    # Seven digits hold an fp32 value.
    return str(value) if isinstance(value, int) else f"{value:.7g}"
