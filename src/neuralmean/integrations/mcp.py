"""A server of the Model Context Protocol: agents inspect models, score and explain images, and write reports.

Needs `pip install neuralmean[mcp]`. The tools call the same functions as the command. They read files of the server's
machine, and with `root` only those below it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuralmean import __version__
from neuralmean.errors import InputError, MissingExtraError, NeuralMeanError

if TYPE_CHECKING:
    from mcp.server import MCPServer

    from neuralmean.detector.saved import SavedDetector

MAX_ROWS = 1000
INSTRUCTIONS = (
    "Tells whether images are unlike what a PyTorch model was trained on. The tools take a file that `nmd fit` wrote. "
    "A p-value is the share of normal images that look at least as unusual, not the probability of being unusual."
)


class Tools:
    """The tools of the server; every path is checked against `root`.

    Args:
        root: Folder that files must lie in; None allows every path.
        trust_local_code: Whether a saved file may name a model in a module of the working folder.
    """

    def __init__(self, root: str | Path | None = None, *, trust_local_code: bool = False) -> None:
        self.root = None if root is None else Path(root).resolve()
        self.trust_local_code = trust_local_code

    def inspect(self, saved: str) -> list[str]:
        """Describe what a saved detector watches, what it was fitted on and when its false-alarm rate holds.

        Args:
            saved: A file that `nmd fit` wrote.
        """
        from neuralmean.detector.inspection import describe_saved

        return list(describe_saved(str(self._inside(saved))))

    def score(self, saved: str, paths: list[str], rate: float | None = None) -> dict[str, Any]:
        """Score images: score, p-value and verdict for each, at most 1,000 of them.

        Args:
            saved: A file that `nmd fit` wrote.
            paths: Image files or folders.
            rate: False-alarm rate, overriding that of the fit.
        """
        from neuralmean.jobs import Tally, score_images

        opened = self._open(saved, rate)
        unreadable: list[str] = []
        rows: list[dict[str, Any]] = []
        batches = score_images(
            opened.detector,
            opened.need_preprocessing(),
            [str(self._inside(path)) for path in paths],
            tally=Tally(),
            workers=0,
            on_unreadable=lambda note: unreadable.append(str(note)),
        )
        for batch in batches:
            rows += [row._asdict() for row in batch]
            if len(rows) >= MAX_ROWS:
                break
        return {
            "threshold": opened.detector.threshold,
            "false_alarm_rate": opened.detector.false_alarm_rate,
            "rows": rows[:MAX_ROWS],
            "unreadable": unreadable[:MAX_ROWS],
            "stopped_early": len(rows) >= MAX_ROWS,
        }

    def explain(self, saved: str, image: str) -> dict[str, Any]:
        """Return the layers that contribute most to the score of an image.

        Args:
            saved: A file that `nmd fit` wrote.
            image: An image file.
        """
        from PIL import Image

        opened = self._open(saved)
        try:
            with Image.open(self._inside(image)) as picture:
                x = opened.need_preprocessing()(picture).unsqueeze(0)
        except OSError as error:
            raise InputError(f"Expected {image!r} to be an image, but it cannot be read: {error}") from None
        decision, explanation = opened.detector.predict(x), opened.detector.explain(x)
        return {
            "score": decision.score.item(),
            "p_value": decision.p_value.item(),
            "is_ood": bool(decision.is_ood.item()),
            "layers": [{"layer": name, "contribution": value} for name, value in explanation.top_layers()],
            "terms": {name: value.item() for name, value in explanation.terms.items()},
        }

    def report(self, saved: str, id_path: str, ood_paths: dict[str, str], out: str, limit: int = 500) -> str:
        """Write an HTML report on how well a detector separates sets of images, and return where it is.

        Args:
            saved: A file that `nmd fit` wrote.
            id_path: Folder of in-distribution images that the detector was not fitted on.
            ood_paths: Folders of out-of-distribution images by name.
            out: The HTML file to write.
            limit: Number of images of each set, spread evenly over it.
        """
        from neuralmean.data.images import ImageBatches
        from neuralmean.report import spread_over, write_report

        opened = self._open(saved)
        how = opened.need_preprocessing()

        def images(path: str) -> ImageBatches:
            where = [str(self._inside(path))]
            return ImageBatches(where, how, workers=0, skip=spread_over(where, limit))

        outside = {name: images(path) for name, path in ood_paths.items()}
        info = {"id_name": Path(id_path).stem, "preprocessing": how.to_json()}
        return str(write_report(opened.detector, images(id_path), outside, self._inside(out), info=info, limit=limit))

    def _open(self, saved: str, rate: float | None = None) -> SavedDetector:
        from neuralmean.detector.saved import open_saved

        return open_saved(self._inside(saved), rate=rate, trust_local_code=self.trust_local_code)

    def _inside(self, path: str) -> Path:
        found = Path(path) if self.root is None else (self.root / path).resolve()
        if self.root is not None and not found.is_relative_to(self.root):
            raise InputError(f"Expected a path below {str(self.root)!r}, but got {path!r}.")
        return found


def create_server(root: str | Path | None = None, *, trust_local_code: bool = False) -> MCPServer:
    """Return the server, to run on stdin and stdout or over HTTP.

    Args:
        root: Folder that files must lie in; None allows every path.
        trust_local_code: Whether a saved file may name a model in a module of the working folder.
    """
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError:
        raise MissingExtraError("The server needs mcp. Install it with `pip install neuralmean[mcp]`.") from None
    server = MCPServer("neuralmean", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING")
    tools = Tools(root, trust_local_code=trust_local_code)

    def telling(tool: Callable[..., Any]) -> Callable[..., Any]:
        """Return the tool with this library's errors as answers; details of other exceptions are not sent to the agent."""

        @wraps(tool)
        def told(*args: Any, **kwargs: Any) -> Any:
            try:
                return tool(*args, **kwargs)
            except NeuralMeanError as error:
                raise ToolError(str(error)) from None

        return told

    for tool in (tools.inspect, tools.score, tools.explain, tools.report):
        server.add_tool(telling(tool))
    return server
