"""Commands of the same job have the same name and therefore the same manifest."""

import pytest

from graphstash._process.job_name import names_of


def exact(command):
    return names_of(command.split())[0]


def coarse(command):
    return names_of(command.split())[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("python train.py --seed 1", "python train.py --seed 2"),
        ("python train.py --api-key hunter2", "python train.py --api-key other"),
        ("python train.py --seed=1", "python train.py --seed=2"),
        ("python train.py train.seed=1", "python train.py train.seed=2"),
        ("torchrun --master-port 1234 train.py", "torchrun --master-port 999 train.py"),
        ("torchrun --rdzv-endpoint a:1 train.py", "torchrun --rdzv-endpoint b:2 train.py"),
        ("python train.py --output_dir /a/x", "python train.py --output_dir /b/y"),
        ("python train.py --resume ckpt/12", "python train.py --resume ckpt/13"),
        ("python train.py /data/step-10.pt", "python train.py /other/step-20.pt"),
        ("python train.py 2026-01-02T03:04", "python train.py 2026-02-03T04:05"),
        ("python train.py 123e4567-e89b-12d3-a456-426614174000", "python train.py"),
        ("python train.py --run-name a -x", "python train.py --run-name b -x"),
        ("python /jobs/17/project/train.py", "/usr/bin/python3 /jobs/18/project/train.py"),
        ("python /runs/run-17/train.py", "python /runs/run-18/train.py"),
        # Too long to be one of a list of choices.
        (f"python train.py --text {'a' * 257}", "python train.py --text"),
    ],
)
def test_arguments_that_vary_between_runs_do_not_change_the_name(one, other):
    assert exact(one) == exact(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("python train.py --layers 2", "python train.py --layers 4"),
        ("python train.py --batch-size=8", "python train.py --batch-size=16"),
        ("python train.py --bf16", "python train.py"),
        ("python train.py --lr 0.1", "python train.py --lr 0.2"),
        ("python train.py model=small", "python train.py model=large"),
        ("python t.py --model_name_or_path org/a", "python t.py --model_name_or_path org/b"),
        ("python train.py configs/a.yaml", "python train.py configs/b.yaml"),
        ("python train.py --scale -1", "python train.py --scale -2"),
    ],
)
def test_arguments_that_may_change_a_graph_change_only_the_fine_name(one, other):
    assert exact(one) != exact(other)
    assert coarse(one) == coarse(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("python train.py", "python evaluate.py"),
        ("python a/train.py", "python b/train.py"),
        ("python -m team.train", "python -m team.evaluate"),
        ("python -c one", "python -c other"),
    ],
)
def test_another_program_is_another_job(one, other):
    assert exact(one) != exact(other)
    assert coarse(one) != coarse(other)


def test_other_versions_of_a_compiler_make_another_job(monkeypatch):
    before = names_of(["python", "train.py"])
    monkeypatch.setattr("graphstash._process.job_name.version_of", lambda _: "9.9")
    assert not set(before) & set(names_of(["python", "train.py"]))


def test_long_hexadecimal_word_is_matched_without_backtracking():
    """A pattern with nested repetition would backtrack for ever on this word."""
    word = "0123456789abcdef" * 16 + "-x"
    assert exact(f"python train.py --rev {word}") != exact("python train.py")


def test_every_command_has_a_name_also_without_a_working_directory(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for command in ([""], ["python"], ["python", "\udc80\x00\n"], ["-m"], ["python", "train.py"]):
        assert all(name.startswith("auto-") for name in names_of(command))
