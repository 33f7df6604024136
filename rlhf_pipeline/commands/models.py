"""`rlhf versions · promote · rollback · reset-baseline · explain · reproduce · export`, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf_pipeline.commands.common import (
    Agent,
    AsJson,
    VersionArgument,
    Workspace,
    actor,
    console,
    inert,
    one_line,
    progress,
    workspace,
)
from rlhf_pipeline.errors import RegistryError

if TYPE_CHECKING:
    from rlhf_pipeline import overview
    from rlhf_pipeline.registry.ledger import ModelVersion

CLOCK = (
    "; its chat template reads the clock (strftime_now), so on another day than it was trained on "
    "other prompts come of it: for versions that come out again on any day, train from a base "
    "whose template writes no date"
)


MEASURED = ("score", "KL", "learned", "satisfaction")
FOR_WIDE = ("label", "MLflow", "learned")
WIDE = 120  # columns; below it each column would get a few letters
WHOLE = 10  # letters of a day or of the longest word, which else would be cut


def versions(agent: Agent) -> None:
    """List an agent's versions: who serves, who waits, what the gate and people said.

    Score is the gate model's on held-out prompts, with its spread between them; learned is how much
    of it came over the champion of that day for 1,000 more votes. KL is in nats a completion.
    Withdrawn is who was rolled back from, or lost an experiment: `rlhf explain VERSION` says which.
    A narrow terminal shows no label, MLflow version and learned.
    """
    from rich.table import Table

    from rlhf_pipeline.overview import standings

    here = workspace()
    here.version(agent, "0")  # says what to do where there is none
    seen = {one.version: one for one in standings(here.store.database, here.ledger, agent)}
    rows = [
        {
            "version": str(version.version),
            "label": version.label,
            "standing": ", ".join(seen[version.version].roles),
            "gate": _gate(version),
            "registered (UTC)": f"{version.created_at:%Y-%m-%d %H:%M}",
            "MLflow": version.mlflow_version or "–",
            **_measured(seen[version.version]),
        }
        for version in here.ledger.versions(agent)
    ]
    shown = console()
    names = [name for name in rows[0] if shown.width >= WIDE or name not in FOR_WIDE]
    table = Table()
    for name in names:
        table.add_column(
            name,
            justify="right" if name in MEASURED else "left",
            min_width=WHOLE if name in ("standing", "gate", "registered (UTC)") else None,
        )
    for row in rows:
        table.add_row(*(row[name] for name in names))
    shown.print(table)


def _measured(standing: overview.Standing) -> dict[str, str]:
    """Return score, KL, what was learned, and satisfaction; a dash where nobody measured."""
    told = [
        (standing.score, f" ± {standing.spread or 0.0:.2f}", "+.2f"),
        (standing.kl, "", ".1f"),
        (standing.learned, "", "+.2f"),
        (standing.satisfaction, f" ± {standing.margin or 0.0:.2f}", ".2f"),
    ]
    shown = ["–" if value is None else f"{value:{form}}{more}" for value, more, form in told]
    return dict(zip(MEASURED, shown, strict=True))


def promote(
    version: VersionArgument,
    agent: Agent,
    reason: Annotated[
        str, typer.Option("--reason", "-r", help="Why; the ledger keeps it.")
    ] = "promoted by hand",
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Although the gate refused or never judged it, or it was rolled back; the ledger "
            "says so.",
        ),
    ] = False,
) -> None:
    """Make a version the champion: from the next request on it answers.

    Its files are checked against the registered hashes first. A version that the gate refused, or
    that was rolled back, as champion or in an experiment, needs --force. What it was compared with
    is the champion of its day: where that is no longer the champion, a warning says so.
    """
    from rlhf_pipeline.experiment.book import ExperimentBook
    from rlhf_pipeline.registry.comparison import by_place, compared_with

    here = workspace()
    wanted, champion = here.version(agent, version), here.version(agent, "champion")
    met = ExperimentBook(here.database).running(agent)
    if version == "challenger" and met is not None and met.challenger != wanted.version:
        raise RegistryError(
            f"a version's number is needed, found challenger: version {met.challenger} is in an "
            f"experiment, and version {wanted.version} waits, which nobody has met"
        )
    here.registry.folder_of(wanted)
    outcome = here.ledger.promote(
        agent,
        wanted.version,
        actor=actor(),
        reason=reason,
        expected_champion=champion.version,
        force=force,
    )
    typer.echo(outcome.words)
    then = compared_with(wanted, by_place(here.ledger.versions(agent)))
    if outcome.changed and then is not None and then.version != champion.version:
        typer.echo(
            f"warning: version {wanted.version} was compared with version {then.version}, the "
            f"champion of that day, and not with version {champion.version}; `rlhf experiment "
            f"offline {champion.version} {wanted.version} --agent {agent}` does that",
            err=True,
        )
    _reconcile(here, agent)


def rollback(
    agent: Agent,
    reason: Annotated[str, typer.Option("--reason", "-r", help="Why; the ledger keeps it.")],
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="VERSION", help="An earlier champion. Default: the last one."),
    ] = None,
) -> None:
    """Make an earlier champion the champion again.

    Twice in a row goes two back. The version that was left is not promoted again without --force.
    """
    here = workspace()
    champion = here.version(agent, "champion")
    previous = here.ledger.standing(agent).previous
    target = here.version(agent, to) if to is not None else previous
    if target is not None:
        here.registry.folder_of(target)
    outcome = here.ledger.rollback(
        agent,
        actor=actor(),
        reason=reason,
        to=target.version if to is not None and target is not None else None,
        expected_champion=champion.version,
    )
    typer.echo(outcome.words)
    _reconcile(here, agent)


def reset_baseline(
    agent: Agent,
    reason: Annotated[str, typer.Option("--reason", "-r", help="Why; the ledger keeps it.")],
) -> None:
    """Make the champion the baseline: the version that drift is measured from.

    PPO's reference, the gate's rules about KL and about what adds up over versions, and the answers
    where a champion fails are the baseline's. It stays what it was, version 0, until a person says
    that where the champion has come to is where it should be. Turns that have begun end with the
    one they began with. The way back: roll back, and reset again.
    """
    here = workspace()
    champion = here.version(agent, "champion")
    here.registry.folder_of(champion)
    outcome = here.ledger.reset_baseline(
        agent, actor=actor(), reason=reason, expected_champion=champion.version
    )
    typer.echo(outcome.words)


def explain(
    version: Annotated[
        str,
        typer.Argument(
            metavar="VERSION|interaction",
            help="A number, or champion, challenger, previous, baseline; or the word interaction.",
        ),
    ],
    interaction: Annotated[
        str | None, typer.Argument(metavar="ID", help="After the word interaction: its id.")
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            "--agent",
            "-a",
            envvar="RLHF_AGENT",
            help="The assistant, by its agent's name. An interaction knows its own.",
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            "--version",
            "-v",
            metavar="VERSION",
            help="Whose preference for an interaction. Default: the version that answered, or the "
            "champion where a model elsewhere did.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print where a version came from, or why it prefers what was said in one interaction.

    A version: every ledger entry, the gate, feedback, code, and its recipe where that is unlike the
    defaults (--json has all of it). An interaction, by its id (`rlhf explain interaction ID`): what
    each reward function and head gives the completion and the baseline's, how much likelier each
    token became, and the nearest votes that were learned from.
    """
    if (version == "interaction") != (interaction is not None):
        raise typer.BadParameter("needed VERSION, or the word interaction and its ID")
    here = workspace()
    if interaction is not None:
        told, text = _reasons(here, interaction, agent, by)
    elif agent is None:
        raise typer.BadParameter("a version is one of an agent's: needed --agent too")
    elif by is not None:
        raise typer.BadParameter(f"needed an interaction for --version, found version {version}")
    else:
        from rlhf_pipeline.registry.explain import explain as explained
        from rlhf_pipeline.registry.explain import to_text

        told = explained(here.ledger, agent, here.version(agent, version).version)
        text = to_text(told)
    shown = json.dumps(told, ensure_ascii=False, indent=2) if as_json else text.rstrip()
    typer.echo(inert(shown))


def _reasons(
    here: Workspace, interaction: str, agent: str | None, by: str | None
) -> tuple[dict[str, Any], str]:
    """Return why a version prefers an interaction's completion, as JSON values and as text."""
    from rlhf_pipeline.registry.reasons import need_interaction, reasons
    from rlhf_pipeline.registry.reasons_told import to_json, to_text

    asked = need_interaction(here.registry, interaction, agent)
    found = reasons(here.registry, here.settings_of(asked.agent_id), interaction, version=by)
    return to_json(found), to_text(found)


def export(
    version: VersionArgument,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new or an empty folder.")],
    agent: Agent,
) -> None:
    """Write a version as a folder that any transformers program loads.

    safetensors and JSON only; hashes are checked on the way, an adapter is merged into its base.
    """
    from rlhf_pipeline.registry.export import export as write

    here = workspace()
    found = here.version(agent, version)
    files = write(here.registry, agent, found.version, directory)
    for name, digest in files.items():
        typer.echo(f"{digest}  {name}")
    typer.echo(f"version {found.version} of {agent}: {len(files)} files in {directory}", err=True)


def reproduce(
    version: VersionArgument,
    agent: Agent,
    keep: Annotated[
        Path | None,
        typer.Option("--keep", metavar="DIR", help="Keep what comes out in this new folder."),
    ] = None,
) -> None:
    """Train a version again from its recorded snapshot, recipe and seeds, and compare the files.

    Takes as long as the training took. On the same machine's CPU the weights come out bit for bit;
    the exit code is 1 where they do not, and the message names the files. A chat template that
    writes the date (strftime_now) writes another one on another day: what it laid out differs then.
    """
    import tempfile

    from rlhf_pipeline.registry.reproduce import reproduce as train_again

    here = workspace()
    found = here.version(agent, version)
    if keep is not None and keep.exists():
        raise RegistryError(f"--keep needs a new folder, found something at {keep}")
    with tempfile.TemporaryDirectory() as scratch, progress() as bars:
        task = bars.add_task(f"version {found.version}", total=None)
        outcome = train_again(
            here.ledger,
            here.settings_of(agent),
            found,
            keep or Path(scratch) / "work",
            lambda facts: bars.update(task, description=str(facts["stage"])),
        )
    for name in outcome.same:
        typer.echo(f"same       {name}")
    for name in outcome.different:
        typer.echo(f"different  {name}")
    if not outcome.is_exact:
        raise RegistryError(
            f"version {found.version} of {agent} came out otherwise in {len(outcome.different)} "
            f"of {len(found.files)} files; it was trained by code {found.lineage.get('code')}: "
            "take that commit, that machine and its thread count, and see `rlhf explain`"
            + (CLOCK if _reads_the_clock(found.path) else "")
        )
    typer.echo(f"version {found.version} of {agent} is reproduced, bit for bit")
    if outcome.erased:
        typer.echo(f"{outcome.erased} rows erased since; none of them was in what it trained on")


def _reads_the_clock(policy: Path) -> bool:
    """Return whether a policy's chat template writes the date of the day on which it is used."""
    files = [policy / name for name in ("chat_template.jinja", "tokenizer_config.json")]
    return any("strftime_now" in file.read_text() for file in files if file.is_file())


def _reconcile(here: Workspace, agent_id: str) -> None:
    """Bring MLflow's aliases after the ledger; the ledger holds whether or not that works."""
    try:
        changes = here.registry.reconcile(agent_id)
    except RegistryError as error:
        typer.echo(
            f"warning: the ledger has it, MLflow's aliases will follow: {one_line(error)}", err=True
        )
        return
    for change in changes:
        typer.echo(f"MLflow {change}")


def _gate(version: ModelVersion) -> str:
    if version.gate is None:
        return "not judged"
    if version.passed_gate:
        return "passed"
    rules = [r["rule"] for r in version.gate.get("results", ()) if r["verdict"] == "fail"]
    return f"refused: {', '.join(rules)}"
