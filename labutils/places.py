"""``lab.who_am_i``: which rank is which process, for any number of nodes and GPUs.

Sliders where there are widgets; a picture that stays in the notebook in any case.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from labutils.figures import TraceFigure

MOST_NODES, MOST_GPUS = 8, 8
"""How far the sliders go."""

CONTROLS = "sliders: nodes, GPUs per node, rank"
"""What stands in place of the sliders where there are no widgets."""


class Numbers(NamedTuple):
    """The numbers of one process, as torchrun puts them into its environment."""

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    nodes: int

    @property
    def environment(self) -> dict[str, str]:
        """RANK, LOCAL_RANK and so on; what torchrun calls group is the node."""
        names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        pairs = zip((*names, "GROUP_WORLD_SIZE"), self, strict=True)
        return {name: str(number) for name, number in pairs}


def numbers(rank: int, nodes: int, gpus: int) -> Numbers:
    """The numbers of ``rank`` where each of ``nodes`` nodes has ``gpus`` GPUs and processes.

    Raises ValueError where there is no such rank.
    """
    for name, value in (("nodes", nodes), ("gpus", gpus)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number from 1 on, not {value!r}.")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < nodes * gpus:
        raise ValueError(f"with {nodes} x {gpus} processes the ranks are 0 to {nodes * gpus - 1}.")
    return Numbers(rank, rank % gpus, rank // gpus, nodes * gpus, gpus, nodes)


class WhoAmI:
    """Nodes, their GPUs, and the numbers of each process; see :func:`who_am_i`.

    ``set(nodes=4)`` moves the sliders from code.
    """

    def __init__(self, nodes: int = 2, gpus: int = 3, rank: int = 0) -> None:
        self.chosen = numbers(rank, nodes, gpus)
        self._handle: Any = None
        self._sliders: dict[str, Any] = {}

    def set(self, **changes: int) -> WhoAmI:
        """Change ``nodes``, ``gpus`` or ``rank``.  Raises ValueError where there is no such rank;
        a rank that was not asked for gives way."""
        asked = {"nodes": self.chosen.nodes, "gpus": self.chosen.local_world_size, **changes}
        rank = changes.get("rank", min(self.chosen.rank, asked["nodes"] * asked["gpus"] - 1))
        self.chosen = numbers(rank, asked["nodes"], asked["gpus"])
        self._redraw()
        return self

    def __repr__(self) -> str:
        me = self.chosen
        values = " ".join(f"{name}={value}" for name, value in me.environment.items())
        return (
            f"{me.nodes} x {me.local_world_size} = {me.world_size} processes; rank {me.rank} = "
            f"node rank {me.node_rank} x {me.local_world_size} + local rank {me.local_rank}: "
            f"it takes cuda:{me.local_rank} of its node\n{values}"
        )

    def picture(self) -> TraceFigure:
        """The nodes and their processes, with the chosen one marked."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        from labutils.figures import WIDTH, TraceFigure

        me = self.chosen
        figure = TraceFigure(figsize=(WIDTH, 0.72 * me.nodes + 0.75), facecolor="white")
        FigureCanvasAgg(figure)
        figure.description = f"{me.nodes} nodes with {me.local_world_size} GPUs: who is which rank"
        axes = figure.add_axes((0.01, 0.02, 0.98, 1 - 0.42 / figure.get_figheight()))
        columns = max(me.local_world_size, 3)
        margin = 0.16 * columns  # where the nodes' names stand
        axes.set(xlim=(-margin, columns), ylim=(me.nodes, -0.05))
        axes.axis("off")
        for node in range(me.nodes):
            axes.text(0.05 - margin, node + 0.42, f"node rank {node}", va="center", weight="bold")
            for local in range(me.local_world_size):
                self._draw(axes, numbers(node * me.local_world_size + local, me.nodes,
                                         me.local_world_size))  # fmt: skip
        axes.set_title(
            f"world size {me.world_size} = {me.nodes} nodes x {me.local_world_size} GPUs; "
            f"rank {me.rank} = {me.node_rank} x {me.local_world_size} + {me.local_rank}",
            fontsize=10, loc="left",
        )  # fmt: skip
        return figure

    def _draw(self, axes: Any, who: Numbers) -> None:
        from matplotlib.patches import Rectangle

        from labutils.holdings import PALETTE

        mine = who.rank == self.chosen.rank
        same_gpu = who.local_rank == self.chosen.local_rank
        colour = PALETTE[1] if mine else PALETTE[0] if same_gpu else "#F3F4F6"
        axes.add_patch(Rectangle(
            (who.local_rank + 0.02, who.node_rank + 0.04), 0.94, 0.8, facecolor=colour,
            edgecolor="#24292F", linewidth=2.4 if mine else 0.8,
        ))  # fmt: skip
        middle = who.local_rank + 0.49
        axes.text(middle, who.node_rank + 0.3, f"rank {who.rank}", ha="center", va="center",
                  fontsize=10, weight="bold")  # fmt: skip
        axes.text(middle, who.node_rank + 0.62, f"local rank {who.local_rank}", ha="center",
                  va="center", fontsize=7.5)  # fmt: skip

    def _ipython_display_(self) -> None:
        from IPython.display import display

        from labutils.sliders import ALONE, WITHOUT_KERNEL

        view = self._controls()
        if view is not None:
            display(view, raw=True)
            display({"text/html": ALONE, "text/plain": WITHOUT_KERNEL}, raw=True)
        data, metadata = self._bundle()
        self._handle = display(data, raw=True, metadata=metadata, display_id=True)

    def _bundle(self) -> tuple[dict[str, Any], dict[str, Any]]:
        from labutils.figures import png_metadata

        figure, buffer = self.picture(), io.BytesIO()
        figure.savefig(buffer, format="png", dpi=100, metadata={"Software": None})
        data = {"image/png": buffer.getvalue(), "text/plain": repr(self)}
        return data, {"image/png": png_metadata(figure.description)}

    def _redraw(self) -> None:
        me = self.chosen
        values = {"nodes": me.nodes, "gpus": me.local_world_size, "rank": me.rank}
        for name, slider in self._sliders.items():
            if name == "rank":
                slider.max = me.world_size - 1
            slider.value = values[name]
        if self._handle is not None:
            data, metadata = self._bundle()
            self._handle.update(data, raw=True, metadata=metadata)

    def _controls(self) -> dict[str, Any] | None:
        """The display data of the sliders; None without ipywidgets."""
        try:
            import ipywidgets
        except ImportError:
            return None
        me = self.chosen
        limits = {
            "nodes": (1, MOST_NODES, me.nodes), "gpus": (1, MOST_GPUS, me.local_world_size),
            "rank": (0, me.world_size - 1, me.rank),
        }  # fmt: skip
        for name, (least, most, value) in limits.items():
            self._sliders[name] = ipywidgets.IntSlider(
                min=least, max=max(most, value), value=value,
                description={"gpus": "GPUs a node"}.get(name, name),
                style={"description_width": "110px"},
            )  # fmt: skip
            self._sliders[name].observe(self._moved, "value")
        box = ipywidgets.VBox(list(self._sliders.values()))
        view = {"version_major": 2, "version_minor": 0, "model_id": box.model_id}
        return {"application/vnd.jupyter.widget-view+json": view, "text/plain": CONTROLS}

    def _moved(self, change: dict[str, Any]) -> None:
        me, values = self.chosen, {name: slider.value for name, slider in self._sliders.items()}
        if (me.nodes, me.local_world_size, me.rank) != tuple(values.values()):
            world = values["nodes"] * values["gpus"]
            self.set(**{**values, "rank": min(values["rank"], world - 1)})


def who_am_i(nodes: int = 2, gpus: int = 3, rank: int = 0) -> WhoAmI:
    """A picture of nodes and GPUs with every process's rank and local rank, to play with.

    Args:
        nodes, gpus: how many, and how many per node.
        rank: the process whose numbers are spelled out.

    Raises:
        ValueError: there is no such rank.
    """
    return WhoAmI(nodes, gpus, rank)


__all__ = ["Numbers", "WhoAmI", "numbers", "who_am_i"]
