"""A policy's name with options: read as written, refused where it means nothing, and spelled in one way."""

import json

import pytest

from kvkeep.cli.console import names
from kvkeep.evaluate.run import Arm, arms_of
from kvkeep.policies import LoreKV, Tiered, make_policy, parse, saved_policy, spelled
from kvkeep.policies.baselines import SnapKV


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("snapkv", ("snapkv", {})),
        (" snapkv ", ("snapkv", {})),
        ("snapkv(window=16, kernel=5)", ("snapkv", {"window": 16, "kernel": 5})),
        (
            "lorekv(objective=mass, weight=-0.5, kept=True)",
            ("lorekv", {"objective": "mass", "weight": -0.5, "kept": True}),
        ),
        ("kvp(weights='a folder/b')", ("kvp", {"weights": "a folder/b"})),
        ("lorekv()", ("lorekv", {})),
        ("tiered(kvp)", ("tiered", {"of": "kvp"})),
        ("tiered(snapkv(window=16), bits=4)", ("tiered", {"of": "snapkv(window=16)", "bits": 4})),
    ],
)
def test_a_name_is_read_with_its_options(text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "lorekv(4)",
        "tiered(kvp, knorm)",
        "tiered(4)",
        "lorekv(",
        "lorekv(steps=1)(2)",
        "lorekv(**{})",
        "a.b(c=1)",
        "lorekv(steps=open('x'))",
        "f(a=1, a=2)",
        "kvp(weights=runs/policy)",
    ],
)
def test_anything_else_is_refused_and_never_run(text):
    with pytest.raises(ValueError, match=r"cannot read the policy .* in quotes: kvp\(weights='runs/policy'\)"):
        parse(text)


def test_equal_policies_have_one_spelling():
    assert spelled("lorekv( steps = 4,futures=4 )") == "lorekv(steps=4)"
    assert spelled("lorekv(objective='mass', futures=1)") == "lorekv(futures=1, objective=mass)"
    assert spelled("lorekv(futures=4)") == spelled("lorekv") == "lorekv"
    assert spelled("tiered( lorekv(steps=4,futures=4), q = .7)") == "tiered(lorekv(steps=4), q=0.7)"
    assert spelled("tiered(h2o, bits=2)") == spelled("tiered(of=h2o)") == "tiered"
    assert spelled("tiered(h2o(decay=0.9))") == "tiered(h2o(decay=0.9))"
    for text in (
        "tiered(snapkv(window=16), bits=4)",
        "kvp(weights='a folder/b')",
        "lorekv(weight=0.5, kept=True)",
        "snapkv(window=16)",
    ):
        assert spelled(text) == text and parse(spelled(text)) == parse(text)


def test_a_policy_may_be_made_of_another_one():
    assert make_policy("tiered(snapkv(window=16), bits=4)") == Tiered(of=SnapKV(window=16), bits=4)
    assert make_policy("tiered", of=SnapKV(window=16), bits=4) == Tiered(of=SnapKV(window=16), bits=4)
    policy = make_policy("tiered(snapkv(window=16), q=.5)")
    assert saved_policy("Tiered", json.loads(json.dumps(policy.settings()))) == policy
    with pytest.raises(ValueError, match="unknown option 'of'"):
        make_policy("snapkv(tova)")


def test_options_stand_in_the_name_or_beside_it():
    assert make_policy("snapkv(window=16)", kernel=5) == make_policy("snapkv", window=16, kernel=5)
    assert make_policy("snapkv(window=16)") == SnapKV(window=16)
    assert make_policy("lorekv(weight=1)") == LoreKV()


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("snapkv(windw=16)", {}, "unknown option 'windw' of policy 'snapkv'; did you mean window"),
        ("streaming", {"window": 3}, "unknown option 'window' of policy 'streaming'; it has none"),
        ("snapkw(window=16)", {}, "unknown policy 'snapkw'; did you mean snapkv"),
        ("snapkv(window=16)", {"window": 3}, "'window' is given twice"),
        ("snapkv(window=wide)", {}, "option 'window' of policy 'snapkv' is like 32, got 'wide'"),
        ("lorekv(kept=1)", {}, "is like False, got 1"),
        ("lorekv(futures=1.5)", {}, "is like 4, got 1.5"),
    ],
)
def test_options_that_do_not_exist_or_fit_are_refused(text, options, message):
    with pytest.raises(ValueError, match=message):
        make_policy(text, **options)


def test_an_evaluation_names_itsarms_of_by_that_spelling_and_takes_each_once():
    arms = arms_of(["lorekv(futures=4)", "lorekv", "lorekv(steps=2 )", "full"], [64])
    assert arms == [Arm("full", "full"), Arm("lorekv", "64"), Arm("lorekv(steps=2)", "64")]


def test_the_evaluations_seed_goes_to_policies_that_have_none(tiny):
    seeds = [
        Arm(name, "64").fresh_cache(tiny("llama"), 7).policy.seed for name in ("lorekv", "lorekv(seed=3)", "random")
    ]
    assert seeds == [7, 3, 7]


def test_commas_within_parentheses_do_not_part_names():
    assert names(["lorekv,lorekv(futures=1, steps=2),snapkv", "snapkv"]) == [
        "lorekv",
        "lorekv(futures=1, steps=2)",
        "snapkv",
    ]
