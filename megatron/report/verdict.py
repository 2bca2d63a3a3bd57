"""Soundness of a law: whether its constants are identified and its form fits, and sentences about it."""

from string import Template

from megatron.laws.forms import FORM
from megatron.laws.law import Law
from megatron.report.study_data import Study
from megatron.study.format import OBJECTIVE_NAMES, join_list


def is_sound(law: Law) -> bool:
    """Return whether no constant is known to be unidentified and no lack-of-fit test has failed."""
    # None (a law without bootstrap replicates) counts as sound: only a failed test is a reason against a law
    return law.identified is not False and law.lack_of_fit.get("passes", True)


def name_law(law: Law) -> str:
    """Return the subject of a sentence about the law: 'the law', or a description of its fault."""
    if law.identified is False:
        return "a law that these runs do not identify"
    if not is_sound(law):
        return "a law that fails its lack-of-fit test"
    return "the law"


def list_law_doubts(law: Law) -> list[str]:
    """Return the faults of a law, one sentence each; empty for a sound law."""
    objective = OBJECTIVE_NAMES.get((law.filter or {}).get("objective", ""), "")
    name = f"the {objective} law" if objective else "the law"
    words = []
    if law.identified is False:
        constants = join_list([c for c in law.params if c in law.not_identified]) or "the constants"
        # several constants can share one reason, which is then stated once
        reasons = " ".join(dict.fromkeys(law.not_identified.values()))
        words.append(f"Not identified: these runs do not determine {constants} of {name}. {reasons}".strip())
    if not law.lack_of_fit.get("passes", True):
        words.append(f"Rejected: {describe_misfit(law)}.")
    return words


def describe_misfit(law: Law) -> str:
    """Return the result of the lack-of-fit test as one clause."""
    test = law.lack_of_fit
    verdict = "passes" if test["passes"] else "fails"
    return (
        f"repeated runs differ by {100 * test['noise']:.2f} %, the form is off by another "
        f"{100 * test['misfit']:.2f} %: it {verdict} the lack-of-fit test "
        f"(F = {test['statistic']:.3g}, p = {test['p_value']:.2g})"
    )


def describe_fit(law: Law) -> str:
    """Return a sentence on the test of the law's form; empty for a rejected law."""
    if not law.lack_of_fit:
        return "Its form is not tested: that requires runs of equal N and D that differ only in their seed."
    words = describe_misfit(law)
    return f"{words[:1].upper()}{words[1:]}." if law.lack_of_fit["passes"] else ""


def suggest_other_form(study: Study) -> str:
    """Return advice for laws whose form fails its test; empty if none does."""
    laws = list(study.laws.values()) or ([study.law] if study.law is not None else [])
    if all(law.lack_of_fit.get("passes", True) for law in laws):
        return ""
    return (
        "More runs do not fix a rejected form: fit the compute-optimal frontier of runs at equal FLOPs, "
        "fit another form (tools/fit_law.py --form), or exclude the runs with large residuals in the figure."
    )


def list_study_doubts(study: Study) -> list[str]:
    """Return the faults of all laws of a study, one sentence each."""
    laws = list(study.laws.values()) or ([study.law] if study.law is not None else [])
    return [line for law in laws for line in list_law_doubts(law)]


def format_symbolic(law: Law) -> str:
    """Return the law's formula with the names of the constants instead of their values."""
    return Template(FORM[law.form].formula).substitute({name: name for name in law.params})
