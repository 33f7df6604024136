"""The chat page: conversation, votes, and two answers side by side.

Whatever models or people write is shown as plain text, never as markdown or HTML. A key for one
agent opens the page with that agent alone. Who signed in with an admin's key also sees why the
answer scored as it did; nobody else's request gets that.
"""

from __future__ import annotations

import html
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import sqlalchemy as sa

from rlhf_pipeline.errors import ChatRefused, FeedbackRefused, PipelineError, TooManyVotes
from rlhf_pipeline.feedback.rules import LONGEST_COMMENT, Rule
from rlhf_pipeline.records import Choice, FeedbackKind, uuid7
from rlhf_pipeline.serving.access import SIGN_OUT, Right, right_in
from rlhf_pipeline.serving.chat_api import SORRY
from rlhf_pipeline.serving.pages.data_page import MINE
from rlhf_pipeline.serving.pages.desk import Answer, Desk, said_so_far
from rlhf_pipeline.serving.pages.visitors import Visitors

CRITERIA = ("relevance", "helpfulness", "safety")
WANTS = ("shorter", "kinder", "safer", "more precise")
STARS = [(f"{n} ★", n) for n in range(1, 6)]  # read out, five of them are a number
MIDDLE = 0.5  # where a score begins
UNSAID = (None, "", "", *[MIDDLE for _ in CRITERIA])
"""The stars, the better answer, the comment and the scores before anything is said of an answer."""
UNDER_WAY = "…"
"""What is judged while an answer after the first is written: none, yet one was there before."""
SHOWN_EVERY_SECONDS = 0.1  # what was written: each time costs more, the longer that is
INDENT = re.compile(r"^[ \t](?=.*\S)", re.MULTILINE)
THANKS = "Thank you, that is stored."
NO_ANSWER = "Not stored: no answer is known here; ask first, or again if one is shown."
BEFORE = "Not stored: that was for the answer before this one."
GONE = "Not stored: this answer is no longer there."
ANEW = "What was said before is no longer there: this is a new conversation."
WHICH = "Which answer is better?"
ALIKE = "This time no second answer says anything else."
CUT_OFF = {
    "length": "The answer ends here because it has reached its greatest length.",
    "content_filter": "The answer ends here because what followed must not be shown.",
}
LAST = "always_last"
"""How often what is chosen is told: Gradio's own way drops a choice made while the one before it is
under way, and the page would show what was not stored."""
SENT = """<script>
const join = window.fetch;
const write = (box, text) => {
  box.value = text;
  box.dispatchEvent(new Event('input', {bubbles: true}));
};
const giveBack = (box, text) => write(box, box.value ? `${text}\\n${box.value}` : text);
window.fetch = async (address, options) => {
  const box = document.querySelector('#question textarea');
  const text = box?.value;
  const asks = text && String(address).includes('/queue/join')
    && JSON.parse(options.body).data[0] === text;
  if (asks) write(box, '');
  const answer = await join(address, options);
  if (asks && !answer.ok) giveBack(box, text);
  return answer;
};
setInterval(() => {
  const unanswered = document.querySelector('#unanswered textarea');
  if (!unanswered?.value) return;
  giveBack(document.querySelector('#question textarea'), unanswered.value);
  write(unanswered, '');
}, 100);
</script>"""
"""Empties the box as its message leaves, and not when the service answers: what is typed in between
would go with it. What could not be sent, or was not answered, comes back before that; it is looked
for, as the `js` of Gradio's events is evaluated, which the pages' policy forbids."""
CHOICES: tuple[tuple[Choice, str], ...] = (
    ("left", "Left is better"),
    ("right", "Right is better"),
    ("tie", "Both are as good"),
    ("both_bad", "Both are bad"),
)


def chat_page(desk: Desk, visitors: Visitors, kept_with: str) -> Any:
    """Return the page as Gradio Blocks; what a browser keeps is encrypted with `kept_with`."""
    import gradio as gr

    with gr.Blocks(title="Chat", analytics_enabled=False, fill_height=True) as page:
        wants = gr.BrowserState([], storage_key="rlhf-wants", secret=kept_with)
        history = gr.State([])  # (question, answer) turns
        answer = gr.State(None)  # the Answer that votes are about
        first = gr.State("this")  # which of the pair stands on the left
        session = gr.State("")
        before = gr.State(None)  # the assistant that the conversation is with
        moves = gr.State(0)  # how often another one was chosen
        # The id of the answer on the screen: a vote that is late may find another in `answer`.
        seen = gr.Textbox(visible="hidden", label="What is judged", elem_id="seen")
        # What waits to go back into the box, where only the page knows what was typed since.
        unanswered = gr.Textbox(visible="hidden", label="What failed", elem_id="unanswered")
        with gr.Row():
            # Which there are, it is told when it opens: the page is the same for every key.
            agent = gr.Dropdown([], value=None, label="Assistant", elem_id="agent")
            pair_mode = gr.Checkbox(False, label="Show two answers", elem_id="pair-mode")
            renew = gr.Button("New conversation", elem_id="renew")
        talk = gr.Chatbot(
            show_label=False,  # it would lie over what was said
            render_markdown=False,
            sanitize_html=True,
            allow_tags=True,  # tags are text here, so they may be seen
            latex_delimiters=[],
            feedback_options=None,
            buttons=[],  # its copies are of what it is given: with &lt; for <
            height="50vh",
            elem_id="talk",
        )
        notice = gr.Textbox(
            "",
            placeholder="Ask something, then say how good the answer was: the assistant learns it.",
            label="What the page says",
            show_label=False,
            container=False,
            interactive=False,
            max_lines=8,  # of a phone: as many as the longest refusal needs
            elem_id="notice",
        )
        with gr.Row():
            question = gr.Textbox(
                label="Your message",
                show_label=False,
                placeholder="Write a message",
                scale=8,
                max_length=20_000,
                elem_id="question",
            )
            send = gr.Button("Send", variant="primary", min_width=80, elem_id="send")
        with gr.Column(visible=False, elem_id="pair") as pair:
            with gr.Row():
                left = gr.Textbox(label="Left", interactive=False, lines=3, elem_id="left")
                right = gr.Textbox(label="Right", interactive=False, lines=3, elem_id="right")
            with gr.Row():
                choose = [
                    gr.Button(words, min_width=120, elem_id=f"choose-{name}")
                    for name, words in CHOICES
                ]
        with gr.Row(visible=False) as thumbs:
            up = gr.Button("👍 Good", min_width=80, elem_id="up")
            down = gr.Button("👎 Bad", min_width=80, elem_id="down")
        with gr.Accordion("Say more about this answer", open=False, visible=False) as more:
            stars = gr.Radio(STARS, label="Stars", elem_id="stars")
            better = gr.Textbox(
                label="Write the better answer", lines=2, max_length=50_000, elem_id="better"
            )
            send_better = gr.Button("Send the better answer", elem_id="send-better")
            comment = gr.Textbox(
                label="A comment: people read it, no model learns from it",
                lines=2,
                max_length=LONGEST_COMMENT,
                elem_id="comment",
            )
            send_comment = gr.Button("Send the comment", elem_id="send-comment")
            sliders = [
                gr.Slider(0, 1, value=MIDDLE, step=0.05, label=name.capitalize(), elem_id=name)
                for name in CRITERIA
            ]
            send_criteria = gr.Button("Send these scores", elem_id="send-criteria")
        with gr.Accordion(
            "Why this answer scored so", open=False, visible=False, elem_id="why"
        ) as why:
            pieces = gr.Textbox(
                label="Its score by pieces",
                show_label=False,
                interactive=False,
                lines=6,
                max_lines=40,
                elem_id="pieces",
            )
        with gr.Accordion("What should it learn?", open=False):
            wishes = gr.CheckboxGroup(
                WANTS, label="What matters to you goes along with your votes", elem_id="wants"
            )
        gr.Markdown(  # a gr.HTML evaluates text, which the pages' policy forbids
            f"[Your data]({MINE}): see, download or erase what is held about you "
            f"· [Sign out]({SIGN_OUT})",
            elem_id="your-data",
        )

        shown = [talk, unanswered, notice, history, answer, first, thumbs, more, pair, left, right]
        asked = [question, history, agent, session, pair_mode, answer, seen]
        said = [stars, better, comment, *sliders, seen]
        answering = gr.on(  # one event, so that no second answer begins beside the first
            [send.click, question.submit],
            _say(gr, desk, visitors),
            asked,
            [*shown, *said, why],
            # It would hold the assistant against the list that was told when the page was opened:
            # a service that was started since has told none, and the page were dead.
            preprocess=False,
            api_visibility="private",
        )
        agent.input(  # which the list tells of whenever it is left, whoever is chosen
            lambda now, before, moves: (now, moves + (now != before)),
            [agent, before, moves],
            [before, moves],
            preprocess=False,
            trigger_mode=LAST,
            api_visibility="private",
        )
        # Another assistant is somebody else, who does not read what was said to the one before.
        begins = [renew.click, talk.clear, moves.change]
        gr.on(begins, None, cancels=[answering])  # or what is under way would come back
        gr.on(
            begins,
            lambda: (
                *([], [], None, uuid7(), ""),
                *(_hidden(gr), _hidden(gr), _hidden(gr), "", _closed(gr)),
            ),
            None,
            [talk, history, answer, session, seen, thumbs, more, pair, notice, why],
            api_visibility="private",
        )
        why.expand(_why(gr, desk), answer, pieces, api_visibility="private")
        vote = _vote(desk)
        judged = [answer, seen, wishes]  # not the kept ones: they follow a moment later
        for button, number in ((up, 1.0), (down, 0.0)):
            button.click(
                lambda a, s, w, number=number: vote(a, s, w, FeedbackKind.thumbs, number=number),
                judged,
                notice,
                api_visibility="private",
            )
        stars.input(
            _stars(gr, vote),
            [*judged, stars],
            notice,
            trigger_mode=LAST,
            api_visibility="private",
        )
        send_better.click(
            lambda a, s, w, text: vote(a, s, w, FeedbackKind.correction, text=text),
            [*judged, better],
            notice,
            api_visibility="private",
        )
        send_comment.click(
            _comment(vote), [*judged, comment], [notice, comment], api_visibility="private"
        )
        send_criteria.click(
            lambda a, s, w, *values: vote(
                a,
                s,
                w,
                FeedbackKind.criteria,
                criteria=dict(zip(CRITERIA, map(float, values), strict=True)),
            ),
            [*judged, *sliders],
            notice,
            api_visibility="private",
        )
        for button, (name, _) in zip(choose, CHOICES, strict=True):
            button.click(
                _choose(gr, vote, name),
                [*judged, first, history],
                [notice, pair, talk, history, answer, thumbs, more, *said],
                api_visibility="private",
            )
        wishes.input(
            lambda chosen: chosen, wishes, wants, trigger_mode=LAST, api_visibility="private"
        )
        page.load(
            _opened(gr, desk),
            [wants, agent],
            [wishes, session, agent, why, before],
            api_visibility="private",
        )
    return page


def assistants(gr: Any, agents: Sequence[str], now: str | None) -> Any:
    """Return the list of assistants as it is at this moment; the chosen one stays."""
    return gr.update(choices=agents, value=now or next(iter(agents), None))


def _opened(gr: Any, desk: Desk) -> Callable[..., tuple[Any, ...]]:
    def opened(chosen: list[str], now: str | None, request: Any) -> tuple[Any, ...]:
        """Return what the page begins with, and what an admin alone sees."""
        right = _right_of(request)
        asks = gr.update(visible=right.role == "admin")
        shown = assistants(gr, _reached(desk, right), now)
        return chosen, uuid7(), shown, asks, shown["value"]

    opened.__annotations__["request"] = gr.Request
    return opened


def _why(gr: Any, desk: Desk) -> Callable[..., Iterator[str]]:
    def why(answer: Answer | None, request: Any) -> Iterator[str]:
        """Tell an admin why the newest answer scored so; to anybody else that it is an admin's."""
        # Whatever the page shows, a request may be made by hand.
        if _right_of(request).role != "admin":
            yield "This is for admins."
            return
        if answer is None:
            yield "There is no answer yet."
            return
        yield "Scoring it …"
        try:
            yield desk.why(answer)
        except PipelineError as error:
            yield f"Not known: {error}"[:500]

    why.__annotations__["request"] = gr.Request
    return why


def _reached(desk: Desk, right: Right) -> list[str]:
    """Return the assistants within the right."""
    return [agent for agent in desk.agents() if right.reaches(agent)]


def _right_of(request: Any) -> Right:
    """Return the right with which the door (access.py) let this request in."""
    return right_in(getattr(getattr(request, "request", None), "scope", None) or {})


def _say(gr: Any, desk: Desk, visitors: Visitors) -> Callable[..., Iterator[tuple[Any, ...]]]:
    def say(
        question: Any,
        history: list[tuple[str, str]],
        agent: Any,
        session: str,
        pair_mode: Any,
        answer: Answer | None,
        seen: Any,
        request: Any,
    ) -> Iterator[tuple[Any, ...]]:
        """Show the answer as it is written; a pair only once both are there, in random order.

        Where the `answer` before has been erased, the conversation begins anew: the next one would
        bring back what was said. So it does where the browser has `seen` one and this session knows
        of none, as after a restart. What the browser sent comes as it is, whatever that may be.
        """
        same = talk = gr.skip()
        question, pair_mode = question if isinstance(question, str) else "", pair_mode is True
        try:
            notice = ""
            if answer is None:
                gone = bool(seen)
            else:
                gone = desk.store.interaction(answer.interaction.interaction_id) is None
            if gone:
                history, notice = [], ANEW
            prompt = said_so_far(history, question)
            right = _right_of(request)
            if not isinstance(agent, str):  # who types faster than the page is told of any
                agent = next(iter(_reached(desk, right)), None)
            if agent is None:
                raise ChatRefused(
                    "no_model", "no assistant has a model yet; its first turn trains one"
                )
            if not right.reaches(agent):
                raise ChatRefused("not_reached", right.alone)
            if not desk.gateway.knows(agent):
                raise ChatRefused("no_model", "this assistant is not here; load the page again")
            talk = before = _messages(history)
            text, due = "", 0.0
            waiting = [*before, _said("user", question), _said("assistant", "…")]
            hidden = _hidden(gr)
            # The answer before stays known, for the question after one that goes unanswered; nobody
            # votes on it, as none is seen. Where none is known, what the browser has seen stays.
            unseen = same if answer is None else UNDER_WAY
            nothing = (*[same] * (2 + len(UNSAID)), unseen, _closed(gr))
            rest = (history, same, same, *[hidden] * 3, *nothing)
            yield (waiting, same, notice, *rest)
            session = session or uuid7()
            who = visitors.person(request.cookies) or session  # where no cookies are let in
            client = getattr(request, "client", None)
            pieces = desk.answer(
                agent,
                prompt,
                session_id=session,
                person=who,
                network=visitors.network(client.host) if client else None,
                pair=pair_mode,
            )
            for piece in pieces:
                if isinstance(piece, Answer):
                    yield _finished(gr, piece, history, question, pair_mode, notice)
                elif not pair_mode:
                    text += piece
                    if time.monotonic() < due:
                        continue
                    waiting[-1] = _said("assistant", text)
                    yield (waiting, *[same] * (12 + len(UNSAID)))
                    due = time.monotonic() + SHOWN_EVERY_SECONDS
        except (PipelineError, sa.exc.DBAPIError) as error:
            # What failed inside, addresses and paths in it, is for admins.
            tells = isinstance(error, ChatRefused) or _right_of(request).role == "admin"
            words = str(error)[:300] if tells and isinstance(error, PipelineError) else SORRY
            # What waits for an answer goes back into its box, out of the conversation.
            yield (talk, question, words, *[same] * (10 + len(UNSAID)))

    say.__annotations__["request"] = gr.Request  # Gradio passes one to who asks for it by type
    return say


def _finished(
    gr: Any,
    answer: Answer,
    history: list[tuple[str, str]],
    question: str,
    pair_mode: bool,
    notice: str = "",
) -> tuple[Any, ...]:
    this, other = answer.interaction, answer.other
    turns = [*history, (question, this.completion)]
    first = random.SystemRandom().choice(("this", "other"))
    texts = [this.completion, other.completion if other else ""]
    left, right = texts if first == "this" else reversed(texts)
    hides = pair_mode and other is not None  # until a choice is made, neither comes first
    messages = _messages(turns)
    if hides:
        messages[-1] = _said("assistant", "(two answers below)")
    ask = "" if other is None else WHICH
    if not ask and pair_mode:
        ask = ALIKE
    if not ask and answer.asks:
        ask = "Was this a good answer? Your vote teaches the assistant."
    if answer.ending in CUT_OFF and not hides:
        ask = f"{CUT_OFF[answer.ending]} {ask}"
    return (
        messages,
        gr.skip(),
        f"{notice} {ask}".strip(),
        turns,
        answer,
        first,
        gr.update(visible=not hides),
        gr.update(visible=not hides, open=answer.asks and other is None),
        gr.update(visible=other is not None),
        left,
        right,
        *UNSAID,
        this.interaction_id,
        gr.skip(),
    )


def _vote(desk: Desk) -> Callable[..., str]:
    def vote(
        answer: Answer | None,
        seen: str | None,
        wants: list[str] | None,
        kind: FeedbackKind,
        **value: Any,
    ) -> str:
        """Store the vote and return what to tell the person."""
        if answer is None:  # none was given, or the session that knew it has ended
            return NO_ANSWER
        if seen != answer.interaction.interaction_id:
            return BEFORE
        try:
            chosen = [want for want in wants or () if want in WANTS]
            desk.vote(answer.interaction, kind, wants=chosen, **value)
        except (PipelineError, sa.exc.DBAPIError) as error:
            return not_stored(error)
        return THANKS

    return vote


def _stars(gr: Any, vote: Callable[..., str]) -> Callable[..., Any]:
    def stars(answer: Answer | None, seen: str | None, wants: list[str], number: Any) -> Any:
        """Store the stars; of an answer that has gone meanwhile there are none to be stored."""
        if number is None:
            return gr.skip()
        return vote(answer, seen, wants, FeedbackKind.rating, number=float(number))

    return stars


def _comment(vote: Callable[..., str]) -> Callable[..., tuple[str, str]]:
    def comment(
        answer: Answer | None, seen: str | None, wants: list[str], text: str
    ) -> tuple[str, str]:
        """Store the comment; what could not be stored stays in its box."""
        words = vote(answer, seen, wants, FeedbackKind.comment, text=text)
        return words, "" if words == THANKS else text

    return comment


def not_stored(error: PipelineError | sa.exc.DBAPIError) -> str:
    """Return what a person is told whose vote was not stored."""
    if isinstance(error, sa.exc.DBAPIError):  # its own words hold the vote
        return "Not stored: the store cannot be written now; please vote again."
    if isinstance(error, TooManyVotes):
        return f"Thank you, but that was too fast to count. Please vote again in {error.seconds} s."
    if isinstance(error, FeedbackRefused) and error.rule == Rule.value_missing:
        return "Not stored: nothing is written yet."
    if isinstance(error, FeedbackRefused) and error.rule == Rule.unknown_interaction:
        return GONE
    return f"Not stored: {error}"[:300]


def _choose(gr: Any, vote: Callable[..., str], choice: Choice) -> Callable[..., tuple[Any, ...]]:
    def choose(
        answer: Answer | None,
        seen: str | None,
        wants: list[str],
        first: Literal["this", "other"],
        history: list[tuple[str, str]],
    ) -> tuple[Any, ...]:
        """Store the choice; the conversation goes on with the answer that was chosen.

        Whatever is said from here on (a thumb, stars) is about that one: it is what is shown.
        """
        same = gr.skip()
        if answer is None or answer.other is None:
            return "There is nothing to compare.", _hidden(gr), *[same] * (6 + len(UNSAID))
        words = vote(
            answer,
            seen,
            wants,
            FeedbackKind.preference,
            other_interaction_id=answer.other.interaction_id,
            choice=choice,
            shown_first=first,
        )
        if words != THANKS:
            return words, *[same] * (7 + len(UNSAID))
        other_won = choice == ("right" if first == "this" else "left")
        kept = answer.other if other_won else answer.interaction
        turns = [*history[:-1], (history[-1][0], kept.completion)] if history else []
        said, shown = Answer(kept, answer.asks), gr.update(visible=True)
        unsaid = (*UNSAID, kept.interaction_id)
        return words, _hidden(gr), _messages(turns), turns, said, shown, shown, *unsaid

    return choose


def _messages(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [
        _said(role, text)
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def _said(role: str, text: str) -> dict[str, str]:
    # Escaped, tags are shown as they were written, and lines stay indented; else the component
    # would take both out.
    escaped = html.escape(text, quote=False)
    return {"role": role, "content": INDENT.sub(lambda one: f"&#{ord(one[0])};", escaped)}


def _hidden(gr: Any) -> Any:
    return gr.update(visible=False)


def _closed(gr: Any) -> Any:
    return gr.update(open=False)
