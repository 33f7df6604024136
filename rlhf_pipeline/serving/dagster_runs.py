"""Asking Dagster for a training run over its GraphQL address, and following the run.

The service trains nothing itself: what it asks for shows in Dagster's page like any other run, and
waits in the same queue. Names that Dagster knows stand here a second time, because the engine
imports nothing above it; a test holds them against the originals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from rlhf_pipeline.errors import OrchestratorAway

if TYPE_CHECKING:
    from gql.transport import Transport

JOB, PARTITIONS = "retrain", "agents"
AGENT, ASKED_BY, WATERMARK = "dagster/partition", "rlhf/asked_by", "rlhf/watermark"  # run tags
MAX_STEPS, LEARNING_RATE = "rlhf/max_steps", "rlhf/learning_rate"
MAX_RUNTIME = "dagster/max_runtime"
SECONDS = 60  # Dagster loads the job before it answers
EVENTS = 1000  # of a run's log that are searched for what failed

NO_RUN = "RunNotFoundError"  # what Dagster answers of a run that was deleted

RunState = Literal["at work", "done", "failed"]

WHERE = """query { repositoriesOrError { __typename
  ... on RepositoryConnection { nodes { name location { name } jobs { name } } }
  ... on PythonError { message } } }"""
AT_WORK = """query ($filter: RunsFilter!) { runsOrError(filter: $filter, limit: 1) { __typename
  ... on Runs { results { runId } }
  ... on PythonError { message } } }"""
ADD_PARTITION = """mutation ($where: RepositorySelector!, $name: String!, $key: String!) {
  addDynamicPartition(
    repositorySelector: $where, partitionsDefName: $name, partitionKey: $key
  ) { __typename ... on UnauthorizedError { message } ... on PythonError { message } } }"""
LOG = """query ($run: ID!, $limit: Int!) { logsForRun(runId: $run, limit: $limit) { __typename
  ... on EventConnection { events { __typename
    ... on ExecutionStepFailureEvent { stepKey error { message causes { message } } }
    ... on RunFailureEvent { message } } } } }"""


class DagsterRuns:
    """The training runs of one Dagster. Every method raises OrchestratorAway where none answers."""

    def __init__(self, url: str, *, transport: Callable[[], Transport] | None = None) -> None:
        self.url = url.rstrip("/")
        self._make_transport = transport or self._over_http

    def at_work(self, agent_id: str) -> str | None:
        """Return the id of the agent's run that waits or trains, None where there is none."""
        statuses = ["QUEUED", "NOT_STARTED", "MANAGED", "STARTING", "STARTED", "CANCELING"]
        wanted = {"tags": [{"key": AGENT, "value": agent_id}], "statuses": statuses}
        found = self._ask(AT_WORK, {"filter": wanted})["runsOrError"]
        runs = self._needed(found, "Runs")["results"]
        return str(runs[0]["runId"]) if runs else None

    def start(
        self, agent_id: str, config: Mapping[str, Any], tags: Mapping[str, str | None]
    ) -> str:
        """Ask for the job `retrain` of one agent, with those tags that have a value; return its id.

        `config` is feedback_snapshot's: the watermark, and whether to train again.
        """
        found = self._needed(self._ask(WHERE)["repositoriesOrError"], "RepositoryConnection")
        homes = [n for n in found["nodes"] if any(job["name"] == JOB for job in n["jobs"])]
        if len(homes) != 1:
            raise OrchestratorAway(
                f"needed one code location with the job {JOB} in Dagster at {self.url}, found "
                f"{len(homes)}; start it from workspace.yaml, and see whether it loads"
            )
        location, repository = homes[0]["location"]["name"], homes[0]["name"]
        where = {"repositoryLocationName": location, "repositoryName": repository}
        added = self._ask(ADD_PARTITION, {"where": where, "name": PARTITIONS, "key": agent_id})
        self._needed(
            added["addDynamicPartition"],
            "AddDynamicPartitionSuccess",
            "DuplicateDynamicPartitionError",  # known already
        )
        from dagster_graphql import DagsterGraphQLClientError

        try:
            run_id: str = self._client().submit_job_execution(
                JOB,
                repository_location_name=location,
                repository_name=repository,
                run_config={"ops": {"feedback_snapshot": {"config": dict(config)}}},
                tags={
                    AGENT: agent_id,
                    ASKED_BY: "api",
                    **{key: value for key, value in tags.items() if value is not None},
                },
            )
        except DagsterGraphQLClientError as error:
            raise self._away(error) from error
        return run_id

    def state(self, run_id: str) -> RunState:
        """Return whether the run still goes on, or how it ended; deleted, it has failed."""
        from dagster_graphql import DagsterGraphQLClientError

        try:
            status: str = self._client().get_run_status(run_id).value
        except DagsterGraphQLClientError as error:
            if error.args[0] == NO_RUN:
                return "failed"
            raise self._away(error) from error
        if status in ("FAILURE", "CANCELED"):
            return "failed"
        return "done" if status == "SUCCESS" else "at work"

    def why(self, run_id: str) -> str:
        """Return what made the run fail, innermost cause first known; for a person to read."""
        found = self._ask(LOG, {"run": run_id, "limit": EVENTS})["logsForRun"]
        if found["__typename"] == NO_RUN:
            return "the run was deleted"
        events = found.get("events", [])
        for event in events:
            if event.get("error"):
                causes = event["error"].get("causes") or [event["error"]]
                return f"{event['stepKey']}: {causes[-1]['message'].strip()[-600:]}"
        ends = [e["message"] for e in events if e["__typename"] == "RunFailureEvent"]
        return ends[-1] if ends else "the run was ended"

    def _ask(self, query: str, variables: Mapping[str, Any] | None = None) -> dict[str, Any]:
        import requests
        from gql import Client, gql
        from gql.transport.exceptions import TransportError

        request = gql(query)
        request.variable_values = dict(variables or {})
        try:
            answer: dict[str, Any] = Client(transport=self._make_transport()).execute(request)
        except (TransportError, requests.RequestException) as error:
            raise self._away(error) from error
        return answer

    def _client(self) -> Any:
        from dagster_graphql import DagsterGraphQLClient

        # A transport belongs to one question at a time; threads ask at once.
        return DagsterGraphQLClient(
            urlsplit(self.url).hostname or "", transport=self._make_transport()
        )

    def _over_http(self) -> Transport:
        from gql.transport.requests import RequestsHTTPTransport

        return RequestsHTTPTransport(url=f"{self.url}/graphql", timeout=SECONDS)

    def _needed(self, found: Mapping[str, Any], *kinds: str) -> Mapping[str, Any]:
        if found["__typename"] not in kinds:
            raise self._away(f"{found['__typename']}: {found.get('message', '')}")
        return found

    def _away(self, error: object) -> OrchestratorAway:
        cause = getattr(error, "__cause__", None)  # their client wraps what happened
        words = str(cause or error).strip() or type(error).__name__
        return OrchestratorAway(
            f"needed Dagster to answer at {self.url}, found {words.splitlines()[0][:300]}; start "
            "it (`make ui`), or set training.dagster_url"
        )
