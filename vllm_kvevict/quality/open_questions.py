"""Questions on real text without one right answer, for which fidelity is measured: summaries, continuations, others."""

from collections.abc import Callable

from vllm_kvevict.quality.questions import Draw, Question, Task, hidden

SUMMARY = "Summarise the text above in a few sentences."
CONTINUE = "Continue the text above."
OPEN = (
    "What is the text above about, and for whom is it written?",
    "Which rules does the text above give? List the most important ones.",
    "Explain one idea of the text above to a beginner.",
    "What would you ask the author of the text above?",
)


def _asking(choose: Callable[[Draw], str]) -> Callable[[Draw], Question]:
    """A question about prose in which nothing is hidden; every reply scores 0."""

    def make(draw: Draw) -> Question:
        return Question(hidden(draw, []), choose(draw), "", (), 0, lambda reply: 0.0)

    return make


TASKS = {
    "summary": Task(_asking(lambda draw: SUMMARY), 1, "nothing", range(1, 2)),
    "continuation": Task(_asking(lambda draw: CONTINUE), 1, "nothing", range(1, 2)),
    "open": Task(_asking(lambda draw: draw.rng.choice(OPEN)), 1, "nothing", range(1, 2)),
}
