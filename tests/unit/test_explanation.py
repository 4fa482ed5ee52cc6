"""Explanations of a miss: which differences from an artifact are found, and how they are worded."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from graphstash._compile.explaining import Cause, brief_line, cause_of
from graphstash_schema import ArtifactKey, ArtifactKind
from graphstash_schema.explanation import (
    MAX_LABEL_CHARACTERS,
    MAX_PARTS_CHARACTERS,
    Description,
    Difference,
    ExplainResponse,
    Relative,
    bounded_parts,
    compare,
    digest_of_parts,
    format_difference,
    identity_of,
    make_description,
)

DIGEST = "a" * 64
OTHER = "b" * 64
FEATURES = [f"feature{number}" for number in range(100)]
KEY = ArtifactKey.parse("jax", "cpu-x86_64-0123456789abcdef", DIGEST)
TEXTS = st.text(max_size=300)
PARTS = st.dictionaries(st.sampled_from(["program", "jax", "inputs", "jax_key", "flags"]), TEXTS)


def explained(here, there):
    return [format_difference(each) for each in compare(here, there)]


@pytest.mark.parametrize(
    ("here", "there", "sentences"),
    [
        ({"jax": "0.11.0"}, {"jax": "0.10.2"}, ["jax: 0.11.0 here, 0.10.2 there"]),
        (
            {"env.XLA_FLAGS": "--a=1"},
            {"env.XLA_FLAGS": "--a=2"},
            ["XLA_FLAGS: --a=1 here, --a=2 there"],
        ),
        ({"libtpu": "1"}, {}, ["libtpu: 1 here, not set there"]),
        ({"flags": ""}, {"flags": "-x"}, ["flags: nothing here, -x there"]),
        # A part that only the compiler can read is reported only if no other part differs.
        ({"jax_key": DIGEST, "jax": "1"}, {"jax_key": OTHER, "jax": "2"}, ["jax: 1 here, 2 there"]),
        (
            {"jax_key": DIGEST},
            {"jax_key": OTHER},
            ["the compiler's own key differs, and it does not say in what"],
        ),
        (
            {"graph": "1"},
            {"graph": "2"},
            ["another graph of the same line: other operations, shapes or types"],
        ),
        # Digests are treated alike: other inputs explain another program.
        ({"program": DIGEST}, {"program": OTHER}, ["the program itself changed"]),
        (
            {"program": DIGEST, "inputs": "f32[8]"},
            {"program": OTHER, "inputs": "f32[16]"},
            ["inputs: f32[8] here, f32[16] there"],
        ),
        ({"compile_options": DIGEST}, {"compile_options": OTHER}, ["other compile options"]),
        ({"jax": "1", "inputs": "x"}, {"jax": "1", "inputs": "x"}, []),
        ({"jax": "1"}, {"jax": "2\x1b[31m\n"}, ["jax: 1 here, 2\\x1b[31m\\n there"]),
        (
            {"cpu_features": " ".join(FEATURES)},
            {"cpu_features": " ".join([*FEATURES[:50], *FEATURES[51:], "avx512f"])},
            ["cpu features: feature50 here, avx512f there"],
        ),
        # Of a list, only the differing items are shown. Brackets are not split.
        (
            {"inputs": "(tensor<8x4xf32>, tensor<4xf32>) -> tensor<f32>"},
            {"inputs": "(tensor<9x4xf32>, tensor<4xf32>) -> tensor<f32>"},
            ["inputs: tensor<8x4xf32> here, tensor<9x4xf32> there"],
        ),
        (
            {"inputs": "float32[8, 4], float32[4]"},
            {"inputs": "float32[8, 4]"},
            ["inputs: float32[4] here, nothing there"],
        ),
        (
            {"options": "CUDAOptions(num_warps=8, libs=(('a', 'b'),))"},
            {"options": "CUDAOptions(num_warps=4, libs=(('a', 'b'),))"},
            ["options: num_warps=8 here, num_warps=4 there"],
        ),
        (
            {"settings": "ambient._get_qengine=4\naot_config=(1, 2)"},
            {"settings": "ambient._get_qengine=5\naot_config=(1)"},
            ["settings: qengine=4 here, qengine=5 there"],
        ),
        (
            {"inputs": "f32 f16"},
            {"inputs": "f16 f32"},
            ["other order of inputs: f32 f16 here, f16 f32 there"],
        ),
        (
            {"inputs": "(f32) -> f16"},
            {"inputs": "(f32) -> f32"},
            ["results: -> f16 here, -> f32 there"],
        ),
        # Constants of added operations are no cause, but replaced constants can be.
        (
            {"operations": "add=1 while=1", "constants": "0 8"},
            {"operations": "add=1", "constants": "0"},
            ["operations: while=1 here, nothing there"],
        ),
        (
            {"operations": "sine=1", "constants": "0.25"},
            {"operations": "tanh=1", "constants": "0.5"},
            ["constants: 0.25 here, 0.5 there", "operations: sine=1 here, tanh=1 there"],
        ),
        # A change of the program is always reported.
        (
            {"program": DIGEST, "threads": "1"},
            {"program": OTHER, "threads": "2"},
            ["threads: 1 here, 2 there", "the program itself changed"],
        ),
        (
            {"program": DIGEST, "operations": "tanh=1"},
            {"program": OTHER, "operations": "sine=1"},
            ["operations: tanh=1 here, sine=1 there"],
        ),
        # Earlier releases do not send these parts.
        ({"jax": "1", "operations": "tanh=1"}, {"jax": "2"}, ["jax: 1 here, 2 there"]),
        ({"jax": "1", "setting.jax_enable_x64": "True"}, {"jax": "1"}, []),
        (
            {"setting.jax_default_matmul_precision": "highest", "precision": "HIGHEST"},
            {"setting.jax_default_matmul_precision": "None", "precision": "DEFAULT"},
            ["jax_default_matmul_precision: highest here, None there"],
        ),
        # Another script does not cause a miss.
        ({"script": "train.py", "jax": "1"}, {"script": "eval.py", "jax": "1"}, []),
        (
            bounded_parts({"flags": "a" * 20_000, "jax": "1"}),
            bounded_parts({"flags": "b" * 20_000, "jax": "1"}),
            ["other flags"],
        ),
    ],
)
def test_difference_is_described_in_words(here, there, sentences):
    assert explained(here, there) == sentences


def test_same_operations_are_named_of_kinds_whose_operations_are_all_counted():
    here = {"program": DIGEST, "operations": "add=1 tanh=1"}
    there = {"program": OTHER, "operations": "add=1 tanh=1"}

    def sentence(there, kind):
        (difference,) = compare(here, there, kind=kind)
        return format_difference(difference)

    changed = "the program itself changed"
    same = (
        f"{changed}: the same operations in another order, or with other operands, shapes, axes, "
        "sharding or attributes"
    )
    assert sentence(there, ArtifactKind.JAX) == same
    assert sentence(there, ArtifactKind.AOT_AUTOGRAD) == changed
    assert sentence({"program": OTHER}, ArtifactKind.JAX) == changed  # of an earlier release


def test_description_of_long_word_shows_differing_place():
    here, there = "x" * 500 + "HERE" + "y" * 500, "x" * 500 + "THERE" + "y" * 500
    (difference,) = compare({"flags": here}, {"flags": there})
    assert "HERE" in difference.here
    assert "THERE" in difference.there
    assert len(difference.here) < 100


def test_words_in_another_order_are_a_difference():
    listed = [f"--flag{number}=on" for number in range(20)]
    (difference,) = compare({"f": " ".join(listed)}, {"f": " ".join(reversed(listed))})
    assert difference.here != difference.there


@given(here=PARTS, there=PARTS)
def test_any_two_sets_can_be_compared_both_ways(here, there):
    differences = compare(here, there)
    assert bool(differences) == (here != there)
    assert [each.part for each in differences] == [each.part for each in compare(there, here)]
    for each in differences:
        assert format_difference(each)
        assert format_difference(each).isprintable()


@given(parts=st.dictionaries(st.text(min_size=1, max_size=20), st.text(max_size=9000), max_size=9))
def test_parts_of_any_size_fit(parts):
    fitting = bounded_parts(parts)
    assert sum(len(name) + len(value) for name, value in fitting.items()) <= MAX_PARTS_CHARACTERS
    assert make_description(KEY, "label", parts).is_bounded


def test_invalid_name_is_left_out_and_refused():
    assert bounded_parts({"\x1b]0;owned": "x", "jax": "1"}) == {"jax": "1"}
    with pytest.raises(ValidationError):
        Description(key=KEY, environment={"\x1b]0;owned": "x"})
    assert "\x1b" not in format_difference(Difference(part="\x1b]0;owned", here="1", there="2"))


def test_large_values_are_compared_in_one_pass():
    """A comparison per word would be too slow: a server compares hundreds of values."""
    here, there = (" ".join(f"{letter}{n}" for n in range(50_000)) for letter in "ab")
    (difference,) = compare({"flags": here}, {"flags": there})
    assert difference.here.endswith("and 49992 more")


def test_a_program_is_the_same_under_other_flags_and_parts_in_any_order():
    assert identity_of({"program": DIGEST, "options": "1"}) == identity_of({"program": DIGEST})
    assert identity_of({"program": DIGEST}) != identity_of({"program": OTHER})
    assert identity_of({"graph": "1"}) == ""
    assert digest_of_parts({"a": "1", "b": "2"}) == digest_of_parts({"b": "2", "a": "1"})
    assert digest_of_parts({"a": "1"}) != digest_of_parts({"a": "2"})
    label = make_description(KEY, "jit(f)\nx" * 100, {}).label
    assert label == ("jit(f) x" * 100)[:MAX_LABEL_CHARACTERS]


def test_same_description_under_another_key_is_not_called_stored():
    there = {"namespace": "ex", "created_at": datetime.now(UTC), "differences": ()}
    relative = Relative(key=KEY, is_same_program=True, **there)
    answer = ExplainResponse(relatives=[relative])
    for missed, sentence in (
        (KEY, "it is stored in the namespace ex, but was not found"),
        (
            ArtifactKey.parse("jax", "gpu", DIGEST),
            f"device type: gpu here, {KEY.device_type} there",
        ),
        (
            ArtifactKey.parse("jax", KEY.device_type, OTHER),
            "another key, though its description is the same",
        ),
    ):
        cause = cause_of(answer, missed=missed, read=["ex"])
        assert (cause.text, cause.nearest) == (sentence, relative)


@pytest.mark.parametrize(
    ("here", "there", "brief"),
    [
        ({"env.XLA_FLAGS": "--a"}, {}, "XLA_FLAGS differs"),
        (
            {"setting.jax_enable_x64": "1"},
            {"setting.jax_enable_x64": "0"},
            "jax_enable_x64 differs",
        ),
        ({"inputs": "f32"}, {"inputs": "f64"}, "inputs differ"),
        ({"inputs": "f32", "jax": "1"}, {"inputs": "f64", "jax": "2"}, "jax and inputs differ"),
        (dict.fromkeys("abcd", "1"), dict.fromkeys("abcd", "2"), "a, b and 2 more differ"),
        ({"program": "1"}, {"program": "2"}, "program differs"),
        ({"jax_key": DIGEST}, {"jax_key": OTHER}, ""),
        ({"graph": "1"}, {"graph": "2"}, ""),
    ],
)
def test_cause_in_brief_names_only_parts_that_a_user_can_read(here, there, brief):
    relative = Relative(
        key=KEY,
        namespace="ex",
        created_at=datetime.now(UTC),
        is_same_program=True,
        differences=compare(here, there),
    )
    assert cause_of(ExplainResponse(relatives=[relative])).brief == brief


@pytest.mark.parametrize(
    ("briefs", "page", "line"),
    [
        (["A differs", "A differs"], "", "missed 2: A differs"),
        (["A differs", "B differs", "B differs"], "", "missed 3: B differs (2 of 3)"),
        (["A differs", "", ""], "http://x", "missed 3: A differs (1 of 3) -> http://x"),
        (["", ""], "http://x", "missed 2 -> http://x"),
        (["", ""], "", ""),
    ],
)
def test_line_at_the_end_of_a_run_omits_uncertain_causes(briefs, page, line):
    causes = [Cause(brief, brief, keys=[KEY]) for brief in briefs]
    assert brief_line(causes, missed=[KEY], misses=len(briefs), page=page) == line
    assert brief_line(causes, missed=[], misses=1, page="http://x") == "missed 1 -> http://x"


def test_line_at_the_end_of_a_run_counts_misses_that_are_not_explained():
    causes = [Cause("a", "A differs", keys=[KEY, KEY]), Cause("b", "B differs", keys=[KEY])]
    line = brief_line(causes, missed=[KEY], misses=9, page="")
    assert line == "missed 9: A differs (2 of 3 explained)"


def test_incomplete_search_is_reported_in_explanation():
    text = "new program: nothing like it is stored"
    whole = cause_of(ExplainResponse(relatives=()))
    assert (whole.text, whole.brief) == (text, "new program")
    text += " in the namespaces that were looked through, which are not all"
    text += " (2 artifacts here without a description)"
    partial = ExplainResponse(relatives=(), is_partial=True, undescribed=2)
    assert (cause_of(partial).text, cause_of(partial).brief) == (text, "")
