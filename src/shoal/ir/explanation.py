"""What ``shoal explain`` answers: tables, sentences, a picture, files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from shoal.core.config import Value
from shoal.core.tables import Table, html, rich_table

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

    from shoal.ir.machine import Machine

Progress = Callable[[float, float, str], None]
"""Called with (done, total, what is done)."""

Text = str | Callable[[], str]
"""Text, or what makes it where it takes long and may not be asked for."""


class Explanation(Value):
    """An answer, before it is printed.

    Args:
        blocks: tables and sentences, in the order in which people read them.
        data: the same for programs, as JSON; the records of the tables if None.
        picture: SVG or a page of HTML; empty where there is none.
        files: name -> text of what can be saved, such as a plan.
        ok: whether the answer to the question is yes; the exit status is 1 otherwise.
    """

    blocks: tuple[Table | str, ...] = ()
    data: Any = None
    picture: Text = ""
    files: dict[str, Text] = {}
    ok: bool = True

    def as_json(self) -> Any:
        """What programs read."""
        if self.data is not None:
            return self.data
        tables = [block for block in self.blocks if isinstance(block, Table)]
        return {table.title: table.records() for table in tables}

    def __repr__(self) -> str:
        titles = [block.title if isinstance(block, Table) else block for block in self.blocks]
        return f"<explanation: {next((one for one in titles if one), 'empty')}>"

    def __str__(self) -> str:
        return repr(self)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        for block in self.blocks:
            yield block if isinstance(block, str) else rich_table(block)

    def _repr_html_(self) -> str:
        picture = self.picture if isinstance(self.picture, str) else self.picture()
        drawn = [picture] if picture.lstrip().startswith("<svg") else []
        return "\n".join([*map(html, self.blocks), *drawn])


@runtime_checkable
class Study(Protocol):
    """A calculation about a technique, whose options are the part's fields.

    Fields called as the class's ``subject`` are the arguments that a user names first. The
    class's ``machine`` is the one it is calculated for by default, ``local`` if it has none; empty
    if it need not be given, and None where a machine says nothing.
    """

    def explain(self, machine: Machine, progress: Progress) -> Explanation:
        """Calculate; nothing of a job runs.

        Args:
            machine: what it is calculated for.
            progress: called now and then where it takes long.

        Raises:
            ShoalError: an option does not fit the others, or the machine.
        """
