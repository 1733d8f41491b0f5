"""What is done to a graph before torch's compiler compiles it. Importing this loads the compiler, which few need."""

from __future__ import annotations

from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

from neuralmean.recorder import joined, scales


class Arrange(CustomGraphPass):
    """Arranges a graph so that what the compiler makes of it is faster, with the same results."""

    def __call__(self, graph: Graph) -> None:
        """Arrange a graph, in place."""
        joined.split_means(graph)
        scales.divide_once(graph)

    def uuid(self) -> Any:
        """Name this version of the code, for the compiler's cache."""
        return get_hash_for_files((__file__, joined.__file__, scales.__file__))
