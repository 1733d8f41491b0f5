"""Scores of many images as rows in one file: exactly once each, whole or not at all, and resumable.

`rows` writes them, the journal records finished parts so that a killed run can resume, `local` scores in this process.
`neuralmean.jobs.cluster` scores over many workers and uses the first two.
"""

from neuralmean.files.journal import Entry, Journal
from neuralmean.jobs.local import (
    CountedBatches,
    LabelledBatches,
    ScoreFile,
    Tally,
    describe_flags,
    score_images,
    score_texts,
    select_rows,
)
from neuralmean.jobs.rows import FORMATS, ScoreRow, format_of, format_rows, write_rows

__all__ = [
    "FORMATS",
    "CountedBatches",
    "Entry",
    "Journal",
    "LabelledBatches",
    "ScoreFile",
    "ScoreRow",
    "Tally",
    "describe_flags",
    "format_of",
    "format_rows",
    "score_images",
    "score_texts",
    "select_rows",
    "write_rows",
]
