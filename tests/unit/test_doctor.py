"""The doctor's page: every probe once, reasons and fixes beside those that failed, readable in 80 columns."""

from rcq_cli.commands import doctor
from rcq_cli.commands.doctor import Probe, tables
from rcq_cli.glyphs import UNICODE, View
from rcq_cli.render import to_text

WORKS = (
    Probe("rcq", "ok", "0.1.0", "rcq_cli"),
    Probe("system", "ok", "Linux-6.18.44-fc-v657-x86_64-with-glibc2.36", "platform"),
    Probe("cuda", "ok", "a card", "torch", "CUDA 13"),
    Probe("model needle", "ok", None, "models", "built in, no download"),
    Probe("task niah", "ok", None, "tasks"),
)
FAILS = (
    Probe("nvml", "no_driver", None, "nvml", "library not found (12)", "install a driver"),
    Probe("pynvml", "error", "11.5", "metadata", "a retired package", "pip uninstall pynvml"),
    Probe("cpu governor", "not_supported", None, "sysfs.cpufreq", "the kernel does not say"),
    Probe("power", "no_permission", None, "nvml"),
)


def lines(*probes, width=80):
    return to_text(
        tables(probes), View(width=width, color=False, glyphs=UNICODE, terminal=False)
    ).splitlines()


def test_what_works_says_what_was_found_and_where_that_is_known_from():
    found = [line.split(maxsplit=1) for line in lines(*WORKS)[3:]]
    told = {name: rest.split("  ")[0] for name, rest in found}
    assert told["rcq"] == "0.1.0"
    assert told["cuda"] == "a card (CUDA 13)"
    page = "\n".join(lines(*WORKS))
    assert "built in, no download" in page
    assert "does not work" not in page


def test_what_fails_has_its_status_its_reason_and_a_fix():
    page = "\n".join(lines(*WORKS, *FAILS))
    for told in (
        "nvml: library not found (12); install a driver",
        "pynvml: 11.5, a retired package; pip uninstall pynvml",
        "cpu governor: the kernel does not say",
        "power: no_permission",
    ):
        assert told in page
    for probe in FAILS:
        assert f"{probe.status} " in page
        assert probe.source in page


def test_a_terminal_of_80_columns_holds_the_page_without_a_second_band():
    page = lines(*WORKS, *FAILS)
    assert max(map(len, page)) <= 80
    assert sum(line.startswith("name") for line in page) == 2


def test_a_missing_package_is_red_and_one_that_may_be_absent_is_not():
    probes = (
        Probe("numpy", "missing", None, "metadata", "not installed", "pip install numpy"),
        Probe("ray", "absent", None, "metadata", "not installed", "pip install 'rcq[ray]'"),
    )
    styles = [row[1].style for row in tables(probes)[1].rows]
    assert styles == ["bad", "doubt"]


def test_a_cache_folder_that_cannot_be_made_is_told(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RCQ_HOME", str(tmp_path / "file" / "home"))
    probe = doctor._cache()
    assert (probe.status, probe.reason) == ("no_permission", "not writable: Not a directory")
