from tests.doubles import DIGEST, digest


def test_the_stand_ins_are_those_that_passed_their_tests() -> None:
    """After a change: `pytest tests/doubles` passes, then `python -m tests.doubles` records it."""
    assert digest() == DIGEST.read_text().strip()
