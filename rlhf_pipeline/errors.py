"""Everything the engine raises on purpose, one type per boundary.

    PipelineError
    ├── ConfigError            a setting is unknown, out of range or contradicts another
    ├── FeedbackError          feedback cannot be taken or read
    │   ├── FeedbackRefused    one event breaks a rule; carries the rule's name
    │   ├── TooManyVotes      one person votes faster than the settings allow
    │   ├── IdempotencyConflict  a known key arrived with another body
    │   │   └── VoteErased     the key's vote was erased with who gave it
    │   ├── UnknownRater       nothing is held about the person who is named
    │   └── SourceError        a file or data set cannot be read at all
    ├── ClaimError             a training run may not go on
    │   ├── ClaimRefused       this fingerprint is already claimed, or was trained on
    │   └── ClaimLost          a newer holder has taken over; what the old one writes is refused
    ├── ValidationFailed       the snapshot as a whole is not fit for training
    ├── TrainingError          a model cannot be trained from what was given
    │   ├── NotEnoughData      too few examples; says how many more
    │   ├── ShapeMismatch      tensors that must agree do not
    │   └── CheckpointDamaged  a checkpoint's files do not match its manifest
    ├── ModelError             a model cannot be loaded, saved or run
    ├── EvaluationError        a comparison cannot be made
    ├── ChatError              a chat request has no answer
    │   ├── ChatRefused        it breaks an input rule; carries the rule's name
    │   └── ChatAway           neither the champion nor the baseline could answer
    ├── ExperimentError        a live experiment cannot begin or change
    ├── BackupError            a state folder cannot be copied, or a copy not taken back
    ├── OrchestratorAway       Dagster does not answer, or refuses a run
    └── RegistryError          the registry or the promotion ledger refuses
        ├── RegistryAway       MLflow's server does not answer, or its disk is full
        ├── StalePromotion     the champion changed since the caller looked
        └── HashMismatch       a model's files are not the ones that were registered

A message says what was needed, what was found and what to do.
"""


class PipelineError(Exception):
    """The root: catch it at the door, never in between."""


class ConfigError(PipelineError):
    """A setting is unknown, out of range or contradicts another."""


class FeedbackError(PipelineError):
    """Feedback cannot be taken or read."""


class FeedbackRefused(FeedbackError):
    """One event breaks a rule; `rule` names it as the quarantine does."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule


class IdempotencyConflict(FeedbackError):
    """A known idempotency key arrived with another body."""


class VoteErased(IdempotencyConflict):
    """The key's vote was erased with who gave it: sent again it stays out."""


class UnknownRater(FeedbackError):
    """Nothing is held about the person who is named."""


class TooManyVotes(FeedbackError):
    """One person votes faster than `feedback.votes_per_minute` allows."""

    def __init__(self, per_minute: int, seconds: int) -> None:
        super().__init__(
            f"needed at most {per_minute} votes a minute of one rater, found more; come again in "
            f"{seconds} s"
        )
        self.seconds = seconds  # to wait


class SourceError(FeedbackError):
    """A file or data set cannot be read at all."""


class ClaimError(PipelineError):
    """A training run may not go on."""


class ClaimRefused(ClaimError):
    """This fingerprint is already claimed, or was already trained on."""


class ClaimLost(ClaimError):
    """A newer holder has taken over the claim."""


class ValidationFailed(PipelineError):
    """The snapshot as a whole is not fit for training."""


class TrainingError(PipelineError):
    """A model cannot be trained from what was given."""


class NotEnoughData(TrainingError):
    """Too few examples; the message says how many more are needed."""


class ShapeMismatch(TrainingError):
    """Tensors that must agree in shape do not."""


class CheckpointDamaged(TrainingError):
    """A checkpoint's files do not match its manifest."""


class ModelError(PipelineError):
    """A model cannot be loaded, saved or run."""


class PromptRefused(ModelError):
    """A model cannot read a prompt: the order or the roles of its messages, or their length."""


class LogitsNotFinite(ModelError):
    """A model's logits are NaN or infinite."""


class EvaluationError(PipelineError):
    """A comparison cannot be made."""


class ChatError(PipelineError):
    """A chat request has no answer."""


class ChatRefused(ChatError):
    """A chat request breaks an input rule; `rule` names it."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule


class ChatAway(ChatError):
    """Neither the champion nor the baseline could answer."""


class ExperimentError(PipelineError):
    """A live experiment cannot begin or change."""


class BackupError(PipelineError):
    """A state folder cannot be copied, or a copy not taken back."""


class OrchestratorAway(PipelineError):
    """Dagster does not answer, or refuses a run."""


class RegistryError(PipelineError):
    """The registry or the promotion ledger refuses."""


class RegistryAway(RegistryError):
    """MLflow's server does not answer, or its disk is full: later it may do what was asked."""


class StalePromotion(RegistryError):
    """The champion changed since the caller looked."""


class HashMismatch(RegistryError):
    """A model's files are not the ones that were registered."""
