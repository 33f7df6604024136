"""Rewards by the names people give them, and the composite that a recipe asks for.

What this does not protect against: a reward loaded as `module:function` is code that runs here;
name only what you would run. Its version follows the file it is written in, and no other that this
one imports.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import ModelError
from rlhf_pipeline.files import file_sha256
from rlhf_pipeline.records import RewardFunction, hashed
from rlhf_pipeline.reward import SETTINGS, missing_from
from rlhf_pipeline.reward.composite import CompositeReward, Term
from rlhf_pipeline.reward.functions import CheckedReward, as_reward
from rlhf_pipeline.reward.judge import JudgeReward
from rlhf_pipeline.reward.lexicon import empathy, item_ratio, recommendation, safety
from rlhf_pipeline.reward.remote import HOW_ASKED, RemoteReward, bearer_token
from rlhf_pipeline.reward.rules import NEED_REFERENCES, RULES, format_fit, length_window
from rlhf_pipeline.reward.settings import CRITERION, LEARNED, FunctionSettings

ENTRY_POINTS = "rlhf_pipeline.rewards"  # the group in which an installed package offers rewards
ADDRESS = ("http://", "https://")  # how that of a remote reward begins


MADE: Mapping[str, Callable[..., RewardFunction]] = {
    "length": length_window,
    "format": format_fit,
    "empathy": empathy,
    "recommendation": recommendation,
    "item-ratio": item_ratio,
    "safety": safety,
    "judge": JudgeReward,
}
"""Functions that take options, by name: what makes them."""


def known_names() -> list[str]:
    """Return the names of all functions that come with the project or an installed package."""
    return [*RULES, *MADE, *_offered()]


def needs_references(functions: Mapping[str, FunctionSettings]) -> bool:
    """Say whether one of the functions compares completions with references."""
    return any((one.function or name) in NEED_REFERENCES for name, one in functions.items())


def folders_of(functions: Mapping[str, FunctionSettings]) -> list[Path]:
    """Return the reward models' folders that are loaded, one for each function that counts."""
    targets = [one.function or name for name, one in functions.items() if one.counts]
    known = {LEARNED, *known_names()}
    return [Path(one) for one in targets if one not in known and Path(one).is_dir()]


def as_scored(functions: Mapping[str, FunctionSettings]) -> dict[str, FunctionSettings]:
    """Return the functions without how a service is asked, which decides no score."""
    scored = dict(functions)
    for name, one in functions.items():
        target = one.function or name
        if target == "judge" or target.startswith(ADDRESS):
            decisive = {key: one.options[key] for key in one.options if key not in HOW_ASKED}
            scored[name] = replace(one, options=decisive)
    return scored


def written_versions(functions: Mapping[str, FunctionSettings]) -> list[str]:
    """Return the versions of what is only named and a person may write anew, in their order.

    That is reward models' folders, and functions that do not come with the project.
    """
    versions = []
    for name, one in functions.items():
        target = one.function or name
        if (Path(target) / SETTINGS).is_file():
            from rlhf_pipeline.reward.model import reward_version

            versions.append(reward_version(Path(target)))
        elif _place_of(target) is not None:
            versions.append(str(getattr(named_reward(target, one.options), "version", None)))
    return versions


def named_reward(
    name: str, options: Mapping[str, Any] | None = None, *, device: str = "auto"
) -> RewardFunction:
    """Return the reward a person names, checked at once that it can be called.

    A name is one of `known_names`, the address of a remote reward, a reward model's folder, or
    `module:function`. A function with `options` is called with them and returns the reward, an
    address is asked as they say, and a folder takes none. Raises ModelError for any other name or
    wrong options.
    """
    options = options or {}
    if name in RULES and not options:
        return CheckedReward(RULES[name], name)
    if name in MADE:
        return _made(MADE[name], name, options)
    if (place := _place_of(name)) is not None:
        return _loaded(place, name, options)
    if name.startswith(ADDRESS):
        return _made(partial(_remote, name), "at its address", options)  # which may hold a secret
    if Path(name).is_dir():
        _check_folder(name, options)
        return as_reward(name, device=device)
    near = difflib.get_close_matches(name, known_names(), n=1)
    hint = f" (the nearest is {near[0]!r})" if near else ""
    raise ModelError(
        f"needed a reward's name ({', '.join(known_names())}), a reward model's folder, an address "
        f"or module:function, found {name!r}{' with options' if options else ''}; correct it{hint}"
    )


def check_function(name: str, one: FunctionSettings) -> None:
    """Raise ModelError unless the function is known and takes its options; no model is loaded."""
    target = one.function or name
    if target == LEARNED or target.startswith(CRITERION):
        if one.options:
            raise ModelError(
                f"{name} is the reward model of this turn, which takes no options, found "
                f"{', '.join(one.options)}; leave them out"
            )
    elif Path(target).is_dir() and target not in MADE:
        _check_folder(target, one.options)
    else:
        named_reward(target, one.options)


def _check_folder(folder: str, options: Mapping[str, Any]) -> None:
    if options:
        raise ModelError(
            f"a reward model's folder takes no options, found {', '.join(options)} for {folder}; "
            "leave them out"
        )
    if missing := missing_from(Path(folder)):
        raise ModelError(
            f"a reward model is needed at {folder}, found no {missing[-1]} in it; correct the path"
        )


def composite_of(
    functions: Mapping[str, FunctionSettings],
    learned: RewardFunction,
    *,
    references: Mapping[str, Sequence[str]] | None = None,
    judgements: Path | None = None,
    device: str = "auto",
) -> RewardFunction:
    """Return what PPO maximises: the learned reward, or its composite with the functions named.

    `judgements` is the folder in which judges keep verdicts, where their options name no other.
    """
    if not functions:
        return learned
    terms: dict[str, Term] = {}
    for name, one in {LEARNED: FunctionSettings(), **functions}.items():
        target = one.function or name
        if not one.counts:
            continue
        kept = {"cache": str(judgements)} if target == "judge" and judgements else {}
        options = {**kept, **one.options}
        low, high = one.fixed_range
        if target == LEARNED:
            function = learned
        elif target.startswith(CRITERION):
            function = _criterion(learned, target.removeprefix(CRITERION))
        else:
            function = named_reward(target, options, device=device)
        terms[name] = Term(
            function,
            weight=one.weight,
            centre=low,
            scale=high - low,
            floor=one.floor,
            running=one.normalisation == "running",
        )
    return CompositeReward(terms, references=references)


def check_keys(functions: Mapping[str, FunctionSettings]) -> None:
    """Raise ModelError where a function that counts asks with a key that is not set."""
    for name, one in functions.items():
        variable = one.options.get("key_variable")
        if isinstance(variable, str) and one.counts:
            bearer_token(variable, f"the reward {name}", "set it where training starts")


def _remote(
    url: str,
    *,
    key_variable: str | None = None,
    timeout_seconds: float = 30.0,
    attempts: int = 4,
    batch_size: int = 64,
    allow_plain_http: bool = False,
) -> RewardFunction:
    """Return the reward behind an address, with what a recipe may say of it."""
    return RemoteReward(
        url,
        key_variable=key_variable,
        timeout_seconds=timeout_seconds,
        attempts=attempts,
        batch_size=batch_size,
        allow_plain_http=allow_plain_http,
    )


def _criterion(learned: RewardFunction, name: str) -> RewardFunction:
    made: Callable[[str], RewardFunction] | None = getattr(learned, "criterion", None)
    if made is None:
        raise ModelError(
            f"{CRITERION}{name} needs one reward model that learnt criteria from people's votes, "
            f"found {type(learned).__name__}; leave the function out"
        )
    return made(name)


def _offered() -> dict[str, str]:
    """Return what installed packages offer: name to module:function."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}


def _place_of(name: str) -> str | None:
    """Return the module:function behind a name; None where it names something else."""
    elsewhere = name.startswith((*ADDRESS, CRITERION)) or Path(name).is_dir()
    return _offered().get(name, name if ":" in name and not elsewhere else None)


def _loaded(target: str, name: str, options: Mapping[str, Any]) -> RewardFunction:
    module, _, attribute = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ModelError(
            f"the reward {name} needs {attribute!r} in the module {module!r}, found none "
            f"({error}); correct the name or install the package"
        ) from error
    if not callable(found):
        raise ModelError(
            f"the reward {name} needs a function that takes items, found a "
            f"{type(found).__name__}; name a function"
        )
    version = hashed(name, *_sources(module, found))
    if options:
        return _made(found, name, options, version=version)
    try:
        inspect.signature(found).bind([])
    except TypeError as error:
        raise ModelError(
            f"the reward {name} needs a function of one argument, the items, found "
            f"{inspect.signature(found)} ({error}); give it options, or correct the function"
        ) from error
    except ValueError:  # one that is not written in Python and does not say what it takes
        pass
    return CheckedReward(found, name, version=version)


def _sources(module: str, found: Any) -> list[str]:
    """Return digests of the module's file, and of the one it has the function from, if another."""
    modules = dict.fromkeys((module, getattr(found, "__module__", None)))
    files = [getattr(sys.modules.get(str(one)), "__file__", None) for one in modules]
    return [file_sha256(file) for file in files if file is not None and Path(file).is_file()]


def _made(
    maker: Callable[..., RewardFunction],
    name: str,
    options: Mapping[str, Any],
    *,
    version: str | None = None,
) -> RewardFunction:
    """Return the reward that the options make; its version says with which.

    `version` is what the maker's own is, where its name does not say that.
    """
    try:
        inspect.signature(maker).bind(**options)
    except TypeError as error:
        takes = ", ".join(inspect.signature(maker).parameters)
        raise ModelError(
            f"the reward {name} takes the options {takes}, found {', '.join(options) or 'none'} "
            f"({error}); correct them"
        ) from error
    try:
        made = maker(**options)
    except (TypeError, AttributeError) as error:  # an option of another kind than it takes
        raise ModelError(
            f"the reward {name} cannot be made with {dict(options)}: {error}; correct its options"
        ) from error
    if getattr(made, "may_skip", False):
        return made  # whose scores the composite checks
    version = version or name
    if options:
        version = hashed(version, *(f"{key}={options[key]!r}" for key in sorted(options)))
    return CheckedReward(made, name, version=version)
