"""Runs every experiment that data and weights allow, then writes the report: the whole paper in one command.

    python benchmarks/paper.py --data DIR --weights DIR --out docs/results.json --markdown docs/results.md --html results.html

Stop it at any moment; the same command resumes. With `--methods quick --jobs 2` it took 54 minutes on two cores from an
empty cache. From a full one it takes some minutes, most of them for `latency`, which times its fits and so runs them anew.
"""

from __future__ import annotations

import argparse
import sys
import time

from neuralmean.bench import experiments, report
from neuralmean.data import progress
from neuralmean.models import allocator as memory


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--cache")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--methods", nargs="*")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--markdown")
    parser.add_argument("--html")
    parser.add_argument("names", nargs="*", help="experiments; all if not given")
    options = parser.parse_args()
    memory.keep_freed()
    begun = time.monotonic()

    def announce(line: str) -> None:
        print(f"[{time.monotonic() - begun:6.0f} s] {line}", file=sys.stderr, flush=True)

    with progress.showing("lines", every=30.0):
        rows = experiments.run(
            options.names or None,
            data=options.data,
            weights=options.weights,
            out=options.out,
            cache=options.cache,
            limit=options.limit,
            methods=options.methods,
            jobs=options.jobs,
            announce=announce,
        )
    announce(f"{len(rows)} rows")
    if options.markdown or options.html:
        for path in report.write(options.out, html=options.html, markdown=options.markdown):
            announce(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
