"""Launching a function on ranks: what arrives there, what comes back, what is said meanwhile."""

from __future__ import annotations

import itertools
import os
import threading
import time
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from rank_helpers import alive, interrupt_after, wait_until

from labutils import launch as launching
from labutils import virtual
from labutils.launch import RankFailure, device, launch, output, pool, wire
from labutils.launch.processes import fork_server
from labutils.launch.world import World


def _environment() -> dict[str, str | int]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    return {name: os.environ[name] for name in names} | {"pid": os.getpid()}


def _sum_of_ranks(scale: float = 1.0) -> float:
    value = torch.tensor([scale * dist.get_rank()])
    dist.all_reduce(value)
    return value.item()


def test_environment_is_torchruns_and_no_rank_is_the_notebook() -> None:
    run = launch(_environment, ranks=3)
    assert [r["RANK"] for r in run.results] == ["0", "1", "2"]
    assert [r["LOCAL_RANK"] for r in run.results] == ["0", "1", "2"]
    assert (
        {r["WORLD_SIZE"] for r in run.results}
        == {"3"}
        == {r["LOCAL_WORLD_SIZE"] for r in run.results}
    )
    pids = {r["pid"] for r in run.results}
    assert len(pids) == 3
    assert os.getpid() not in pids
    assert not alive(*pids)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_process_group_is_ready(ranks: int) -> None:
    run = launch(_sum_of_ranks, ranks=ranks, kwargs={"scale": 2.0})
    assert run.results == [float(ranks * (ranks - 1))] * ranks


def test_functions_and_classes_travel_by_value() -> None:
    offset = 10

    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    def use(values: list[Local]) -> Local:
        return Local(sum(v.value for v in values) + offset + dist.get_rank())

    run = launch(lambda values: use(values), ranks=2, args=([Local(1), Local(2)],))
    assert [r.value for r in run.results] == [13, 14]
    assert isinstance(run.results[0], Local)


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, "4", 65])
def test_impossible_numbers_of_ranks(bad: Any) -> None:
    with pytest.raises(ValueError, match="ranks"):
        launch(_environment, ranks=bad)
    with pytest.raises(ValueError, match=r"nodes|65 ranks"):
        launch(_environment, ranks=1, nodes=bad)


def test_wrong_arguments_are_one_sentence() -> None:
    with pytest.raises(TypeError, match="function"):
        launch(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"args=\('abc',\)"):
        launch(_environment, args="abc")
    with pytest.raises(TypeError, match=r"args must be a tuple of arguments, .* args=\(3,\)"):
        launch(_environment, args=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="kwargs must be a dict of named arguments, not 3"):
        launch(_environment, kwargs=3)  # type: ignore[arg-type]
    for timeout in (0, -1, "3"):
        with pytest.raises(ValueError, match="timeout"):
            launch(_environment, timeout=timeout)  # type: ignore[arg-type]


def test_what_cannot_travel_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match="'lock'.*create it inside"):
        launch(lambda: lock, ranks=2)
    with pytest.raises(TypeError, match="argument 1"):
        launch(_sum_of_ranks, ranks=2, args=(1, lock))


def test_unpicklable_result_is_an_error_of_its_rank() -> None:
    def work() -> object:
        return threading.Lock() if dist.get_rank() == 1 else "fine"

    with pytest.raises(RankFailure, match="cannot be sent to the notebook") as failure:
        launch(work, ranks=2)
    assert failure.value.rank == 1
    assert failure.value.run.results == ["fine", None]


def test_tensors_return_exactly_and_on_the_cpu() -> None:
    def work() -> dict[str, Any]:
        torch.manual_seed(dist.get_rank())
        module = torch.nn.Linear(300, 300)
        return {"big": torch.randn(200, 1000), "small": torch.arange(3), "none": torch.empty(0, 4),
                "half": torch.ones(2, dtype=torch.bfloat16), "module": module,
                "slice": torch.arange(12).reshape(3, 4)[:, 1]}  # fmt: skip

    for rank, result in enumerate(launch(work, ranks=2).results):
        torch.manual_seed(rank)
        module = torch.nn.Linear(300, 300)
        assert torch.equal(result["big"], torch.randn(200, 1000))
        assert torch.equal(result["module"].weight, module.weight)
        assert isinstance(result["module"].weight, torch.nn.Parameter)
        assert result["none"].shape == (0, 4)
        assert result["half"].dtype == torch.bfloat16
        assert result["slice"].tolist() == [1, 5, 9]
        result["small"] += 1  # what arrives can be written to
        assert result["small"].tolist() == [1, 2, 3]


def test_result_of_more_than_two_gigabytes() -> None:
    size = 2**31 + 5

    def work() -> torch.Tensor | None:
        if dist.get_rank():
            return None
        big = torch.zeros(size, dtype=torch.uint8)
        big[-1] = 7
        return big

    result = launch(work, ranks=2).results[0]
    assert result.shape == (size,)
    assert result[-1] == 7


def test_a_result_without_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labutils.launch.supervise.free_memory", lambda: 1 << 20)
    with pytest.raises(RankFailure, match="return a part of it"):
        launch(lambda: torch.zeros(100 << 20, dtype=torch.uint8), ranks=1)


def test_output_is_whole_lines_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        rank = dist.get_rank()
        for i in range(50):
            print("begin", end=" ")
            print(f"line {i} of {rank}")
        os.system(f"echo from a child of {rank}")
        print("no newline", end="")

    run = launch(work, ranks=3)
    lines = capsys.readouterr().out.splitlines()
    for rank in range(3):
        mine = [f"begin line {i} of {rank}" for i in range(50)]
        mine += [f"from a child of {rank}", "no newline"]
        assert run.logs[rank].splitlines() == mine
        assert [x for x in lines if x.startswith(f"[rank {rank}]")] == [
            f"[rank {rank}] {line}" for line in mine
        ]
    assert len(lines) == 3 * 52


def test_collected_output_is_in_rank_order(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        time.sleep(0.1 * (2 - dist.get_rank()))
        print("one\ntwo")

    launch(work, ranks=3, collect=True)
    expected = "".join(f"[rank {r}] one\n[rank {r}] two\n" for r in range(3))
    assert capsys.readouterr().out == expected


def test_a_hundred_thousand_lines(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        for i in range(100_000):
            print(i)

    run = launch(work, ranks=2)
    assert all(log.split() == [str(i) for i in range(100_000)] for log in run.logs)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) <= 2 * (output.SHOWN_LINES + output.TAIL_LINES + 1)
    assert "[rank 1] 99999" in shown


def test_progress_bars_leave_their_last_state() -> None:
    log = output.Log(0, lambda text: None)
    log.feed(b" 10%\r 50%\r100%\ndone\r\n")
    assert log.text == "100%\ndone\n"


def test_ddp_ends_without_deadlock() -> None:
    def train() -> torch.Tensor:
        torch.manual_seed(0)
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(3):
            torch.manual_seed(10 * step + dist.get_rank())
            optimizer.zero_grad()
            net(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        return net.module.weight

    for _ in range(3):
        results = launch(train, ranks=3).results
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


def test_code_may_make_its_own_process_group_again_and_again() -> None:
    def work() -> list[float]:
        sums = []
        for _ in range(2):
            dist.init_process_group("gloo")
            sums.append(_sum_of_ranks())
        dist.destroy_process_group()
        dist.init_process_group()
        return [*sums, _sum_of_ranks()]

    assert launch(work, ranks=3).results == [[3.0, 3.0, 3.0]] * 3


def test_data_loader_with_workers_in_a_rank() -> None:
    class Squares(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            return index**2

    def work() -> list[int]:
        loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=2)
        return [int(x) for batch in loader for x in batch]

    assert launch(work, ranks=2).results == [[i**2 for i in range(8)]] * 2


def test_plain_subprocesses_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABUTILS_START", "spawn")
    assert launch(_sum_of_ranks, ranks=2, args=(3.0,)).results == [3.0, 3.0]

    def fail() -> None:
        if dist.get_rank() == 1:
            raise KeyError("missing")
        dist.barrier()

    with pytest.raises(RankFailure, match="Rank 1 failed: KeyError"):
        launch(fail, ranks=2)


def test_in_the_background() -> None:
    start = time.monotonic()
    run = launch(lambda: time.sleep(60), ranks=2, block=False)
    assert run.running
    with pytest.raises(TimeoutError):
        run.wait(0.1)
    run.stop()
    assert time.monotonic() - start < 30
    assert not run.running
    assert run.failure is None
    assert "stopped" in repr(run)
    again = launch(_sum_of_ranks, ranks=2, block=False).wait()
    assert again.results == [1.0, 1.0]
    failed = launch(lambda: 1 / 0, ranks=2, block=False)
    with pytest.raises(RankFailure, match="ZeroDivisionError"):
        failed.wait()


def test_ten_side_by_side() -> None:
    runs = [launch(_sum_of_ranks, ranks=2, args=(i,), block=False) for i in range(10)]
    assert [run.wait(60).results for run in runs] == [[float(i), float(i)] for i in range(10)]


def test_listens_on_the_loopback_address_only() -> None:
    def work() -> set[str]:
        _sum_of_ranks()
        return {c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"}

    here = {"127.0.0.1", "::1"}
    run = launch(work, ranks=2)
    assert all(addresses <= here for addresses in run.results)
    held = launch(lambda: time.sleep(60), ranks=2, block=False)
    mine = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"}
    held.stop()
    assert mine
    assert mine <= here


def test_threads_follow_from_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labutils.hardware.usable_cores", lambda: 6)
    run = launch(lambda: (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]), ranks=3)
    assert run.results == [(2, "2")] * 3
    assert "2 threads each" in run.about
    assert World(8, gpus=0).threads == 1


def test_backend_and_device_follow_from_the_gpus() -> None:
    assert World(4, gpus=0).backend == "gloo"
    assert World(4, gpus=2).backend == "gloo"
    assert "2 GPUs shared" in World(4, gpus=2).about()
    if not torch.cuda.is_available():
        kinds = launch(lambda: (str(device()), dist.get_backend()), ranks=2).results
        assert [kind for kind, _ in kinds] == ["vgpu:0", "vgpu:1"]


def test_memory_is_checked_before_starting() -> None:
    with pytest.raises(ValueError, match=r"8 ranks need about 2\.0 GiB.*at most 4 ranks"):
        World(8, gpus=0).check_memory(free=2**30, each=2**28)
    World(4, gpus=0).check_memory(free=2**30, each=2**28)


@pytest.mark.parametrize("checked", [True, False])
def test_interrupt_during_a_collective(checked: bool) -> None:
    def work() -> None:
        if dist.get_rank() == 0:
            time.sleep(60)
        dist.barrier()

    with interrupt_after(1.0), pytest.raises(KeyboardInterrupt):
        launch(work, ranks=2, checked=checked)
    assert launch(_sum_of_ranks, ranks=2).results == [1.0, 1.0]


def test_interrupt_of_ranks_that_print_without_end(capsys: pytest.CaptureFixture[str]) -> None:
    def count() -> None:
        for number in itertools.count():
            print(number)

    with interrupt_after(1.0), pytest.raises(KeyboardInterrupt):
        launch(count, ranks=2, timeout=None, collect=True)
    assert capsys.readouterr().out.startswith("[rank 0] 0\n[rank 0] 1\n")


def test_interrupt_during_computation_and_during_launch() -> None:
    def compute() -> None:
        while True:
            torch.ones(200, 200) @ torch.ones(200, 200)

    before = set(psutil.Process(fork_server().pid).children())
    for seconds in (1.0, 0.02, 0.1, 0.2):
        with interrupt_after(seconds), pytest.raises(KeyboardInterrupt):
            launch(compute, ranks=2, timeout=None)
        time.sleep(0.05)
    server = psutil.Process(fork_server().pid)
    assert wait_until(lambda: set(server.children()) <= before, 2.0)


def test_live_view_follows_and_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {"spans": [], "closed": None}

    class View:
        def update(self, spans: Any, memory: Any, now: float) -> None:
            seen["spans"] += spans
            assert now > 0

        def close(self, trace: Any) -> None:
            seen["closed"] = trace

    monkeypatch.setattr(launching, "_live_view", lambda title, stop: View())

    def work() -> None:
        from labutils.telemetry import span

        with span("forward"):
            time.sleep(0.01)
        time.sleep(0.6)

    launch(work, ranks=2, watch=True)
    assert [s.name for s in seen["spans"]] == ["forward", "forward"]
    assert len([s for s in seen["closed"].spans if s.name == "forward"]) == 2


def test_launch_inside_a_rank_is_refused() -> None:
    with pytest.raises(RankFailure, match="called inside a rank"):
        launch(lambda: launch(_sum_of_ranks), ranks=2)


def test_file_names_survive_pickling() -> None:
    function = wire.pack(lambda: None).load()
    assert function.__code__.co_filename == __file__


def test_a_rehearsed_node_has_a_virtual_gpu_for_each_of_its_ranks() -> None:
    virtual.enable(4)
    try:
        assert pool._virtual(World(2))["virtual"]["devices"] == 4
        assert pool._virtual(World(2, nodes=2))["virtual"]["devices"] == 2
    finally:
        virtual.disable()
