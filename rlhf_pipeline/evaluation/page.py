"""A comparison as one HTML page that needs nothing else: no script, no network, no other file.

Pictures are data URIs, and a content security policy in the page itself forbids everything else, so
what a model wrote cannot act even where escaping it was forgotten.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from rlhf_pipeline.evaluation.gate import GateDecision
from rlhf_pipeline.evaluation.report import (
    GROUP_HEAD,
    JUDGE_HEAD,
    MEANING,
    PHRASES,
    Against,
    EvaluationReport,
    GroupResult,
    Sample,
    group_rows,
)

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'"
STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.45 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0} img{max-width:100%} small,.off{color:#6b6b6b}
td,th{padding:.25rem .7rem;border-bottom:1px solid #ddd;text-align:left}
.n{text-align:right;font-variant-numeric:tabular-nums} td.n{white-space:nowrap}
.scroll{overflow-x:auto}
.pass{color:#1b7837} .fail{color:#b2182b;font-weight:bold} .pause,.warn{color:#b35806}
.sample{border-left:3px solid #ccc;padding-left:1rem;margin:1.2rem 0} .said{white-space:pre-wrap}
.sample table{width:100%;table-layout:fixed} .sample td{vertical-align:top;overflow-wrap:anywhere}
.wide{min-width:16rem} @media (max-width:40rem){.scroll img{max-width:none}}
@media (prefers-color-scheme:dark){td,th{border-color:#444} small,.off{color:#a0a0a0}
img{filter:invert(.93) hue-rotate(180deg)}
.pass{color:#7fd495} .fail{color:#ff9a9a} .pause,.warn{color:#f0b070}}
"""
PLAIN: Mapping[str, str] = {}  # systems and metrics under the report's own names


def page(title: str, inner: str) -> str:
    """Return the page: its title, and a `body` below it."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n{inner}\n</body></html>\n"
    )


def body(
    report: EvaluationReport,
    decision: GateDecision | None,
    pictures: Sequence[Path],
    *,
    words: Sequence[str] = (),
    names: Mapping[str, str] = PLAIN,
) -> str:
    """Return verdict, rules, numbers, phrases, groups, behaviour, pictures, samples, as HTML.

    Without a decision nothing is said of the gate; PNG files among `pictures` are put in.
    A comparison outside a turn says in `words` what it found, and of which prompts; `names` has
    what is shown in the place of the report's own names of systems and metrics.
    """
    prompts = "prompts" if words else "held-out prompts"
    parts = [
        *(f"<p>{escape(line)}</p>" for line in words),
        f"<p>{report.prompts} {prompts}, temperature {report.temperature:g}, seed "
        f"{report.seed}. Intervals hold 95 %.</p>",
        *([] if decision is None else _gate(decision)),
        *(_comparison(report, against, names) for against in report.others),
        *(f"<p>{escape(line)}</p>" for line in report.judge_words()),
        *(_phrases(report, against, names) for against in report.others),
        _pieces(report),
        _groups("topic", report.topics),
        _groups("cohort", report.cohorts),
        _judge(report),
        _behaviour(report),
        "<h2>Pictures</h2>" if pictures else "",
        *(_picture(picture) for picture in pictures),
        "<h2>Side by side</h2>" if report.samples else "",
        *(_sample(sample, names) for sample in report.samples),
    ]
    return "\n".join(part for part in parts if part)


def _gate(decision: GateDecision) -> list[str]:
    verdict = "lets it through" if decision.passed else "refuses it"
    rows = [
        [
            _named(r.rule, r.words.partition(": needed")[0]),
            f'<span class="{escape(r.verdict)}">{escape(r.verdict)}</span>',
            "not measured" if r.number is None else f"{r.number:.4g}",
            r.bound,
        ]
        for r in decision.results
    ]
    return [
        f"<h2>The gate {verdict}</h2>",
        "".join(f"<p>{escape(words)}</p>" for words in decision.said),
        _table(["rule", "verdict", "number", "limit"], rows, numbers=(2, 3)),
    ]


def _comparison(report: EvaluationReport, against: Against, names: Mapping[str, str]) -> str:
    rows = [
        [
            _named(names.get(row.name, row.name), MEANING.get(row.name, "")),
            *map(escape, (row.other, row.here, row.change, row.percent, row.interval)),
        ]
        for row in report.rows(against)
    ]
    here, other = names.get("candidate", "candidate"), names.get(against, against)
    head = ["metric", other, here, "change", "change %", "95 % interval"]
    title = f"{here.capitalize()} against {other}"
    return f"<h2>{escape(title)}</h2>" + _table(head, rows, range(1, 6))


def _phrases(report: EvaluationReport, against: Against, names: Mapping[str, str]) -> str:
    rows = [list(map(escape, cells)) for cells in report.phrase_rows(against)]
    if not rows:
        return ""
    here, other = names.get("candidate", "candidate"), names.get(against, against)
    title = f"{PHRASES} than the {against}"
    for system, name in names.items():
        title = title.replace(f"the {system}", name)
    head = ["words", f"{other}: share of answers", here]
    return f"<h2>{escape(title)}</h2>" + _table(head, rows, range(1, 3))


def _pieces(report: EvaluationReport) -> str:
    if report.reward is None:
        return ""
    head, *rows = report.reward.rows()
    return "<h2>Reward by function</h2>" + _table(
        head, [list(map(escape, row)) for row in rows], range(1, len(head))
    )


def _groups(word: str, groups: Mapping[str, GroupResult]) -> str:
    rows = [
        [*map(escape, cells), f'<div class="wide">{escape(rest)}</div>']
        for *cells, rest in group_rows(groups)
    ]
    if not rows:
        return ""
    return f"<h2>By {word}, against the champion</h2>" + _table(
        [word, *GROUP_HEAD], rows, range(1, len(GROUP_HEAD))
    )


def _judge(report: EvaluationReport) -> str:
    rows = [list(map(escape, cells)) for cells in report.judge_rows()]
    if not rows:
        return ""
    return "<h2>The gate's reward model, by group</h2>" + _table(JUDGE_HEAD, rows, range(1, 4))


def _behaviour(report: EvaluationReport) -> str:
    if not report.behaviour:
        return ""
    systems = ["candidate", *report.others]
    rows = [
        [
            escape(result.kind.replace("_", " ")),
            escape(result.name),
            *(f"{result.failures[system]} of {result.tries}" for system in systems),
            escape(f"{result.wrong}: {result.example}" if result.example is not None else ""),
        ]
        for result in report.behaviour
    ]
    head = [
        "kind",
        "item",
        *(f"{system} fails" for system in systems),
        "the candidate's first failure",
    ]
    return "<h2>Behaviour</h2>" + _table(head, rows, range(2, 2 + len(systems)))


def _picture(path: Path) -> str:
    encoded = base64.b64encode(path.read_bytes()).decode()
    words = escape(path.stem.replace("_", " "))
    drawn = f'<img alt="{words}" src="data:image/png;base64,{encoded}">'
    return f'<div class="scroll">{drawn}</div>'


def _sample(sample: Sample, names: Mapping[str, str]) -> str:
    asked = [f"<b>{escape(role)}:</b> {escape(content)}" for role, content in sample.prompt]
    head = [f"{names.get(s, s)} ({sample.scores[s]:.2f})" for s in sample.completions]
    said = [f'<div class="said">{escape(text)}</div>' for text in sample.completions.values()]
    return f'<div class="sample">{"<br>".join(asked)}{_table(head, [said], ())}</div>'


def _named(name: str, meaning: str) -> str:
    """Return a name that may break at its underscores, and below it what it means."""
    told = f"<br><small>{escape(meaning)}</small>" if meaning else ""
    return escape(name).replace("_", "_<wbr>") + told


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> str:
    """Return a table; its cells are HTML already."""
    lines = [_row("th", [escape(cell) for cell in head], numbers)]
    lines += [_row("td", row, numbers) for row in rows]
    return '<div class="scroll"><table>' + "\n".join(lines) + "</table></div>"


def _row(kind: str, cells: Sequence[str], numbers: Sequence[int]) -> str:
    inside = (
        f"<{kind}{' class=n' if i in numbers else ''}>{cell}</{kind}>"
        for i, cell in enumerate(cells)
    )
    return f"<tr>{''.join(inside)}</tr>"
