"""The generated task: what is held out is never drawn, and a problem is a function of seed and index."""

from policy_trainer.data.problem import Problem
from policy_trainer.data.tasks.arithmetic import EVAL_PROBLEMS, NUMBERS, Arithmetic


def pair(problem: Problem) -> tuple[int, int]:
    """The two numbers of a well-formed problem, whose answer is right."""
    (message,) = problem.messages
    assert message["role"] == "user" and problem.prompt == ""
    a, b = (int(number) for number in message["content"].removesuffix("=?").split("+"))
    assert message["content"] == f"{a}+{b}=?" and problem.answer == str(a + b)
    return a, b


def test_ten_thousand_pairs_are_split() -> None:
    task = Arithmetic(seed=0)
    train = {pair(task.problem(index)) for index in range(NUMBERS**2 - EVAL_PROBLEMS)}
    eval_problems = {pair(problem) for problem in task.eval_problems()}
    assert (len(train), len(eval_problems)) == (9000, 1000)
    assert train | eval_problems == {(a, b) for a in range(100) for b in range(100)}
    # Held out of everywhere, so that the share that carries is not another one.
    assert 350 < sum(a % 10 + b % 10 > 9 for a, b in eval_problems) < 550


def test_what_is_held_out_does_not_depend_on_the_seed() -> None:
    eval_problems = Arithmetic(7).eval_problems()
    for seed in (0, 1, 12345):
        task = Arithmetic(seed)
        assert task.eval_problems() == eval_problems
        assert all(task.problem(index) not in eval_problems for index in (10**9, 2**62))
