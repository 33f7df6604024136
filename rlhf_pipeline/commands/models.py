"""`rlhf versions · promote · rollback · explain · reproduce · export`: the ledger, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_pipeline.commands.common import (
    Agent,
    AsJson,
    VersionArgument,
    Workspace,
    actor,
    console,
    one_line,
    progress,
    workspace,
)
from rlhf_pipeline.errors import RegistryError

if TYPE_CHECKING:
    from rlhf_pipeline.registry.ledger import ModelVersion, Standing


def versions(agent: Agent) -> None:
    """List an agent's versions: who serves, who waits, what the gate said."""
    from rich.table import Table

    here = workspace()
    here.version(agent, "0")  # says what to do where there is none
    standing, baseline = here.ledger.standing(agent), here.ledger.baseline(agent)
    table = Table("version", "label", "standing", "gate", "registered (UTC)", "MLflow")
    for version in here.ledger.versions(agent):
        table.add_row(
            str(version.version),
            version.label,
            ", ".join(_roles(version, standing, baseline)),
            _gate(version),
            f"{version.created_at:%Y-%m-%d %H:%M}",
            version.mlflow_version or "–",
        )
    console().print(table)


def promote(
    version: VersionArgument,
    agent: Agent,
    reason: Annotated[
        str, typer.Option("--reason", "-r", help="Why; the ledger keeps it.")
    ] = "promoted by hand",
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Although the gate refused or never judged it; the ledger says so."
        ),
    ] = False,
) -> None:
    """Make a version the champion: from the next request on it answers.

    Its files are checked against the registered hashes first. A version that the gate refused, or
    that was rolled back from, needs --force.
    """
    here = workspace()
    wanted, champion = here.version(agent, version), here.version(agent, "champion")
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


def explain(version: VersionArgument, agent: Agent, as_json: AsJson = False) -> None:
    """Print where a version came from: feedback, recipe, code, gate, every ledger entry."""
    from rlhf_pipeline.registry.explain import explain as explained
    from rlhf_pipeline.registry.explain import to_text

    here = workspace()
    told = explained(here.ledger, agent, here.version(agent, version).version)
    text = json.dumps(told, ensure_ascii=False, indent=2) if as_json else to_text(told).rstrip()
    typer.echo(text)


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
    the exit code is 1 where they do not, and the message names the files.
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
        )
    typer.echo(f"version {found.version} of {agent} is reproduced, bit for bit")
    if outcome.erased:
        typer.echo(f"{outcome.erased} rows erased since; none of them was in what it trained on")


def _reconcile(here: Workspace, agent_id: str) -> None:
    """Bring MLflow's aliases after the ledger; the ledger holds whether or not that works."""
    try:
        changes = here.registry.reconcile(agent_id).changes
    except RegistryError as error:
        typer.echo(
            f"warning: the ledger has it, MLflow's aliases will follow: {one_line(error)}", err=True
        )
        return
    for change in changes:
        typer.echo(f"MLflow {change}")


def _roles(version: ModelVersion, standing: Standing, baseline: ModelVersion | None) -> list[str]:
    roles = {
        "champion": standing.champion,
        "challenger": standing.challenger,
        "previous": standing.previous,
        "baseline": baseline,
    }
    return [name for name, other in roles.items() if other and other.version == version.version]


def _gate(version: ModelVersion) -> str:
    if version.gate is None:
        return "not judged"
    if version.passed_gate:
        return "passed"
    rules = [r["rule"] for r in version.gate.get("results", ()) if r["verdict"] == "fail"]
    return f"refused: {', '.join(rules)}"
