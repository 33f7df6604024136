"""What validation judges a snapshot's rows by: numbers and flags, all rows at once.

Each distinct text is looked at once (Arrow's dictionary encoding); equality of texts is then
equality of numbers. Nothing here decides: `validation` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_pipeline.records import LIVE, FeedbackKind

if TYPE_CHECKING:
    import pandas as pd

LONG = 64  # characters from which a text's share of letters says something
REPEATED = 16  # from this length on, one character over and over is no text

_STRING = r'"(?:[^"\\]|\\.)*"'
_CONVERSATION = rf'^\[(?:\["(?:user|assistant|system)", {_STRING}\], )*\["user", {_STRING}\]\]$'
_ALTERNATING = (
    rf'^\[(?:\["system", {_STRING}\], )?'
    rf'(?:\["user", {_STRING}\], \["assistant", {_STRING}\], )*\["user", {_STRING}\]\]$'
)
# What Python calls a blank, as JSON writes it; \s is ASCII's alone here.
_BLANK = r"[\s\pZ\x{85}]|\\[nrtf]|\\u000b|\\u001[c-f]"
_BLANK_PROMPT = rf'\["user", "(?:{_BLANK})*"\]\]$'
# What nobody sees: marks of width 0, of direction, tags. Joiners are seen, but for those at an end:
# they make one sign of two emoji, or part letters.
_UNSEEN = (
    r"[\x{AD}\x{61C}\x{180E}\x{200B}\x{200E}\x{200F}\x{202A}-\x{202E}\x{2060}-\x{206F}\x{FEFF}"
    r"\x{E0001}\x{E0020}-\x{E007F}]"
)
_ENDS = r"^[\s\pZ\x{200C}\x{200D}]+|[\s\pZ\x{200C}\x{200D}]+$"
_GAP = r"(\S)[\t\p{Zs}]+"  # within a line: blanks at its begin may be what a program means
_MAY_LOOK_ALIKE = rf"{_UNSEEN}|[\x{{200C}}\x{{200D}}\t]|[^\P{{Zs}} ]| [\p{{Zs}}]"
_UNIT_NUMBER = r"(?:-?0(?:\.0+)?|0(?:\.\d+)?|1(?:\.0+)?|\d(?:\.\d+)?e-\d+)"
_CRITERION = rf"{_STRING}: {_UNIT_NUMBER}"
_CRITERIA = rf"^\{{{_CRITERION}(?:, {_CRITERION})*\}}$"


def measured(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one number or word per row and measure; NaN where a measure does not apply.

    Flags are 1.0 for true and 0.0 for false.
    """
    import pandas as pd
    import pyarrow.compute as pc

    prompts, (prompt, other_prompt) = _encoded(frame, ["prompt", "other_prompt"], trim=False)
    texts, (completion, other, text) = _encoded(
        frame, ["completion", "other_completion", "text"], trim=True
    )
    all_criteria, (criteria,) = _encoded(frame, ["criteria"], trim=False)
    in_prompts, in_texts = _text_measures(prompts), _text_measures(texts)
    looks, is_blank = _looks(texts)
    in_texts["characters"][is_blank] = 0
    kind = frame["kind"].astype("object").to_numpy()
    is_kind = {each: kind == each.value for each in FeedbackKind}
    preference, correction = is_kind[FeedbackKind.preference], is_kind[FeedbackKind.correction]
    number = frame["number"].to_numpy(dtype=float, na_value=np.nan)
    valued = {
        "number": ~np.isnan(number),
        "text": text >= 0,
        "criteria": criteria >= 0,
        "choice": frame["choice"].notna().to_numpy() & (other >= 0),
    }
    value_present = np.select(
        [preference, correction | is_kind[FeedbackKind.comment], is_kind[FeedbackKind.criteria]],
        [valued["choice"], valued["text"], valued["criteria"]],
        valued["number"],
    )
    counterpart = np.where(preference, other, np.where(correction, text, -1))
    paired = (counterpart >= 0) & (completion >= 0)
    differ = _taken(looks, counterpart) != _taken(looks, completion)
    contexts_agree = (other_prompt < 0) | (other_prompt == prompt)
    columns: dict[str, Any] = {
        "kind": pd.Categorical(kind),  # words as categories: quick to look up and to hash
        "prompt_characters": _taken(in_prompts["characters"], prompt),
        "completion_characters": _taken(in_texts["characters"], completion),
        "other_characters": _where(preference, _taken(in_texts["characters"], other)),
        "text_characters": _where(correction, _taken(in_texts["characters"], text)),
        "is_conversation": _taken(_matches(pc, prompts, _CONVERSATION), prompt),
        "prompt_alternates": _taken(_matches(pc, prompts, _ALTERNATING), prompt),
        "prompt_is_blank": _taken(_matches(pc, prompts, _BLANK_PROMPT), prompt),
        "value_present": value_present.astype(float),
        "thumbs": _where(is_kind[FeedbackKind.thumbs], number),
        "rating": _where(is_kind[FeedbackKind.rating], number),
        "score": _where(is_kind[FeedbackKind.score], number),
        "choice": pd.Categorical(frame["choice"].where(preference)),
        "shown_first": pd.Categorical(frame["shown_first"].where(preference)),
        "criteria_in_range": _where(
            is_kind[FeedbackKind.criteria], _taken(_matches(pc, all_criteria, _CRITERIA), criteria)
        ),
        "contexts_agree": _where(preference, contexts_agree.astype(float)),
        "completions_differ": _where(paired, differ.astype(float)),
        "prompt_damaged": _taken(in_prompts["damaged"], prompt),
        "completion_damaged": _taken(in_texts["damaged"], completion),
        "counterpart_damaged": _taken(in_texts["damaged"], counterpart),
        "completion_letters": _taken(in_texts["letters"], completion),
        "counterpart_letters": _taken(in_texts["letters"], counterpart),
        "completion_repeats": _taken(in_texts["repeats"], completion),
        "counterpart_repeats": _taken(in_texts["repeats"], counterpart),
    }
    codes = {
        "kind": _codes(frame["kind"]),
        "source": _codes(frame["source"]),
        "rater": _codes(frame["rater_id"]),
        "origin": _codes(frame["origin"]),
        "choice": _codes(frame["choice"]),
        "shown_first": _codes(frame["shown_first"]),
        "criteria": criteria,
        "comment": _codes(frame["comment"]),
        "prompt": prompt,
        "other_prompt": other_prompt,
        "completion": completion,
        "other": other,
        "text": text,
        "number": number,
    }
    moment = frame["occurred_at"]  # that of receipt, where the row told none
    own_moment = moment.notna() & (moment != frame["received_at"])
    lone = (codes["rater"] < 0) & (frame["origin"].isin(LIVE) | own_moment).to_numpy()
    inline = frame["interaction_id"].isna().to_numpy() & ~lone
    columns["is_repeated"] = _repeated(codes, inline)
    decided = preference & contexts_agree & paired & (completion != other)
    columns["is_contradicted"] = _contradicted(codes, inline, decided, frame)
    return pd.DataFrame(columns)


def _encoded(
    frame: pd.DataFrame, names: Sequence[str], *, trim: bool
) -> tuple[Any, list[np.ndarray[Any, Any]]]:
    """Return the distinct texts of some columns, and each column as numbers into them; -1: null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    arrays = [pa.array(frame[name], type=pa.large_string(), from_pandas=True) for name in names]
    arrays = [a.combine_chunks() if isinstance(a, pa.ChunkedArray) else a for a in arrays]
    if trim:
        arrays = [pc.utf8_trim_whitespace(array) for array in arrays]
    encoded = pa.chunked_array(arrays).dictionary_encode().unify_dictionaries()
    if not len(frame):
        return pa.array([], pa.large_string()), [np.empty(0, dtype=np.int64) for _ in names]
    codes = [chunk.indices.fill_null(-1).to_numpy() for chunk in encoded.chunks]
    return encoded.chunk(0).dictionary, codes


def _looks(texts: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return per distinct text a number that texts which look the same share, and who is blank."""
    import pyarrow as pa
    import pyarrow.compute as pc

    odd = pc.match_substring_regex(texts, _MAY_LOOK_ALIKE)  # few: the others need no second look
    seen = texts.filter(odd)
    for pattern, instead in ((_UNSEEN, ""), (_ENDS, ""), (_GAP, r"\1 ")):
        seen = pc.replace_substring_regex(seen, pattern, instead)
    seen = pc.replace_with_mask(texts, odd, seen)
    numbers = seen.dictionary_encode().indices.to_numpy()
    return numbers, pc.equal(seen, pa.scalar("", pa.large_string())).to_numpy(zero_copy_only=False)


def _text_measures(texts: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return per distinct text: characters, share damaged, share of letters, one character only.

    A letter is an ASCII letter or digit or anything beyond ASCII, so no script is at a
    disadvantage; its share is 1 where the text is short. Texts go by in blocks: memory stays flat.
    """
    import pyarrow.compute as pc

    letter = np.zeros(256, dtype=np.uint8)
    control = np.zeros(256, dtype=np.uint8)
    for byte in range(256):
        letter[byte] = (byte < 128 and chr(byte).isalnum()) or byte >= 0xC2  # 0x80-0xBF: inside one
        control[byte] = byte == 127 or (byte < 32 and chr(byte) not in "\t\n\r")
    names = ("characters", "damaged", "letters", "repeats")
    found = {name: np.zeros(len(texts)) for name in names}
    for start in range(0, len(texts), 50_000):
        block = texts.slice(start, 50_000)
        rows = slice(start, start + len(block))
        characters = pc.utf8_length(block).to_numpy(zero_copy_only=False).astype(float)
        length = np.maximum(characters, 1)
        replaced = pc.count_substring(block, "\ufffd").to_numpy(zero_copy_only=False)
        letters, controls = _byte_sums(block, (letter, control))
        found["characters"][rows] = characters
        found["damaged"][rows] = (replaced + controls) / length
        found["letters"][rows] = np.where(characters >= LONG, (letters - replaced) / length, 1.0)
        same = pc.equal(
            pc.utf8_slice_codeunits(block, 0, -1), pc.utf8_slice_codeunits(block, 1, None)
        ).to_numpy(zero_copy_only=False)
        found["repeats"][rows] = same & (characters >= REPEATED)
    return found


def _byte_sums(block: Any, tables: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Return per text and table the sum of the table's entries over the text's bytes."""
    _, offset_buffer, content_buffer = block.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int64)[block.offset :][: len(block) + 1]
    content = np.frombuffer(content_buffer or b"", dtype=np.uint8)[offsets[0] : offsets[-1]]
    starts, empty = offsets[:-1] - offsets[0], offsets[1:] == offsets[:-1]
    sums = []
    for table in tables:
        weights = np.append(table[content], np.uint8(0))  # so that a last empty text has a place
        if weights.any():
            sums.append(np.where(empty, 0, np.add.reduceat(weights, starts, dtype=np.int32)))
        else:
            sums.append(np.zeros(len(block), dtype=np.int32))
    return sums


def _matches(pc: Any, texts: Any, pattern: str) -> np.ndarray[Any, Any]:
    matched = pc.match_substring_regex(texts, pattern)
    return np.asarray(matched.to_numpy(zero_copy_only=False), dtype=float)


def _taken(values: np.ndarray[Any, Any], codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the value of each row's text, NaN where the row has none."""
    if not len(values):
        return np.full(len(codes), np.nan)
    return np.where(codes >= 0, values[codes], np.nan)


def _where(applies: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.where(applies, values, np.nan)


def _codes(column: pd.Series[Any]) -> np.ndarray[Any, Any]:
    import pandas as pd

    return pd.factorize(column)[0]


def _hashes(columns: Mapping[str, np.ndarray[Any, Any]]) -> pd.Series[Any]:
    """Return one 64-bit hash per row: equal rows, equal hash."""
    import pandas as pd

    return pd.util.hash_pandas_object(pd.DataFrame(dict(columns)), index=False)


def _repeated(
    codes: Mapping[str, np.ndarray[Any, Any]], inline: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Return 1.0 for inline rows that say again what an earlier row of their origin said.

    Rows about an interaction are never duplicates: many people may say the same of one answer. Nor
    are unsigned ones of LIVE origins, or with a moment of their own, which are not among `inline`.
    """
    rows = np.flatnonzero(inline)
    repeated = np.zeros(len(inline))
    hashes = _hashes({name: values[rows] for name, values in codes.items()})
    repeated[rows] = hashes.duplicated().to_numpy()
    return repeated


def _contradicted(
    codes: Mapping[str, np.ndarray[Any, Any]],
    inline: np.ndarray[Any, Any],
    decided: np.ndarray[Any, Any],
    frame: pd.DataFrame,
) -> np.ndarray[Any, Any]:
    """Return 1.0 for preferences whose opposite is there too.

    From the same rater; of unsigned inline rows from the same file. Unsigned votes on interactions,
    from LIVE origins, or with a moment of their own come from people we cannot tell apart, who may
    disagree.
    """
    import pandas as pd

    choice = frame["choice"].astype("object").to_numpy()
    first = frame["shown_first"].astype("object").to_numpy()
    decided = decided & np.isin(choice.astype(str), ("left", "right"))
    decided &= np.isin(first.astype(str), ("this", "other"))
    rows = np.flatnonzero(decided & ((codes["rater"] >= 0) | inline))
    prefers_this = (choice[rows] == "left") == (first[rows] == "this")
    this, other = codes["completion"][rows], codes["other"][rows]
    rater = codes["rater"][rows]
    keys = _hashes(
        {
            "rater": rater,
            "origin": np.where(rater >= 0, -1, codes["origin"][rows]),
            "prompt": codes["prompt"][rows],
            "low": np.minimum(this, other),
            "high": np.maximum(this, other),
        }
    )
    prefers_low = pd.Series(prefers_this == (this < other))
    contradicted = np.zeros(len(decided))
    contradicted[rows] = prefers_low.groupby(keys).transform("nunique").to_numpy() > 1
    return contradicted
