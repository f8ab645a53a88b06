"""Who is which rank: the numbers, the picture, the sliders."""

from __future__ import annotations

import pytest

import labutils as lab
from labutils import places


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("gpus", [1, 3, 8])
def test_ranks_count_through_one_node_after_the_other(nodes: int, gpus: int) -> None:
    expected = [(node, local) for node in range(nodes) for local in range(gpus)]
    found = [places.numbers(rank, nodes, gpus) for rank in range(nodes * gpus)]
    assert [(who.node_rank, who.local_rank) for who in found] == expected
    assert {who.world_size for who in found} == {nodes * gpus}


def test_the_environment_is_that_of_torchrun() -> None:
    """Beside what two real torchrun agents set."""
    import os

    def mine() -> dict[str, str]:
        return {name: os.environ[name] for name in names}

    names = list(places.numbers(0, 2, 2).environment)
    run = lab.launch(mine, nodes=2, ranks=2)
    assert run.results == [places.numbers(rank, 2, 2).environment for rank in range(4)]


@pytest.mark.parametrize(("nodes", "gpus", "rank"), [(2, 3, 6), (2, 3, -1), (0, 3, 0), (2, 0, 0)])
def test_there_is_no_such_rank(nodes: int, gpus: int, rank: int) -> None:
    with pytest.raises(ValueError, match="ranks are 0 to 5|whole number from 1"):
        lab.who_am_i(nodes, gpus, rank)


def test_the_picture_names_every_process() -> None:
    shown = lab.who_am_i(4, 8, rank=13)
    texts = [text.get_text() for text in shown.picture().axes[0].texts]
    assert [t for t in texts if t.startswith("rank ")] == [f"rank {n}" for n in range(32)]
    assert texts.count("local rank 5") == 4
    assert sum(t.startswith("node rank ") for t in texts) == 4
    assert "rank 13 = node rank 1 x 8 + local rank 5: it takes cuda:5" in repr(shown)


def test_moving_from_code_keeps_to_ranks_that_exist() -> None:
    shown = lab.who_am_i(4, 8, rank=31)
    assert shown.set(nodes=2).chosen.rank == 15
    assert shown.set(rank=3, gpus=2).chosen == (3, 1, 1, 4, 2, 2)
    with pytest.raises(ValueError, match="ranks are 0 to 3"):
        shown.set(rank=4)
    assert shown.chosen.rank == 3


def test_sliders_move_the_picture() -> None:
    pytest.importorskip("ipywidgets")
    shown = lab.who_am_i(2, 3, rank=5)
    bundle = shown._controls()
    assert bundle is not None and "application/vnd.jupyter.widget-view+json" in bundle
    shown._sliders["gpus"].value = 1
    assert shown.chosen == (1, 0, 1, 2, 1, 2)
    assert shown._sliders["rank"].max == 1 and shown._sliders["rank"].value == 1
    shown._sliders["nodes"].value = 4
    assert shown.chosen.world_size == 4
