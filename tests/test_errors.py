from __future__ import annotations

import pytest

from cgdnn import errors


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("RunError", 1),
        ("UsageError", 2),
        ("DescriptionError", 2),
        ("DataError", 3),
        ("NonFiniteError", 4),
    ],
)
def test_what_a_user_can_mend_has_its_exit_code(name: str, code: int) -> None:
    error = getattr(errors, name)
    assert issubclass(error, errors.CgdnnError)
    assert error("text").exit_code == code


def test_a_bug_of_ours_is_no_error_of_the_user() -> None:
    assert not issubclass(errors.InternalError, errors.CgdnnError)
