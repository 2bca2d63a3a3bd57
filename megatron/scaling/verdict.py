"""Whether a law may be quoted: what its runs leave open, whether its form fits, and in which words."""

from string import Template

from megatron.scaling import wording
from megatron.scaling.forms import FORM
from megatron.scaling.law import Law
from megatron.scaling.study import Study


def is_sound(law: Law) -> bool:
    """Whether every constant is identified, as far as known, and no lack-of-fit test has failed."""
    return law.identified is not False and law.lack_of_fit.get("passes", True)


def law_words(law: Law) -> str:
    """What to call it in a sentence: 'the law', or what is wrong with it."""
    if law.identified is False:
        return "a law that these runs do not identify"
    if not is_sound(law):
        return "a law that fails its lack-of-fit test"
    return "the law"


def doubts(law: Law) -> list[str]:
    """Sentences that come before anything else is said of the law; empty for a sound one."""
    objective = wording.OBJECTIVES.get((law.filter or {}).get("objective", ""), "")
    name = f"the {objective} law" if objective else "the law"
    words = []
    if law.identified is False:
        constants = wording.listed([c for c in law.params if c in law.not_identified]) or "the constants"
        reasons = " ".join(dict.fromkeys(law.not_identified.values()))
        words.append(f"Not identified: these runs do not hold {constants} of {name}. {reasons}".strip())
    if not law.lack_of_fit.get("passes", True):
        words.append(f"Rejected: {misfit_words(law)}.")
    return words


def misfit_words(law: Law) -> str:
    """The lack-of-fit test in one clause."""
    test = law.lack_of_fit
    verdict = "passes" if test["passes"] else "fails"
    return (
        f"repeated runs differ by {100 * test['noise']:.2f} %, the form is off by another "
        f"{100 * test['misfit']:.2f} %: it {verdict} the lack-of-fit test "
        f"(F = {test['statistic']:.3g}, p = {test['p_value']:.2g})"
    )


def fit_words(law: Law) -> str:
    """What is known of the fit of its form: a sentence, empty for a law that was rejected."""
    if not law.lack_of_fit:
        return "Its form is not tested: that needs runs of one N and D that differ in their seed alone."
    words = misfit_words(law)
    return f"{words[:1].upper()}{words[1:]}." if law.lack_of_fit["passes"] else ""


def other_form_words(study: Study) -> str:
    """What to do about forms that fail their test; empty where none does."""
    laws = list(study.laws.values()) or ([study.law] if study.law is not None else [])
    if all(law.lack_of_fit.get("passes", True) for law in laws):
        return ""
    return (
        "More runs do not repair a rejected form: fit the compute-optimal frontier of runs at equal FLOPs, "
        "fit another form (tools/fit_law.py --form), or leave out the runs that the misfit's figure shows."
    )


def first_lines(study: Study) -> list[str]:
    """The doubts about all laws of a study."""
    laws = list(study.laws.values()) or ([study.law] if study.law is not None else [])
    return [line for law in laws for line in doubts(law)]


def symbolic(law: Law) -> str:
    """Its form with the names of the constants in place of their values."""
    return Template(FORM[law.form].formula).substitute({name: name for name in law.params})
