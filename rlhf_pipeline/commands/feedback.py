"""`rlhf ingest · feedback export, withdraw, quarantine`: votes from files, out, back, set aside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlhf_pipeline.commands.common import (
    SOME_QUARANTINED,
    Agent,
    AsJson,
    Force,
    console,
    inert,
    need_name,
    need_new,
    need_outside,
    one_line,
    progress,
    tell_new,
    workspace,
)
from rlhf_pipeline.errors import ConfigError

SHOWN = ("origin", "line", "rule", "detail", "raw", "feedback_id")
LONGEST_SHOWN = 200  # characters of a row that a terminal shows; --json has what is kept

if TYPE_CHECKING:
    from rlhf_pipeline.feedback.ingest import IngestSummary
    from rlhf_pipeline.records import Progress


def ingest(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...",
            help="Files (.jsonl, .json, .ndjson, .csv, .tsv, each also .gz; .parquet, .xlsx), "
            "folders, or hf://DATASET.",
        ),
    ],
    agent: Agent,
    format: Annotated[
        str,
        typer.Option(
            "--format",
            help="auto looks at the rows; or events, pairs, hh_rlhf, oasst, answers, judgements, "
            "quality.",
        ),
    ] = "auto",
    source: Annotated[
        Literal["human", "model", "code"],
        typer.Option("--source", help="Whose judgement it is, where the rows do not say."),
    ] = "human",
    split: Annotated[
        str, typer.Option("--split", help="The split of a hub data set.", metavar="NAME")
    ] = "train",
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="FIELD=COLUMN",
            help="The file's name for a field, or a path into its objects as trace.input.text; "
            "again for each.",
        ),
    ] = None,
    fixed: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="A field that is the same in every row, such as kind=thumbs; again for each.",
        ),
    ] = None,
    words: Annotated[
        list[str] | None,
        typer.Option(
            "--means",
            metavar="THEIRS=OURS",
            help="What the file's word for a vote means, such as like=up; again for each.",
        ),
    ] = None,
    zone: Annotated[
        str | None,
        typer.Option(
            "--zone",
            metavar="NAME",
            help="Of moments without a zone, as dates in a table have none: Europe/Berlin.",
        ),
    ] = None,
) -> None:
    """Take in feedback from files, folders or hub data sets.

    Every sound row is stored once: the same file again stores nothing twice. A row that breaks a
    rule goes to quarantine with the rule's name; it is never dropped and never repaired. Names of
    its own that a file has for columns can be told here, or once in the recipe (feedback.names),
    whose place --map and --set take; --means and --zone alone are added to them.

    Exit code: 0 when every row was sound, 3 when some were quarantined or a file of a folder could
    not be read (the rest is stored), 1 when a named file could not be read.
    """
    from rlhf_pipeline.continuous import lacks_for_reward
    from rlhf_pipeline.feedback.ingest import ingest as take_in
    from rlhf_pipeline.feedback.renaming import Renaming

    renaming = Renaming(
        _pairs(columns, "--map"), _pairs(fixed, "--set"), _pairs(words, "--means", last=True), zone
    )
    names_told = bool(renaming.columns or renaming.fixed)
    need_name(agent)  # else every row would be set aside for it
    here = workspace(may_be_new=True)
    if not here.settings.feedback.enabled:
        raise ConfigError("feedback.enabled is off in this recipe; turn it on to take feedback in")
    try:
        own = here.settings_of(agent).feedback.names.renaming()
        if names_told:
            renaming = replace(renaming, zone=zone or own.zone)
        else:
            renaming = own.with_words(renaming.words, zone)
    except ConfigError:
        if not names_told:  # else the names are told, whatever has become of the recipe
            raise
    others = here.known_beside(agent)
    with _bytes_bar(paths) as report:
        summary = take_in(
            here.store,
            paths,
            agent,
            format,
            source=source,
            split=split,
            renaming=renaming,
            on_progress=report,
        )
    try:
        settings = here.settings_of(agent)
        lacks = lacks_for_reward(here.store, agent, here.store.counts(agent), settings)
    except ConfigError as error:  # of the agent's own recipe: what came in is told all the same
        lacks = one_line(error)
    _print_summary(summary, agent, lacks)
    _print_passed_over(paths)
    if others and summary.read:
        tell_new(agent, others)
    if summary.quarantined or summary.unreadable:
        raise typer.Exit(SOME_QUARANTINED)


def _pairs(told: list[str] | None, option: str, *, last: bool = False) -> dict[str, str]:
    """Return what an option told as NAME=VALUE, again and again; `last`: a name may hold a =."""
    found: dict[str, str] = {}
    for one in told or ():
        name, sign, value = one.rpartition("=") if last else one.partition("=")
        if not (name and sign and value) or name in found:
            raise typer.BadParameter(
                f"needed NAME=VALUE, each name once, found {ascii(one)[:80]}", param_hint=option
            )
        found[name] = value
    return found


@contextmanager
def _bytes_bar(paths: Sequence[str]) -> Iterator[Progress]:
    """Yield a Progress that draws a bar over the bytes of all files; of the hub it counts rows."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

    known = not any(path.startswith("hf://") for path in paths)
    finished, current, size = 0, "", 0
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[rows]} rows"),
    )
    more = (DownloadColumn(), TimeRemainingColumn()) if known else ()
    with progress(*columns, *more) as bar:
        task = bar.add_task("reading", total=_bytes_of(paths) if known else None, rows=0)

        def report(facts: Mapping[str, float | int | str]) -> None:
            nonlocal finished, current, size
            if facts["file"] != current:
                finished, current = finished + size, str(facts["file"])
            size = int(facts["bytes_total"])
            bar.update(
                task,
                description=Path(current).name,
                completed=finished + int(facts["bytes_read"]),
                rows=facts["read"],
            )

        yield report


def _bytes_of(paths: Sequence[str]) -> int:
    from rlhf_pipeline.feedback.sources import files_in

    folders = [Path(path) for path in paths if Path(path).is_dir()]
    files = [Path(path) for path in paths if Path(path).is_file()]
    files += [path for folder in folders for path in files_in(folder)]
    return sum(path.stat().st_size for path in files)


def _print_passed_over(paths: Sequence[str]) -> None:
    from rlhf_pipeline.feedback.ingest import MOST_COLUMNS
    from rlhf_pipeline.feedback.sources import SUFFIXES, passed_over

    folders = [Path(path) for path in paths if Path(path).is_dir()]
    found = [path for folder in folders for path in passed_over(folder)]
    if found:
        shown = ", ".join(_printable(str(path)) for path in found[:MOST_COLUMNS])
        more = ", …" if len(found) > MOST_COLUMNS else ""
        typer.echo(
            f"passed over, as they are not named {', '.join('*' + each for each in SUFFIXES)}: "
            f"{shown}{more}; unpack or rename what holds votes",
            err=True,
        )


def _print_summary(summary: IngestSummary, agent_id: str, lacks: str | None) -> None:
    from rich.table import Table

    from rlhf_pipeline.feedback.rules import MEANINGS, Rule

    table = Table(title=f"Feedback of agent {agent_id}", title_justify="left")
    table.add_column("")
    table.add_column("rows", justify="right")
    table.add_column("why")
    table.add_row("read", f"{summary.read:,}", f"{summary.counted_files}, {summary.seconds:.1f} s")
    for name, rows, why in summary.taken:
        table.add_row(name, f"{rows:,}", why)
    table.add_row("quarantined", f"{sum(summary.quarantined.values()):,}", "", end_section=True)
    for rule, rows in summary.quarantined.items():
        table.add_row(rule, f"{rows:,}", MEANINGS.get(Rule(rule), ""))
    console().print(table)
    for remark in summary.remarks:
        typer.echo(remark, err=not summary.read)
    if summary.read and lacks is not None:
        typer.echo(f"no reward yet: {lacks}")
    for rule, example in summary.examples.items():
        typer.echo(f"{rule}: {_printable(example)}")
    if summary.quarantined:
        typer.echo(f"every line of them: rlhf feedback quarantine --agent {agent_id}")
    for name, why in summary.unreadable.items():
        typer.echo(f"not read: {name}: {why}", err=True)


def export(
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="name.jsonl, name.csv, a folder for a Hugging Face data set, or - for JSON lines "
            "on standard output.",
        ),
    ],
    agent: Agent,
    pairs: Annotated[
        bool,
        typer.Option("--pairs", help="Preference pairs in TRL's format instead of every event."),
    ] = False,
    history: Annotated[
        bool, typer.Option("--history", help="Also the votes that later ones replaced.")
    ] = False,
    by_interaction: Annotated[
        bool,
        typer.Option(
            "--by-interaction",
            help="Keep interaction ids instead of their texts: for the store that has them.",
        ),
    ] = False,
    force: Force = False,
) -> None:
    """Write an agent's feedback to a file or a data set folder; `rlhf ingest` takes it back."""
    from rlhf_pipeline.feedback.export import STDOUT
    from rlhf_pipeline.feedback.export import export as write

    if pairs and (history or by_interaction):
        raise ConfigError(
            "--pairs holds the votes that count, with their texts, found another option beside it; "
            "leave --history and --by-interaction out"
        )
    need_new(out, force=force)
    here = workspace()
    if out != STDOUT:
        need_outside(out, here.settings.state_dir)
    here.need_agent(agent)
    what: Literal["events", "pairs"] = "pairs" if pairs else "events"
    rows = write(
        here.database, agent, out, what=what, history=history, by_interaction=by_interaction
    )
    typer.echo(f"{rows:,} {what} of agent {agent} in {out}", err=out == STDOUT)


def withdraw(
    agent: Agent,
    file: Annotated[str, typer.Option("--file", help="The file's name, without its folder.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Take back the votes that came with a file, as where its columns were read by wrong names.

    They count for nothing from now on, and what the same people had said of the same before counts
    again; models that learnt from them stay as they are, and an export with --history still has
    them. Ingest the file again as it should have been read: its rows count
    anew, those that are read as they were too.
    """
    here = workspace()
    here.need_agent(agent)
    counts = here.store.origins(agent)
    if file not in counts:
        shown = ", ".join(f"{origin} ({count:,})" for origin, count in counts.items())
        raise ConfigError(
            f"needed a file that votes of agent {agent} came with, found {ascii(file)[:80]}; they "
            f"came from {shown or 'nowhere: none counts'}"
        )
    if not yes:
        typer.echo(f"agent {agent}: {counts[file]:,} votes that count came with {inert(file)}")
        typer.confirm("Take them back? What undoes it is to ingest the file again", abort=True)
    gone = here.store.withdraw(agent, here.store.keys_from(agent, file))
    typer.echo(f"votes of agent {agent} taken back: {gone.votes:,}")
    if gone.again:
        typer.echo(f"votes that those had replaced, and that count again: {gone.again:,}")
    claim = here.claims.held(agent)
    if claim is not None and here.store.withdrawn_from(agent, claim.watermark):
        typer.echo("the turn at work learns from them: its version waits for a person")


def quarantine(
    agent: Agent,
    rule: Annotated[
        str | None, typer.Option("--rule", help="Those of one rule alone.", metavar="NAME")
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, help="How many, the newest first chosen.")
    ] = 20,
    close: Annotated[
        bool,
        typer.Option(
            "--close", help="All of them, or of --rule, are dealt with: count them no more."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show rows that broke a rule: file and line, what was needed and found, and the row itself.

    Mend them where they came from and `rlhf ingest` that again: what is known is stored once. Then
    --close them. Votes that a turn set aside leave by themselves with the turn that finds nothing
    wrong with them.
    """
    import json

    here = workspace()
    here.need_agent(agent)
    counts = here.store.quarantined(agent)
    if rule is not None and rule not in counts:
        raise ConfigError(
            f"needed a rule that set rows of agent {agent} aside ({', '.join(counts) or 'none'}), "
            f"found {ascii(rule)[:80]}"
        )
    if close:
        closed = here.store.close_quarantined(agent, rule=rule)
        typer.echo(f"rows of agent {agent} closed: {closed:,}")
        return
    rows = here.store.quarantined_rows(agent, rule=rule, limit=limit)
    for row in rows:
        place = row.origin if row.line is None else f"{row.origin}:{row.line}"
        if as_json:
            typer.echo(json.dumps({name: getattr(row, name) for name in SHOWN}, ensure_ascii=False))
        else:
            typer.echo(_printable(f"{place}: {row.rule}: {row.detail}"))
            if row.raw is not None:
                typer.echo(f"    {_printable(row.raw[:LONGEST_SHOWN])}")
    total = sum(counts.values()) if rule is None else counts[rule]
    if len(rows) < total:
        typer.echo(f"the newest {len(rows)} of {total:,}; --limit shows more", err=True)
    elif not rows:
        typer.echo(f"no row of agent {agent} is in quarantine", err=True)


def _printable(text: str) -> str:
    """Return the text on one line, without what a terminal would obey."""
    return "".join(sign if sign.isprintable() else " " for sign in text)
