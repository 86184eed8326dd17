"""What workers see, in a form to display: the blocks of each view, in order."""

from __future__ import annotations

from collections import Counter
from typing import Any

from shoal.serve.decode.hogwild.protocols import BlockSpace
from shoal.serve.decode.hogwild.session import HogwildSession


def inspected(session: HogwildSession) -> dict[str, Any]:
    """The views of a session that has begun, as they are now.

    Returns:
        ``id`` of its first request, and ``workers``: each with ``name``, ``length`` of its view and
        ``blocks`` that hold something. A block has ``what`` it is (``prompt``, which finished steps
        are joined to; ``header``; ``step``, one that was finished just now; ``work``), its
        ``owner`` where one worker writes to it, ``offset`` of its first token in the view,
        ``length``, and whether it is ``shared``: in another's view, too.
    """
    assert session.space is not None
    space = session.space
    views = {worker.name: session.view(worker) for worker in session.running}
    readers = Counter(block.number for view in views.values() for block in view.blocks)
    kinds = _kinds(space)
    return {
        "id": session.workers[0].request.id,
        "workers": [
            {
                "name": name,
                "length": len(view),
                "blocks": [
                    {
                        "what": kinds[block.number],
                        "owner": block.writer,
                        "offset": offset,
                        "length": len(block),
                        "shared": readers[block.number] > 1,
                    }
                    for block, offset in view.placed()
                ],
            }
            for name, view in views.items()
        ],
    }


def _kinds(space: BlockSpace) -> dict[int, str]:
    """Number of each block -> what it is."""
    kinds = {space.prompt.number: "prompt"}
    kinds |= {block.number: "header" for block in space.headers.values()}
    kinds |= {block.number: "step" for block in space.history}
    kinds |= {block.number: "work" for block in space.own.values()}
    return kinds
