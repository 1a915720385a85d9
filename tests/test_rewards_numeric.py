"""Numbers with units, and a reward that is only noise."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from reward_kit import episode

from relax_gym.errors import RewardError
from relax_gym_rewards._units import KINDS, UNITS
from relax_gym_rewards.numeric import Numeric


@pytest.mark.parametrize(
    ("action", "answer", "optional", "required"),
    [
        ("5 km", "5 km", 1.0, 1.0),
        ("5000 m", "5 km", 1.0, 1.0),
        ("5,000 meters", "5 km", 1.0, 1.0),
        ("5 m", "5 km", 0.0, 0.0),
        ("5", "5 km", 1.0, 0.0),
        ("5 kg", "5 km", 0.0, 0.0),
        ("5 apples", "5 km", 1.0, 0.0),
        ("2 hours", "120 min", 1.0, 1.0),
        ("120 Minutes", "2 h", 1.0, 1.0),
        ("36 km/h", "10 m/s", 1.0, 1.0),
        ("10 km/h", "10 m/s", 0.0, 0.0),
        ("20 °C", "68 °F", 1.0, 1.0),
        ("293.15 K", "20 °C", 1.0, 1.0),
        ("20 K", "20 °C", 0.0, 0.0),
        (r"$20^\circ$C", "20 °C", 1.0, 1.0),
        (r"$180^{\circ}$", "3.14159265358979 rad", 1.0, 1.0),
        ("10000 cm^2", "1 m²", 1.0, 1.0),
        ("1 m^2", "100 m^2", 0.0, 0.0),
        (r"5\text{ km}", "5000 m", 1.0, 1.0),
        (r"$5\,\text{km}$", "5000 m", 1.0, 1.0),
        ("5~km", "5000 m", 1.0, 1.0),
        ("1 kWh", "3.6 MJ", 1.0, 1.0),
        ("1 MW", "1 mW", 0.0, 0.0),
        ("1 inch", "2.54 cm", 1.0, 1.0),
        ("1 lb", "0.45359237 kg", 1.0, 1.0),
        ("5 inches", "12.7 cm", 1.0, 1.0),
        ("10 km/hr", "10 km/h", 1.0, 1.0),
        ("5 KM", "5 km", 1.0, 1.0),
        ("5 Kg", "5 kg", 1.0, 1.0),
        ("5 mL", "5 ml", 1.0, 1.0),
        ("5 L", "5000 ml", 1.0, 1.0),
        ("5 mls", "5 ml", 1.0, 1.0),
        ("5 kms", "5000 m", 1.0, 1.0),
        ("5 lbs", "5 lb", 1.0, 1.0),
        ("5 Mins", "300 s", 1.0, 1.0),
        ("5 MINUTES", "300 s", 1.0, 1.0),
        ("5 T", "5 kg", 1.0, 0.0),
        ("5 T", "5000 kg", 0.0, 0.0),
        ("5 H", "300 min", 0.0, 0.0),
        ("5 Ns", "5 ns", 1.0, 0.0),
        ("**5 km**", "5 km", 1.0, 1.0),
        ("*5 km* or so", "5 km", 1.0, 1.0),
        ("5 km.", "5 km", 1.0, 1.0),
        ("<answer>5 km</answer>", "5 km", 1.0, 1.0),
        ("35.28 km/h", "9.8 m/s²", 0.0, None),
        ("9.8 m/s^2", "9.8 m/s", 1.0, 0.0),
        ("9.8 m/s/s", "9.8 m/s", 1.0, 0.0),
        (r"9.8\text{ m}/\text{s}^2", "9.8 m", 1.0, 0.0),
        ("5 kg·m/s", "5 kg", 1.0, 0.0),
        ("5 N·m", "5 N", 1.0, 0.0),
        ("5 N*m", "5 N", 1.0, 0.0),
        ("5 N * m", "5 N", 1.0, 0.0),
        (r"5 N\cdot m", "5 N", 1.0, 0.0),
        ("5 m2", "5 m", 1.0, 0.0),
        ("5 metres per second", "5 m", 1.0, 0.0),
        ("5%", "5 km", 0.0, 0.0),
        ("5 km, no: 6 km", "5 km", 0.0, 0.0),
        ("6 km, no: 5 km", "5 km", 1.0, 1.0),
        ("<think>5 km</think>6 km", "5 km", 0.0, 0.0),
        ("<think>5 km", "5 km", 0.0, 0.0),
        ("５ km", "5 km", 0.0, 0.0),
        ("km", "5 km", 0.0, 0.0),
        ("", "5 km", 0.0, 0.0),
        ("5 " + "k" * 100_000, "5 km", 1.0, 0.0),
    ],
)
def test_units(action: str, answer: Any, optional: float, required: float | None) -> None:
    finished = episode("something else", action, answer=answer)
    assert Numeric(units="optional")(finished) == optional
    if required is None:
        with pytest.raises(RewardError, match="with no unit of its table"):
            Numeric(units="required")(finished)
    else:
        assert Numeric(units="required")(finished) == required


def test_units_are_ignored_unless_asked_for_and_where_the_reference_has_none() -> None:
    assert Numeric()(episode("5 kg", answer="5 km")) == 1.0
    assert Numeric()(episode("5000 m", answer="5 km")) == 0.0
    assert Numeric(units="optional")(episode("5 kg", answer=5)) == 1.0
    assert Numeric(units="optional")(episode("50%", answer=0.5)) == 1.0
    with pytest.raises(RewardError, match=r"info\['answer'\] is '5', with no unit of its table"):
        Numeric(units="required")(episode("5 kg", answer=5))
    with pytest.raises(RewardError, match="numeric: units is 'si'; it must be one of 'ignore', 'optional', 'required'"):
        Numeric(units="si")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (np.int64(5), 1.0),
        (np.float32(5), 1.0),
        (Fraction(10, 2), 1.0),
        (Decimal("5.0"), 1.0),
        (["4", 5], 1.0),
        ([4, 6], 0.0),
    ],
)
def test_any_kind_of_number_is_a_reference(answer: Any, expected: float) -> None:
    assert Numeric()(episode("5", answer=answer)) == expected


def test_tolerance_is_in_the_unit_of_the_reference() -> None:
    assert Numeric(units="optional", tolerance=0.1)(episode("1050 m", answer="1 km")) == 1.0
    assert Numeric(units="optional", tolerance=0.1)(episode("1150 m", answer="1 km")) == 0.0


def test_no_unit_has_two_meanings() -> None:
    assert len(UNITS) == sum(map(len, KINDS.values()))
