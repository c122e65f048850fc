"""The table of lines that a port adds and removes, of all programs; the libraries themselves are not needed."""

from tests.ports import count


def test_the_table_has_all_programs_and_the_other_libraries_where_there_is_a_port():
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in count.table().splitlines()[2:]]
    names = {path.stem for path in count.PROGRAMS.glob("*.py") if not path.stem.endswith("_plain")}
    assert {row[0] for row in rows} == names
    assert all(row[2] for row in rows)
    assert {row[0] for row in rows if row[3] and row[4]} == {"augment", "contrast", "distill"}


def test_moved_indentation_blank_lines_and_the_docstring_do_not_count(tmp_path):
    plain, ported = tmp_path / "plain.py", tmp_path / "ported.py"
    plain.write_text('"""Plain."""\n\na = 1\nb = 2\nc = 3\n')
    ported.write_text('"""Ported.\n\nTo another library.\n"""\na = 1\n\nwith open(a):\n    b = 2\n    d = 4\n')
    assert count.changed(plain, ported) == (2, 1)
