"""What every setting is for: the tree of config.py as a recipe whose comments tell it.

It is read off the settings themselves (their schema), so it is what this release takes. Presets,
which fill others in, are told where they are asked for. What it does not have: what one setting
means for another; a recipe that contradicts itself is refused when it is read.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from rlhf_pipeline.config import (
    PPO_PRESETS,
    PRESETS,
    SHARED_WITH_PPO,
    Settings,
    nearest_settings,
)
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.reward.settings import PRESETS as REWARD_PRESETS

WIDTH = 88
LEFT_OUT = {"recipe", *(f"ppo.{key}" for key in SHARED_WITH_PPO)}  # said once, under their homes
Node = Mapping[str, Any]
FILLED_IN = {  # by a name -> what stands there, and the names
    "presets": ("some of them, the last wins, as in [production, memory-constrained]", PRESETS),
    "ppo.preset": ("one of them", PPO_PRESETS),
    "reward.preset": ("one of them, or a YAML file of such functions", REWARD_PRESETS),
}


def told(place: str = "") -> str:
    """Return a setting, or all those below it, with defaults and what each is for; '' for all.

    YAML that a recipe may hold as it is: what stands in comments alone is not set. Raises
    ConfigError where there is no such setting.
    """
    if place in FILLED_IN:
        return "".join(f"# {line}\n" for line in _preset_lines(place))
    schema = Settings.model_json_schema()
    node: Node = schema
    usual: Any = None
    names = place.split(".") if place else []
    for depth, name in enumerate(names):
        inner = node.get("properties", {})
        if name not in inner or ".".join(names[: depth + 1]) in LEFT_OUT:
            near = nearest_settings(place)
            hint = f"the nearest right one is {' or '.join(map(repr, near))}"
            if not near:
                every = [each for each in schema["properties"] if each not in LEFT_OUT]
                hint = f"there are {', '.join(every)}, and more below these"
            raise ConfigError(f"needed a setting, found no {place!r}; {hint}")
        usual = usual.get(name) if isinstance(usual, Mapping) else inner[name].get("default")
        node = _resolved(inner[name], schema)
    lines = _around(names, node, usual, schema) if names else _below(node, None, schema, "", "")
    return "\n".join(lines) + "\n"


def _preset_lines(place: str) -> Iterator[str]:
    """Yield what a preset's setting is for, and what each name fills in."""
    what, presets = FILLED_IN[place]
    yield f"{place}: {what}. Fills settings in;"
    yield "what the recipe itself says wins. There are:"
    # Through JSON, as some are read-only mappings, which YAML has no form for.
    yield from yaml.safe_dump(json.loads(json.dumps({**presets}, default=dict))).splitlines()


def _around(names: list[str], node: Node, usual: Any, schema: Node) -> Iterator[str]:
    """Yield the sections around a setting, then it and what is below."""
    for depth, name in enumerate(names[:-1]):
        yield f"{'  ' * depth}{name}:"
    pad = "  " * (len(names) - 1)
    yield from _one(names[-1], node, usual, schema, pad, ".".join(names))


def _below(node: Node, usual: Any, schema: Node, pad: str, place: str) -> Iterator[str]:
    for name, raw in node["properties"].items():
        where = f"{place}.{name}" if place else name
        if where not in LEFT_OUT:
            inner = _resolved(raw, schema)
            default = inner.get("default")
            if isinstance(usual, Mapping):
                default = usual.get(name, default)
            yield from _one(name, inner, default, schema, pad, where)


def _one(name: str, node: Node, usual: Any, schema: Node, pad: str, place: str) -> Iterator[str]:
    words = " ".join(f"{node.get('description', '')} {_limits(node)}".split())
    yield from textwrap.wrap(words, WIDTH, initial_indent=f"{pad}# ", subsequent_indent=f"{pad}# ")
    if "properties" in node:
        yield f"{pad}{name}:"
        yield from _below(node, usual, schema, pad + "  ", place)
        return
    if usual is None and node.get("type") == "object":
        usual = {}  # made anew each time, so that the schema has none
    needed = usual is None and "default" not in node
    yield f"{pad}{name}:" if needed else f"{pad}{name}: {_plain(usual)}"
    for key, inner in _inside(node, schema):  # what may stand there, were it set
        for line in (f"{key or name}:", *_below(inner, None, schema, "  ", place)):
            yield f"{pad}# {line}"


def _inside(node: Node, schema: Node) -> Iterator[tuple[str, Node]]:
    """Yield the sections that a setting may hold though it holds none by default."""
    for branch in node.get("anyOf", [node]):
        found = _resolved(branch, schema)
        if "properties" in found:
            yield "", found
        for more in (
            found.get("additionalProperties"),
            *found.get("patternProperties", {}).values(),
        ):
            named = _resolved(more, schema) if isinstance(more, Mapping) else {}
            if "properties" in named:
                yield "NAME", named


def _limits(node: Node) -> str:
    """Return what values a setting takes, in words; nothing where any of its type does."""
    said: list[str] = []
    for branch in node.get("anyOf", [node]):
        if "enum" in branch:
            said.append("One of: " + ", ".join(map(str, branch["enum"])) + ".")
        bounds = [
            f"{word} {branch[key]:g}"
            for key, word in (
                ("minimum", "at least"),
                ("exclusiveMinimum", "above"),
                ("maximum", "at most"),
                ("exclusiveMaximum", "below"),
            )
            if key in branch
        ]
        if bounds:
            words = ", ".join(bounds)
            said.append(f"{words[0].upper()}{words[1:]}.")
    return " ".join(said)


def _resolved(node: Node, schema: Node) -> Node:
    """Return a node with what it refers to; what it says itself wins."""
    if "$ref" not in node:
        return node
    return {**schema["$defs"][node["$ref"].rpartition("/")[2]], **node}


def _plain(value: Any) -> str:
    """Return a value on one line of YAML."""
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("...\n").strip()
