"""What Python is told of a part, a kind and a study."""

from __future__ import annotations

import pytest

from shoal.api import explain
from shoal.core.errors import ConfigError, UnknownPartError
from shoal.core.tables import Table


def test_a_part_its_kind_and_a_study() -> None:
    part = explain("speculative.medusa")
    (options,) = (block for block in part.blocks if isinstance(block, Table))
    assert {"heads", "tree"} <= {row[0] for row in options.rows}
    assert any("[97] Medusa" in block for block in part.blocks if isinstance(block, str))
    assert "Heads that were trained" in repr(part)
    assert "<table" in part._repr_html_()
    (kind,) = explain("shard").blocks
    assert isinstance(kind, Table)
    assert "zero1" in {row[0] for row in kind.rows}
    study = explain("schedule", schedule="zbv", pp=4, microbatches=8)
    assert "<svg" in study._repr_html_()


def test_a_name_of_parts_of_several_kinds_explains_each() -> None:
    both = explain("medusa")
    words = [block for block in both.blocks if isinstance(block, str)]
    assert words[0] == "2 parts have this name."
    assert words.index("speculative.medusa") < words.index("drafter.medusa")
    titles = [block.title for block in both.blocks if isinstance(block, Table)]
    assert titles == ["options of speculative medusa", "options of drafter medusa"]
    for kind in ("speculative", "drafter"):
        assert set(explain(f"{kind}.medusa").blocks) <= set(both.blocks)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("speculative.medussa", {}, "medusa"),
        ("nothing_like_it", {}, "there is no such part or kind"),
    ],
)
def test_unknown_names(name: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(UnknownPartError, match=words):
        explain(name, **options)


def test_a_part_takes_no_options() -> None:
    with pytest.raises(ConfigError, match="pp, machine: only studies take options"):
        explain("medusa", pp=4, machine="H100")
