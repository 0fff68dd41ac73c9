"""Print tables: drawn by rich on a terminal, plain aligned columns in a file or a pipe."""

from __future__ import annotations

import sys

import rich.box
import rich.table
from rich.console import Console

from cgdnn.plan.show import Table


def print_table(table: Table) -> None:
    """Print a table on standard output."""
    if sys.stdout.isatty():
        _print_drawn(table)
    else:
        _print_plain(table)


def _print_drawn(table: Table) -> None:
    drawn = rich.table.Table(box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in table.columns:
        if _holds_numbers(name):
            drawn.add_column(name.lstrip("#"), justify="right", no_wrap=True)
        else:
            drawn.add_column(name, overflow="fold")
    for row in table.rows:
        drawn.add_row(*row)
    console = Console(highlight=False, markup=False)
    console.print(table.title, style="bold", soft_wrap=True)
    console.print(drawn)
    console.print()


def _print_plain(table: Table) -> None:
    rows = [tuple(name.lstrip("#") for name in table.columns), *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    print(table.title)
    for row in rows:
        cells = [
            text.rjust(width) if _holds_numbers(name) else text.ljust(width)
            for name, text, width in zip(table.columns, row, widths, strict=True)
        ]
        print("  " + "  ".join(cells).rstrip())
    print()


def _holds_numbers(column: str) -> bool:
    return column.startswith("#")
