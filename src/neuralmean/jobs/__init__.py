"""Scores of many images as rows in one file: exactly once each, whole or not at all, and resumable.

`rows` writes them, `journal` notes what is finished so that a killed run goes on, `local` scores in this process.
`neuralmean.jobs.cluster` scores over many workers and uses the first two.
"""

from neuralmean.files.journal import Entry, Journal
from neuralmean.jobs.local import CountedBatches, ScoreFile, Tally, score_images
from neuralmean.jobs.rows import FORMATS, ScoreRow, format_of, format_rows, write_rows

__all__ = [
    "FORMATS",
    "CountedBatches",
    "Entry",
    "Journal",
    "ScoreFile",
    "ScoreRow",
    "Tally",
    "format_of",
    "format_rows",
    "score_images",
    "write_rows",
]
