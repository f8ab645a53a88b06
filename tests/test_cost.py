"""Costs against closed forms, and against published measurements."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest
from timing_toys import toy

from labutils.timing import cost, products, profiles
from labutils.virtual.record import Copy, Kernel

A100 = profiles.load("A100-SXM4-80GB")
V100 = profiles.load("V100-SXM2")
MiB = 1 << 20


def matmul(m: int, n: int, k: int, dtype: str = "float32", kind: str = "gemm") -> Kernel:
    item = cost.ITEM_BYTES[dtype]
    shapes = ((m, k), (k, n))
    return Kernel("mm", kind, dtype, 2 * m * n * k, item * (m * k + k * n), item * m * n, shapes, 3)


def elementwise(nbytes: int, kind: str = "elementwise", name: str = "add") -> Kernel:
    return Kernel(name, kind, "float32", 0, nbytes, nbytes, (), 3)


# ---------------------------------------------------------------------------------------- kernels


def test_a_view_takes_no_time_on_the_device() -> None:
    assert cost.kernel_seconds(elementwise(1 << 30, "view"), A100) == 0


def test_a_tiny_kernel_takes_the_shortest_time() -> None:
    assert cost.kernel_seconds(elementwise(4), A100) == pytest.approx(
        A100.model.kernel_floor, rel=1e-3
    )


def test_a_large_elementwise_kernel_runs_at_memory_speed() -> None:
    for kind in ("elementwise", "norm", "reduction"):
        seconds = cost.kernel_seconds(elementwise(4 << 30, kind), A100)
        rate = 2 * (4 << 30) / seconds
        assert rate == pytest.approx(2039e9 * A100.model.memory_efficiency, rel=0.01)


def test_batch_norm_reads_its_input_more_than_once() -> None:
    plain = cost.kernel_seconds(elementwise(1 << 30, "norm", "native_layer_norm"), V100)
    batch = cost.kernel_seconds(elementwise(1 << 30, "norm", "native_batch_norm"), V100)
    assert batch / plain == pytest.approx((V100.model.norm_read_passes + 1) / 2, rel=0.01)
    half = elementwise(1 << 30, "norm", "native_batch_norm")._replace(dtype="float16")
    last = cost.kernel_seconds(half, V100)  # taken to be channels last
    assert last / plain == pytest.approx((V100.model.norm_read_passes_nhwc + 1) / 2, rel=0.01)


def batch_norm(channels: int, elements: int) -> Kernel:
    shape = (1, channels, elements // channels, 1)
    return elementwise(4 * elements, "norm", "native_batch_norm")._replace(shapes=(shape,))


@pytest.mark.parametrize(
    ("channels", "elements", "microseconds"),
    [(64, 25690112, 242), (64, 102760448, 962), (256, 102760448, 486), (512, 51380224, 239),
     (1024, 25690112, 116)],
)  # fmt: skip
def test_batch_norm_of_few_channels_leaves_multiprocessors_idle(
    channels: int, elements: int, microseconds: float
) -> None:
    """Measured on an H100: sarchlab/triosim, sample_trace/trace2-h100-bs128/resnet50."""
    seconds = cost.kernel_seconds(batch_norm(channels, elements), profiles.load("H100-SXM"))
    assert seconds * 1e6 == pytest.approx(microseconds, rel=0.2)


def test_a_multi_tensor_step_is_launched_in_parts() -> None:
    one = Kernel("_foreach_add_", "optimizer", "float32", 0, 4, 4, (), 2)
    per_launch = A100.model.tensors_per_launch
    many = one._replace(tensors=3 * per_launch)
    assert cost.kernel_seconds(many, A100) == pytest.approx(
        3 * cost.kernel_seconds(one, A100), rel=1e-3
    )


@pytest.mark.parametrize("kind", ["gemm", "conv", "attention"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("size", [64, 300, 1024, 4096, 16384])
def test_no_kernel_beats_the_hardware(kind: str, dtype: str, size: int) -> None:
    work = matmul(size, size, size, dtype, kind)
    for name in profiles.names():
        gpu = profiles.load(name).gpu
        seconds = cost.kernel_seconds(work, profiles.load(name))
        best = (
            max(gpu.peak.values()) if dtype == "float16" or kind == "conv" else gpu.peak["float32"]
        )
        assert seconds > work.flops / best
        assert seconds > work.bytes / gpu.memory_bandwidth


def test_a_large_product_comes_near_the_librarys_best() -> None:
    work = matmul(16384, 16384, 16384)
    rate = work.flops / cost.kernel_seconds(work, V100)
    assert rate / 15.7e12 == pytest.approx(V100.model.simt_efficiency, abs=0.05)


def test_efficiency_grows_with_the_depth_of_the_sum() -> None:
    rates = []
    for k in (32, 128, 512, 2048):
        work = matmul(8192, 8192, k, "float16")
        rates.append(work.flops / cost.kernel_seconds(work, A100))
    assert rates == sorted(rates)
    assert rates[-1] > 2 * rates[0]


def test_tiles_run_in_waves() -> None:
    """One wave of the largest tiles and a little more takes less than two, for there are smaller
    tiles, but more than its share; two full waves take twice as long as one."""
    profile = replace(A100, model=replace(A100.model, kernel_floor=0.0))
    side, k = 128, 8192

    def seconds(tiles: float) -> float:
        return cost.kernel_seconds(matmul(int(side * tiles), side, k), profile)

    processors = A100.gpu.multi_processor_count
    one = seconds(processors)
    assert seconds(2 * processors) == pytest.approx(2 * one, rel=0.01)
    assert 1.05 * one < seconds(processors * 1.02) < 1.95 * one


def convolution(name: str, groups: int, side: int = 3, stride: int = 1) -> Kernel:
    """A convolution of 32 images 56 x 56 of 128 channels, as it is recorded."""
    image, weight = (32, 128, 56, 56), (128, 128 // groups, side, side)
    output = (32, 128, 56 // stride, 56 // stride)
    flops = 2 * 32 * 128 * (56 // stride) ** 2 * (128 // groups) * side**2
    sizes = [4 * prod(shape) for shape in (image, weight, output)]
    if name == "convolution":
        read, written, shapes = sizes[0] + sizes[1], sizes[2], (image, weight)
    else:
        read, written, shapes = sum(sizes), sizes[0] + sizes[1], (output, image, weight)
        flops *= 2
    return Kernel(name, "conv", "float32", flops, read, written, shapes, 3)


def test_winograd_helps_3x3_convolutions_of_stride_one_on_ordinary_cores() -> None:
    slow = replace(V100, model=replace(V100.model, winograd_gain=1.0))
    for name in ("convolution", "convolution_backward"):
        gains = [
            cost.kernel_seconds(work, slow) / cost.kernel_seconds(work, V100)
            for work in (convolution(name, 1), convolution(name, 1, stride=2),
                         convolution(name, 1, side=1))
        ]  # fmt: skip
        assert gains[0] == pytest.approx(V100.model.winograd_gain, rel=0.02)
        assert gains[1:] == [1.0, 1.0]
    tensor = replace(A100, model=replace(A100.model, winograd_gain=2.0))
    work = convolution("convolution", 1)
    assert cost.kernel_seconds(work, A100) == cost.kernel_seconds(work, tensor)


def test_backward_of_a_convolution_is_about_two_forwards() -> None:
    forward = cost.kernel_seconds(convolution("convolution", 1), V100)
    backward = cost.kernel_seconds(convolution("convolution_backward", 1), V100)
    assert 1.8 < backward * V100.model.gradient_efficiency / forward < 2.5


def test_tf32_changes_the_layout_around_most_convolutions() -> None:
    """All but some of those that are a plain product."""
    usual = replace(A100, gpu=replace(A100.gpu, peak={**A100.gpu.peak, "float32": 1e11}))
    model = replace(A100.model, layout_passes=20.0)  # and ordinary cores that are slower still
    slow = replace(usual, model=replace(model, pointwise_layout_share=1e-9))
    for name in ("convolution", "convolution_backward"):
        three, one, strided = (
            cost.kernel_seconds(convolution(name, 1, side=side, stride=stride), slow)
            / cost.kernel_seconds(convolution(name, 1, side=side, stride=stride), usual)
            for side, stride in ((3, 1), (1, 1), (1, 2))
        )
        assert one <= 1 < 3 < min(three, strided)


def test_tf32_is_left_where_ordinary_cores_are_quicker() -> None:
    """An RTX 4090 has the same peak for both, and tensor cores reach less of theirs."""
    gpu = profiles.load("RTX-4090")
    ordinary = replace(gpu, tf32=frozenset())
    works = [convolution("convolution", 1), convolution("convolution_backward", 1)]
    for work in (*works, matmul(4096, 4096, 4096)):
        allowed = replace(gpu, tf32=frozenset({"conv", "gemm"}))
        assert cost.kernel_seconds(work, allowed) <= cost.kernel_seconds(work, ordinary)


@pytest.mark.parametrize(("dtype", "times"), [("float32", 4 / 3), ("float16", 8 / 3)])
def test_tensor_cores_compute_on_groups_of_channels(dtype: str, times: float) -> None:
    """An image's three channels become four (TF32) or eight (half): 16 bytes."""
    image, weight = (128, 3, 224, 224), (64, 3, 7, 7)
    flops, outputs = 2 * 128 * 64 * 112**2 * 147, 128 * 64 * 112**2
    kernel = Kernel("convolution", "conv", dtype, flops, 0, cost.ITEM_BYTES[dtype] * outputs,
                    (image, weight), 3)  # fmt: skip
    on = "tfloat32" if dtype == "float32" else dtype
    found = products.arithmetic_seconds(kernel, on, A100)
    product = products.products(kernel)[0]
    expected = flops / A100.gpu.peak[on] / products.efficiency(product, "conv", on, A100)
    assert found / expected == pytest.approx(times)


def test_groups_narrower_than_a_tile_waste_the_rest() -> None:
    """Groups of 4 channels fill an eighth of the narrowest tile; those of 32 fill it."""
    four = products.products(convolution("convolution", 32))[0]
    full = products.products(convolution("convolution", 4))[0]
    assert (full.flops, four.flops) == (convolution("convolution", 4).flops, full.flops)
    assert len(products.products(convolution("convolution_backward", 32))) == 2


def test_the_first_convolution_computes_no_gradient_of_the_data() -> None:
    work = convolution("convolution_backward", 1)
    first = work._replace(flops=work.flops // 2, bytes_written=4 * prod(work.shapes[2]))
    assert [p.outputs for p in products.products(first)] == [prod(work.shapes[2])]


def test_long_sums_with_few_outputs_are_split() -> None:
    """The gradient of a weight sums over a whole batch; it still uses the whole GPU."""
    deep, wide = matmul(128, 128, 1 << 20), matmul(8192, 8192, 256)
    assert deep.flops == wide.flops
    ratio = cost.kernel_seconds(deep, V100) / cost.kernel_seconds(wide, V100)
    assert ratio < 2


def test_float32_convolutions_use_tf32_by_default_and_products_do_not() -> None:
    work = matmul(8192, 8192, 8192)
    assert cost.precision(work, A100) == "float32"
    assert cost.precision(work._replace(kind="conv"), A100) == "tfloat32"
    assert cost.precision(work._replace(kind="conv"), V100) == "float32"
    allowed = replace(A100, tf32=frozenset({"conv", "gemm"}))
    assert cost.kernel_seconds(work, A100) > 3 * cost.kernel_seconds(work, allowed)


def test_a_type_that_the_gpu_lacks_runs_as_float32() -> None:
    work = matmul(8192, 8192, 8192)
    half = work._replace(dtype="bfloat16", bytes_written=work.bytes_written // 2)
    assert cost.kernel_seconds(half, V100) == pytest.approx(
        cost.kernel_seconds(work, V100), rel=0.02
    )


# ----------------------------------------------------------------------------------------- copies


def test_copies_take_latency_and_bandwidth() -> None:
    pinned, pageable = Copy(-1, 0, True, False), Copy(-1, 0, False, True)
    bus = V100.bus
    assert cost.copy_seconds(16 * MiB, pinned, V100) == bus.latency + 16 * MiB / 10.92e9
    assert cost.copy_seconds(16 * MiB, pageable, V100) == bus.latency + 16 * MiB / 5.73e9
    back = Copy(0, -1, True, False)
    assert cost.copy_seconds(MiB, back, V100) == cost.copy_seconds(MiB, pinned, V100)


def test_copies_between_gpus_use_their_link() -> None:
    across, within = Copy(0, 1, True, False), Copy(0, 0, True, False)
    assert cost.copy_seconds(1 << 30, across, A100) == pytest.approx((1 << 30) / 270e9, rel=0.01)
    assert cost.copy_seconds(1 << 30, within, A100) < cost.copy_seconds(1 << 30, across, A100)


# ------------------------------------------------------------------------------------ collectives


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_a_large_ring_all_reduce_sends_everything_nearly_twice(n: int) -> None:
    size = 4 << 30
    expected = 2 * (n - 1) / n * size / 229e9
    assert cost.collective_seconds("all_reduce", size, n, A100) == pytest.approx(expected, rel=0.02)


def test_the_two_halves_of_an_all_reduce() -> None:
    base = A100.model.collective_base
    for size in (4096, 25 * MiB, 1 << 30):
        whole = cost.collective_seconds("all_reduce", size, 8, A100) - base
        halves = [
            cost.collective_seconds(op, size, 8, A100) - base
            for op in ("reduce_scatter", "all_gather")
        ]
        assert sum(halves) == pytest.approx(whole)


def test_a_broadcast_sends_everything_once() -> None:
    seconds = cost.collective_seconds("broadcast", 4 << 30, 8, A100)
    assert seconds == pytest.approx((4 << 30) / 229e9, rel=0.02)


def test_small_messages_take_as_long_as_one_byte() -> None:
    times = [cost.collective_seconds("all_reduce", n, 8, A100) for n in (0, 1, 1024, 32768)]
    assert times == pytest.approx([times[0]] * 4)


def test_the_measured_curve_is_met_at_its_points() -> None:
    """Published: eight A100, 32 KiB to 1 GiB (stas00/ml-engineering)."""
    published = {32 << 10: 43.8, MiB: 101.9, 16 * MiB: 276.6, 128 * MiB: 1327.6, 1 << 30: 8203.9}
    for size, microseconds in published.items():
        seconds = cost.collective_seconds("all_reduce", size, 8, A100)
        assert seconds * 1e6 == pytest.approx(microseconds, rel=1e-6)


def test_between_its_points_the_curve_never_falls_far() -> None:
    sizes = [int(1.3**i) for i in range(30, 90)]
    times = [cost.collective_seconds("all_reduce", n, 8, A100) for n in sizes]
    assert all(later > 0.99 * sooner for sooner, later in pairwise(times))


@pytest.mark.parametrize(
    ("name", "fabric", "ranks", "nodes", "bus"),
    [
        ("H200-SXM", None, 8, 1, 367.6), ("DGX-1-V100", "ib-100g", 32, 4, 12.2),
        ("DGX-1-V100", "ib-4x100g", 32, 4, 48), ("DGX-A100", "ib-4xHDR", 24, 3, 96),
        ("DGX-1-V100", "eth-100g", 32, 4, 5),
    ],
)  # fmt: skip
def test_published_bus_bandwidths(
    name: str, fabric: str | None, ranks: int, nodes: int, bus: float
) -> None:
    size = 16 << 30
    seconds = cost.collective_seconds("all_reduce", size, ranks, profiles.load(name, fabric), nodes)
    assert 2 * (ranks - 1) / ranks * size / seconds / 1e9 == pytest.approx(bus, rel=0.02)


def test_over_nodes_the_slowest_part_decides() -> None:
    """A fast fabric leaves the links of the node as the limit."""
    fabric = profiles.load("DGX-A100").fabric
    assert fabric is not None
    fast = replace(A100, fabric=replace(fabric, bandwidth=1e15, latency=1e-9))
    within = cost.collective_seconds("all_reduce", 1 << 30, 8, A100)
    assert cost.collective_seconds("all_reduce", 1 << 30, 16, fast, 2) == pytest.approx(within)


def test_many_nodes_use_a_tree() -> None:
    """Latency grows with the logarithm of the nodes, not with their number (NCCL tuning.cc)."""
    profile = profiles.load("DGX-1-V100")
    few, many = (cost.collective_seconds("all_reduce", 4, 8 * n, profile, n) for n in (32, 128))
    assert many - few == pytest.approx(2 * 2 * 14e-6)


def test_several_nodes_need_a_fabric() -> None:
    with pytest.raises(ValueError, match="names no fabric between nodes: choose one"):
        cost.collective_seconds("all_reduce", 4, 16, profiles.load("T4"), 2)


def test_one_rank_has_nobody_to_wait_for() -> None:
    assert cost.collective_seconds("all_reduce", 1 << 30, 1, A100) < 1e-5


# ------------------------------------------------------------------------------------------ hosts


def test_only_python_threads_hold_the_gil() -> None:
    profile = toy(python=3, dispatch=5, engine=7)
    work = elementwise(4)
    assert cost.issue_seconds(work, True, profile) == pytest.approx((3e-6, 5e-6))
    assert cost.issue_seconds(work, False, profile) == pytest.approx((0, 7e-6))
    assert cost.issue_seconds(elementwise(4, "view"), True, profile) == pytest.approx((3e-6, 0))


def test_costs_are_whole_nanoseconds_of_the_same_functions() -> None:
    costs = cost.Costs(A100)
    work = matmul(1000, 1000, 1000)
    held, free, length, nbytes, detail = costs.kernel(work, True)
    assert (held, free) == (10_000, 10_000)
    assert length == round(cost.kernel_seconds(work, A100) * 1e9)
    assert (nbytes, detail) == (work.bytes, "float32, 2 GFLOP")
    assert costs.kernel(work, False)[0] == 0
    expected = cost.collective_seconds("all_reduce", MiB, 8, A100)
    assert costs.collective("all_reduce", MiB, 8, 1)[0] == round(expected * 1e9)
