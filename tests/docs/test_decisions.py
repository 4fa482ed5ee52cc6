"""The records of design decisions: numbered without gaps, whole, and listed in the index."""

import re
from itertools import count

from snippets import ROOT

_FOLDER = ROOT / "docs" / "decisions"
_RECORDS = sorted(_FOLDER.glob("0*.md"))
_REQUIRED = ["Context", "Decision"]
_OPTIONAL = ["Measurements", "Rejected alternatives", "Consequences"]


def test_records_are_numbered_without_gaps_and_have_a_date():
    for number, record in zip(count(1), _RECORDS, strict=False):
        assert record.name.startswith(f"{number:04}-")
        assert re.match(rf"# {number}\. .+\n\nDate: \d{{4}}-\d\d-\d\d\n", record.read_text()), (
            record.name
        )


def test_records_have_context_and_decision_before_optional_sections():
    for record in _RECORDS:
        sections = re.findall(r"^## (.+)$", record.read_text(), re.MULTILINE)
        assert sections[:2] == _REQUIRED, record.name
        assert sections[2:] == [each for each in _OPTIONAL if each in sections], record.name


def test_index_lists_every_record_once_with_its_title():
    listed = re.findall(r"^\* \[(.+)\]\((.+)\)$", (_FOLDER / "index.md").read_text(), re.MULTILINE)
    titles = [
        (record.read_text().splitlines()[0].partition(". ")[2], record.name) for record in _RECORDS
    ]
    assert sorted(listed) == sorted(titles)
