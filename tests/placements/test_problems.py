from __future__ import annotations

from placements.spec.problems import MAX_TEXT, Problem, has_errors, in_order, render

ERROR = Problem("pin-length", "error", "a.yaml:3:5", "has 4 cores", "pin to 0-7")
WARNING = Problem("note", "warning", "", "something", "")


def test_render_has_place_severity_id_fact_and_remedy() -> None:
    """One line for the finding and one for its remedy, if there is one."""
    assert render([ERROR, WARNING]) == (
        "a.yaml:3:5: error: pin-length: has 4 cores\n    hint: pin to 0-7\nwarning: note: something\n"
    )


def test_render_of_no_problems_is_empty() -> None:
    assert render([]) == ""


def test_color_changes_nothing_but_escape_codes() -> None:
    """Without its codes the coloured text is the plain one."""
    import re

    assert re.sub(r"\x1b\[[0-9;]*m", "", render([ERROR, WARNING], color=True)) == render([ERROR, WARNING])


def test_only_errors_are_errors() -> None:
    """A warning alone does not fail a spec."""
    assert (has_errors([WARNING]), has_errors([WARNING, ERROR]), has_errors([])) == (False, True, False)


def test_problems_are_in_the_order_of_the_file_without_duplicates() -> None:
    """Line 9 precedes line 10, problems without a place are last."""
    nine, ten = Problem("x", "error", "a:9:1", "x"), Problem("x", "error", "a:10:1", "x")
    assert in_order([WARNING, ten, nine, ten]) == (nine, ten, WARNING)


def test_as_dict_holds_the_five_fields() -> None:
    """The JSON of a problem."""
    assert ERROR.as_dict() == {
        "id": "pin-length",
        "severity": "error",
        "where": "a.yaml:3:5",
        "what": "has 4 cores",
        "hint": "pin to 0-7",
    }


def test_a_long_text_is_cut() -> None:
    """A client or a checkpoint may have chosen it."""
    problem = Problem("bad-value", "error", "", "a" * 5000, "b" * 5000)
    assert problem.what == "a" * MAX_TEXT + "... (5000 characters)"
    assert problem.hint == "b" * MAX_TEXT + "... (5000 characters)"


def test_control_characters_are_escaped() -> None:
    """They could change what a terminal shows."""
    assert Problem("bad-value", "error", "", "a\x1b[2J\nb").what == "a\\x1b[2J\\nb"
