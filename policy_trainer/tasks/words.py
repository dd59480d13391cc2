"""What tasks say to a model besides their problems."""

from policy_trainer.data.problem import Message

# The form that the rewards `format` and `tags` look for.
THINK_THEN_ANSWER = (
    "You are a helpful assistant. You first think about how to solve the user's question, and then give the answer. "
    "Put your reasoning between <think> and </think>, and after it the answer alone between <answer> and </answer>: "
    "<think>your reasoning</think><answer>your answer</answer>."
)


def asked_by_user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)
