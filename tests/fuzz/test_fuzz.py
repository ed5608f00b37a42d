"""A fixed share of the fuzzer's inputs; `python -m tests.fuzz.fuzz --count 10000` tries them all."""

import pytest

from tests.fuzz.fuzz import KINDS, fuzz


@pytest.mark.parametrize("kind", KINDS)
def test_no_input_ends_in_a_defect_or_a_hang(kind):
    counts, findings = fuzz(30, seed=2, only=kind)
    assert counts == {kind: 30}
    assert findings == []


def test_a_finding_is_repeated_from_its_number():
    from tests.fuzz import fuzz as fuzzer

    seen = []
    chosen = fuzzer.KINDS["arguments"][0]
    try:
        fuzzer.KINDS["arguments"] = (
            lambda chance, ground: seen.append(chosen(chance, ground)) or ["modes"],
            40,
        )
        fuzz(3, seed=7, first=40, only="arguments")
        fuzz(1, seed=7, first=41, only="arguments")
    finally:
        fuzzer.KINDS["arguments"] = (chosen, 40)
    assert seen[1] == seen[3]


def test_a_defect_is_a_finding(monkeypatch):
    def broken(_argv):
        raise RuntimeError("oops")

    monkeypatch.setattr("tests.fuzz.fuzz.run", broken)
    counts, findings = 0, []
    from tests.fuzz import fuzz as fuzzer

    class Bare(fuzzer.Ground):
        def __init__(self, folder):
            self.folder = folder
            (folder / "work").mkdir()

    monkeypatch.setattr(fuzzer, "Ground", Bare)
    counts, findings = fuzz(2, seed=1, only="arguments")
    assert counts == {"arguments": 2}
    assert [finding.number for finding in findings] == [0, 1]
    assert "RuntimeError('oops')" in findings[0].what
