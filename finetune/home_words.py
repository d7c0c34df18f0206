"""The words of the embedded data set: which templates are used, what their commands name, and how it is said.

Tables only; `home_intents` samples from them. A changed word changes the rows, so it raises `home_intents._REVISION`.
"""

from __future__ import annotations

import re

# Which templates are used: intent -> (the package's name of a combination of slots, kind of device, weight).
# Left out, because the command alone does not tell the label: combinations whose area is the speaker's own room,
# timers that run a free-text command later ("open the door in 5 minutes"), scripts and scenes (any word can be one).
_Cell = tuple[str, str | None, int]
_SWITCHED: tuple[_Cell, ...] = (
    ("name_only", "light", 4),
    ("name_only", "switch", 3),
    ("name_only", "fan", 1),
    ("name_only", "media_player", 2),
    ("name_only", "cover", 2),  # open and close
    ("name_only", "lock", 1),  # lock and unlock
    ("name_area", "light", 3),
    ("name_area", "switch", 2),
    ("area_domain", "light", 5),
    ("area_domain", "fan", 1),
    ("area_device_class_cover", "cover", 2),
    ("floor_domain", "light", 1),
)
INTENTS: dict[str, tuple[_Cell, ...]] = {
    "HassTurnOn": _SWITCHED,
    "HassTurnOff": _SWITCHED,
    "HassLightSet": (
        ("name_brightness", "light", 4),
        ("name_color", "light", 4),
        ("name_temperature", "light", 1),
        ("area_brightness", "light", 4),
        ("area_color", "light", 4),
        ("area_temperature", "light", 1),
    ),
    "HassClimateSetTemperature": (
        ("area_temperature", None, 5),
        ("name_temperature", "climate", 4),
        ("floor_temperature", None, 1),
    ),
    "HassClimateGetTemperature": (("area_only", None, 3), ("name_only", "climate", 2)),
    "HassGetWeather": (("name_only", "weather", 9), ("default", None, 1)),
    "HassStartTimer": (
        ("minutes_only", None, 4),
        ("hours_only", None, 1),
        ("seconds_only", None, 1),
        ("hours_minutes", None, 2),
        ("minutes_seconds", None, 1),
        ("name_minutes", None, 4),
        ("name_hours", None, 1),
    ),
    "HassShoppingListAddItem": (("item_only", None, 1),),
}

# What the commands name: (in training and in the seen half of the test, only in the held-out half of the test).
# `area` and `floor` are rooms; the timer's name and the shopping item are free text; the others are kinds of device.
VOCABULARY: dict[str, tuple[str, str]] = {
    "area": (
        "kitchen, living room, bedroom, bathroom, office, garage, hallway, basement, guest room, nursery, attic, "
        "laundry room, library, porch, entrance, gym, cellar, conservatory",
        "dining room, study, playroom, patio, sunroom, pantry",
    ),
    "floor": ("ground, first, second", "third, top"),
    "light": (
        "desk lamp, ceiling light, floor lamp, christmas lights, string lights, hue bulb, night light, wall light, "
        "mood light, mirror light, spotlight, chandelier, led strip, lava lamp",
        "bedside lamp, reading lamp, aquarium light, closet light, lantern",
    ),
    "switch": (
        "coffee machine, kettle, toaster, fountain, router, printer, electric blanket, dishwasher, dehumidifier, "
        "rice cooker, water pump",
        "air purifier, slow cooker, humidifier, washing machine",
    ),
    "fan": ("ceiling fan, tower fan, exhaust fan, pedestal fan", "box fan, desk fan"),
    "media_player": ("tv, soundbar, speaker, projector, radio", "stereo, record player"),
    "cover": ("left blind, roller shutter, canopy, sun shade, bay window curtain", "skylight, right blind"),
    "lock": ("front door, back door, side gate, mailbox", "main gate, safe"),
    "climate": (
        "thermostat, heater, radiator, air conditioner, towel warmer, boiler, hot tub, underfloor heating",
        "heat pump, fireplace, pellet stove, wine cooler",
    ),
    "weather": (
        "london, paris, new york, boston, tokyo, madrid, rome, chicago, sydney, dublin, vienna, toronto, cape town, "
        "seattle, prague, singapore, athens, home",
        "berlin, san francisco, oslo, lisbon, mumbai, denver, lima",
    ),
    "timer_name": (
        "pizza, pasta, tea, eggs, workout, bread, rice, meeting, cookies, roast, homework, yoga, potatoes, coffee",
        "stew, nap, soup, chicken, break",
    ),
    "shopping_list_item": (
        "milk, eggs, bread, olive oil, bananas, dish soap, coffee, rice, batteries, cat food, toilet paper, oranges, "
        "pasta, butter, cheese, apples, onions, flour, orange juice, yogurt, potatoes, salt, shampoo, honey, "
        "peanut butter, tea, ham, light bulbs, paper towels, carrots, ice cream, garlic",
        "tomatoes, dog food, cereal, lemons, black pepper, toothpaste, frozen peas, strawberries, soy sauce",
    ),
}
ROOMS_AND_FLOORS = ("area", "floor")
_FREE_TEXT = ("timer_name", "shopping_list_item")
DEVICES = tuple(kind for kind in VOCABULARY if kind not in ROOMS_AND_FLOORS + _FREE_TEXT)

# Numbers people say; each is inside the package's own range.
NUMBERS: dict[str, range] = {
    "timer_hours": range(1, 13),
    "timer_minutes": range(1, 61),
    "timer_seconds": range(5, 61, 5),
    "brightness": range(5, 101, 5),
    "temperature": range(15, 29),
    "color_temperature": range(2000, 6501, 100),
}

# A narrower wording of the package's rules: "switch on the fan", not "bring on the fan throughout the attic".
# The recogniser uses the package's own rules, so every sentence is still one of the package's.
WORDING = {
    "all": "all",
    "close": "(close|shut)",
    "how_is": "(how is|how's)",
    "in": "in",
    "light": "(lights|light|lamps)",
    "numeric_value_set": "(set|change|turn [(up|down)]|increase|decrease)",
    "open": "(open|raise)",
    "set": "(set|change|make|turn)",
    "temp": "(temperature|temp)",
    "the": "(the|my)",
    "turn": "(turn|switch)",
    "what_is": "(what's|what is|tell me)",
}

# How often an optional part is said, by the rule or word it begins with; 0.5 for the others.
SAID = {
    "<the>": 0.85,
    "<in>": 0.9,
    "<set>": 0.9,
    "<turn>": 0.9,
    "<numeric_value_set>": 0.9,
    "<all>": 0.2,
    "a": 0.9,
    "in": 0.9,
    "my": 0.9,
    "of": 0.9,
    "the": 0.9,
    "to": 0.9,
    "floor": 1.0,
}

# Templates nobody speaks, or that set two names side by side so that the words could be cut either way.
DROPPED_TEMPLATES = re.compile(
    r"^\[<the>\] \{name\}$"  # "the kettle" alone would turn it on
    r"|\{area\} \[<the>\] \{name\}"  # "the office the desk lamp"
    r"|\{name\} <light>"  # "the desk lamp light"
    r"|<light> \{floor\}"  # "the lights second"
)

# Sampled sentences nobody speaks: number, article and spacing that the templates leave free.
UNNATURAL = re.compile(
    r"\b1[ -](hour|minute|second)s\b"  # 1 minutes
    r"|\d-?(hour|minute|second)s? (hour|minute|second)"
    r"|\d-(hour|minute|second)s\b|for .*\d-(hour|minute|second)"  # 5-minutes, for 5-minute
    r"|\d (hour|minute|second)s (and )?(\d+[ -]\w+ )?timer"  # a 5 minutes timer
    r"|for .*\b(?!1 )\d+ (hour|minute|second)\b"  # for 5 minute
    r"|\ba (8|11|18)\b|\ban (?!8\b|11\b|18\b|hour\b)"  # a 8 minute timer, an timer
    r"|half an? (hour|minute)s|and half|half (hour|minute)\b|1/2"
    r"|\bdegree$|\d [%°k]|\dkelvin"  # 20 degree, 40 %
    r"|switch out|switch .* out$|turn (the )?color"
    r"|tell me .* like\b|weather .*\bin home"
    r"|\b(the|my) (?!weather)[a-z ]+ weather|weather .*\b(the|my)\b|\bat (?!home)"  # the london weather, at rome
    r"|\ball ([a-z ]+ )?(light|fan)\b"  # all the light
    r"|\b(decrease|down)\b.* (max|highest)|\b(increase|up)\b.* (min|lowest)"
)
