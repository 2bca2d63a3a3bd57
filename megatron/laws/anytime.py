"""Interval that holds at every look, for a mean that is compared after each new run.

An interval of Student's t covers at 95 % for one number of runs, chosen before. Who looks after every
run and stops at the first decision errs more often, and in the end always. The interval here covers at
all looks together. It is the set of means whose Bayes factor against a mean of variance SCALE sigma^2
around them stays below 1 / (1 - level), with the right Haar prior of the unknown sigma: this factor is
a martingale under the true mean, so Ville's inequality bounds the chance that it ever exceeds that
(Wang and Ramdas, arXiv 2310.03722; Perez-Ortiz et al., arXiv 2208.07610).
"""

import math

SCALE = 3.0  # differences of about 1.7 sigma are decided by the fewest runs; any scale is valid


def anytime_half_width(sigma: float, dof: float, n: float, level: float = 0.95) -> float:
    """Return the half-width of the interval of a mean of n observations; infinite with too few.

    sigma  standard deviation of one observation, estimated with `dof` degrees of freedom, to
           which all observations so far contribute
    n      observations; for a difference of two means 1 / (1 / n_a + 1 / n_b)
    """
    if dof <= 0 or n <= 0:
        return math.inf
    gain = 1 + n * SCALE
    # The factor of t is gain^(-1/2) ((1 + t^2 / dof) / (1 + t^2 / (dof gain)))^((dof + 1) / 2); it equals
    # 1 / (1 - level) where the ratio of both brackets is `limit`.
    log_limit = 2 / (dof + 1) * (0.5 * math.log(gain) - math.log1p(-level))
    if log_limit >= math.log(gain):
        return math.inf
    limit = math.exp(log_limit)
    square = dof * (limit - 1) / (1 - limit / gain)  # t^2
    return math.sqrt(square / n) * sigma
