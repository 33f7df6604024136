"""The review page: annotators judge the most uncertain and some random answers, by keyboard."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa

from rlhf_pipeline.errors import FeedbackRefused, PipelineError
from rlhf_pipeline.feedback.rules import LONGEST_NAME, check_text
from rlhf_pipeline.records import FeedbackKind, Interaction, hash_rater
from rlhf_pipeline.serving.access import SIGN_OUT
from rlhf_pipeline.serving.pages import review
from rlhf_pipeline.serving.pages.approval_page import PATH as CANDIDATES
from rlhf_pipeline.serving.pages.chat_page import BEFORE, GONE, assistants, not_stored
from rlhf_pipeline.serving.pages.desk import Desk
from rlhf_pipeline.serving.pages.files_page import PATH as FILES

KEYS = (
    "Keys: **g** good · **b** bad · **1** to **5** stars "
    "· **w** write the better answer · **s** skip"
)
BY_KEY = {"g": "good", "b": "bad", "s": "skip", **{str(n): f"star-{n}" for n in range(1, 6)}}
# In the page's head: an event's own `js` would need a policy that lets the page evaluate text.
SHORTCUTS = """<script>
document.addEventListener('keydown', (event) => {
  const typing = event.target.closest('input, textarea, select');
  if (typing || event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
  const button = document.getElementById(KEYS[event.key]);
  if (event.key === 'w') {
    event.preventDefault();
    document.querySelector('#better textarea').focus();
  } else if (button) {
    button.click();
  }
});
</script>""".replace("KEYS", json.dumps(BY_KEY))
# A double click, a bouncing key or a held Enter would judge the next answer too. Only the browser
# knows since when that is on the screen: frames are drawn only while people can see the page.
UNREAD = """<script>
const READ_MILLISECONDS = 500;  // nobody has read an answer sooner
let shown = '';
let since = 0;
const showQuestion = () => {  // the last thing said, and no key scrolls a box one cannot write in
  const said = document.querySelector('#prompt textarea');
  said.scrollTop = said.scrollHeight;
};
const look = () => {
  const seen = document.querySelector('#seen textarea, #seen input')?.value ?? '';
  if (seen === shown) return;
  [shown, since] = [seen, performance.now()];
  requestAnimationFrame(showQuestion);  // once the box has the height of what is in it
};
const everyFrame = () => { look(); requestAnimationFrame(everyFrame); };
everyFrame();
document.addEventListener('click', (event) => {
  look();
  const unread = event.timeStamp - since < READ_MILLISECONDS;
  if (unread && event.target.closest('JUDGES')) event.stopPropagation();
}, true);
document.addEventListener('keydown', (event) => {
  if (event.repeat && event.target.closest('JUDGES')) event.preventDefault();
}, true);
</script>""".replace("JUDGES", ", ".join(f"#{one}" for one in (*BY_KEY.values(), "send-better")))

UNSENT = "Send the better answer first, or empty its box."


def review_page(desk: Desk, kept_with: str) -> Any:
    """Return the page as Gradio Blocks; what a browser keeps is encrypted with `kept_with`."""
    import gradio as gr

    agents = desk.agents()
    with gr.Blocks(title="Review", analytics_enabled=False) as page:
        name = gr.BrowserState("", storage_key="rlhf-annotator", secret=kept_with)
        waiting = gr.State([])  # Interactions, the shown one first
        skipped = gr.State([])  # ids of what was skipped since the answers were fetched
        # The id of what is on the screen. A judgement brings it along: the session's own queue may
        # be at the next answer already, or gone with the service that held it.
        seen = gr.Textbox(visible="hidden", label="What is judged", elem_id="seen")
        with gr.Row():
            agent = gr.Dropdown(
                agents, value=next(iter(agents), None), label="Assistant", elem_id="agent"
            )
            who = gr.Textbox(label="Your name", max_length=LONGEST_NAME, elem_id="who")
            start = gr.Button("Fetch answers", variant="primary", elem_id="start")
        notice = gr.Textbox(
            "",
            placeholder="Say who you are, then fetch the answers that wait for a judgement.",
            label="What the page says",
            show_label=False,
            container=False,
            interactive=False,
            elem_id="notice",
        )
        prompt = gr.Textbox(label="Conversation", interactive=False, lines=4, elem_id="prompt")
        completion = gr.Textbox(label="Answer", interactive=False, lines=4, elem_id="completion")
        with gr.Row():
            good = gr.Button("👍 Good", min_width=80, elem_id="good")
            bad = gr.Button("👎 Bad", min_width=80, elem_id="bad")
            stars = [gr.Button(f"{n} ★", min_width=50, elem_id=f"star-{n}") for n in range(1, 6)]
            skip = gr.Button("Skip", min_width=80, elem_id="skip")
        better = gr.Textbox(label="The better answer", lines=2, max_length=50_000, elem_id="better")
        send = gr.Button("Send the better answer", elem_id="send-better")
        agreement = gr.Textbox(
            placeholder="Agreement: told with the answers.",
            label="Agreement",
            show_label=False,
            interactive=False,
            elem_id="agreement",
        )
        gr.Markdown(
            f"{KEYS}\n\n[Feedback from files, and into them]({FILES}) "
            f"· [Versions that wait for approval]({CANDIDATES}) · [Sign out]({SIGN_OUT})"
        )

        shown = [waiting, skipped, seen, prompt, completion, notice, agreement, better]
        here = [waiting, skipped, seen, agent, who]
        keep = gr.skip()
        judge = _judge(desk, keep)
        start.click(
            _unless_typed(_fetch(desk, keep), keep),
            [seen, better, agent, who],
            shown,
            api_visibility="private",
        ).then(lambda given: given, who, name, api_visibility="private")
        judgements: list[tuple[Any, FeedbackKind | None, float]] = [
            (good, FeedbackKind.thumbs, 1.0),
            (bad, FeedbackKind.thumbs, 0.0),
            *((star, FeedbackKind.rating, float(n)) for n, star in enumerate(stars, 1)),
            (skip, None, 0.0),
        ]
        for button, kind, number in judgements:
            button.click(
                _unless_typed(partial(judge, kind=kind, number=number), keep),
                [seen, better, *here],
                shown,
                api_visibility="private",
            )
        send.click(
            lambda *now: judge(*now[:-1], kind=FeedbackKind.correction, text=now[-1]),
            [*here, better],
            shown,
            api_visibility="private",
        )
        page.load(  # a name typed before the kept one has come is left alone
            lambda kept, now: (kept or gr.skip(), assistants(gr, desk.agents(), now)),
            [name, agent],
            [who, agent],
            api_visibility="private",
        )
    return page


def _unless_typed(act: Callable[..., tuple[Any, ...]], keep: Any) -> Callable[..., tuple[Any, ...]]:
    """Return what acts, except while a better answer than the one on the screen is unsent."""

    def checked(seen: str | None, typed: str | None, *now: Any) -> tuple[Any, ...]:
        if seen and (typed or "").strip():
            return *[keep] * 5, UNSENT, keep, keep
        return act(*now)

    return checked


def _fetch(desk: Desk, better: Any) -> Callable[..., tuple[Any, ...]]:
    """Return what fetches a queue and gives the box of the better answer this."""

    def fetch(agent: str | None, who: str | None, skipped: Sequence[str] = ()) -> tuple[Any, ...]:
        """Return a queue without what was skipped, and its first answer."""
        if problem := _unfit(who):
            return _shown([], skipped, problem, "", better)
        if not agent:
            words = "No assistant has a model yet; its first turn trains one."
            return _shown([], skipped, words, "", better)
        rater = hash_rater(agent, _person(who))
        waiting = review.queue(desk.store.database, agent, rater, without=skipped)
        words = review.agreement(desk.store.database, agent).words()
        answers = "1 answer" if len(waiting) == 1 else f"{len(waiting)} answers"
        notice = f"{answers} to judge" if waiting else "Nothing left to judge for now."
        if skipped and not waiting:
            notice = "Nothing left but what was skipped; fetch answers to see it again."
        return _shown(waiting, skipped, notice, words, better)

    return fetch


def _judge(desk: Desk, keep: Any) -> Callable[..., tuple[Any, ...]]:
    """Return what stores a judgement; `keep` leaves the box of the better answer as it is."""

    def judge(
        waiting: list[Interaction],
        skipped: list[str],
        seen: str | None,
        agent: str | None,
        who: str | None,
        kind: FeedbackKind | None,
        **value: Any,
    ) -> tuple[Any, ...]:
        """Store the judgement of the answer that was seen and show the next one."""
        if not seen or agent is None:
            return _fetch(desk, keep)(agent, who, skipped)

        def not_done(why: str) -> tuple[Any, ...]:
            words = review.agreement(desk.store.database, agent).words()
            return _shown(waiting, skipped, why, words, keep)

        try:
            if waiting and waiting[0].interaction_id != seen:
                return not_done(BEFORE)
            found = desk.store.interaction(seen)  # it may have been erased since
            if found is None:
                waiting = waiting[1:]
                return not_done(GONE)
            waiting = waiting or [found]  # where they went with the session
            if problem := _unfit(who):
                return not_done(f"Not stored: {problem}")
            if kind is not None:
                desk.vote(waiting[0], kind, person=_person(who), origin="review", **value)
        except (PipelineError, sa.exc.DBAPIError) as error:
            return not_done(not_stored(error))
        rest = waiting[1:]
        if kind is None:
            skipped = [*skipped, seen]
        sent = "" if kind == FeedbackKind.correction else keep
        if not rest:
            return _fetch(desk, sent)(agent, who, skipped)
        words = review.agreement(desk.store.database, agent).words()
        done = "Skipped" if kind is None else "Stored"
        return _shown(rest, skipped, f"{done}; {len(rest)} left", words, sent)

    return judge


def _unfit(who: str | None) -> str:
    """Return why nobody can vote under the name; nothing where one can."""
    name = (who or "").strip()
    if not name:
        return "A name is needed, so that your votes count once."
    try:
        check_text("your name", name, LONGEST_NAME)
    except FeedbackRefused as error:
        return str(error)
    return ""


def _person(who: str | None) -> str:
    return f"annotator:{(who or '').strip().lower()}"


def _shown(
    waiting: list[Interaction],
    skipped: Sequence[str],
    notice: str,
    agreement: str,
    better: Any,
) -> tuple[Any, ...]:
    if not waiting:
        return [], list(skipped), "", "", "", notice, agreement, better
    first = waiting[0]
    turns = "\n".join(f"{m.role}: {m.content}" for m in first.prompt)
    ids = list(skipped), first.interaction_id
    return waiting, *ids, turns, first.completion, notice, agreement, better
