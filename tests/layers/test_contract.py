import inspect

import pytest

from cgdnn.layers._registry import layer_types
from tests.layers.contract import CHECKS, all_cases, fields_of, missing_fields

ALL_CASES = all_cases()


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
@pytest.mark.parametrize("check", CHECKS)
def test_layer(check, case):
    CHECKS[check](case)


@pytest.mark.parametrize("layer_type", layer_types())
def test_layer_has_cases(layer_type):
    assert [case for case in ALL_CASES if case.type == layer_type]


@pytest.mark.parametrize("layer_type", layer_types())
def test_every_parameter_field_has_a_case(layer_type):
    assert not missing_fields(layer_type, ALL_CASES)


@pytest.mark.parametrize("layer_type", layer_types())
def test_layer_is_documented(layer_type):
    text = layer_types()[layer_type].__dict__.get("__doc__")
    assert text
    assert len(inspect.cleandoc(text).splitlines()) > 1
    names = {field.partition(".")[2] for field in fields_of(layer_type)}
    assert not {name for name in names if name not in text}
