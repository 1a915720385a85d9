"""Units a number may carry, as factors of a base unit. A table, so that nothing a model wrote is evaluated."""

from __future__ import annotations

import re
from collections.abc import Mapping

LENGTH = {"nm": 1e-9, "um": 1e-6, "µm": 1e-6, "mm": 1e-3, "cm": 1e-2, "dm": 0.1, "m": 1.0, "km": 1e3}
LENGTH |= {"inch": 0.0254, "inches": 0.0254, "ft": 0.3048, "foot": 0.3048, "feet": 0.3048, "yd": 0.9144, "yard": 0.9144}
LENGTH |= {"mile": 1609.344, "mi": 1609.344, "meter": 1.0, "metre": 1.0, "kilometer": 1e3, "kilometre": 1e3}
LENGTH |= {"centimeter": 1e-2, "centimetre": 1e-2, "millimeter": 1e-3, "millimetre": 1e-3}
AREA = {"mm²": 1e-6, "cm²": 1e-4, "m²": 1.0, "km²": 1e6, "ha": 1e4, "hectare": 1e4, "acre": 4046.8564224}
VOLUME = {"ml": 1e-6, "cl": 1e-5, "dl": 1e-4, "l": 1e-3, "liter": 1e-3, "litre": 1e-3, "cm³": 1e-6, "m³": 1.0}
MASS = {"ug": 1e-9, "µg": 1e-9, "mg": 1e-6, "g": 1e-3, "kg": 1.0, "t": 1e3, "gram": 1e-3, "kilogram": 1.0, "tonne": 1e3}
MASS |= {"lb": 0.45359237, "pound": 0.45359237, "oz": 0.028349523125, "ounce": 0.028349523125}
TIME = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "second": 1.0, "min": 60.0}
TIME |= {"minute": 60.0, "h": 3600.0, "hr": 3600.0, "hour": 3600.0, "day": 86400.0, "week": 604800.0}
SPEED = {"m/s": 1.0, "km/s": 1e3, "km/h": 1 / 3.6, "km/hr": 1 / 3.6, "kph": 1 / 3.6, "mph": 0.44704, "ft/s": 0.3048}
FORCE = {"N": 1.0, "kN": 1e3, "newton": 1.0}
ENERGY = {
    "J": 1.0,
    "kJ": 1e3,
    "MJ": 1e6,
    "cal": 4.184,
    "kcal": 4184.0,
    "Wh": 3600.0,
    "kWh": 3.6e6,
    "eV": 1.602176634e-19,
}
ENERGY |= {"joule": 1.0}
POWER = {"mW": 1e-3, "W": 1.0, "kW": 1e3, "MW": 1e6, "watt": 1.0}
PRESSURE = {"Pa": 1.0, "hPa": 1e2, "kPa": 1e3, "MPa": 1e6, "bar": 1e5, "atm": 101325.0, "mmHg": 133.322387415}
FREQUENCY = {"Hz": 1.0, "kHz": 1e3, "MHz": 1e6, "GHz": 1e9}
VOLTAGE = {"V": 1.0, "mV": 1e-3, "kV": 1e3, "volt": 1.0}
CURRENT = {"A": 1.0, "mA": 1e-3, "ampere": 1.0, "amp": 1.0}
RESISTANCE = {"Ω": 1.0, "kΩ": 1e3, "ohm": 1.0}
AMOUNT = {"mol": 1.0, "mmol": 1e-3, "mole": 1.0}
ANGLE = {"°": 0.017453292519943295, "degree": 0.017453292519943295, "deg": 0.017453292519943295, "rad": 1.0}
ANGLE |= {"radian": 1.0}
TEMPERATURE = {"K": 1.0, "kelvin": 1.0, "°C": 1.0, "°F": 5 / 9}
DATA = {"B": 1.0, "byte": 1.0, "bit": 0.125, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
DATA |= {"KiB": 1024.0, "MiB": 1024.0**2, "GiB": 1024.0**3}
ZEROS = {"°C": 273.15, "°F": 459.67 * 5 / 9}
"""Kelvins at zero of a scale that does not start at nothing."""

KINDS: Mapping[str, Mapping[str, float]] = {
    "length": LENGTH,
    "area": AREA,
    "volume": VOLUME,
    "mass": MASS,
    "time": TIME,
    "speed": SPEED,
    "force": FORCE,
    "energy": ENERGY,
    "power": POWER,
    "pressure": PRESSURE,
    "frequency": FREQUENCY,
    "voltage": VOLTAGE,
    "current": CURRENT,
    "resistance": RESISTANCE,
    "amount": AMOUNT,
    "angle": ANGLE,
    "temperature": TEMPERATURE,
    "data": DATA,
}
UNITS = {unit: (kind, factor) for kind, table in KINDS.items() for unit, factor in table.items()}
_ANY_CASE = {"km", "cm", "ft", "yd", "km²", "cm²", "cm³", "ml", "cl", "dl", "l", "kg", "lb", "oz", "kph", "mph"}
_ANY_CASE |= {"sec", "min", "hr", "day", "bar", "amp", "ohm", "atm", "mol", "deg", "rad", "bit"}
SPELLED = {unit.casefold(): unit for unit in UNITS if len(unit) > 3 or unit in _ANY_CASE}
"""Units in any case: words and what is taken for nothing else, while T is no tonne and H no hour."""
_POWERS = (("^{2}", "²"), ("^{3}", "³"), ("^2", "²"), ("^3", "³"))
_DEGREES = (("^{\\circ}", "°"), ("^\\circ", "°"), ("\\circ", "°"), ("º", "°"), ("°$", "°"), ("° ", "°"))
_WRITTEN = re.compile(
    r"(?:\\[ ,;]|[~\s]){0,3}(?:\\(?:text|mathrm)\{\s?)?(°?[A-Za-zµΩ]{1,12}[²³]?(?:/[A-Za-z]{1,3})?|°)"
)
_GOES_ON = re.compile(r"\}?\s?(?:[²³⁴⁻^/·⋅×]|\\cdot|\\times)|[0-9_]|\*\w| \* \w|\s+per\s")
"""What stands behind the first part of a unit that is not in the table, as in "m/s²" and "N·m"."""


def tidy(text: str) -> str:
    """`^2` and `^\\circ` as signs, so that they are no numbers."""
    for old, new in (*_POWERS, *_DEGREES):
        text = text.replace(old, new)
    return text


def unit_at(text: str, start: int) -> str | None:
    """The unit of the table that is written at `start` of a tidy text: "Hours" counts; None when it is no such unit."""
    written = _WRITTEN.match(text, start)
    if written is None or _GOES_ON.match(text, written.end()):
        return None
    word = written[1]
    small = word.casefold()
    return word if word in UNITS else SPELLED.get(small, SPELLED.get(small.removesuffix("s")))


def converted(value: float, unit: str, target: str) -> float | None:
    """A value in another unit; None when the two measure different things."""
    (kind, factor), (other, divisor) = UNITS[unit], UNITS[target]
    if kind != other:
        return None
    return (value * factor + ZEROS.get(unit, 0.0) - ZEROS.get(target, 0.0)) / divisor
