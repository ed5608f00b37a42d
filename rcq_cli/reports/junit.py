"""JUnit XML of a comparison: a suite per task and context, a case per candidate and gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree as Xml

from rcq_cli.table import interval

Json = Any
Record = Mapping[str, Json]

UNDECIDED = ("inconclusive", "warn", "not evaluated")
COUNTED = ("failure", "error", "skipped")


@dataclass(frozen=True, slots=True)
class JUnit:
    """The report that CI servers read tests from."""

    name: str = "junit"
    summary: str = "every gate as a test case: failure, error or skipped, with its reason"

    def text(self, document: Record) -> str:
        """Return the XML of a finished comparison, or of one that ended with an error."""
        suites = [_broken(document)] if "error" in document else _suites(document)
        root = Xml.Element("testsuites", name="rcq compare")
        root.extend(suites)
        for element in (root, *suites):
            cases = element.findall(".//testcase")
            element.set("tests", str(len(cases)))
            for tag, counter in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
                element.set(counter, str(sum(case.find(tag) is not None for case in cases)))
        Xml.indent(root)
        body = Xml.tostring(root, encoding="unicode")
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _suites(document: Record) -> list[Xml.Element]:
    gates = document["gate"]["gates"]
    places = dict.fromkeys((r["task"], r.get("ctx")) for r in (*document["cells"], *gates))
    return [_suite(document, place, [g for g in gates if (g["task"], g["ctx"]) == place]) for place in places]


def _suite(document: Record, place: tuple[str, int | None], gates: Sequence[Record]) -> Xml.Element:
    task, ctx = place
    where = f"{task}.{'-' if ctx is None else ctx}"
    suite = Xml.Element("testsuite", name=_clean(task if ctx is None else f"{task}@{ctx}"))
    _properties(suite, document, place)
    for gate in gates:
        name = f"{gate['candidate'] or gate['matched']}: {gate['expr']}"
        case = Xml.SubElement(suite, "testcase", classname=_clean(f"rcq.{where}"), name=_clean(name))
        _outcome(case, gate)
    return suite


def _properties(suite: Xml.Element, document: Record, place: tuple[str, int | None]) -> None:
    known: dict[str, Json] = {"contract": document["contract"]}
    for entry in document.get("contracts", ()):
        if entry["ctx"] == place[1] and place[0].partition("/")[0] == entry["task"].partition("/")[0]:
            known |= {"contract": entry["contract"], "seed": entry["seed"]}
            known |= {f"mode_hash.{mode}": digest for mode, digest in entry["mode_hashes"].items()}
    for pair in document["pairs"]:
        if (pair["task"], pair["ctx"]) == place:
            known[f"n.{pair['candidate']}"] = pair["n"]
            known[f"difference.{pair['candidate']}"] = interval(pair["difference_ci"], sign=True) or None
    held = Xml.SubElement(suite, "properties")
    for name, value in known.items():
        if value is not None:
            Xml.SubElement(held, "property", name=_clean(name), value=_clean(str(value)))


def _outcome(case: Xml.Element, gate: Record) -> None:
    code, reason = gate["code"], gate["reason"] or gate["status"]
    if code in (3, 4):
        _child(case, "failure", "certificate" if code == 4 else "gate", reason)
    elif code:
        _child(case, "error", f"exit-{code}", reason)
    elif gate["status"] in UNDECIDED:
        Xml.SubElement(case, "skipped", message=_clean(f"{gate['status']}: {reason}"))
    elif gate["status"] == "expected":
        Xml.SubElement(case, "system-out").text = _clean(f"failed as expected: {reason}")


def _broken(document: Record) -> Xml.Element:
    """Return the suite of a comparison that came to no judgement."""
    error = document["error"]
    suite = Xml.Element("testsuite", name="rcq compare")
    case = Xml.SubElement(suite, "testcase", classname="rcq.compare", name="the comparison was carried out")
    text = "; ".join(filter(None, (error["what"], error["why"], error["fix"])))
    kind = "failure" if document["exit_code"] == 4 else "error"
    _child(case, kind, f"exit-{document['exit_code']}", f"{text} [{error['id']}]")
    return suite


def _child(case: Xml.Element, tag: str, kind: str, text: str) -> None:
    Xml.SubElement(case, tag, type=kind, message=_clean(text)).text = _clean(text)


def _clean(text: str) -> str:
    """Return `text` without the characters that XML 1.0 cannot hold."""
    return "".join(
        c if c in "\t\n\r" or " " <= c <= "\ud7ff" or "\ue000" <= c not in "\ufffe\uffff" else "?"
        for c in text
    )


REPORT = JUnit()
