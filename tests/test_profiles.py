"""Profiles: complete, sourced, plausible by first principles, and clear about mistakes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from labutils.timing import profiles, ranges

SYSTEMS = ["DGX-1-V100", "DGX-2-V100", "DGX-A100", "DGX-H100", "PCIe-box"]
GPUS = [
    "V100-SXM2", "V100-PCIe", "P100", "A100-SXM4-80GB", "A100-SXM4-40GB", "A100-PCIe", "H100-SXM",
    "H200-SXM", "T4", "RTX-4090", "TITAN-RTX", "2080-Ti",
]  # fmt: skip
FABRICS = ["ib-100g", "ib-4x100g", "ib-4xHDR", "eth-10g", "eth-25g", "eth-100g"]

CORES_AND_CLOCK = {
    "P100": (3584, 1.480e9), "V100-SXM2": (5120, 1.530e9), "V100-PCIe": (5120, 1.380e9),
    "A100-SXM4-80GB": (6912, 1.410e9), "H100-SXM": (16896, 1.980e9), "T4": (2560, 1.590e9),
    "RTX-4090": (16384, 2.520e9), "TITAN-RTX": (4608, 1.770e9), "2080-Ti": (4352, 1.545e9),
}  # fmt: skip
BUS_BITS_AND_RATE = {
    "P100": (4096, 1.43e9), "V100-SXM2": (4096, 1.752e9), "A100-SXM4-40GB": (5120, 2.43e9),
    "A100-SXM4-80GB": (5120, 3.186e9), "H100-SXM": (5120, 5.23e9), "H200-SXM": (6144, 6.25e9),
    "T4": (256, 10e9), "RTX-4090": (384, 21e9), "TITAN-RTX": (384, 14e9), "2080-Ti": (352, 14e9),
}  # fmt: skip


def test_everything_promised_is_there() -> None:
    assert set(SYSTEMS + GPUS) <= set(profiles.names())
    assert set(FABRICS) <= set(profiles.fabrics())


@pytest.mark.parametrize("name", profiles.names())
def test_every_profile_loads_and_names_its_sources(name: str) -> None:
    profile = profiles.load(name)
    parts = [profile.gpu, profile.bus, profile.link, profile.host, profile.model]
    assert profile.name == name
    assert all(part.source for part in [profile, *parts])


def test_every_table_names_its_source() -> None:
    tables = profiles._built_in()
    for kind in ("gpu", "link", "bus", "fabric", "system"):
        assert [n for n, values in tables[kind].items() if "source" not in values] == []


@pytest.mark.parametrize("name", CORES_AND_CLOCK)
def test_float32_peak_is_two_operations_per_core_and_cycle(name: str) -> None:
    cores, clock = CORES_AND_CLOCK[name]
    assert profiles.load(name).gpu.peak["float32"] == pytest.approx(2 * cores * clock, rel=0.01)


@pytest.mark.parametrize("name", BUS_BITS_AND_RATE)
def test_memory_bandwidth_is_bus_width_times_rate(name: str) -> None:
    bits, rate = BUS_BITS_AND_RATE[name]
    assert profiles.load(name).gpu.memory_bandwidth == pytest.approx(bits / 8 * rate, rel=0.01)


def test_a_variant_inherits_what_it_does_not_change() -> None:
    small, large = profiles.load("V100-SXM2").gpu, profiles.load("V100-SXM2-32GB").gpu
    assert large.memory_bytes > 2 * small.memory_bytes
    assert large.peak == small.peak


def test_a_system_has_its_gpu_and_fabric_and_takes_another() -> None:
    assert profiles.load("DGX-1-V100").gpu.name == "V100-SXM2"
    assert profiles.load("DGX-1-V100").fabric == profiles.load("V100-SXM2", "ib-4x100g").fabric
    slow = profiles.load("DGX-1-V100", fabric="eth-10g").fabric
    assert slow is not None
    assert slow.bandwidth < 1.25e9  # ten gigabit per second


def test_a_mesh_has_less_bandwidth_among_fewer_gpus() -> None:
    link = profiles.load("DGX-1-V100").link
    assert [link.among(n) for n in (2, 3, 4, 7, 8)] == [20e9, 20e9, 80e9, 80e9, 120e9]
    assert profiles.load("DGX-A100").link.among(2) == profiles.load("DGX-A100").link.bandwidth


@pytest.mark.parametrize(
    ("wrong", "near"), [("A100-SXM", "A100-SXM4-80GB"), ("DGX-V100", "DGX-1-V100"), ("t4", "T4")]
)
def test_an_unknown_profile_names_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"^Unknown profile '{wrong}'\. .*{near}"):
        profiles.load(wrong)


def test_an_unknown_name_like_nothing_lists_the_known() -> None:
    with pytest.raises(ValueError, match="Known: DGX-1-V100, .*2080-Ti"):
        profiles.load("????")


def test_an_unknown_fabric_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"^Unknown fabric 'ib-4xhdr'\. Did you mean ib-4xHDR"):
        profiles.load("DGX-A100", fabric="ib-4xhdr")


# ------------------------------------------------------------------------------ a user's own file

OWN = """
profile = "mine"
[gpu.mine]
source = "measured here"
memory_bytes = 8000000000
multi_processor_count = 20
memory_bandwidth = 2e11
peak = { float32 = 5e12 }
bus = "usb"
link = "pcie3"
[bus.usb]
source = "a joke"
pinned = 1e9
pageable = 5e8
latency = 1e-5
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_users_file_adds_to_the_tables(tmp_path: Path) -> None:
    profile = profiles.load(write(tmp_path, OWN))
    assert (profile.name, profile.gpu.multi_processor_count, profile.bus.pinned) == (
        "mine",
        20,
        1e9,
    )
    assert profile.link == profiles.load("T4").link


def test_a_users_file_may_change_one_number_of_a_known_gpu(tmp_path: Path) -> None:
    text = '[gpu.slow]\nlike = "T4"\nmemory_bandwidth = 1e11\n[host]\npython_seconds = 1e-4\n'
    profile = profiles.load(write(tmp_path, text))
    assert profile.gpu.peak == profiles.load("T4").gpu.peak
    assert profile.gpu.memory_bandwidth == 1e11
    assert profile.host.python_seconds == 1e-4
    assert profile.host.sync_seconds == profiles.load("T4").host.sync_seconds


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("memory_bytes = 8000000000", "", r"\[gpu.mine\] has no 'memory_bytes'"),
        ("2e11", "-2e11", r"gpu.mine.memory_bandwidth must be a positive number, not -2"),
        ("2e11", "0", r"gpu.mine.memory_bandwidth must be a positive number, not 0"),
        ("2e11", "nan", r"gpu.mine.memory_bandwidth must be a positive number, not nan"),
        ("2e11", "inf", r"gpu.mine.memory_bandwidth must be a positive number, not inf"),
        ("2e11", "true", r"gpu.mine.memory_bandwidth must be a positive number, not True"),
        ("2e11", '"fast"', r"gpu.mine.memory_bandwidth must be a positive number, not 'fast'"),
        ("{ float32 = 5e12 }", "{ float32 = 0 }", r"gpu.mine.peak.float32 must be a positive"),
        ("{ float32 = 5e12 }", "{ float16 = 5e12 }", r"gpu.mine.peak needs a number for 'float32'"),
        ("{ float32 = 5e12 }", "5e12", r"\[gpu.mine.peak\] must be a table"),
        ("memory_bandwidth", "memory_bandwith", r"Unknown entry of \[gpu.mine\] 'memory_bandwith'"),
        ('bus = "usb"', 'bus = "ubs"', r"Unknown bus 'ubs'\. Did you mean usb"),
        ('bus = "usb"', "bus = 3", r"gpu.mine.bus must be a text, not 3"),
        ('source = "a joke"', "source = ", r"not readable TOML"),
        ("[gpu.mine]", '[gpu.mine]\nlike = "mine"', r"gpu.mine is like 'mine'"),
        ('profile = "mine"', 'profile = "yours"', r"Unknown profile 'yours'\. Known: .*mine"),
        ('profile = "mine"', "profile = 3", r"profile must be a text, not 3"),
        ("memory_bytes = 8000000000", "memory_bytes = 0.5", r"memory_bytes must be a whole number"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in OWN
    with pytest.raises(ValueError, match=complaint) as caught:
        profiles.load(write(tmp_path, OWN.replace(old, new, 1)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "defines no"),
        ("gpu = 3", r"\[gpu\] must be a table"),
        ("[gpu]\nmine = 3", r"\[gpu.mine\] must be a table"),
        ('[gpu.x]\nlike = "T4"\n[host]\nqueue_depth = []', "host.queue_depth must be a positive"),
        ('[gpu.x]\nlike = "T4"\nlink = "l"\n[link.l]\nlike = "pcie3"\nranks = 2\n'
         "curve = [[2, 1e-5], [1, 2e-5]]", "link.l.curve must be in ascending order"),
        ('[gpu.x]\nlike = "T4"\nlink = "l"\n[link.l]\nlike = "pcie3"\nranks = 2\ncurve = [[2]]',
         r"link.l.curve must be a list of \[bytes, seconds\]"),
        ('[gpu.x]\nlike = "T4"\nlink = "l"\n[link.l]\nlike = "pcie3"\ncurve = [[1, 1e-5], [2, 1]]',
         "link.l has a curve, so it needs 'ranks', 2 or more"),
        ('[gpu.x]\nlike = "T4"\nlink = "l"\n[link.l]\nlike = "pcie3"\nranks = 2\n'
         "curve = [[1, 1e-9], [2, 1]]", "launching a collective alone takes 8.4e-06 s"),
        ('[gpu.x]\nlike = "T4"\nlink = "l"\n[link.l]\nlike = "pcie3"\nby_ranks = { two = 1e9 }',
         "link.l.by_ranks goes by whole numbers, 1 or more, so 'two' cannot be a key"),
        ('[gpu.x]\nlike = "T4"\nlink = "l"\n[link.l]\nlike = "pcie3"\nranks = 2\n'
         "curve = [[1024, 2e-5], [1000000000, 3e-5]]",
         r"link.l.curve has 3e-05 s for 1000000000 bytes: each GPU would send 3.33e\+13 bytes per"),
        ('[system.x]\ngpu = "T4"\ngpus = 8\nfabric = "f"\n[fabric.f]\nlike = "eth-10g"\n'
         "ranks = 2\ncurve = [[1024, 2e-5], [1000000000, 3e-5]]", "fabric.f.curve has 3e-05 s"),
        ('[gpu.x]\nlike = "T4"\nlink = "l"\n[link.l]\nlike = "pcie3"\nranks = 2\n'
         "curve = [[1024, 1e-3], [2048, 2e-5]]",
         "link.l.curve has 0.001 s for 1024 bytes, but only 2e-05 s for 2048: .*the slower point"),
        ('[gpu.x]\nlike = "T4"\n[hosts]\npython_seconds = 1', "of mine.toml 'hosts'. .* host\\?"),
        ('[gpu.x]\nlike = "T4"\n[modell]', "Unknown table of mine.toml 'modell'. .* model\\?"),
        ('[gpu.x]\nlike = "T4"\n[fabrics.x]', "Unknown table of mine.toml 'fabrics'. .* fabric\\?"),
        ('[gpus.x]\nlike = "T4"', "Unknown table of mine.toml 'gpus'. Did you mean gpu"),
        ('proflie = "T4"', "Unknown table of mine.toml 'proflie'. Did you mean profile"),
        ('[gpu.x]\nlike = "T4"\ntensor = "float16"', "gpu.x.tensor must be a list of texts"),
        ('[gpu.x]\nlike = "T4"\n[model]\nmemory_efficiency = 3',
         "model.memory_efficiency is a share, at most 1, but is 3"),
    ],
)  # fmt: skip
def test_malformed_files_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        profiles.load(write(tmp_path, text))


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("2e11", "200", r"gpu.mine.memory_bandwidth is in bytes per second, 1e\+09 to 1e\+15"),
        ("5e12", "5", "gpu.mine.peak.float32 is in FLOP per second"),
        ("8000000000", "8", "gpu.mine.memory_bytes is in bytes, .* so it cannot be 8"),
        ("2e11", "1e-300", "gpu.mine.memory_bandwidth .* cannot be 1e-300"),
        ("pinned = 1e9", "pinned = 1", "bus.usb.pinned is in bytes per second"),
        ("latency = 1e-5", "latency = 20", "bus.usb.latency is in seconds, 1e-09 to 10"),
        ("float32 = 5e12", "float32 = 5e12, float17 = 1e12",
         r"Unknown element type in \[gpu.mine\] 'float17'. Did you mean .*float16"),
        ("{ float32 = 5e12 }", '{ float32 = 5e12 }\ntensor = ["float16"]',
         "gpu.mine.tensor has 'float16', but gpu.mine.peak no number for it"),
        ("[bus.usb]", "[host]\npython_seconds = 10\n[bus.usb]",
         "host.python_seconds is in seconds"),
        ("[bus.usb]", "[system.s]\ngpu = 'mine'\ngpus = 99999999\n[bus.usb]",
         "system.s.gpus is in GPUs, 1 to 65536"),
    ],
)  # fmt: skip
def test_a_number_in_the_wrong_unit_is_refused(
    tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    text = OWN.replace('"mine"', '"s"') if "system.s" in new else OWN
    assert old in text
    with pytest.raises(ValueError, match=complaint):
        profiles.load(write(tmp_path, text.replace(old, new, 1)))


def test_every_entry_of_a_profile_has_a_range() -> None:
    numbers = {
        f.name
        for kind in (profiles.Gpu, profiles.Bus, profiles.Link)
        for f in fields(kind)
        if "float" in str(f.type) or f.type == "int"
    }
    assert numbers - {"curve"} <= ranges.RANGES.keys()


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"There is no profile file 'nowhere.toml'"):
        profiles.load("nowhere.toml")
