"""One HTML file that shows what a detector was fitted on and how well it separates sets of images.

`write_report` goes over each set once, keeps a few numbers per image, and writes a page that needs no network.
"""

from neuralmean.report.build import write_report
from neuralmean.report.sources import spread_over

__all__ = ["spread_over", "write_report"]
