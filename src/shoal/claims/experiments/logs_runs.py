"""What claim [89] Logs does: Drain and drain3 over lines, scores, and sizes of packed logs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.claims.experiments.logs_data import LabelledLog
from shoal.core.extras import import_extra
from shoal.fields.data.logs.formats import PLAIN
from shoal.fields.data.logs.packed.container import packed_block
from shoal.fields.data.logs.parsers.drain import DrainParser
from shoal.fields.data.logs.reading import block_of, masked
from shoal.fields.data.logs.score import ParsingScores, scores


def parsed(parser: DrainParser, log: LabelledLog) -> tuple[Any, list[bytes]]:
    """Template of each line, from the bytes of the contents."""
    column = block_of(b"\n".join(log.contents) + b"\n", PLAIN).field(-1)
    miner = parser.suited(log.form.depth, log.form.similarity).open()
    groups = miner.add(masked(column, log.form.masks))
    mined = miner.finish()
    return mined.ids[groups], mined.templates


def scored(parser: DrainParser, log: LabelledLog) -> ParsingScores:
    """How well a parser groups the lines of a log."""
    ids, templates = parsed(parser, log)
    return scores(
        ids, [one.decode("utf-8", "replace") for one in templates], log.ids, log.templates
    )


def grouping(log: LabelledLog, ids: Any) -> float:
    """Grouping accuracy of the groups that a parser gave."""
    return scores(ids, [""] * (max(ids) + 1), log.ids, log.templates).grouping_accuracy


def drain3_over(log: LabelledLog) -> Callable[[], list[int]]:
    """The parser drain3 over the same lines, with the same masks and settings."""
    miner: Any = import_extra("drain3.template_miner", extra="bench", purpose="the peer")
    config: Any = import_extra("drain3.template_miner_config", extra="bench", purpose="the peer")
    masking: Any = import_extra("drain3.masking", extra="bench", purpose="the peer")
    text = b"\n".join(log.contents)

    def run() -> list[int]:
        settings = config.TemplateMinerConfig()
        settings.drain_sim_th, settings.drain_depth = log.form.similarity, log.form.depth
        settings.profiling_enabled, settings.mask_prefix, settings.mask_suffix = False, "<", ">"
        settings.masking_instructions = [
            masking.MaskingInstruction(mask, "*") for mask in log.form.masks
        ]
        one = miner.TemplateMiner(config=settings)
        lines = text.decode("utf-8", "replace").split("\n")
        return [one.add_log_message(line)["cluster_id"] for line in lines]

    return run


def all_of(arms: list[Callable[[], list[int]]]) -> list[list[int]]:
    """What each arm gives."""
    return [arm() for arm in arms]


def packed_sizes(log: LabelledLog) -> tuple[int, int]:
    """Bytes of a log in the container, and by zstd at level 19."""
    zstd: Any = import_extra("zstandard", extra="fields", purpose="packing logs")
    plain = zstd.ZstdCompressor(level=19).compress(log.text)
    return len(packed_block(log.text, log.form)), len(plain)
