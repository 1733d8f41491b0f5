"""Reference, fit and scores over many workers, on Ray (`pip install neuralmean[ray]`).

Inputs are cut into numbered chunks (`chunks`), a job runs on each (`jobs`), here or in Ray's workers (`engine`), and the
results are combined in the order of the numbers. `workers=0` does the same in this process, without Ray.
"""

from neuralmean.jobs.cluster.api import ScoreRun, reference, score, stream
from neuralmean.jobs.cluster.chunks import Chunk, Chunks
from neuralmean.jobs.cluster.fitting import fit
from neuralmean.jobs.cluster.jobs import ChunkScores

__all__ = ["Chunk", "ChunkScores", "Chunks", "ScoreRun", "fit", "reference", "score", "stream"]
